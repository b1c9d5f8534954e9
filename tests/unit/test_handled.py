"""What the tests of kills judge by finds each way in which messages can be handled wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.handled import Judgement, Noted, Notes, Outage, judge

OUTAGE = Outage(100.0, 100.2)


def noted(text: str) -> list[Noted]:
    """Return lines from ``at what message consumer``."""
    lines = (line.split() for line in text.strip().splitlines())
    return [Noted(float(at), what, message, consumer) for at, what, message, consumer in lines]


@pytest.mark.parametrize(
    "notes",
    [
        "1 got m a\n2 completing m a\n3 completed m a",
        "1 got m killed\n2 got m a\n2 completing m a\n3 completed m a",  # the kill came before the work was done
        "1 got m killed\n2 completing m killed",  # the kill came before the answer could be noted
        "99 got m a\n99.9 completing m a",  # it was taken, and the server killed
        "1 got m a\n2 failed m a\n3 got m b\n4 completing m b\n5 completed m b",
    ],
)
def test_what_is_right_is_not_found(notes: str) -> None:
    found = judge({"m"}, noted(notes), {"killed"}, [OUTAGE])
    assert found == Judgement(redelivered=found.redelivered)


@pytest.mark.parametrize(
    ("notes", "wrong"),
    [
        ("1 got other a\n2 completing other a\n3 completed other a", Judgement(lost=["m"])),
        ("1 got m killed", Judgement(lost=["m"])),
        ("1 got m a\n2 completing m a\n3 failed m a", Judgement(lost=["m"])),
        (
            "1 got m a\n2 completing m a\n3 completed m a\n4 got m b\n5 failed m b",
            Judgement(again=["m"], redelivered=1),
        ),
        (
            "1 got m a\n1 got m b\n2 completing m a\n3 completed m a\n4 completing m b\n5 completed m b",
            Judgement(twice=["m"], redelivered=1),
        ),
        (
            "95 got m a\n96 completing m a\n97 completed m a\n103 got m b\n104 completing m b\n105 completed m b",
            Judgement(again=["m"], twice=["m"], redelivered=1),
        ),
    ],
)
def test_a_planted_fault_is_found(notes: str, wrong: Judgement) -> None:
    assert judge({"m"}, noted(notes), {"killed"}, [OUTAGE]) == wrong


def test_a_verdict_that_a_server_took_with_it_is_counted_apart() -> None:
    notes = noted(
        "99 got m a\n99.3 completing m a\n99.5 completed m a\n103 got m b\n104 completing m b\n104 completed m b"
    )
    assert judge({"m"}, notes, set(), [OUTAGE]) == Judgement(undone=1, redelivered=1)


def test_notes_are_read_as_they_grow(tmp_path: Path) -> None:
    file = tmp_path / "7.log"
    file.write_text("1.5 got m\n2.5 got n\n")
    notes = Notes(file)
    assert (notes.in_hand(), notes.handled()) == ({"m", "n"}, set())
    with file.open("a") as more:
        more.write("3.5 completing m\n3.6 completed m\n4.5 failed n\n")
    assert (notes.in_hand(), notes.handled()) == (set(), {"m"})
    assert notes.lines()[-1] == Noted(4.5, "failed", "n", "7")
