"""The page of alternatives has all contenders and faults, and its tables agree; the measurement finds two that act."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from benchmarks.hang import CONTENDERS, FAULTS, PEERS, SHORT, Act, Contender, Outcome, Process, outcome, suffers, trial

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "alternatives.md").read_text(encoding="utf-8")
TTL = 1.5  # what is seen as "goes on" must be longer than a pause of a busy machine


def part(name: str) -> list[str]:
    """Return the lines that the benchmark has written into the page under this *name*."""
    found = re.findall(rf"<!-- measured: {name} -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert len(found) == 1
    return [line for line in found[0].splitlines() if line]


def table(name: str) -> dict[str, list[str]]:
    """Return a table of the page: the cells of each row by its first."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part(name)]
    assert re.fullmatch(r"[|-]+", part(name)[1])
    return {first: cells for first, *cells in (rows[0], *rows[2:])}


def members_of(row: str) -> list[str]:
    return [each.name for each in CONTENDERS if each.row == row]


# --- the page ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["seconds", "late acts"])
def test_a_table_has_each_contender_and_each_fault(name: str) -> None:
    assert list(table(name)) == ["", *(each.name for each in CONTENDERS)]
    assert table(name)[""] == list(FAULTS.values())
    for contender in CONTENDERS:
        empty = [fault for fault, cell in zip(FAULTS, table(name)[contender.name], strict=True) if cell == "—"]
        never = [fault for fault, cell in zip(FAULTS, table("seconds")[contender.name], strict=True) if cell == "never"]
        missing = [fault for fault in FAULTS if not suffers(contender, fault)]
        assert empty == [fault for fault in FAULTS if fault in missing or (name == "late acts" and fault in never)]


def test_the_short_table_says_the_same_as_the_long_ones() -> None:
    short, seconds, late = table("short"), table("seconds"), table("late acts")
    assert short[""] == [FAULTS[fault] for fault in SHORT]
    assert list(short)[1:] == list(dict.fromkeys(each.row for each in CONTENDERS if each.row))
    for row, cells in list(short.items())[1:]:
        for cell, fault in zip(cells, SHORT, strict=True):
            place = list(FAULTS).index(fault)
            those = [name for name in members_of(row) if seconds[name][place] != "—"]
            if not those:
                assert cell == "—", (row, fault)
                continue
            assert (cell == "B never acts") == all(seconds[name][place] == "never" for name in those), (row, fault)
            assert ("goes on" in cell) == any(late[name][place] == "goes on" for name in those), (row, fault)
            most = [int(found[1]) for name in those if (found := re.search(r"\((\d+)\)", late[name][place]))]
            if "goes on" not in cell:
                assert re.findall(r"(\d+) late", cell) == ([str(max(most))] if most else []), (row, fault)


def test_the_readme_has_the_short_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\n".join(part("short")) in readme


def test_each_fault_is_explained() -> None:
    assert [title for title in FAULTS.values() if f"- *{title}*" not in PAGE] == []


def test_the_page_names_the_versions_and_the_command() -> None:
    (about,) = part("about")
    assert [name for name in PEERS if not re.search(rf"\b{name} \d", about)] == []
    assert re.search(r"`python -m benchmarks hang --rounds \d+ --write`", about)


# --- the measurement ---------------------------------------------------------------------------------------------


def judged(acts: str, *, ended_at: float) -> Outcome:
    """Judge *acts*, one a second, beginning at 1; the fault comes at 2."""
    return outcome(
        [Act(holder, float(at)) for at, holder in enumerate(acts, start=1)], 2.0, ended_at=ended_at, quiet=1.5
    )


def test_acts_of_the_old_leader_count_from_the_first_act_of_the_new_one() -> None:
    assert judged("AAAABBB", ended_at=7.0) == Outcome(took=3.0, late=0, goes_on=False)
    assert judged("AAABAABB", ended_at=8.0) == Outcome(took=2.0, late=2, goes_on=False)
    assert judged("AAABABAA", ended_at=8.0) == Outcome(took=2.0, late=3, goes_on=True)


def test_without_an_act_of_the_new_leader_there_are_no_late_ones() -> None:
    assert judged("AAAAAAA", ended_at=7.0) == Outcome(took=None, late=0, goes_on=False)


def test_the_order_of_the_resource_counts_and_not_the_time_that_a_process_has_read() -> None:
    acts = [Act("A", 1.0), Act("B", 9.0), Act("A", 1.5)]  # the old leader was stopped after it had read the clock
    assert outcome(acts, 1.2, ended_at=12.0, quiet=1.0).late == 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "fault", "took", "goes_on"),
    [("nothing", "none", True, True), ("flock", "none", False, False), ("flock", "killed", True, False)],
)
def test_a_pair_of_processes_is_judged_right(kind: str, fault: str, took: bool, goes_on: bool) -> None:
    found = asyncio.run(trial(Contender(kind, kind), fault, None, TTL, 0, 1))
    assert (found.took is not None, found.goes_on) == (took, goes_on)
    assert (found.late > 0) == goes_on


@pytest.mark.process
def test_a_process_that_ends_by_itself_is_reported() -> None:
    async def start() -> None:
        process = await Process.start("unknown", "", "name", "1", "/", "A", "")
        with pytest.raises(RuntimeError, match="a process has ended with 1"):
            await process.until_ready()

    asyncio.run(start())
