"""tenure.sync, and elections whose caller and renewal thread have loops of their own: real threads, and real time."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import linecache
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any
from uuid import uuid4

import pytest

import tenure
import tenure.sync
from tenure._runtime.renewal_thread import RenewalThread
from tenure.events import Event, TermBegan, TermEnding
from tenure.sync._stopping import forwarded
from tests.durations import PATIENCE, stretched, until, wait_until

TTL = 30.0
"""Of a lease that is released; long enough for the busiest machine."""

IMPATIENT: dict[str, Any] = {"ttl": TTL, "grace": 0.1, "retry_every": 0.1}
"""Of an election whose backend waits for work that does not end: for the sum of the last two."""


@pytest.fixture
def url() -> str:
    return f"memory:{uuid4().hex}"


@pytest.fixture
def short() -> float:
    """The length of a lease that is to run out, and must not do so before it is used."""
    return stretched(0.3)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    before = threading.enumerate()
    yield
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("tenure") and t not in before])


def keep(*terms: tenure.sync.Term, seconds: float) -> None:
    """Check *terms* for so many seconds."""
    until = time.monotonic() + seconds

    def is_over() -> bool:
        for term in terms:
            term.check()
        return time.monotonic() > until

    wait_until(is_over)


def test_a_thread_leads_and_releases(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        election = backend.election("chair", ttl=TTL)
        tokens: list[int] = []

        def work(term: tenure.sync.Term) -> None:
            leader = election.leader()
            assert leader is not None
            assert leader.holder == term.holder
            term.check()
            tokens.append(term.token)

        election.run(work)
        election.run(work)
        assert tokens == [1, 2]
        assert election.leader() is None
        assert backend.leaders() == {"chair": None}


def test_work_on_a_thread_outlives_many_renewals(url: str) -> None:
    ttl = stretched(0.75)
    with tenure.sync.connect(url) as backend, backend.election("chair", ttl=ttl).campaign() as term:
        keep(term, seconds=1.2 * ttl)  # which takes three renewals


def test_an_error_of_a_thread_is_raised(url: str) -> None:
    def work(term: tenure.sync.Term) -> None:
        raise LookupError("no plan")

    with tenure.sync.connect(url) as backend:
        with pytest.raises(LookupError, match="no plan"):
            backend.election("chair", ttl=TTL).run(work)
        with pytest.raises(ZeroDivisionError), backend.election("chair", ttl=TTL).campaign():
            _ = 1 // 0
        assert backend.election("chair").leader() is None


def test_a_thread_that_exits_the_interpreter_only_ends_its_work(url: str) -> None:
    def work(term: tenure.sync.Term) -> None:
        raise SystemExit(3)

    with tenure.sync.connect(url) as backend, pytest.raises(tenure.TenureError, match="work raised SystemExit: 3"):
        backend.election("chair", ttl=TTL).run(work)


def test_a_thread_ends_its_work_also_with_an_error_that_exits_when_it_is_printed(url: str) -> None:
    class Leaving(BaseException):
        def __str__(self) -> str:
            raise SystemExit("printed")

    def work(term: tenure.sync.Term) -> None:
        raise Leaving

    with tenure.sync.connect(url) as backend:
        with pytest.raises(tenure.TenureError, match="work raised Leaving, which can't be printed"):
            backend.election("chair", ttl=TTL).run(work)
        assert backend.election("chair").leader() is None


def test_work_may_resign_from_its_own_thread(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        election = backend.election("chair", ttl=TTL)
        stop = threading.Event()

        def work(term: tenure.sync.Term) -> None:
            assert election.resign()
            assert term.lost.wait(PATIENCE)
            stop.set()

        election.run(work, stop=stop)
        assert election.leader() is None


def test_stop_from_another_thread(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        stop = threading.Event()
        began = threading.Event()
        leader = backend.election("chair", ttl=TTL)
        with leader.campaign():
            waiting = threading.Thread(target=lambda: backend.election("chair", ttl=TTL).run(began.set, stop=stop))  # type: ignore[arg-type]
            waiting.start()
            stop.set()
            waiting.join(PATIENCE)
            assert not waiting.is_alive()
            assert not began.is_set()


def test_a_thread_that_does_not_beat_loses_its_lease(url: str, short: float) -> None:
    events: list[Event] = []
    with tenure.sync.connect(url, on_event=events.append) as backend:
        election = backend.election("chair", ttl=short, stall_after=0.2)
        with pytest.raises(tenure.TermLost, match="made no progress"), election.campaign() as term:
            assert term.lost.wait(PATIENCE)
            wait_until(lambda: term.remaining() == 0.0)
            term.check()


def test_threads_observe_changes(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        changes = backend.election("chair").observe()
        assert next(changes) is None
        with backend.election("chair", ttl=TTL).campaign() as term:
            leader = next(changes)
            assert leader is not None
            assert leader.token == term.token
            assert backend.election("chair").ask_to_resign()
            assert term.lost.wait(PATIENCE)
        assert next(changes) is None
        changes.close()


def test_a_closed_backend_says_so(url: str) -> None:
    backend = tenure.sync.connect(url)
    with pytest.raises(tenure.ConfigError, match="is not open"):
        backend.election("chair")


async def test_a_blocked_loop_loses_its_lease_and_disturbs_no_other(url: str) -> None:
    events: list[Event] = []
    free: list[Event] = []
    asleep = threading.Event()
    ttl = stretched(1.0)

    def neighbour() -> None:
        with (
            tenure.sync.connect(url, on_event=free.append) as backend,
            backend.election("other chair", ttl=ttl).campaign() as term,
        ):
            asleep.wait(PATIENCE)
            keep(term, seconds=1.25 * ttl)  # which takes renewals

    thread = threading.Thread(target=neighbour)
    thread.start()
    async with tenure.connect(url, on_event=events.append) as backend:
        with pytest.raises(tenure.TermLost, match="made no progress"):
            async with backend.election("chair", ttl=ttl).campaign() as term:
                asleep.set()
                time.sleep(1.25 * ttl)
                assert term.remaining() == 0.0
                with pytest.raises(tenure.TermLost):
                    term.check()
                await asyncio.Event().wait()
    await asyncio.to_thread(thread.join, PATIENCE)
    assert [event.reason for event in events if isinstance(event, TermEnding)] == ["stalled"]
    assert not [event for event in free if isinstance(event, TermEnding)]


async def test_the_name_passes_on_while_the_old_loop_is_blocked(url: str, short: float) -> None:
    successor = threading.Event()

    def succeed() -> None:
        with tenure.sync.connect(url) as backend, backend.election("chair", ttl=TTL).campaign():
            successor.set()

    async with tenure.connect(url) as backend:
        thread = threading.Thread(target=succeed)
        with pytest.raises(tenure.TermLost):
            async with backend.election("chair", ttl=short).campaign():
                thread.start()
                assert successor.wait(PATIENCE)  # blocks the loop
                await asyncio.Event().wait()
        await asyncio.to_thread(thread.join, PATIENCE)


async def test_cancelled_at_any_moment_no_leader_is_left(url: str) -> None:
    async with tenure.connect(url) as backend:
        for steps in range(60):
            task = asyncio.create_task(backend.election("chair", ttl=TTL).run(lambda term: asyncio.Event().wait()))
            for _ in range(steps % 20):
                await asyncio.sleep(0 if steps < 40 else 0.0005)
            task.cancel()
            await asyncio.wait({task})
        driver = backend._connection.require_driver()

        async def is_vacant() -> bool:
            return (await backend.leaders()).get("chair") is None and not driver.candidacies

        await until(is_vacant)


async def test_an_observer_may_outlive_its_backend(url: str) -> None:
    async with tenure.connect(url) as backend:
        changes = backend.election("chair").observe()
        assert await anext(changes) is None
    await changes.aclose()


@pytest.mark.parametrize("is_answered", [True, False])
async def test_an_observer_is_told_that_its_backend_was_closed(
    url: str, is_answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the store never answered, and the thread that waits for that ends with the backend."""
    asked = threading.Event()

    async def never(name: str) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with tenure.connect(url) as backend:
        election = backend.election("chair")
        changes = election.observe()
        if is_answered:
            assert await anext(changes) is None
        else:
            monkeypatch.setattr(election._driver.store, "inspect", never)
        observing = asyncio.ensure_future(anext(changes))
        await until(lambda: is_answered or asked.is_set())
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(tenure.Unavailable, match=r"the backend (is|was) closed"):
            await observing


