"""docs/patterns.md answers each point of the two patterns, and names only tests, modules and places that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "patterns.md"
TEXT = PAGE.read_text(encoding="utf-8")

POINTS = {
    "Leader Election": [
        "Transient and lasting failures",
        "Detect that the leader has failed",
        "Scaling in ends the leader",
        "The store is a single point of failure",
        "One dedicated process as the leader",
        "An algorithm of one's own",
        "The leader must not be a bottleneck",
    ],
    "Competing Consumers": [
        "Order of messages",
        "Services that are restarted",
        "Poison messages",
        "Results",
        "Scale of the messaging system",
        "Reliability of the messaging system",
    ],
}
"""The issues and considerations of both pages, in their order."""

TABLES = {
    ("Leader Election", "When to use it"): ["shared resource", "one result"],
    ("Leader Election", "Which strategy"): ["mutex", "lowest id, Bully, Ring", "Raft"],
    ("Leader Election", "When not to use it"): ["natural leader", "lighter way", "another product"],
    ("Leader Election", "What the page says about its sample"): [
        "single point",
        "stalled",
        "which instance",
        "nothing",
    ],
    ("Competing Consumers", "One consumer for each message"): [
        "levels the load",
        "failed consumer",
        "no coordination",
        "number of consumers",
        "transactional reads",
    ],
    ("Competing Consumers", "When not to use it"): ["separate tasks", "must wait", "certain order"],
}
"""What else both pages say, and a few words of the row that answers it."""

RELATED = [
    "Asynchronous Request-Reply",
    "Bulkhead",
    "Choreography",
    "Circuit Breaker",
    "Claim Check",
    "Compensating Transaction",
    "Compute Resource Consolidation",
    "Health Endpoint Monitoring",
    "Idempotent consumer",
    "Messaging Bridge",
    "Pipes and Filters",
    "Priority Queue",
    "Publisher-Subscriber",
    "Queue-Based Load Leveling",
    "Rate Limiting",
    "Retry",
    "Scheduler Agent Supervisor",
    "Sequential Convoy",
    "Sharding",
]


def part(title: str, level: int, within: str = TEXT) -> str:
    """Return what is below the heading *title*, up to the next one of its level or above."""
    found = re.search(
        rf"^#{{{level}}} {re.escape(title)}\n(.*?)(?=^#{{1,{level}}} |\Z)", within, re.MULTILINE | re.DOTALL
    )
    assert found, f"docs/patterns.md has no section {title!r}"
    return found[1]


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ")]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of *page*, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("pattern", "point"), [(pattern, point) for pattern in POINTS for point in POINTS[pattern]])
def test_each_point_is_answered(pattern: str, point: str) -> None:
    answer = part(point, 3, part(pattern, 2))
    labels = re.findall(r"^- \*(.+?):\*", answer, re.MULTILINE)
    assert labels == ["The pattern", "tenure", "Shown by", "Yours"]
    assert re.search(r"\]\(\w+\.md", answer), "the answer names no page"
    shown_by = answer.partition("*Shown by:*")[2].partition("- *Yours")[0]
    assert len(re.findall(r"\[test_\w+\]", shown_by)) >= 3


@pytest.mark.parametrize("pattern", POINTS)
def test_each_point_has_a_line_at_the_top(pattern: str) -> None:
    top = TEXT.partition("\n## ")[0]
    named = [re.findall(r"^\| \[(.*?)\]", row) for row in rows(top)]
    assert [one for (one,) in filter(None, named) if one in POINTS[pattern]] == POINTS[pattern]


@pytest.mark.parametrize(("where", "points"), TABLES.items())
def test_each_row_is_there(where: tuple[str, str], points: list[str]) -> None:
    first_cells = [row.split(" | ")[0] for row in rows(part(where[1], 3, part(where[0], 2)))]
    assert [point for point in points if not any(point in cell for cell in first_cells)] == []


def test_each_related_pattern_is_there() -> None:
    listed = [row.split(" | ")[0].removeprefix("| ") for row in rows(part("Related patterns", 2))][1:]
    assert len(listed) == len(RELATED)
    assert [known for known, one in zip(RELATED, listed, strict=True) if not one.startswith(known)] == []


def test_each_named_test_exists() -> None:
    named = re.findall(r"\[(test_\w+)\]\(\.\./(\S+?\.py)\)", TEXT)
    assert len(named) > 60
    missing = [f"{file}::{test}" for test, file in named if f"def {test}(" not in (ROOT / file).read_text("utf-8")]
    assert missing == []


def test_no_test_is_named_without_its_file() -> None:
    assert re.findall(r"(?<!\[)\btest_\w+(?![\w.]*\]\()", re.sub(r"\([^)]*\)", "", TEXT)) == []


def test_each_place_exists() -> None:
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\((?!https?:)([^)]+)\)", TEXT)):
        page = PAGE.parent / target if target else PAGE
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), f"{target} has no heading for #{anchor}"


def test_both_sources_are_named() -> None:
    for name in ("leader-election", "competing-consumers"):
        assert f"https://learn.microsoft.com/en-us/azure/architecture/patterns/{name}" in TEXT
