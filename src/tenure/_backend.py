"""A store, connected: where elections and queues come from."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack, cast
from weakref import WeakSet, WeakValueDictionary

from tenure import _registry as registry
from tenure._election.driver import Driver
from tenure._election.elector import Election, leader_of
from tenure._election.options import ElectionOptions, timing_of
from tenure._election.store import LeaseStore, LeaseTraits
from tenure._election.term import MakeTerm, Term
from tenure._lease import HeldBy, Leader, Vacant
from tenure._opened import Fact, Opened
from tenure._queue.broker import Broker, QueueOptions, QueueTraits, checked_changes, settings_with
from tenure._queue.checks import check_count, check_name
from tenure._queue.context import QueueContext
from tenure._queue.hints import HintSubscriptions
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.producer import Requests, is_reply_queue
from tenure._queue.queue import Queue
from tenure._queue.verdicts import COMPLETE, Settled, Settlement
from tenure._runtime.clock import Clock, SystemClock
from tenure._runtime.renewal_thread import RenewalThread
from tenure._runtime.threads import in_thread
from tenure._url import Url
from tenure.errors import ConfigError, TenureError, Unavailable, refuse_unknown
from tenure.events import Event

INSPECTED_AT_ONCE = 16

TRIAL = "tenure-doctor-"
"""The prefix of the names of queues in which a message is tried."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The facts that ``tenure doctor`` found about a backend.

    ``round_trip`` is the median of five questions, in seconds; ``queues`` is None where there are none. ``failure`` is
    the error that prevented a message from being kept and removed again, if that was tried.
    """

    url: str
    round_trip: float
    traits: LeaseTraits
    facts: Sequence[Fact]
    queues: QueueTraits | None = None
    failure: TenureError | None = None


class Backend:
    """A store that coordinates equal instances; made by :func:`tenure.connect`.

    It is used inside ``async with``; or between :meth:`open` and :meth:`aclose`, where a block doesn't fit.
    """

    def __init__(
        self,
        url: str,
        *,
        renewal_thread: RenewalThread | None = None,
        clock: Clock | None = None,
        on_event: Callable[[Event], None] | None = None,
        make_term: MakeTerm = Term,
    ) -> None:
        self.url: Url = Url.parse(url)
        self._module = registry.load(self.url)
        self._given_renewal_thread = renewal_thread
        self._clock = clock or SystemClock()
        self._on_event = on_event
        self._make_term = make_term
        self._renewal_thread: RenewalThread | None = None
        self._opened: Opened | None = None
        self._driver: Driver | None = None
        # Weak: some ask for their queue anew for each message. By number, as several may be of one name.
        self._queues: WeakValueDictionary[int, Queue] = WeakValueDictionary()
        self._queues_made = 0
        self._requests: dict[str, Requests] = {}
        self._hints = HintSubscriptions()
        self._was_open = False
        self._turns: dict[str, Future[None]] = {}  # the one that opens or closes it now, done when that is over

    async def open(self) -> Backend:
        """Open the backend unless it is open, and return it: for frameworks whose start and end are two functions.

        ``async with`` does the same. It starts the renewal thread; the first question connects. After :meth:`aclose`,
        and in a child by fork of a process that has it open, it is opened anew; elections and queues that were made
        before stay closed.

        Example::

            backend = await tenure.connect("sqlite:///work.db").open()
            ...
            await backend.aclose()
        """
        async with self._in_turn():
            if self._renewal_thread is None:
                await self._open()
        return self

    async def aclose(self) -> None:
        """Close the backend, if open: end campaigns and consumers, release leases and locks, close the store.

        Handlers are cancelled; await ``queue.drain()`` before, to let them finish. So is a handler that calls this: it
        gets no further than that line, and ``consume`` raises ``Unavailable``. Let the opener close it.
        """
        async with self._in_turn():
            if self._renewal_thread is not None:
                await self._close()

    async def __aenter__(self) -> Backend:
        async with self._in_turn():
            if self._renewal_thread is not None:
                raise ConfigError(
                    f"{self.url} is open already (a block opens it by itself); "
                    "connect once more for a second connection"
                )
            await self._open()
        return self

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """Open and close one after the other, on whatever loops."""
        if self._renewal_thread is not None and self._renewal_thread.is_forked:
            self._renewal_thread = self._driver = self._opened = None  # the open ones stayed with the parent
        turn: Future[None] = Future()
        while (before := self._turns.setdefault("now", turn)) is not turn:  # in one step, as threads may race
            await asyncio.wait({asyncio.wrap_future(before)})
        _turning.add(self)
        try:
            yield
        finally:
            _turning.discard(self)
            self._turns.pop("now", None)  # a fork inside of the block has left none
            turn.set_result(None)

    async def _open(self) -> None:
        _check_loop(here=self._given_renewal_thread is not None)
        renewal_thread = self._given_renewal_thread or RenewalThread.enter()

        async def open_store() -> tuple[Opened, Driver]:
            opened: Opened = self._module.open(self.url, clock=self._clock)
            return opened, Driver(opened.leases, self._clock)

        try:
            self._opened, self._driver = await renewal_thread.call(open_store)
        except BaseException:
            await _leave(renewal_thread, given=self._given_renewal_thread is not None)
            raise
        self._renewal_thread = renewal_thread
        self._was_open = True
        _open.add(self)

    if not TYPE_CHECKING:  # so that type checkers go on refusing it

        def __enter__(self) -> None:
            raise TypeError(
                "tenure.connect() is for 'async with'; in a program without asyncio, "
                "write 'with tenure.sync.connect(…) as backend:'"
            )

        __exit__ = __enter__  # Python looks for both first

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every campaign and every consumer, release leases and locks, close the store. See :meth:`aclose`."""
        await self.aclose()

    async def _close(self) -> None:
        renewal_thread, driver, opened = self._connected()
        _open.discard(self)
        queues, requests = list(self._queues.values()), list(self._requests.values())
        self._queues.clear()
        self._requests.clear()

        async def close() -> None:
            try:
                await driver.close()
            finally:
                await opened.close()

        try:
            # All at once: a store that is away keeps each of them waiting.
            await _all_closed(queues)
            await _all_closed(requests)
        finally:
            self._renewal_thread = self._driver = self._opened = None
            try:
                await renewal_thread.call(close)
            finally:
                await _leave(renewal_thread, given=self._given_renewal_thread is not None)

    def election(self, name: str, **options: Unpack[ElectionOptions]) -> Election:
        """Return an election for *name*, in which this object is one candidate.

        Args:
            name: 1 to 1,024 characters. All instances that use it compete.
            ttl: Length of a lease in seconds (15, or the nearest within this backend's limits). A dead leader's
                name is free after this time.
            renew_every, retry_every, drift, margin, grace: See :class:`tenure.Timing`; unset, they follow from *ttl*.
            stall_after: Renew only while ``term.beat()`` was called within so many seconds.
            health: Renew only while this function (plain or async, called on the work's loop) returns true.
            overrun: The reaction when work still runs at the end of its term: ``"report"`` leaves the lease to run out
                and says so; ``"exit"`` ends the process with code 70, from a thread of its own.
            metadata: Text about the leader for others to read, such as its address.
            label: The readable part of the holder's identity (default: host name and process id). A random part is
                always appended: identities must never be shared.

        Raises:
            ConfigError: The times leave too little room, or don't fit this backend's limits.
            TypeError: There is no such option; the message names the nearest one.
        """
        renewal_thread, driver, opened = self._connected()
        refuse_unknown("election", options, ElectionOptions.__annotations__)
        return Election(
            name,
            timing_of(options, opened.leases.traits),
            driver=driver,
            renewal_thread=renewal_thread,
            label=options.get("label"),
            metadata=options.get("metadata"),
            stall_after=options.get("stall_after"),
            health=options.get("health"),
            overrun=options.get("overrun", "report"),
            on_event=self._on_event,
            make_term=self._make_term,
        )

    def queue(self, name: str, **settings: Unpack[QueueOptions]) -> Queue:
        """Return the queue called *name*. It comes into being when it is first used.

        This program expects the settings given here. The first use declares those that are not declared yet, for all
        programs; where one was declared otherwise, every use raises ``ConfigError``. Use
        :meth:`tenure.Queue.declare` to change them. A setting not given is neither checked nor written: its declared
        value holds, or else the default in brackets below.

        Args:
            name: 1 to 200 printable characters, without ``$``. All instances that use it compete.
            lock: For how many seconds a received message belongs to its consumer (30). Consumers renew it themselves.
            max_deliveries: How often a message is handed out before it is dead-lettered (10).
            dedupe_window: For how many seconds a message's id is remembered, so that it is kept once (600).
            body_max: The largest body in bytes (1 MiB, or the most that the backend takes).
            dead_retention: For how many seconds a dead letter is kept (``math.inf``: until it is redriven or purged).
                After that, a process that uses the queue removes it for good.

        Raises:
            ConfigError: A setting can't work, or doesn't fit this backend. (That one was declared otherwise is raised
                by the first use.)
        """
        renewal_thread, _, opened = self._connected()
        broker: Broker | None = getattr(opened, "broker", None)
        if broker is None:
            raise ConfigError(f"{self.url} has no queues; use another backend for them")
        expected = checked_changes("queue", settings)
        usual = settings_with(expected, broker.traits)
        holder = f"{platform.node()}:{os.getpid()}"
        context = QueueContext(
            check_name(name), broker, renewal_thread, self._clock, usual, holder, self._on_event, expected
        )
        context.hints = self._hints
        queue = Queue(context, self._requests)
        self._queues_made += 1
        self._queues[self._queues_made] = queue
        return queue

    async def queues(self) -> list[str]:
        """Return the names of all queues that were ever used on this store, sorted.

        The queues in which processes receive answers to their requests are left out, unless something is in them.

        Raises:
            Unavailable: The store could not be asked.
        """
        _, _, opened = self._connected()
        broker: Broker | None = getattr(opened, "broker", None)
        if broker is None:
            return []
        names = await broker.names()
        return [name for name in names if not is_reply_queue(name) or await broker.stats(name) != Stats()]

    async def leaders(self) -> dict[str, Leader | None]:
        """Return every name that was ever led on this store, sorted, with its present leader.

        Raises:
            Unavailable: The store could not be asked.
        """
        renewal_thread, driver, _ = self._connected()

        async def look() -> dict[str, Leader | None]:
            found = await _inspected(driver.store, await driver.store.names())
            return {one.name: leader_of(one) for one in found}

        return await renewal_thread.call(look)

    async def vacancies(self, *names: str) -> dict[str, float | None]:
        """Return those names that have no leader now, with the least number of seconds since they had one.

        That is by the store's clock, and None where the store can't tell: on Azure and among peers, on Redis if the
        last leader did not hand its lease back, and for a name that was never led.

        Args:
            names: Which names to look at; without any, all that were ever led on this store, sorted.

        Raises:
            Unavailable: The store could not be asked.
        """
        renewal_thread, driver, _ = self._connected()

        async def look() -> dict[str, float | None]:
            found = await _inspected(driver.store, names or await driver.store.names())
            return {one.name: one.vacant_for for one in found if isinstance(one, Vacant)}

        return await renewal_thread.call(look)

    async def diagnose(self, *, write: bool = False) -> Diagnosis:
        """Reach the store; return its facts, its round trip, and warnings.

        Args:
            write: Whether to try a message, too: it is sent, received and completed, in a queue that is then deleted.

        Raises:
            Unavailable: The store could not be asked.
        """
        renewal_thread, driver, opened = self._connected()

        async def look() -> Diagnosis:
            trips = []
            for _ in range(5):
                asked_at = time.perf_counter()
                await driver.store.inspect("tenure doctor")
                trips.append(time.perf_counter() - asked_at)
            facts = [
                Fact("python", platform.python_version()),
                *await opened.describe(),
                Fact("clock", f"{type(self._clock).__name__}, at {self._clock.now():.3f} s"),
            ]
            broker: Broker | None = getattr(opened, "broker", None)
            queues = broker.traits if broker is not None else None
            failure = None
            if broker is not None and write:
                asked_at = time.perf_counter()
                failure = await _tried(broker)
                took = f"works: a message went through in {1_000 * (time.perf_counter() - asked_at):.0f} ms"
                facts.append(Fact("writing", "fails", str(failure)) if failure else Fact("writing", took))
            round_trip = sorted(trips)[len(trips) // 2]
            return Diagnosis(str(self.url), round_trip, driver.store.traits, facts, queues, failure)

        return await renewal_thread.call(look)

    async def migrate(self) -> str:
        """Create or upgrade the schema that the store needs, if it needs one; return a text that says which.

        Any number of processes may do it at once, and again.

        Raises:
            ConfigError: The schema is newer than this tenure, or the user may not create it.
            Unavailable: The store could not be asked. Then nothing has changed.
        """
        renewal_thread, _, opened = self._connected()
        migrate: Callable[[], Coroutine[Any, Any, object]] | None = getattr(opened, "migrate", None)
        if migrate is None:
            return f"{self.url} needs no schema; there is nothing to do"
        return str(await renewal_thread.call(migrate))

    async def migration_sql(self, since: int | None = None) -> str:
        """Return the SQL that :meth:`migrate` would run, to be read first, and run as another user.

        Nothing is changed. If nothing needs to be done, it is an SQL comment that says so.

        Args:
            since: The version that the schema has, 0 for none yet. Then the store is not asked, and the backend need
                not be open. If unset, it is found out.

        Raises:
            ConfigError: There is no such version, or the schema is newer than this tenure.
            Unavailable: The store could not be asked.
        """
        if since is not None:
            check_count("since", since, least=0)
            write: Callable[[Url, int], str] | None = getattr(self._module, "migration_sql", None)
            if write is not None:
                return write(self.url, since)
        else:
            renewal_thread, _, opened = self._connected()
            ask: Callable[[], Coroutine[Any, Any, str]] | None = getattr(opened, "migration_sql", None)
            if ask is not None:
                return await renewal_thread.call(ask)
        return f"-- {self.url} needs no schema; there is nothing to do"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}, {self._state}>"

    @property
    def _state(self) -> str:
        if self._renewal_thread is None:
            return "closed" if self._was_open else "not open"
        return "of the parent process" if self._renewal_thread.is_forked else "open"

    def _connected(self) -> tuple[RenewalThread, Driver, Opened]:
        if self._renewal_thread is None or self._driver is None or self._opened is None:
            raise ConfigError(not_open(self.url, was_open=self._was_open))
        if self._renewal_thread.is_forked:
            raise ConfigError(self._renewal_thread.fork_message)
        return self._renewal_thread, self._driver, self._opened

    def _note_fork(self) -> None:
        """Let nothing in a forked child reach the store by the parent's connections, threads or memory."""
        _of_parent.append((self._renewal_thread, self._driver, self._opened))
        self._turns.clear()  # the thread that would end it isn't in this process
        for queue in list(self._queues.values()):
            queue._context.broker = cast(Broker, _OfParent(self._connected))


