"""``make proof``: it resumes after an interruption, and ends with a line that replays each failure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proof.__main__ import follow, main, table
from tests.proof.simulated import Seed, election, queue
from tests.proof.state import Part, State


def steps(part: Part, enough: int, stop: int) -> Iterator[None]:
    while part.done < enough:
        if part.done == stop:
            raise KeyboardInterrupt
        part.done += 1
        part.next_seed += 1
        yield


def test_it_resumes_after_an_interruption(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = State(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        follow("kills", 9, state, steps(state.part("kills", "processes"), 9, 4))
    again = State(tmp_path)
    assert again.parts["kills"].done == 4
    follow("kills", 9, again, steps(again.parts["kills"], 9, -1))
    assert State(tmp_path).parts["kills"].done == 9
    assert table(again) == 0
    assert "0-8" in capsys.readouterr().out


def test_a_failure_is_shown_with_the_line_that_replays_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = State(tmp_path)
    state.part("queues", "messages").failed("seed 7: lost", "tenure sim --queues --seed 7")
    state.save()
    none = [
        f"--{part}=0"
        for part in ("elections", "queues", "fuzz", "kills", "interop", "coordinators", "rotation", "soak")
    ]
    assert main([*none, "--state", str(tmp_path)]) == 1
    assert "queues: seed 7: lost\n  replay: tenure sim --queues --seed 7" in capsys.readouterr().out


def test_a_seed_is_simulated_and_counted() -> None:
    for run in (election, queue):
        one = run(3)
        assert one == Seed(3, one.amount, "", one.replay)
        assert one.amount > 0
        assert one.replay.endswith("--seed 3")