async def test_two_loops_in_one_process_share_the_renewal_thread(url: str) -> None:
    async with tenure.connect(url) as one, tenure.connect(url) as two:
        assert [t.name for t in threading.enumerate()].count("tenure-renewals") == 1
        async with one.election("chair", ttl=TTL).campaign():
            leader = await two.election("chair").leader()
            assert leader is not None
            assert leader.token == 1


async def test_closing_a_backend_ends_its_campaigns(url: str) -> None:
    events: list[Event] = []
    backend = tenure.connect(url, on_event=events.append)
    async with backend:
        task = asyncio.create_task(backend.election("chair", ttl=TTL).run(lambda term: asyncio.Event().wait()))
        await until(lambda: any(isinstance(event, TermBegan) for event in events))
    async with asyncio.timeout(PATIENCE):
        await task
    async with tenure.connect(url) as again:
        assert await again.leaders() == {"chair": None}


def test_a_forked_child_has_a_renewal_thread_of_its_own(url: str) -> None:
    with tenure.sync.connect(url):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                renewal_thread = RenewalThread.enter()
                answer = renewal_thread.call_blocking(lambda: asyncio.sleep(0, b"alive"))
                renewal_thread.leave()
                os.write(write, answer)
            finally:
                os._exit(0)
        os.close(write)
        assert os.read(read, 5) == b"alive"
        os.close(read)
        os.waitpid(child, 0)


