"""One thread that does all the writing of a process to a file: concurrent requests share one commit (group commit).

The rule is "flush when the last commit has returned": a request to an idle thread is committed at once, and those that
arrive during a commit share the next one. So an idle queue has no added latency, and a busy one waits for the disk once
for hundreds of requests.

House rules:

- Requests run one after the other, in the order of their arrival, in one transaction, and are answered after the
  commit. An error of the file or of the commit reaches all of them.
- The wait for the disk comes after the commit, when the write lock is free again, and only for requests whose answer
  must survive a loss of power. A claim and a renewal need not: their process would be gone as well. (Their commits
  survive the death of any process.) So others see a sent message a little before its sender gets the answer.
- A bad request doesn't fail the others: then each runs in a transaction of its own.
- Renewals go first, so that no lock runs out behind a large backlog of sends.
- Answers go back with one call per loop and commit.
- A request that was cancelled before its turn is skipped. One that was cancelled later, and is executed nevertheless,
  is undone if possible: a claim is given back, also when the caller's loop is closed by now.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from tenure._backends.sqlite.client import PATIENCE, Database, DiskFullError
from tenure._backends.sqlite.file_clock import FileClock
from tenure._backends.sqlite.operations import Operations
from tenure._queue.message import Died
from tenure.errors import ConfigError, Unavailable

T = TypeVar("T")

GROUP_SECONDS = 0.02
"""Seconds after which a transaction accepts no further request: callers and other processes wait for its end."""

DIED_MAX = 10_000
"""The most deaths in a queue, the newest, that are kept until a claim reports them."""

NOTIFY_EVERY = 0.001
"""Seconds between notifications for a queue: a busy sender wakes others no more often."""

_REQUEST_FAULTS = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
"""SQLite's errors about a request, not about the file."""


@dataclass(slots=True, eq=False)
class Request(Generic[T]):
    """Work to be done in a transaction, and the future that waits for it."""

    work: Callable[[Operations], T]
    answer: asyncio.Future[T]
    loop: asyncio.AbstractEventLoop
    asked_at: float
    undo: Callable[[Operations, T], object] | None
    """Undoes the work in another transaction, if the caller has given up by the time of the answer."""
    lasting: bool
    """Whether it must survive a loss of power before it is answered."""
    result: Any = None  # a T, once there is one
    error: BaseException | None = None

    def deliver(self) -> bool:
        """Set the answer; on its loop. False if the caller has given up."""
        answer = self.answer
        if answer.done():
            return False
        if self.error is not None:
            answer.set_exception(self.error)
        else:
            answer.set_result(self.result)
        return True

    def undone(self) -> Request[object] | None:
        """Return the request that undoes this one; None if nothing was done, or it can't be undone."""
        undo = self.undo
        if self.error is not None or undo is None:
            return None
        result = self.result
        answer: asyncio.Future[object] = self.loop.create_future()
        return Request(
            lambda operations: undo(operations, result), answer, self.loop, time.monotonic(), None, lasting=False
        )


