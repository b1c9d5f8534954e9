"""The thread that ends the process at a deadline, with a manual clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import tenure
import tenure.sync
from tenure._runtime.watchdog import EXIT_OVERRUN, Watchdog
from tenure.testing import ManualClock
from tests.durations import PATIENCE


def test_the_nearest_deadline_counts_wherever_it_was_moved() -> None:
    clock = ManualClock(100.0)
    watchdog = Watchdog(clock)  # never started: nothing here ends the process
    late, soon, unbegun = (watchdog.deadline(at, "") for at in (130.0, 110.0, 105.0))
    late.begin()
    soon.begin()
    assert watchdog.overdue() is None
    clock.advance(9.999)
    assert watchdog.overdue() is None
    clock.advance(0.001)
    assert watchdog.overdue() is soon
    soon.move(140.0)
    assert watchdog.overdue() is None
    late.move(110.0)
    assert watchdog.overdue() is late
    late.lift()
    late.move(0.0)
    late.lift()
    assert watchdog.overdue() is None
    clock.advance(30.0)
    assert watchdog.overdue() is soon
    soon.lift()
    assert watchdog.overdue() is None
    unbegun.begin()
    assert watchdog.overdue() is unbegun
    unbegun.lift()
    unbegun.begin()
    assert watchdog.overdue() is None


def test_it_checks_each_second_and_never_without_a_deadline() -> None:
    clock = ManualClock(100.0)
    watchdog = Watchdog(clock)
    watchdog.overdue()
    assert watchdog._pause() is None
    watchdog.deadline(103.0, "later").begin()
    watchdog.overdue()
    assert watchdog._pause() == 1.0
    clock.advance(2.75)
    watchdog.overdue()
    assert watchdog._pause() == 0.25


def test_it_ends_at_a_deadline_that_was_moved_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    codes: list[int] = []

    def note(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", note)
    clock = ManualClock(100.0)
    watchdog = Watchdog(clock)
    watchdog.start()
    deadline = watchdog.deadline(1e9, "moved")
    deadline.begin()
    deadline.move(100.0)
    assert ended.wait(PATIENCE)
    assert codes == [EXIT_OVERRUN]
    watchdog.end()


# --- with real processes ----------------------------------------------------------------------------------------------

_STUCK = """
import asyncio, re, sys, threading, time
import tenure
from tenure._runtime.renewal_thread import RenewalThread

async def work(term):
    stuck = threading.Event()
    def block():
        stuck.set()
        threading.Event().wait()
    RenewalThread._shared.loop.call_soon_threadsafe(block)
    stuck.wait()
    print("stuck", flush=True)
    {then}

async def main():
    async with tenure.connect(sys.argv[1]) as backend:
        await backend.election("chair", ttl=2.0, overrun="exit").run(work)

asyncio.run(main())
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "then",
    [
        pytest.param("await asyncio.sleep(1000)", id="work awaits"),
        pytest.param("while True: re.match('(a+)+$', 'a' * 22 + 'b')", id="work holds the GIL most of the time"),
    ],
)
def test_the_process_ends_although_the_renewal_thread_is_stuck(tmp_path: Path, then: str) -> None:
    program = _STUCK.format(then=then)
    ran = subprocess.run(
        [sys.executable, "-c", program, f"sqlite:///{tmp_path}/a.db"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ran.stdout, ran.returncode) == ("stuck\n", EXIT_OVERRUN)
    assert ran.stderr.count("overrun='exit' ends this process with code 70") == 1


_ENDED = """
import sys, threading, time
import tenure.sync
from tenure._runtime.renewal_thread import RenewalThread

with tenure.sync.connect(sys.argv[1]) as backend:
    def work(term):
        if term.token > 1:
            return
        until = term._exit_deadline.at
        stuck = threading.Event()
        def block():
            stuck.set()
            while term._clock.now() < until + 0.1:
                time.sleep(0.01)
        RenewalThread._shared.loop.call_soon_threadsafe(block)
        stuck.wait()
    backend.election("chair", ttl=2.0, overrun="exit").run(work)
    print("went on")
"""


@pytest.mark.process
def test_work_that_has_ended_in_time_ends_no_process_even_if_its_loop_is_blocked(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _ENDED, f"sqlite:///{tmp_path}/a.db"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ran.stdout, ran.returncode) == ("went on\n", 0), ran.stderr


_RETURNED = """
import asyncio, sys, time
import tenure

async def main():
    async with tenure.connect(sys.argv[1]) as backend:
        async def work(term):
            asyncio.get_running_loop().call_soon(time.sleep, 2.5)  # blocks the loop before the end is noted
            tokens.append(term.token)
        tokens = []
        await backend.election("chair", ttl=2.0, overrun="exit").run(work)
        print("went on", len(tokens))

asyncio.run(main())
"""


@pytest.mark.process
def test_a_loop_that_is_blocked_after_its_work_has_ended_ends_no_process_and_starts_no_work(
    tmp_path: Path,
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _RETURNED, f"sqlite:///{tmp_path}/a.db"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (ran.stdout, ran.returncode) == ("went on 1\n", 0), ran.stderr


_UNBEGUN = """
import asyncio, sys, time
import tenure

async def main():
    tokens = []
    async def work(term):
        term.check()
        tokens.append(term.token)
    async with tenure.connect(sys.argv[1]) as backend:
        election = backend.election("chair", ttl=1.0, overrun="exit")
        running = asyncio.ensure_future(election.run(work))
        while election._candidate is None or election._candidate.term is None:
            await asyncio.sleep(0) if election._candidate is None else time.sleep(0.01)  # so that it can't begin
        first = election._candidate.term
        while first.remaining():
            time.sleep(0.01)
        time.sleep(0.1)
        await running
    print(first.token in tokens, len(tokens))

asyncio.run(main())
"""


@pytest.mark.process
def test_work_that_never_began_ends_no_process_and_does_not_begin_in_an_ended_term(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _UNBEGUN, f"sqlite:///{tmp_path}/a.db"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (ran.stdout, ran.returncode) == ("False 1\n", 0), ran.stderr


def test_without_its_thread_there_is_no_campaign(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(watchdog: Watchdog) -> None:
        raise RuntimeError("can't start new thread")

    with tenure.sync.connect("memory:") as backend:
        election = backend.election("chair", overrun="exit")
        with monkeypatch.context() as patch:
            patch.setattr(Watchdog, "start", refuse)
            with pytest.raises(tenure.Unavailable, match="needs a thread of its own, and the system can"):
                election.run(lambda term: None)
        assert election.leader() is None
        election.run(lambda term: term.check())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_touches_nothing_of_it() -> None:
    with tenure.sync.connect("memory:") as backend, backend.election("chair", overrun="exit").campaign() as term:
        assert term._exit_deadline is not None
        changed = term._exit_deadline._watchdog._changed  # type: ignore[union-attr]
        child = _fork_while_held(changed, term._note_work_end)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        term.check()


def _fork_while_held(lock: threading.Condition, act: Callable[[], object]) -> int:
    """Fork while another thread has *lock*; the child does *act*, and ends. Return its process id."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(PATIENCE)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        act()
        os._exit(0)
    done.set()
    holder.join()
    return child