class _OfParent:
    """A broker that stayed with the parent of this forked child: every question raises the reason."""

    def __init__(self, refuse: Callable[[], object]) -> None:
        self._refuse = refuse

    def __getattr__(self, name: str) -> Any:
        self._refuse()
        raise AttributeError(name)


_open: WeakSet[Backend] = WeakSet()

_turning: WeakSet[Backend] = WeakSet()
"""Backends that are being opened or closed just now."""

_of_parent: list[object] = []
"""In a forked child: everything that its parent has open. It is never freed: a connection that is collected here
would tell the kernel not to wait for it, and the parent's loop waits with the same ``epoll``."""


def _note_fork() -> None:
    for backend in {*_open, *_turning}:
        backend._note_fork()
    _turning.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def not_open(
    url: Url, *, was_open: bool, block: str = "async with tenure.connect", opening: str = "await open()"
) -> str:
    """Return a text that says that a backend can't be used now, and what to do."""
    if was_open:
        return f"{url} was closed; open it again with {opening}, and make queues and elections anew"
    return f"{url} is not open; use it inside '{block}(…) as backend:', or open it with {opening}"


def url_given(url: str | None) -> str:
    """Return *url*, or the URL that the environment names in its place.

    Raises:
        ConfigError: Neither says anything.
    """
    found = os.environ.get("TENURE_URL") if url is None else url
    if url is None and not found:
        raise ConfigError(
            "no store is named: connect() was given no URL, and the environment variable TENURE_URL is "
            f"{'empty' if found == '' else 'not set'}; set it, or write for example connect('sqlite:///work.db')"
        )
    assert found is not None
    return found