def test_in_a_forked_child_the_parents_backend_is_refused(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        election = backend.election("chair")
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                election.leader()
            except tenure.ConfigError as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.close(write)
        assert b"connect again after the fork" in os.read(read, 1000)
        os.close(read)
        os.waitpid(child, 0)


def test_calls_while_the_last_backend_closes_end(url: str) -> None:
    for _ in range(10):
        ended: list[BaseException | None] = []

        def ask(election: tenure.sync.Election, ended: list[BaseException | None] = ended) -> None:
            try:
                while True:
                    election.leader()
            except tenure.TenureError as error:
                ended.append(error)

        with tenure.sync.connect(url) as backend:
            threads = [threading.Thread(target=ask, args=(backend.election("chair"),)) for _ in range(4)]
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert len(ended) == 4


@contextmanager
def logged_by(handle: Callable[[logging.LogRecord], object]) -> Iterator[None]:
    """Pass tenure's log records to *handle*."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            handle(record)

    handler, logger, level = Handler(), logging.getLogger("tenure"), logging.getLogger("tenure").level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_hooks_and_log_handlers_that_block_end_no_lease(url: str) -> None:
    ttl = stretched(0.75)
    called, logged, may_go_on = threading.Event(), threading.Event(), threading.Event()

    def hook(event: object) -> None:
        called.set()
        may_go_on.wait(PATIENCE)

    def handle(record: logging.LogRecord) -> None:
        logged.set()
        may_go_on.wait(PATIENCE)

    with (
        logged_by(handle),
        tenure.sync.connect(url) as backend,
        backend.election("innocent", ttl=ttl).campaign() as term,
        tenure.sync.connect(url, on_event=hook) as hooked,
        hooked.election("hooked", ttl=ttl).campaign() as told_of,
    ):
        assert called.wait(PATIENCE)
        assert logged.wait(PATIENCE)
        keep(term, told_of, seconds=1.2 * ttl)  # neither lease lasts without a renewal
        may_go_on.set()


def test_events_of_an_election_are_logged_before_its_backend_is_left(url: str) -> None:
    said: list[str] = []
    threads: set[str] = set()

    def handle(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        threads.add(threading.current_thread().name)
        raise SystemExit(1)  # in a log handler, too

    with logged_by(handle), tenure.sync.connect(url) as backend, backend.election("chair", ttl=TTL).campaign():
        pass
    assert "elected" in said[0]
    assert "released" in said[-1]
    assert "tenure-renewals" not in threads


def test_the_renewal_thread_sees_no_context_of_a_caller_and_hooks_do(url: str) -> None:
    request = contextvars.ContextVar("request", default="none")
    seen: list[str] = []
    request.set("mine")

    def healthy() -> bool:
        seen.append(request.get())
        return True

    with tenure.sync.connect(url) as backend:
        renewal_thread = RenewalThread.enter()

        async def look() -> str:
            return request.get()

        assert renewal_thread.call_blocking(look) == "none"
        with backend.election("chair", ttl=stretched(2.0), health=healthy).campaign():
            wait_until(lambda: seen)
        renewal_thread.leave()
    assert set(seen) == {"mine"}


async def test_events_on_a_loop_are_logged_there_in_the_context_of_the_owner(url: str) -> None:
    request = contextvars.ContextVar("request", default="none")
    request.set("mine")
    seen: list[tuple[str, str]] = []

    def note(_: object) -> None:
        seen.append((threading.current_thread().name, request.get()))

    with logged_by(note):
        async with tenure.connect(url, on_event=note) as backend, backend.election("chair", ttl=TTL).campaign():
            pass
    assert len(seen) == 4  # begun and ended, from the hook and the log
    assert set(seen) == {(threading.current_thread().name, "mine")}


@pytest.mark.parametrize("raised", [StopIteration("7"), KeyboardInterrupt("7"), asyncio.CancelledError("7")])
def test_any_exception_of_work_on_a_thread_ends_its_campaign(url: str, raised: BaseException) -> None:
    def work(term: tenure.sync.Term) -> None:
        raise raised

    with tenure.sync.connect(url) as backend:
        election = backend.election("chair", ttl=TTL)
        with pytest.raises(Exception, match=r"raised (StopIteration|KeyboardInterrupt|CancelledError): 7"):
            election.run(work)
        assert election.leader() is None


def test_an_interrupt_that_meets_a_health_callback_ends_the_program(url: str) -> None:
    def interrupted() -> bool:
        raise KeyboardInterrupt

    async def main() -> None:
        async with tenure.connect(url) as backend:
            await backend.election("chair", ttl=0.5, health=interrupted).run(lambda term: asyncio.Event().wait())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


def test_an_exit_in_a_callback_does_not_end_the_renewal_thread(url: str, short: float) -> None:
    def leave(*_: object) -> Any:
        raise SystemExit(1)

    with tenure.sync.connect(url, on_event=leave) as backend:
        with backend.election("chair", ttl=TTL).campaign() as term:
            term.check()
        with pytest.raises(tenure.TermLost), backend.election("chair", ttl=short, health=leave).campaign() as term:
            wait_until(lambda: term.remaining() == 0.0)
            term.check()
        wait_until(lambda: backend.election("chair").leader() is None)


def test_an_async_health_callback_for_threads_runs_on_a_thread(url: str) -> None:
    threads: set[str] = set()

    async def healthy() -> bool:
        threads.add(threading.current_thread().name)
        return True

    with (
        tenure.sync.connect(url) as backend,
        backend.election("chair", ttl=TTL, health=healthy).campaign() as term,
    ):
        wait_until(lambda: threads)
        term.check()
    assert "tenure-renewals" not in threads


def test_a_health_callback_that_hangs_takes_one_thread_and_keeps_no_process_alive(url: str, short: float) -> None:
    hanging, stop = threading.Event(), threading.Event()
    asked: list[threading.Thread] = []
    terms: list[int] = []

    def hangs() -> bool:
        asked.append(threading.current_thread())
        return hanging.wait(PATIENCE)

    def lead(term: tenure.sync.Term) -> None:
        terms.append(term.token)
        term.lost.wait(PATIENCE)

    with tenure.sync.connect(url) as backend:
        ill = backend.election("ill", ttl=short, health=hangs)
        suffering = threading.Thread(target=lambda: ill.run(lead, again=True, stop=stop))
        suffering.start()
        wait_until(lambda: len(terms) > 2)
        stop.set()
        suffering.join(PATIENCE)
        assert not suffering.is_alive()
        assert len(asked) == 1
        assert asked[0].daemon  # or the process could not end
        hanging.set()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_forgotten_observer_ends_quietly_after_its_backend(url: str) -> None:
    with tenure.sync.connect(url) as backend:
        changes = backend.election("chair").observe()
        assert next(changes) is None
    changes.close()


def test_an_observer_gets_an_error_when_its_backend_is_closed(url: str) -> None:
    with tenure.sync.connect(url), tenure.sync.connect(url) as backend:  # the first keeps the renewal thread
        changes = backend.election("chair").observe()
        assert next(changes) is None
        failed: list[BaseException] = []

        def listen() -> None:
            try:
                next(changes)
            except tenure.Unavailable as error:
                failed.append(error)

        hints = threading.Thread(target=listen)
        hints.start()
    hints.join(PATIENCE)
    assert not hints.is_alive()
    assert len(failed) == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlit:///x.db", "no backend serves 'sqlit'; did you mean 'sqlite'"),
        ("work.db", "is not the URL of a backend .* write for example sqlite:///work.db"),
        ("ftp://me:geheim@host/x", "no backend serves 'ftp'"),
    ],
)
def test_urls_without_a_backend(url: str, message: str) -> None:
    with pytest.raises(tenure.ConfigError, match=message) as caught:
        tenure.connect(url)
    assert "geheim" not in str(caught.value)


async def test_a_ttl_outside_the_backends_limits(url: str) -> None:
    async with tenure.connect(url) as backend:
        with pytest.raises(tenure.ConfigError, match=r"ttl \(0.001 s\) must be"):
            backend.election("chair", ttl=0.001)
        with pytest.raises(tenure.ConfigError, match="is open already"):
            await backend.__aenter__()


class Stubborn:
    """Work that ignores its cancellation."""

    def __init__(self) -> None:
        self.began, self.may_end = asyncio.Event(), asyncio.Event()

    async def __call__(self, term: tenure.Term) -> None:
        self.began.set()
        while not self.may_end.is_set():
            with suppress(asyncio.CancelledError):
                await self.may_end.wait()


async def test_work_that_outlives_its_backend_gets_an_error(url: str) -> None:
    work = Stubborn()
    async with tenure.connect(url) as backend:
        task = asyncio.create_task(backend.election("chair", **IMPATIENT).run(work))
        await work.began.wait()
    assert not task.done()
    work.may_end.set()
    with pytest.raises(tenure.Unavailable, match="closed while work was still running"):
        await task


async def test_a_close_that_is_cancelled_leaves_no_caller_waiting(url: str) -> None:
    work = Stubborn()
    async with tenure.connect(url):  # it keeps the renewal thread
        backend = tenure.connect(url)
        await backend.__aenter__()
        task = asyncio.create_task(backend.election("chair", ttl=60.0).run(work))
        await work.began.wait()
        driver, closing = backend._connection.require_driver(), asyncio.create_task(backend.__aexit__(None, None, None))
        await until(lambda: driver._is_closing)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await until(lambda: not driver.candidacies)  # this happens on the renewal thread, a moment later
        work.may_end.set()
        with pytest.raises(tenure.Unavailable, match="closed while work was still running"):
            await task


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with others"])
async def test_there_is_no_leader_on_a_closed_backend(url: str, others: bool) -> None:
    async with tenure.connect(url) if others else nullcontext():
        async with tenure.connect(url) as backend:
            election, queue = backend.election("chair", ttl=TTL), backend.queue("letters")
        with pytest.raises(tenure.Unavailable, match="closed"):
            await election.run(lambda term: asyncio.Event().wait())
        with pytest.raises(tenure.Unavailable, match="closed"):
            async with election.campaign():
                pass
        with pytest.raises(tenure.ConfigError, match="closed"):
            await queue.send(b"too late")


@pytest.mark.parametrize("others", [False, True], ids=["alone", "with others"])
def test_a_thread_whose_backend_is_closed_under_its_work(url: str, others: bool) -> None:
    began, may_end = threading.Event(), threading.Event()
    ended: list[BaseException] = []

    def work(term: tenure.sync.Term) -> None:
        began.set()
        may_end.wait(PATIENCE)
        if term.name == "failing":
            raise LookupError("no plan")

    def lead(election: tenure.sync.Election) -> None:
        try:
            election.run(work)
        except Exception as error:
            ended.append(error)

    for name, error in (("failing", LookupError), ("chair", tenure.Unavailable)):
        began.clear()
        may_end.clear()
        with tenure.sync.connect(url) if others else nullcontext():
            with tenure.sync.connect(url) as backend:
                leading = threading.Thread(target=lead, args=(backend.election(name, **IMPATIENT),))
                leading.start()
                assert began.wait(PATIENCE)
            assert leading.is_alive()  # run does not return before the work does
            may_end.set()
            leading.join(PATIENCE)
        assert isinstance(ended.pop(), error)


class Interrupted(BaseException):
    """Like KeyboardInterrupt, which would end pytest."""


def interrupt_at(step: int, act: Callable[[], None]) -> bool:
    """Do *act*, interrupted on this thread at its *step*-th line within the library; False if it has fewer."""
    left, before = step, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if "/tenure/" not in frame.f_code.co_filename and "contextlib" not in frame.f_code.co_filename:
            return None
        # Of these there are events, too, but Python does not look for signals there: at a try, at the end of a with.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        left -= event == "line" and not line.startswith(("try:", "with "))
        if left == 0:
            raise Interrupted
        return trace

    sys.settrace(trace)
    try:
        act()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return left <= 0


def confined(step: int, act: Callable[[], None]) -> Iterator[bool]:
    """Do the same in a generator, with a current exception of its own: Python may keep one when a trace raises."""
    yield interrupt_at(step, act)


@pytest.mark.parametrize("form", ["campaign", "partitions", "run", "session"])
def test_interrupted_at_any_line_nothing_is_held_for_ever(url: str, form: str) -> None:
    with tenure.sync.connect(url) as backend:
        election, queue = backend.election("chair", ttl=TTL), backend.queue("letters")

        def hold() -> None:
            if form == "run":
                election.run(lambda term: None)
            elif form == "partitions":
                stop = threading.Event()
                with backend.partitions("group", 1, ttl=TTL, retry_every=0.1) as mine:
                    mine.run(lambda term: stop.set(), stop=stop)
            elif form == "campaign":
                with election.campaign() as term:
                    term.check()
            else:
                with queue.session("s", wait=PATIENCE) as session:  # it waits for the one before
                    assert session.remaining()

        step = 1
        gc.collect()
        gc.freeze()  # so that each collection visits what has been made since
        while next(confined(step, hold)):
            gc.collect()  # a block that was not entered is left by its generator's end
            wait_until(lambda: not backend._behind._connection.require_driver().candidacies)
            step += 1
        assert step > 10
    assert sys.exc_info() == (None, None, None)


def test_a_stop_that_comes_when_the_loop_is_closed_harms_nothing() -> None:
    looked, closed = threading.Event(), threading.Event()

    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            looked.set()
            return closed.wait(PATIENCE)

    async def until_it_looks() -> None:
        with forwarded(Late()):
            await asyncio.to_thread(looked.wait, PATIENCE)

    asyncio.run(until_it_looks())
    (waiting,) = [thread for thread in threading.enumerate() if thread.name == "tenure-stop"]
    closed.set()
    waiting.join(PATIENCE)  # an exception in it would fail the test


async def test_a_backend_of_a_loop_is_used_from_threads(url: str) -> None:
    async with tenure.connect(url) as backend:
        orders = backend.queue("orders")
        with tenure.sync.Backend(backend) as for_threads:

            def lead() -> int:
                token = 0

                def work(term: tenure.sync.Term) -> None:
                    nonlocal token
                    term.check()
                    token = term.token

                for_threads.election("chair", ttl=TTL).run(work, sigterm=False)
                for_threads.queue("orders").send(b"from a thread")
                return token

            assert await asyncio.to_thread(lead) == 1
        assert [message.body for message in await orders.receive()] == [b"from a thread"]  # it is still open
        with pytest.raises(tenure.ConfigError, match=r"was closed"):
            for_threads.queue("orders")
    with pytest.raises(tenure.ConfigError, match="was closed"):
        for_threads.open()
    with pytest.raises(tenure.ConfigError, match=r"has on_event of its own"):
        tenure.sync.Backend(backend, on_event=print)


async def test_a_consumer_of_threads_ends_with_its_view_of_a_backend(url: str) -> None:
    began = threading.Event()
    may_end = threading.Event()
    failed: list[BaseException] = []

    def handle(message: tenure.sync.Message) -> None:
        began.set()
        may_end.wait(PATIENCE)

    def consume(queue: tenure.sync.Queue) -> None:
        try:
            queue.consume(handle, sigterm=False)
        except tenure.Unavailable as error:
            failed.append(error)

    async with tenure.connect(url) as backend:
        orders = backend.queue("orders")
        await orders.send(b"slow")
        for_threads = tenure.sync.Backend(backend).open()
        consuming = threading.Thread(target=consume, args=(for_threads.queue("orders"),))
        consuming.start()
        await asyncio.to_thread(began.wait, PATIENCE)
        closing = asyncio.create_task(asyncio.to_thread(for_threads.close))
        await asyncio.sleep(0.1)
        may_end.set()
        await closing
        await asyncio.to_thread(consuming.join)
        assert len(failed) == 1
        stats = await orders.stats()
        assert stats.ready + stats.locked <= 1


async def test_requests_from_two_loops_each_get_their_answers(url: str) -> None:
    async def twice(message: tenure.Message) -> tenure.Reply:
        return tenure.Reply(message.body * 2)

    async with tenure.connect(url) as backend:
        orders = backend.queue("orders")
        consuming = asyncio.create_task(orders.consume(twice, sigterm=False))
        with tenure.sync.Backend(backend) as for_threads:
            there = for_threads.queue("orders")
            asking = [asyncio.to_thread(there.request, b"%d" % number) for number in range(10)]
            answers = await asyncio.gather(*(orders.request(b"%d" % number) for number in range(10)), *asking)
            assert [one.body for one in answers] == [b"%d" % number * 2 for number in range(10)] * 2
        assert len(await _reply_queues(backend)) == 2
        await orders.drain()
        await consuming
    async with tenure.connect(url) as backend:
        assert await _reply_queues(backend) == []


async def _reply_queues(backend: tenure.Backend) -> list[str]:
    broker = backend._connection.require_open()[1].broker
    return [name for name in await broker.names() if ".replies." in name]
