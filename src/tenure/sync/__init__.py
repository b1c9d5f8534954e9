"""tenure for threads: the same face, run on the keeper's loop. No second copy of the code.

Every call is handed to the asynchronous object of the same name and waited for. Work runs on a thread of its own. A
thread can't be cancelled: watch ``term.lost``, or call ``term.check()`` before every act.

::

    with tenure.sync.connect("sqlite:///work.db") as backend:
        backend.election("nightly-report").run(coordinate)  # def coordinate(term): ...
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Literal, TypeVar

import tenure.backend
import tenure.election.elector
from tenure.clock import Clock
from tenure.election.elector import Health, Tenancy
from tenure.errors import ConfigError, TenureError
from tenure.events import Event
from tenure.keeper import Keeper
from tenure.lease import Grant, Leader
from tenure.pacing import DERIVED, Timing
from tenure.url import Url

__all__ = ["Backend", "Election", "Term", "connect"]

T = TypeVar("T")


class Term(Tenancy[threading.Event]):
    """A term of office; ``lost`` is a ``threading.Event``. See :class:`tenure.Term`."""

    def __init__(self, grant: Grant, trusted_until: float, clock: Clock) -> None:
        super().__init__(grant, trusted_until, clock, threading.Event())


Work = Callable[[Term], Any]


class Election:
    """One name to lead, and our candidacy for it. See :class:`tenure.Election`."""

    def __init__(self, election: tenure.election.elector.Election, keeper: Keeper) -> None:
        self.name: str = election.name
        self.timing: Timing = election.timing
        self._election = election
        self._keeper = keeper
        self._worker: threading.Thread | None = None

    def run(self, work: Work, *, again: bool = False, stop: threading.Event | None = None) -> None:
        """Campaign for the name and run *work*, on a thread of its own, during every term won.

        Blocks until the campaign ends. See :meth:`tenure.Election.run`; as a thread can't be cancelled, *work* must
        watch ``term.lost`` or call ``term.check()``. Until it has ended, the lease is not handed back, and this
        candidate does not contend.
        """

        async def campaign() -> None:
            stopping = asyncio.Event()
            ended = threading.Event()
            if stop is not None:
                _forward(stop, stopping, ended)
            try:
                await self._election.run(self._on_thread(work), again=again, stop=stopping)
            finally:
                ended.set()

        self._keeper.call_blocking(campaign)

    @contextmanager
    def campaign(self) -> Iterator[Term]:
        """Campaign for the name as a block, which runs on this thread once elected.

        Raises:
            TermLost: The term ended before the block did.
        """
        campaign = self._election.campaign(cancel=False)
        term: Term = self._keeper.call_blocking(campaign.__aenter__)
        self._worker = threading.current_thread()
        failure: BaseException | None = None
        try:
            yield term
        except BaseException as error:
            failure = error
            raise
        finally:
            self._worker = None
            kind, trace = (type(failure), failure.__traceback__) if failure else (None, None)
            self._keeper.call_blocking(lambda: campaign.__aexit__(kind, failure, trace))

    def leader(self) -> Leader | None:
        """Return who leads now, or None. See :meth:`tenure.Election.leader`."""
        return self._keeper.call_blocking(self._election.leader)

    def observe(self) -> Generator[Leader | None, None, None]:
        """Yield who leads, at first and at every change. See :meth:`tenure.Election.observe`."""
        changes = self._election.observe()
        try:
            while True:
                yield self._keeper.call_blocking(lambda: _next(changes))
        finally:
            self._keeper.call_blocking(lambda: _close(changes))

    def resign(self) -> bool:
        """End our own term. See :meth:`tenure.Election.resign`.

        Called by the work itself, it returns at once, with ``term.lost`` set: the lease is handed back when it ends.
        """
        wait = threading.current_thread() is not self._worker
        return self._keeper.call_blocking(lambda: self._election.resign(wait=wait))

    def ask_to_resign(self) -> bool:
        """Ask the present leader, whoever it is, to step down. See :meth:`tenure.Election.ask_to_resign`."""
        return self._keeper.call_blocking(self._election.ask_to_resign)

    def _on_thread(self, work: Work) -> Callable[[Any], Any]:
        async def serve(term: Term) -> None:
            loop = asyncio.get_running_loop()
            outcome: asyncio.Future[None] = loop.create_future()

            def labour() -> None:
                error: Exception | None = None
                try:
                    work(term)
                except Exception as raised:
                    error = raised
                except BaseException as raised:  # SystemExit in a thread would end nothing but the thread
                    error = TenureError(f"work raised {type(raised).__name__}: {raised}")
                    error.__cause__ = raised
                loop.call_soon_threadsafe(_settle, outcome, error)

            self._worker = threading.Thread(target=labour, name=f"tenure-{term.name}-{term.token}", daemon=True)
            self._worker.start()
            while not outcome.done():
                with suppress(asyncio.CancelledError):  # term.lost is set; the term is not over before the thread is
                    await asyncio.wait({outcome})
            self._worker = None
            outcome.result()

        return serve


class Backend:
    """A store, connected. See :class:`tenure.Backend`."""

    def __init__(self, url: str, *, on_event: Callable[[Event], None] | None = None) -> None:
        self._backend = tenure.backend.Backend(url, on_event=on_event, make_term=Term)
        self.url: Url = self._backend.url
        self._keeper: Keeper | None = None

    def __enter__(self) -> Backend:
        keeper = Keeper.enter()
        try:
            keeper.call_blocking(self._backend.__aenter__)
        except BaseException:
            keeper.leave()
            raise
        self._keeper = keeper
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        keeper, self._keeper = self._connected(), None
        try:
            keeper.call_blocking(lambda: self._backend.__aexit__(kind, error, trace))
        finally:
            keeper.leave()

    def election(
        self,
        name: str,
        *,
        ttl: float = 15.0,
        renew_every: float = DERIVED,
        retry_every: float = DERIVED,
        drift: float = 0.05,
        margin: float = DERIVED,
        grace: float = DERIVED,
        stall_after: float | None = None,
        health: Health | None = None,
        overrun: Literal["report", "exit"] = "report",
        metadata: Mapping[str, str] | None = None,
        label: str | None = None,
    ) -> Election:
        """Return an election for *name*, in which this object is one candidate. See :meth:`tenure.Backend.election`.

        ``health`` is called on a thread of its own.
        """
        election = self._backend.election(
            name,
            ttl=ttl,
            renew_every=renew_every,
            retry_every=retry_every,
            drift=drift,
            margin=margin,
            grace=grace,
            stall_after=stall_after,
            health=health,
            overrun=overrun,
            metadata=metadata,
            label=label,
        )
        return Election(election, self._connected())

    def leaders(self) -> dict[str, Leader | None]:
        """Return every name that was ever led, with its present leader. See :meth:`tenure.Backend.leaders`."""
        return self._connected().call_blocking(self._backend.leaders)

    def diagnose(self) -> tenure.backend.Diagnosis:
        """Reach the store and tell what it is. See :meth:`tenure.Backend.diagnose`."""
        return self._connected().call_blocking(self._backend.diagnose)

    def _connected(self) -> Keeper:
        if self._keeper is None:
            raise ConfigError(f"{self.url} is not open; use it inside 'with tenure.sync.connect(…) as backend:'")
        return self._keeper


def connect(url: str, *, on_event: Callable[[Event], None] | None = None) -> Backend:
    """Connect to the store at *url*; use it as ``with tenure.sync.connect(url) as backend:``.

    See :func:`tenure.connect`. *on_event* is called on the keeper's thread, so it must return at once.
    """
    return Backend(url, on_event=on_event)


def _forward(stop: threading.Event, stopping: asyncio.Event, ended: threading.Event) -> None:
    """Carry a thread's event over to the loop. A thread's event can only be waited for by a thread."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        while not ended.is_set():
            if stop.wait(0.2):
                loop.call_soon_threadsafe(stopping.set)
                return

    threading.Thread(target=wait, name="tenure-stop", daemon=True).start()


def _settle(outcome: asyncio.Future[None], error: Exception | None) -> None:
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)


async def _next(changes: AsyncGenerator[Leader | None, None]) -> Leader | None:
    return await anext(changes)


async def _close(changes: AsyncGenerator[Leader | None, None]) -> None:
    await changes.aclose()
