"""The demonstration's ledger: a new leader goes on where the old one stopped, an old one can't write, and a result
that comes twice counts once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import tenure
from tenure._demo.computation import Count, merge
from tenure._demo.job import Chunk, File, Job
from tenure._demo.ledger import Ledger, Progress
from tenure._demo.messages import DeadChunk, Result

FILES = (File("a.py", True), File(os.fsdecode(b"caf\xe9"), False), File("c", False), File("d", False))
JOB = Job("/some/where", (Chunk(1, FILES[:2]), Chunk(2, FILES[2:3]), Chunk(3, FILES[3:])), 0.5)
COUNTS = [Count(file.path, size=9, lines=1, words=2, digest="d") for file in FILES]
FIRST, SECOND, THIRD = Result.of(1, 1, COUNTS[:2]), Result.of(2, 1, COUNTS[2:3]), Result.of(3, 2, COUNTS[3:])
POISONOUS = DeadChunk(3, "max_deliveries", "TooDeep: so it is", 5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with closing(Ledger.create(path, JOB)) as created:
        yield created


def test_the_job_is_kept(ledger: Ledger, path: Path) -> None:
    with closing(Ledger(path)) as another:
        assert another.job() == JOB
        assert another.remaining() == list(JOB.chunks)
        assert another.result() is None


def test_a_new_leader_goes_on_where_the_old_one_stopped(ledger: Ledger, path: Path) -> None:
    ledger.begin_term(1, instance=1)
    ledger.record(1, [FIRST])
    with closing(Ledger(path)) as successor:
        successor.begin_term(2, instance=2)
        assert successor.remaining() == list(JOB.chunks[1:])
        assert successor.result() == FIRST
        successor.record(2, [THIRD, SECOND])
        assert successor.counts() == COUNTS
        assert successor.progress() == Progress(counted=3, dead=0, of=3, again=0, finished=False)
        assert successor.outcome() is None
        successor.finish(2, merge(COUNTS))
    assert ledger.outcome() == merge(COUNTS)
    assert ledger.progress().finished


def test_a_result_that_comes_again_is_known(ledger: Ledger) -> None:
    ledger.record(1, [FIRST, FIRST])
    ledger.record(2, [SECOND, FIRST])
    assert ledger.counts() == COUNTS[:3]
    assert ledger.progress() == Progress(counted=2, dead=0, of=3, again=2, finished=False)


def test_a_chunk_that_always_failed_is_recorded_once(ledger: Ledger) -> None:
    ledger.record_dead(1, [POISONOUS])
    ledger.record_dead(2, [POISONOUS])
    assert ledger.dead() == [POISONOUS]
    assert ledger.remaining() == list(JOB.chunks[:2])
    assert ledger.progress().left == 2


def test_a_chunk_is_either_counted_or_dead(ledger: Ledger) -> None:
    ledger.record_dead(1, [POISONOUS])
    ledger.record(1, [THIRD])
    assert ledger.dead() == []
    ledger.record_dead(1, [POISONOUS])
    assert ledger.progress() == Progress(counted=1, dead=0, of=3, again=0, finished=False)


def test_after_the_first_act_of_a_term_older_ones_are_refused(ledger: Ledger) -> None:
    ledger.begin_term(1, instance=1)
    ledger.begin_term(2, instance=2)
    late: list[Callable[[], None]] = [
        lambda: ledger.begin_term(1, instance=1),
        lambda: ledger.record(1, [FIRST]),
        lambda: ledger.record_dead(1, [POISONOUS]),
        lambda: ledger.finish(1, merge([])),
    ]
    for write in late:
        with pytest.raises(tenure.TermLost):
            write()
    assert ledger.progress() == Progress(counted=0, dead=0, of=3, again=0, finished=False)
    ledger.record(2, [FIRST])  # the refusals left no transaction behind
    assert ledger.progress().counted == 1