def connect(
    url: str | None = None,
    *,
    on_event: Callable[[Event], None] | None = None,
) -> Backend:
    """Connect to the store at *url*; use it as ``async with tenure.connect(url) as backend:``.

    Where a block doesn't fit, there are ``await backend.open()`` and ``await backend.aclose()``.

    Args:
        url: ``sqlite:///path``, ``postgresql://…``, ``redis://…``, ``azure://…``, ``peers://…`` or ``memory:``; options
            stand in the query and are checked. Without, the environment variable ``TENURE_URL`` names the store.
        on_event: Called on the caller's loop with everything that happens to its candidates and consumers: an
            ``Event``, of one of the kinds in ``tenure.events``. It must return soon.

    Raises:
        ConfigError: The URL names no backend, or an option is unknown or doesn't fit; or there is none.
        BackendNotInstalled: The backend's driver is missing; the message names the pip command.
    """
    return Backend(url_given(url), on_event=on_event)


async def _inspected(store: LeaseStore, names: Sequence[str]) -> list[HeldBy | Vacant]:
    """Tell of each of *names*; some at once, as a store may be far away, and the names many."""
    found: list[HeldBy | Vacant] = []
    for start in range(0, len(names), INSPECTED_AT_ONCE):
        some = names[start : start + INSPECTED_AT_ONCE]
        found += await asyncio.gather(*(store.inspect(name) for name in some))
    return found


