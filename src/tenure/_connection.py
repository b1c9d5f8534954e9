"""A store, opened and closed: by one call at a time, on any loop or thread; after a fork, only in the parent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet, WeakValueDictionary

from tenure._election.store import LeaseStore
from tenure._opened import Fact, Opened
from tenure._queue.broker import Broker
from tenure._queue.hints import HintSubscriptions
from tenure._queue.looks import SharedLooks
from tenure._queue.producer import OpenRequests
from tenure._queue.queue import Queue
from tenure._runtime.clock import Clock
from tenure._runtime.closing import close_together
from tenure._runtime.renewal_thread import RenewalThread
from tenure._runtime.threads import in_thread
from tenure._telemetry.callbacks import logger, run_callback
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from tenure._credentials import AskCredentials
    from tenure._election.driver import Driver


class Connection:
    """Opens and closes the store at *url*, with the renewal thread and the election driver that it needs.

    Args:
        url: The address of the store.
        module: Opens it, see :mod:`tenure._opened`.
        clock: Measures leases and locks.
        renewal_thread: Used in place of the process's own, and not ended.
        credentials: The caller's function that returns the login, for a store that has passwords.
    """

    def __init__(
        self,
        url: Url,
        module: ModuleType,
        clock: Clock,
        renewal_thread: RenewalThread | None,
        credentials: AskCredentials | None = None,
    ) -> None:
        self.url = url
        self.queues: OpenQueues = OpenQueues()
        self.was_open = False
        self.renewal_thread: RenewalThread | None = None
        self.opened: Opened | None = None
        self.elections: Elections | None = None
        self._module = module
        self._clock = clock
        self._given_renewal_thread = renewal_thread
        self._credentials = credentials
        self._turns: dict[str, Future[None]] = {}  # the call that opens or closes it now, done when that is over

    async def open(self, *, anew: bool = False) -> None:
        """Open it unless it is open; with *anew*, that is refused.

        Raises:
            ConfigError: It is open; or no asyncio loop in real time runs here.
        """
        async with self.in_turn():
            if self.renewal_thread is None:
                await self._open()
            elif anew:
                raise ConfigError(
                    f"{self.url} is open already (a block opens it by itself); "
                    "connect once more for a second connection"
                )

    async def close(self) -> None:
        """Close the queues, the elections and the store, if it is open."""
        async with self.in_turn():
            if self.renewal_thread is not None:
                await self._close()

    @asynccontextmanager
    async def in_turn(self) -> AsyncIterator[None]:
        """Open or close inside this block: one call at a time, also of calls on different loops and threads."""
        if self.renewal_thread is not None and self.renewal_thread.is_forked:
            self.renewal_thread = self.elections = self.opened = None  # the open ones stayed with the parent
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

        given = {}
        if self._credentials is not None:
            from tenure._logins import Given

            # Calls that block open it on the renewal thread, where no code of the caller runs.
            loop = None if renewal_thread.is_current else asyncio.get_running_loop()
            given["credentials"] = Given(self._credentials, loop)

        async def open_store() -> tuple[Opened, Elections | None]:
            opened: Opened = self._module.open(self.url, clock=self._clock, **given)
            warnings: Sequence[Fact] = getattr(opened, "warnings", ())
            for fact in warnings:
                self._warn(fact)
            if (report_to := getattr(opened, "report_to", None)) is not None:
                report_to(self._warn)
            leases: LeaseStore | None = getattr(opened, "leases", None)
            return opened, None if leases is None else Elections(leases, self._clock)

        try:
            self.opened, self.elections = await renewal_thread.call(open_store)
        except BaseException:
            await self._leave(renewal_thread)
            raise
        self.renewal_thread = renewal_thread
        self.was_open = True
        _open.add(self)

    def _warn(self, fact: Fact) -> None:
        run_callback(logger.warning, "%s: %s: %s; %s", self.url, fact.name, fact.value, fact.advice)

    async def _close(self) -> None:
        renewal_thread, opened = self.require_open()
        elections = self.elections
        _open.discard(self)

        async def close() -> None:
            try:
                if elections is not None:
                    await elections.close()
            finally:
                await opened.close()

        try:
            await self.queues.close()
        finally:
            self.renewal_thread = self.elections = self.opened = None
            try:
                await renewal_thread.call(close)
            finally:
                await self._leave(renewal_thread)

    async def _leave(self, renewal_thread: RenewalThread) -> None:
        """Give the renewal thread back without blocking the caller's loop while its thread ends."""
        if self._given_renewal_thread is not None:
            return
        if asyncio.get_running_loop() is renewal_thread.loop:
            renewal_thread.leave()
        else:
            await in_thread("tenure-leaving", renewal_thread.leave)

    def require_open(self) -> tuple[RenewalThread, Opened]:
        """Return what an open one has.

        Raises:
            ConfigError: It is not open, or open in the parent of this forked process.
        """
        if self.renewal_thread is None or self.opened is None:
            raise ConfigError(not_open(self.url, was_open=self.was_open))
        if self.renewal_thread.is_forked:
            raise ConfigError(self.renewal_thread.fork_message)
        return self.renewal_thread, self.opened

    def require_driver(self) -> Driver:
        """Return the driver of elections, of an open one.

        Raises:
            ConfigError: The store has none, or it is not open.
        """
        return self._require_elections().driver()

    def require_leases(self) -> LeaseStore:
        """Return the leases, of an open one: to look, and not to campaign.

        Raises:
            ConfigError: The store has none, or it is not open.
        """
        return self._require_elections().leases

    def _require_elections(self) -> Elections:
        self.require_open()
        if self.elections is None:
            raise ConfigError(f"{self.url} has queues, but no elections; use another store for them")
        return self.elections

    @property
    def state(self) -> str:
        """Whether it is open, in words."""
        if self.renewal_thread is None:
            return "closed" if self.was_open else "not open"
        return "of the parent process" if self.renewal_thread.is_forked else "open"

    def note_fork(self) -> None:
        """Let nothing in a forked child reach the store by the parent's connections, threads or memory."""
        _of_parent.append((self.renewal_thread, self.elections, self.opened))
        self._turns.clear()  # the thread that would end it isn't in this process
        _of_parent.append(self.queues)
        self.queues.leave_to_parent(self.require_open)
        self.queues = OpenQueues()  # its consumers and requests stay with the parent: a close would wait for their end


