"""Threads of tenure, also when the system gives no more of them."""

from __future__ import annotations

import threading

import pytest

from tenure._runtime.threads import DaemonThreads
from tests.durations import PATIENCE


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_refused_job_is_not_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, done = DaemonThreads(2, "few"), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.submit(done.append, "refused")
    threads.submit(done.append, "taken").result(PATIENCE)
    threads.shutdown()
    assert done == ["taken"]


def test_no_second_thread_is_started_while_one_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, may_end = DaemonThreads(2, "few"), threading.Event()
    busy = threads.submit(may_end.wait, PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        waiting = threads.submit(str, 7)
    may_end.set()
    assert waiting.result(PATIENCE) == "7"
    assert busy.result(PATIENCE)
    threads.shutdown()


def test_threads_that_are_busy_are_never_taken_for_idle() -> None:
    """Two jobs that wait for each other: with one thread for both, neither would end."""
    for _ in range(100):
        threads, both = DaemonThreads(2, "few"), threading.Barrier(2)
        for _ in range(3):  # a job may be submitted just before its thread is noted as idle
            threads.submit(int).result(PATIENCE)
        waiting = [threads.submit(both.wait, PATIENCE) for _ in range(2)]
        assert {one.result(PATIENCE) for one in waiting} == {0, 1}
        threads.shutdown()
