"""The interface of tenure for threads: the same classes and methods, without ``await``.

Each call runs the method of the asynchronous object on the renewal loop, and waits for its result. Work runs on a
thread of its own. A thread can't be cancelled: watch ``term.lost``, or call ``term.check()`` before every act. Queues
are consumed on one more loop for each backend, where hooks and handlers may block without delaying a renewal.

::

    with tenure.sync.connect("sqlite:///work.db") as backend:
        backend.election("nightly-report").run(coordinate)  # def coordinate(term): ...
        backend.queue("orders").consume(handle)  # def handle(message): ...
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Unpack
from weakref import WeakSet

import tenure
from tenure import ElectionOptions, Missed, Outgoing, QueueOptions, Url
from tenure._backend import import_late_modules, url_given
from tenure._connection import not_open
from tenure._election.term import BlockingTerm as Term
from tenure._partitions.partitions import BlockingPartitionTerm as PartitionTerm
from tenure._partitions.partitions import make_blocking_partition_term
from tenure._public import publish_all
from tenure._queue.received import BlockingMessage as Message
from tenure._runtime.loop_thread import LoopThread
from tenure._runtime.renewal_thread import RenewalThread
from tenure._telemetry.hook import ForwardingHook, call_hook
from tenure.errors import ConfigError
from tenure.events import Event
from tenure.sync._blocking import blocking
from tenure.sync._elections import Election, Work
from tenure.sync._partitions import Partitions, PartitionWork
from tenure.sync._queues import DeadLetters, Queue, Session
from tenure.sync._schedules import Schedule, Schedules
from tenure.sync._service import Service
from tenure.sync._typed_queues import TypedQueue
from tenure.telemetry import Telemetry

__all__ = [
    "Backend",
    "DeadLetters",
    "Election",
    "Message",
    "PartitionTerm",
    "PartitionWork",
    "Partitions",
    "Queue",
    "Schedule",
    "Schedules",
    "Service",
    "Session",
    "Term",
    "TypedQueue",
    "Work",
    "connect",
]


class Backend:
    """A store, connected. See :class:`tenure.Backend`.

    It is used inside ``with``; or between :meth:`open` and :meth:`close`, where a block doesn't fit.

    Args:
        url: As for :func:`connect`. A :class:`tenure.Backend` in its place, open on an event loop, is used from threads
            then: it keeps its ``on_event``, and stays open when this object is closed.
        credentials: As for :func:`connect`.
        on_event: As for :func:`connect`.
        telemetry: As for :func:`tenure.connect`.

    Example::

        async with tenure.connect("sqlite:///work.db") as backend:
            with tenure.sync.Backend(backend) as for_threads:
                await asyncio.to_thread(for_threads.queue("orders").send, b"two kettles")
    """

    def __init__(
        self,
        url: str | tenure.Backend,
        *,
        credentials: tenure.AskCredentials | None = None,
        on_event: Callable[[Event], None] | None = None,
        telemetry: Telemetry | Sequence[Telemetry] | None = None,
    ) -> None:
        import_late_modules()
        self._on_event = on_event
        self._is_owner = not isinstance(url, tenure.Backend)
        if isinstance(url, tenure.Backend):
            own = {"credentials": credentials, "on_event": on_event, "telemetry": telemetry}
            if given := [name for name, value in own.items() if value is not None]:
                raise ConfigError(f"{url!r} has {given[0]} of its own; give it to tenure.connect()")
            self._behind = url
        else:
            hook = None if on_event is None else ForwardingHook(self._forward)
            self._behind = tenure.Backend(url, credentials=credentials, on_event=hook, telemetry=telemetry)
        self.url: Url = self._behind.url
        self._entered: RenewalThread | None = None
        self._consumer_loop: LoopThread | None = None
        self._new_locks()
        _made.add(self)

    def _new_locks(self) -> None:
        self._guard = threading.Lock()
        self._turn = threading.Lock()  # while it is opened or closed

    def open(self) -> Backend:
        """Open the backend unless it is open, and return it: for frameworks whose start and end are two functions.

        ``with`` does the same. After :meth:`close`, and in a child by fork of a process that has it open, it is opened
        anew; elections and queues that were made before stay closed. Any number of threads may call it.

        Example::

            backend = tenure.sync.connect("sqlite:///work.db").open()
            atexit.register(backend.close)
        """
        with self._turn:
            if self._entered is None or self._entered.is_forked:
                self._open()
        return self

    def close(self) -> None:
        """Close the backend, if open: end campaigns and consumers, release leases and locks, close the store.

        Handlers are not waited for: call ``queue.drain()`` before, to let them finish.
        """
        loop = self._consumer_loop
        # A hook can't wait until its own backend is closed: the close waits for the hook.
        if self._turn.acquire(blocking=loop is None or not loop.is_current):
            try:
                self._close()
            finally:
                self._turn.release()

    def __enter__(self) -> Backend:
        with self._turn:
            self._open()
        return self

    def _open(self) -> None:
        if not self._is_owner:
            self._behind._connection.require_open()
            if self._entered is not None and not self._entered.is_forked:
                raise ConfigError(f"this object is open already (a block opens it by itself): {self!r}")
        renewal_thread = RenewalThread.enter()
        try:
            if self._is_owner:
                renewal_thread.call_blocking(self._behind.__aenter__)
        except BaseException:
            renewal_thread.leave()
            raise
        if self._entered is not None:  # by our parent, where the thread of its consumers stays
            self._consumer_loop = None
        self._entered = renewal_thread
        if self._on_event is not None:
            self._consumer_thread()

    def _close(self) -> None:
        renewal_thread, self._entered = self._entered, None
        if renewal_thread is None or renewal_thread.is_forked:  # a child that ends has nothing to close
            return
        if sys.is_finalizing():  # an unfinished generator is closed: the backend ends with the process
            return
        try:
            if self._is_owner:
                renewal_thread.call_blocking(self._behind.aclose)
        finally:
            renewal_thread.leave()
            with self._guard:
                loop = self._consumer_loop
            try:
                if loop is not None:
                    loop.end()
            finally:
                self._consumer_loop = None  # not before: a hook that still runs there must find that out

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._behind)

    def election(self, name: str, **options: Unpack[ElectionOptions]) -> Election:
        """Return an election for *name*, in which this object is one candidate. See :meth:`tenure.Backend.election`.

        ``health`` is called on a thread of its own.
        """
        renewal_thread = self._renewal_thread
        return Election(self._behind._election(name, options, Term), renewal_thread)

    def partitions(
        self, name: str, partitions: int | Iterable[str], *, weight: int = 1, **options: Unpack[ElectionOptions]
    ) -> Partitions:
        """Return the partitions of a group, of which this object is one member. See :meth:`tenure.Backend.partitions`.

        ``health`` is called on a thread of its own.

        Example::

            partitions = backend.partitions("orders", 64)
            partitions.run(work)  # work(term) for each term.partition owned, on a thread of its own
        """
        renewal_thread = self._renewal_thread
        behind = self._behind._partitions(name, partitions, weight, options, make_blocking_partition_term)
        return Partitions(behind, renewal_thread)

    def queue(self, name: str, **settings: Unpack[QueueOptions]) -> Queue:
        """Return the queue called *name*. See :meth:`tenure.Backend.queue`."""
        renewal_thread = self._renewal_thread
        queue = self._behind.queue(name, **settings)
        return Queue(queue, renewal_thread, self._consumer_thread)

    def schedule(
        self,
        name: str,
        every: str | float | timedelta,
        *,
        queue: str,
        timezone: str = "UTC",
        missed: Missed = "once",
        missed_after: float = 60.0,
        message: Outgoing | None = None,
    ) -> Schedule:
        """Return a schedule, which sends to *queue* at each of its times. See :meth:`tenure.Backend.schedule`.

        ``schedule.run()`` blocks: run it on a thread of its own.
        """
        behind = self._behind.schedule(
            name,
            every,
            queue=queue,
            timezone=timezone,
            missed=missed,
            missed_after=missed_after,
            message=message,
        )
        return Schedule(behind, self._consumer_thread)

    schedules = blocking(tenure.Backend.schedules)
    leaders = blocking(tenure.Backend.leaders)
    vacancies = blocking(tenure.Backend.vacancies)
    queues = blocking(tenure.Backend.queues)
    diagnose = blocking(tenure.Backend.diagnose)
    migrate = blocking(tenure.Backend.migrate)
    migration_sql = blocking(tenure.Backend.migration_sql)
    set_clock = blocking(tenure.Backend.set_clock)

    def _consumer_thread(self) -> LoopThread:
        """Return the loop on which queues are consumed and hooks called, started when it is first needed."""
        with self._guard:
            if self._consumer_loop is None:
                self._require_open()
                self._consumer_loop = LoopThread()
                self._consumer_loop.start("tenure-consumers")
            return self._consumer_loop

    def _forward(self, event: Event) -> None:
        """Call the hook on the loop that it may block: elections emit their events on the renewal loop."""
        assert self._on_event is not None
        loop = self._consumer_loop
        if loop is None or loop.is_current:
            self._on_event(event)
        else:
            with suppress(RuntimeError):  # that loop is closed, and the backend with it
                loop.loop.call_soon_threadsafe(call_hook, self._on_event, event)

    @property
    def _renewal_thread(self) -> RenewalThread:
        return self._require_open()

    def _require_open(self) -> RenewalThread:
        if self._entered is None:
            was_open = self._behind._connection.was_open
            raise ConfigError(not_open(self.url, was_open=was_open, block="with tenure.sync.connect", opening="open()"))
        return self._entered


_made: WeakSet[Backend] = WeakSet()


def _note_fork() -> None:
    for backend in list(_made):
        backend._new_locks()  # threads of the parent may have held the old ones


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def connect(
    url: str | None = None,
    *,
    credentials: tenure.AskCredentials | None = None,
    on_event: Callable[[Event], None] | None = None,
    telemetry: Telemetry | Sequence[Telemetry] | None = None,
) -> Backend:
    """Connect to the store at *url*; use it as ``with tenure.sync.connect(url) as backend:``.

    Without *url*, the environment variable ``TENURE_URL`` names the store. Where a block doesn't fit, there are
    ``backend.open()`` and ``backend.close()``. See :func:`tenure.connect`.

    *credentials* is called on threads of tenure's own, and so is *on_event*: on the one on which queues are consumed.
    If that blocks, consumers and the end of the block wait for it; no lease or lock is lost.
    """
    return Backend(url_given(url), credentials=credentials, on_event=on_event, telemetry=telemetry)


publish_all(__name__)
