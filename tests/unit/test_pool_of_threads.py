"""Threads of tenure's own: what happens when the system gives no more of them."""

from __future__ import annotations

import threading

import pytest

from tenure.threads import Threads

PATIENCE = 60.0


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_what_is_told_as_not_done_is_not_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, done = Threads(2, "few"), list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.submit(done.append, "refused")
    threads.submit(done.append, "taken").result(PATIENCE)
    threads.shutdown()
    assert done == ["taken"]


def test_what_one_thread_can_do_needs_no_second(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, may_end = Threads(2, "few"), threading.Event()
    busy = threads.submit(may_end.wait, PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        waiting = threads.submit(str, 7)
    may_end.set()
    assert waiting.result(PATIENCE) == "7"
    assert busy.result(PATIENCE)
    threads.shutdown()
