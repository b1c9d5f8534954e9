"""The check that no two contestants lead at once: it finds what it should, and only that."""

from __future__ import annotations

from pathlib import Path

from tests.interop.acts import ACT, BEGIN, END, Act, Record, overlaps, terms


def acts(*lines: str) -> list[Act]:
    return [Act(*line.split()) for line in lines]


def test_terms_one_after_another_are_in_order() -> None:
    lines = acts("begin n a", "act n a", "end n a", "begin n b", "act n b", "end n b", "begin n a", "end n a")
    assert overlaps(lines) == []
    assert terms(lines) == {"a": 2, "b": 1}


def test_a_term_that_begins_within_another_is_found() -> None:
    assert overlaps(acts("begin n a", "act n a", "begin n b")) == ["line 3: b begins to lead n while a leads it"]


def test_an_act_of_an_old_leader_is_found() -> None:
    found = overlaps(acts("begin n a", "begin n b", "act n a", "act n b"))
    assert found == ["line 2: b begins to lead n while a leads it", "line 3: a writes 'act' for n, led by b"]
    assert overlaps(acts("begin n a", "end n a", "act n a")) == ["line 3: a writes 'act' for n, led by none"]


def test_each_election_is_looked_at_by_itself() -> None:
    assert overlaps(acts("begin n a", "begin m b", "act n a", "act m b", "end n a", "end m b")) == []


def test_an_incomplete_line_is_not_read(tmp_path: Path) -> None:
    record = Record(tmp_path / "acts")
    record.note(BEGIN, "n", "a")
    record.note(ACT, "n", "a")
    with record.path.open("a") as file:
        file.write(f"{END} n")
    assert record.acts() == acts("begin n a", "act n a")
    record.close()
