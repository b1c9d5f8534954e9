"""The demonstration's ledger: a new leader goes on where the old one stopped, and an old one can't write."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import tenure
from tenure.demo.computation import Count, merge
from tenure.demo.job import File, Job
from tenure.demo.ledger import Ledger, Progress

JOB = Job("/some/where", (File("a.py", True), File(os.fsdecode(b"caf\xe9"), False), File("c", False)), 0.5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with closing(Ledger.create(path, JOB)) as created:
        yield created


def test_the_job_is_what_it_was(ledger: Ledger, path: Path) -> None:
    with closing(Ledger(path)) as another:
        assert another.job() == JOB
        assert another.remaining() == list(JOB.files)


def test_a_new_leader_goes_on_where_the_old_one_stopped(ledger: Ledger, path: Path) -> None:
    counts = [Count(file.path, size=9, lines=1, words=2, digest="d") for file in JOB.files]
    ledger.begin_term(1, instance=1)
    ledger.record(1, counts[:2])
    with closing(Ledger(path)) as successor:
        successor.begin_term(2, instance=2)
        assert successor.remaining() == [JOB.files[2]]
        successor.record(2, counts[2:])
        assert successor.counts() == counts
        assert successor.progress() == Progress(done=3, of=3, finished=False)
        assert successor.outcome() is None
        successor.finish(2, merge(counts))
    assert ledger.outcome() == merge(counts)
    assert ledger.progress().finished


def test_from_a_terms_first_act_on_every_older_one_is_refused(ledger: Ledger) -> None:
    ledger.begin_term(1, instance=1)
    ledger.begin_term(2, instance=2)
    late: list[Callable[[], None]] = [
        lambda: ledger.begin_term(1, instance=1),
        lambda: ledger.record(1, [Count("a.py")]),
        lambda: ledger.finish(1, merge([])),
    ]
    for write in late:
        with pytest.raises(tenure.TermLost):
            write()
    assert ledger.progress() == Progress(done=0, of=3, finished=False)
    ledger.record(2, [Count("a.py")])  # the refusals left no transaction behind
    assert ledger.progress().done == 1


def test_no_file_is_counted_twice(ledger: Ledger) -> None:
    ledger.record(1, [Count("a.py")])
    with pytest.raises(sqlite3.IntegrityError):
        ledger.record(2, [Count("c"), Count("a.py")])
    assert [count.path for count in ledger.counts()] == ["a.py"]
