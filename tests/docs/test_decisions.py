"""The list of decisions has each record once, in the order of the numbers, under its own title, and in a topic."""

from __future__ import annotations

from pathlib import Path

DECISIONS = Path(__file__).resolve().parents[2] / "docs" / "decisions"


def test_decisions_are_listed_in_order() -> None:
    listed = [line for line in (DECISIONS / "README.md").read_text().splitlines() if "](" in line]
    known = []
    for record in sorted(DECISIONS.glob("[0-9]*.md")):
        number, _, title = record.read_text().splitlines()[0].removeprefix("# ").partition(". ")
        assert int(number) == int(record.name[:4])
        known.append(f"{number}. [{title}]({record.name})")
    assert listed == known


def test_each_decision_is_in_the_table_of_topics() -> None:
    topics = [line for line in (DECISIONS / "README.md").read_text().splitlines() if line.startswith("| ")][1:]
    listed = {int(number) for topic in topics for number in topic.strip("| ").rpartition("|")[2].split(",")}
    assert listed == {int(record.name[:4]) for record in DECISIONS.glob("[0-9]*.md")}