class PendingWrites:
    """The requests of one loop without an answer yet: each ends with ``Unavailable`` after ``patience`` seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, patience: float, path: str) -> None:
        self._loop = loop
        self._patience = patience
        self._path = path
        self._waiting: deque[Request[Any]] = deque()
        self._watch: asyncio.TimerHandle | None = None

    def add(self, request: Request[Any]) -> None:
        """Add *request*. One timer serves all requests: one for each would cost more than the request itself."""
        waiting = self._waiting
        while waiting and waiting[0].answer.done():
            waiting.popleft()
        waiting.append(request)
        if self._watch is None:
            self._watch = self._loop.call_later(self._patience, self._give_up_late)

    def _give_up_late(self) -> None:
        self._watch = None
        waiting, now = self._waiting, time.monotonic()
        while waiting:
            request = waiting[0]
            if not request.answer.done():
                left = request.asked_at + self._patience - now
                if left > 0:
                    self._watch = self._loop.call_later(left, self._give_up_late)
                    return
                request.answer.set_exception(
                    Unavailable(
                        f"{self._path} gave no answer within {self._patience:g} s; the disk may hang. "
                        "The request may still be executed"
                    )
                )
            waiting.popleft()


class Writer:
    """The thread with the connection that writes; started when first needed, and again after a fork.

    Args:
        make: Makes the database; called for the first request.
        clock: The clock of the file.
        notify: Notifies all processes of a change in a queue, by name; called after the commit.
    """

    def __init__(self, make: Callable[[], Database], clock: FileClock, notify: Callable[[str], None]) -> None:
        self._make = make
        self._clock = clock
        self._notify = notify
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._thread: _WriterThread | None = None
        self._closed = False
        self._died: dict[str, deque[Died]] = {}  # by queue, not reported yet

    def submit(
        self,
        work: Callable[[Operations], T],
        undo: Callable[[Operations, T], object] | None = None,
        *,
        lasting: bool = True,
        urgent: bool = False,
    ) -> asyncio.Future[T]:
        """Return a future of the result of *work*, done once that is committed. Called on a loop.

        *work* may run several times, each time in a new transaction, after a rollback of the one before. A caller that
        is cancelled only stops waiting.

        Args:
            work: Runs in the writer's thread.
            undo: Undoes it, in the writer's thread too, if the caller was cancelled meanwhile.
            lasting: Whether the answer must survive a loss of power.
            urgent: Run it before all requests that are not urgent.

        Raises:
            Unavailable: The file could not be used now, or the answer did not come in time.
            ConfigError: The file can't be used as it is, or the writer is closed.
        """
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            thread = self._running()
        loop = asyncio.get_running_loop()
        request = Request(work, loop.create_future(), loop, time.monotonic(), undo, lasting)
        thread.take(request, urgent=urgent)
        return request.answer

    def died(self, queue: str) -> Sequence[Died]:
        """Return the messages of *queue* that this process found expired or failed since the last call."""
        died = self._died.get(queue)
        if not died:
            return ()
        found = []
        with suppress(IndexError):  # the thread may add to it meanwhile
            while True:
                found.append(died.popleft())
        return found

    def _collect_deaths(self, died: dict[str, list[Died]]) -> None:
        for queue, found in died.items():
            self._died.setdefault(queue, deque(maxlen=DIED_MAX)).extend(found)

    async def close(self) -> None:
        """Finish all requests, then close the connection and end the thread."""
        self._closed = True
        with self._guard:
            thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(thread.patience):
                await thread.end()

    def _running(self) -> _WriterThread:
        if self._pid != os.getpid():
            # The parent's thread doesn't exist here; its connection must not be used, nor its lock, which may be held.
            _LEFT_BY_FORK.append(self._thread)
            self._guard, self._thread, self._pid = threading.Lock(), None, os.getpid()
        with self._guard:
            if self._closed:
                raise ConfigError("this backend was closed; connect again")
            if self._thread is None:
                self._thread = _WriterThread(self._make(), self._clock, self._notify, self._collect_deaths)
            return self._thread


_LEFT_BY_FORK: list[object] = []  # connections inherited by a fork, kept: closing them would not be safe either


class _Command(Enum):
    """Commands to the thread besides requests."""

    STOP = "stop"
    RUN_URGENT = "run an urgent request"


_STOP, _RUN_URGENT = _Command.STOP, _Command.RUN_URGENT


class _WriterThread:
    """The running thread."""

    def __init__(
        self,
        database: Database,
        clock: FileClock,
        notify: Callable[[str], None],
        collect_deaths: Callable[[dict[str, list[Died]]], None],
    ) -> None:
        self._collect_deaths = collect_deaths
        self.patience = database.options.busy + PATIENCE
        self._database = database
        self._clock = clock
        self._notify = notify
        self._pending_of: dict[asyncio.AbstractEventLoop, PendingWrites] = {}
        self._inbox: SimpleQueue[Request[Any] | _Command] = SimpleQueue()
        self._urgent: deque[Request[Any]] = deque()
        self._to_notify: dict[str, None] = {}
        self._notified_at = 0.0
        self._ended: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._thread = threading.Thread(target=self._serve, name="tenure-writer", daemon=True)
        self._thread.start()

    # --- on the callers' loops ---

    def take(self, request: Request[Any], *, urgent: bool) -> None:
        """Add a request."""
        pending = self._pending_of.get(request.loop)
        if pending is None:
            for loop in [loop for loop in self._pending_of if loop.is_closed()]:
                self._pending_of.pop(loop, None)
            pending = self._pending_of[request.loop] = PendingWrites(request.loop, self.patience, self._database.path)
        pending.add(request)
        if urgent:
            self._urgent.append(request)
            self._inbox.put(_RUN_URGENT)
        else:
            self._inbox.put(request)

    async def end(self) -> None:
        """Stop the thread, and wait for its end."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        self._ended.append((loop, ended))
        self._inbox.put(_STOP)
        await ended

    # --- in the thread ---

    def _serve(self) -> None:
        while True:
            try:
                request = self._inbox.get(timeout=self._until_notification())
            except Empty:
                self._notify_now()
                continue
            if request is _RUN_URGENT and self._urgent:
                request = self._urgent.popleft()
            if request is _STOP or (
                isinstance(request, Request) and not request.answer.done() and self._commit(request)
            ):
                break
        self._notify_now()
        self._database.close()
        for loop, ended in self._ended:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, ended)

    def _until_notification(self) -> float | None:
        return max(0.0, self._notified_at + NOTIFY_EVERY - time.monotonic()) if self._to_notify else None

    def _notify_now(self) -> None:
        names, self._to_notify = self._to_notify, {}
        for name in names:
            self._notify(name)
        self._notified_at = time.monotonic()

    def _commit(self, first: Request[Any]) -> bool:
        """Run *first* and all requests that have arrived since, in one transaction; True if the thread is to stop."""
        group = [first]
        self._database.until = first.asked_at + self._database.options.busy
        is_end = False

        def work(connection: sqlite3.Connection) -> Operations:
            nonlocal is_end
            operations = Operations(connection, self._clock)
            with _separating_faults():
                for request in group:  # more than one only if an earlier attempt has failed
                    request.result = request.work(operations)
                give_up = time.monotonic() + GROUP_SECONDS
                while not is_end and time.monotonic() < give_up:
                    try:
                        another = self._urgent.popleft() if self._urgent else self._inbox.get_nowait()
                    except Empty:
                        break
                    if isinstance(another, Request) and not another.answer.done():
                        group.append(another)
                        another.result = another.work(operations)
                    is_end = another is _STOP
                operations.close()
            if operations.needs_reserve:
                self._database.keep_reserve(operations.growth)
            return operations

        try:
            operations = self._database.write(work)
        except _FaultyRequestError as faulty:
            if len(group) == 1:
                first.error = faulty.__cause__
            else:
                self._commit_singly(group)
        except DiskFullError as error:
            if len(group) == 1:
                first.error = error
            else:
                self._commit_singly(group)  # there may be room for requests that don't send
        except Exception as error:
            for request in group:
                request.error = error
        else:
            self._committed(operations)
        if self._to_notify and time.monotonic() - self._notified_at >= NOTIFY_EVERY:
            self._notify_now()
        self._answer(group)
        return is_end

    def _answer(self, group: list[Request[Any]]) -> None:
        """Answer the callers; where the answer must last, after the disk has it."""
        self._deliver([request for request in group if not request.lasting])
        lasting = [request for request in group if request.lasting]
        if any(request.error is None for request in lasting):
            try:
                self._database.sync()
            except Exception as error:
                for request in lasting:
                    request.error = request.error or error
        self._deliver(lasting)

    def _deliver(self, group: list[Request[Any]]) -> None:
        """Deliver the answers of *group*, with one call for each loop."""
        loops: dict[asyncio.AbstractEventLoop, list[Request[Any]]] = {}
        for request in group:
            loops.setdefault(request.loop, []).append(request)
        for loop, requests in loops.items():
            try:
                loop.call_soon_threadsafe(self._deliver_here, requests)
            except RuntimeError:  # that loop is closed, and its callers with it
                self._undo(requests)

    def _deliver_here(self, requests: list[Request[Any]]) -> None:
        self._undo([request for request in requests if not request.deliver()])

    def _undo(self, requests: list[Request[Any]]) -> None:
        for request in requests:
            if (undoing := request.undone()) is not None:
                self._inbox.put(undoing)

    def _commit_singly(self, group: list[Request[Any]]) -> None:
        """Run each request of *group* in a transaction of its own, so that only a bad one fails."""
        for request in group:

            def work(connection: sqlite3.Connection, request: Request[Any] = request) -> Operations:
                operations = Operations(connection, self._clock)
                with _separating_faults():
                    request.result = request.work(operations)
                    operations.close()
                if operations.needs_reserve:
                    self._database.keep_reserve(operations.growth)
                return operations

            try:
                operations = self._database.write(work)
            except _FaultyRequestError as faulty:
                request.error = faulty.__cause__
            except Exception as error:
                request.error = error
            else:
                self._committed(operations)

    def _committed(self, operations: Operations) -> None:
        self._to_notify.update(operations.changed)
        if operations.died:
            self._collect_deaths(operations.died)


class _FaultyRequestError(Exception):
    """One request of a transaction is bad."""


@contextmanager
def _separating_faults() -> Iterator[None]:
    """Separate the errors of a request from those of the file."""
    try:
        yield
    except _REQUEST_FAULTS as error:
        raise _FaultyRequestError from error
    except sqlite3.Error:
        raise
    except Exception as error:
        raise _FaultyRequestError from error


def _settle(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