class Elections:
    """The elections of an open backend: their driver, made when there is first one. A program of queues has none."""

    def __init__(self, leases: LeaseStore, clock: Clock) -> None:
        self.leases = leases
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._drivers: dict[str, Driver] = {}  # one at most
        self._is_closed = False

    def driver(self) -> Driver:
        """Return the driver; on any loop or thread.

        Raises:
            Unavailable: It was closed meanwhile.
        """
        from tenure._election.driver import Driver

        driver = self._drivers.setdefault("one", Driver(self.leases, self._clock, self._loop))  # as threads may race
        if self._is_closed and not driver.is_closing:
            raise Unavailable("the backend was closed, so no candidate can campaign on it; connect again")
        return driver

    async def close(self) -> None:
        """End every candidacy, and refuse others."""
        self._is_closed = True
        for driver in list(self._drivers.values()):
            await driver.close()


class OpenQueues:
    """The queues of an open backend and their requests, which are closed before the store."""

    def __init__(self) -> None:
        self.hints: HintSubscriptions = HintSubscriptions()
        self.looks: SharedLooks = SharedLooks()
        self.requests: OpenRequests = OpenRequests()
        # Weak: a program may make a queue for each message. By number: several may have one name.
        self._queues: WeakValueDictionary[int, Queue] = WeakValueDictionary()
        self._made = 0

    def add(self, queue: Queue) -> None:
        """Note a queue that was handed out."""
        self._made += 1
        self._queues[self._made] = queue

    async def close(self) -> None:
        """Close the queues, then their requests; the other ones too if one fails."""
        queues, requests = list(self._queues.values()), self.requests.take()
        self._queues.clear()
        try:
            await close_together(*(one.close for one in queues))
        finally:
            await close_together(*(one.close for one in requests))

    def leave_to_parent(self, refuse: Callable[[], object]) -> None:
        """In a forked child: make every use of the queues call *refuse*, which raises the reason."""
        for queue in list(self._queues.values()):
            queue._context.broker = cast(Broker, _OfParent(refuse))


class _OfParent:
    """A broker that stayed with the parent of this forked child: every question raises the reason."""

    def __init__(self, refuse: Callable[[], object]) -> None:
        self._refuse = refuse

    def __getattr__(self, name: str) -> Any:
        self._refuse()
        raise AttributeError(name)


_open: WeakSet[Connection] = WeakSet()

_turning: WeakSet[Connection] = WeakSet()
"""Those that are being opened or closed just now."""

_of_parent: list[object] = []
"""In a forked child: everything that its parent has open. It is never freed: a connection that is collected here
would tell the kernel not to wait for it, and the parent's loop waits with the same ``epoll``."""


def _note_fork() -> None:
    for connection in {*_open, *_turning}:
        connection.note_fork()
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