async def _tried(broker: Broker) -> TenureError | None:
    """Send, receive and complete a message in a queue of its own, which is deleted; return what prevented it."""
    name = f"{TRIAL}{secrets.token_hex(8)}"
    failure: TenureError | None = None
    try:
        await broker.delete_when_idle(name, 60.0)
        await broker.send(name, [Outgoing(b"trial")])
        got = (await broker.receive(name, 1, max(30.0, broker.traits.lock_min))).deliveries
        answers = await broker.settle([Settlement(one, COMPLETE) for one in got])
        if len(answers) != 1 or not isinstance(answers[0], Settled):
            failure = Unavailable(f"a message that was sent could not be received and completed: {answers!r}")
    except TenureError as error:
        failure = error
    try:
        await broker.delete(name, force=True)
        for left in await broker.idle():
            if left.startswith(TRIAL):  # when the disk was full, it could not be deleted either
                await broker.delete(left, force=True)
    except TenureError as error:
        failure = failure or error
    return failure


def _check_loop(*, here: bool) -> None:
    """Refuse where no asyncio loop runs, or one in virtual time, which never waits for the renewal thread."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigError(
            "tenure needs asyncio, and no event loop of asyncio runs here; under Trio, use tenure.sync.connect in a "
            "thread (trio.to_thread.run_sync)"
        ) from None
    if not here and getattr(loop, "is_virtual", False):
        raise ConfigError(
            "tenure.connect() needs threads and real time, and this event loop runs in virtual time; "
            "connect with tenure.testing.connect_here('memory:')"
        )


async def _all_closed(rooms: Sequence[Queue] | Sequence[Requests]) -> None:
    for ended in await asyncio.gather(*(room.close() for room in rooms), return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended


async def _leave(renewal_thread: RenewalThread, *, given: bool) -> None:
    """Give the renewal thread back without blocking the caller's loop while its thread ends."""
    if given:
        return
    if asyncio.get_running_loop() is renewal_thread.loop:
        renewal_thread.leave()
    else:
        await in_thread("tenure-leaving", renewal_thread.leave)
