"""``Election`` and ``Campaign``, for users: campaign for a name, run the work of each term, observe leaders."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast

from tenure._election.driver import NOT_OBSERVED, Driver
from tenure._election.handle import HOLDER_BYTES, CandidateHandle, CandidateSettings
from tenure._election.health import Health, HealthCheck
from tenure._election.status import CandidateStatus
from tenure._election.store import NAME_MAX, require_name
from tenure._election.term import MakeTerm, Term, TermBase
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, HeldBy, Leader, Metadata, Vacant, leader_of
from tenure._runtime.renewal_thread import RenewalThread
from tenure._runtime.signals import on_shutdown_signal
from tenure._timing import Timing
from tenure.errors import ConfigError, TenureError, TermLost, Unavailable, refuse_generator
from tenure.events import Event

if TYPE_CHECKING:
    from concurrent.futures import Future

Work = Callable[[Term], Awaitable[Any]]
"""``work(term)``: async; it is called when this process is elected, and cancelled when the term ends."""


class Election:
    """The election of one name, and this process's candidate for it. Made by ``backend.election(name, …)``."""

    def __init__(
        self,
        name: str,
        timing: Timing,
        *,
        driver: Driver,
        renewal_thread: RenewalThread,
        label: str | None = None,
        metadata: Mapping[str, str] | None = None,
        stall_after: float | None = None,
        health: Health | HealthCheck | None = None,
        overrun: Literal["report", "exit"] = "report",
        on_event: Callable[[Event], None] | None = None,
        make_term: MakeTerm = Term,
        once: bool = False,
    ) -> None:
        require_name(name)
        self.name: str = _plain(name)
        self.timing = timing
        self.metadata: Metadata = checked_metadata(metadata)
        _check_conditions(stall_after, health, overrun)
        label = label or f"{socket.gethostname()}-{os.getpid()}"
        require_name(label, of="label", most=NAME_MAX - 1 - 2 * HOLDER_BYTES)
        self.label: str = _plain(label)
        self.stall_after = stall_after
        self.health = health
        self.overrun = overrun
        self._driver = driver
        self._renewal_thread = renewal_thread
        self._on_event = on_event
        self._make_term = make_term
        self._once = once
        self.context: contextvars.Context | None = None
        """The context in which hooks, log handlers and the health callback are called; None: that of ``run``."""
        self.health_check = health if health is None or isinstance(health, HealthCheck) else HealthCheck(health)
        self._newest_candidate: CandidateHandle | None = None

    async def run(
        self, work: Work, *, again: bool = False, stop: asyncio.Event | None = None, sigterm: bool | None = None
    ) -> None:
        """Campaign for the name and run *work* during every term won.

        *work* is cancelled ``grace`` before its term can no longer be trusted, which is before the store would give the
        name to another candidate. After a loss, the candidate campaigns again, for ever, and starts *work* with a new
        term. The lease is released once *work* has really ended, never before. A thread that *work* awaits, as by
        ``asyncio.to_thread``, is not part of it: when *work* is cancelled there, it has ended, and the thread runs on.

        Args:
            work: ``async def work(term)``. When it returns, the campaign ends; see *again*. When it raises, the
                candidate steps down and the error comes out of ``run``.
            again: Campaign again when *work* returns.
            stop: Set it to stop campaigning. Work that runs may finish; the lease is released after it.
            sigterm: Whether SIGTERM or a first SIGINT ends the campaign: the work is cancelled, the lease released, and
                ``run`` returns. By default they do if tenure leads or consumes in the main thread, and the program does
                not handle the signal itself; with False, never. A consumer inside *work* is cancelled with it: to let
                its handlers finish, pass False here, and end *work* when ``consume`` returns.

        Raises:
            ConfigError: The store can never be used as it is configured, so this candidate can't campaign.

        Example::

            async def coordinate(term):
                while True:
                    term.check()
                    await plan(fence=term.token)


            await election.run(coordinate)
        """
        refuse_generator("work", work)
        if stop is not None and stop.is_set():
            return
        signalled = asyncio.Event()
        with on_shutdown_signal(signalled.set, sigterm):
            async with self._new_candidate() as candidate:
                stopping = [asyncio.create_task(_stop_when(signalled, candidate, at_once=True))]
                if stop is not None:
                    stopping.append(asyncio.create_task(_stop_when(stop, candidate, at_once=False)))
                try:
                    while (term := await candidate.next_term()) is not None:
                        if signalled.is_set() or (stop is not None and stop.is_set()):  # set while it was being won
                            candidate.end_term(term, again=False)
                        else:
                            await self._run_term(candidate, term, work, again)
                finally:
                    for task in stopping:
                        task.cancel()

    def campaign(self, *, cancel: bool = True) -> Campaign:
        """Campaign for the name as a block: it is entered once elected; when it is left, the lease is released.

        When the term is lost, the block is cancelled and raises ``TermLost``. A thread that it awaits, as by
        ``asyncio.to_thread``, is not cancelled: it runs on after the lease has been released.

        Args:
            cancel: False leaves the block running when the term is lost; it must watch ``term.lost`` itself.

        Raises:
            TermLost: The term ended before the block did.
            ConfigError: The store can never be used as it is configured.

        Example::

            async with election.campaign() as term:
                await rebuild_index(fence=term.token)
        """
        return Campaign(self, cancel)

    async def leader(self) -> Leader | None:
        """Return the present leader, or None if there is none.

        Raises:
            Unavailable: The store could not be asked.
        """
        return leader_of(await self._renewal_thread.call(lambda: self._driver.store.inspect(self.name)))

    async def status(self) -> CandidateStatus:
        """Return the status of this object's candidate, for the probes of an orchestrator.

        It asks no store, but the thread that renews the lease. So, with a time limit around it, it also finds a process
        that hangs.

        Raises:
            Unavailable: The backend is being closed.

        Example::

            status = await election.status()
            return 200 if status.is_ready else 503
        """
        return CandidateStatus(self.name) if self._candidate is None else await self._candidate.status()

    async def observe(self) -> AsyncGenerator[Leader | None, None]:
        """Yield the leader, at first and then at every change; None stands for a vacancy.

        While the store can't be reached, nothing is yielded: the last answer is the newest that is known. Changes that
        follow one another within a round trip may be yielded as one. On etcd and ZooKeeper, a new leader may be seen a
        moment before its metadata; then it is yielded again, with them.
        """
        loop = asyncio.get_running_loop()
        changes: asyncio.Queue[HeldBy | Vacant | Exception] = asyncio.Queue()

        async def watch() -> None:  # on the renewal loop, to its end: a generator can't be closed from another
            async with aclosing(self._driver.watch(self.name, self.timing.retry_every, self.timing.ttl)) as answers:
                async for answer in answers:
                    loop.call_soon_threadsafe(changes.put_nowait, answer)

        def ended(watching: Future[None]) -> None:
            error = None if watching.cancelled() else watching.exception()
            # The renewal loop may end before it, and cancels it then.
            told = error if isinstance(error, Exception) else Unavailable(NOT_OBSERVED)
            with suppress(RuntimeError):  # this loop is closed
                loop.call_soon_threadsafe(changes.put_nowait, told)

        watching = self._renewal_thread.submit(watch)
        watching.add_done_callback(ended)
        try:
            while not isinstance(change := await changes.get(), Exception):
                yield leader_of(change)
            raise change
        finally:
            watching.cancel()

    async def resign(self, *, wait: bool = True) -> bool:
        """End the term of this candidate: the work is cancelled, and the lease released once it has ended.

        The candidacy goes on, but lets other candidates go first. Returns whether there was a term to end.

        Args:
            wait: Return only once the lease has been released. (Work that waits for this is cancelled meanwhile.)
        """
        return await self._candidate.resign(wait) if self._candidate else False

    async def ask_to_resign(self) -> bool:
        """Ask the present leader, in any process, to step down; it gets the request with its next renewal or by a hint.

        Returns whether there was a leader to ask. Another program that leads under the same name, through the store's
        own protocol, reads no such requests: False.

        Raises:
            Unavailable: The store could not be asked.
        """
        return await self._renewal_thread.call(lambda: self._driver.store.ask_to_resign(self.name))

    def __repr__(self) -> str:
        candidate = self._candidate
        term = None if candidate is None else candidate.term
        if candidate is None:
            state = "no candidate"
        elif term is not None and (left := term.remaining()):
            state = f"leading in term {term.token}, {left:.3g} s left"
        else:
            state = "standing by"
        return f"<Election {self.name!r}, ttl {self.timing.ttl:g} s, {state}>"

    @property
    def _candidate(self) -> CandidateHandle | None:
        """The candidate that campaigns or leads at present."""
        candidate = self._newest_candidate
        return candidate if candidate is not None and candidate.is_active else None

    def _new_candidate(self) -> CandidateHandle:
        if self._candidate is not None:
            raise ConfigError(
                f"this object campaigns for {self.name!r} already; one object is one candidate: make another with "
                f"backend.election({self.name!r})"
            )
        settings = CandidateSettings(
            name=self.name,
            timing=self.timing,
            label=self.label,
            metadata=self.metadata,
            stall_after=self.stall_after,
            health=self.health_check,
            overrun=self.overrun,
            on_event=self._on_event,
            make_term=self._make_term,
            context=self.context,
            once=self._once,
        )
        self._newest_candidate = CandidateHandle(settings, self._driver, self._renewal_thread)
        return self._newest_candidate

    async def _run_term(self, candidate: CandidateHandle, term: Any, work: Work, again: bool) -> None:
        """Run *work* for one term, to its real end."""
        call: object = work(term)
        if not inspect.isawaitable(call):
            raise ConfigError(
                f"work must be an async function, and {_name_of(work)} returned {type(call).__name__}; "
                "for plain functions there is tenure.sync"
            )
        task = asyncio.ensure_future(_noting_end(call, candidate, term))
        candidate.work_started(term, task.cancel)
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                # The caller of run() is cancelled. The lease can't be released before the work has ended: wait for it.
                cancelled = error
                candidate.stop(at_once=True)
        if inspect.iscoroutine(call):
            call.close()  # if it was cancelled before it started
        failure = None if task.cancelled() else task.exception()
        if failure is None and not task.cancelled():
            failure = task.result()
        lost = candidate.work_stopped(term)
        if isinstance(failure, TermLost) and lost:
            failure = None  # raised by check(): the expected end of work whose term is lost
        cancelled_itself = task.cancelled() and not lost and cancelled is None
        goes_on = (again or lost) and failure is None and cancelled is None and not cancelled_itself
        candidate.end_term(term, again=goes_on)
        if failure is not None:
            raise failure
        if cancelled is not None:
            raise cancelled
        if cancelled_itself:
            raise TenureError("the work cancelled itself: it raised CancelledError, but tenure had not cancelled it")


class Campaign:
    """The block form of a campaign: ``async with election.campaign() as term``."""

    def __init__(self, election: Election, cancel: bool) -> None:
        self._election = election
        self._cancel = cancel
        self._is_entered = False

    async def __aenter__(self) -> Term:
        self._candidate = candidate = self._election._new_candidate()
        await candidate.__aenter__()
        try:
            term = await candidate.next_term()
            if term is None:
                raise TermLost(
                    f"the campaign for {self._election.name!r} was ended before it won: the backend was closed"
                )
        except BaseException:
            await candidate.__aexit__(*sys.exc_info())
            raise
        self._term = term
        self._cancelled: asyncio.Task[Any] | None = None
        task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()

        def cancel() -> None:
            if self._cancel:
                self._cancelled = task
                task.cancel()

        candidate.work_started(term, cancel)
        self._is_entered = True
        return cast("Term", term)  # made by make_term: tenure.sync gets its own kind

    async def withdraw(self, error: BaseException | None = None) -> None:
        """Leave the block if it was entered: for a caller that may have been interrupted while it entered."""
        if self._is_entered:
            await self.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_entered = False
        if self._candidate.is_forked:
            if error is None:
                raise TermLost(self._term.loss_message())
            return  # the error that ends the child is not replaced
        self._candidate.work_stopped(self._term)
        over = self._term.remaining() == 0.0
        also_cancelled = False
        if self._cancelled:
            if kind is not asyncio.CancelledError:
                # Our cancel() may not be delivered before the next await: receive it here.
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
            # As asyncio.timeout does: replace the cancellation only if it was ours alone.
            ours = self._cancelled.uncancel() <= self._cancelling
            over = ours and (over or kind is asyncio.CancelledError)
            also_cancelled = not ours and kind is not asyncio.CancelledError
        self._candidate.end_term(self._term, again=False)
        await self._candidate.__aexit__(kind, error, trace)
        if also_cancelled and error is None:
            raise asyncio.CancelledError
        if over and (error is None or kind is asyncio.CancelledError):
            raise TermLost(self._term.loss_message()) from error


async def _stop_when(stop: asyncio.Event, candidate: CandidateHandle, *, at_once: bool) -> None:
    await stop.wait()
    candidate.stop(at_once=at_once)


async def _noting_end(work: Awaitable[Any], candidate: CandidateHandle, term: TermBase[Any]) -> SystemExit | None:
    """Await *work*, and note its end at once: if the loop blocks later, the work of this term is not the cause.

    Returns a ``SystemExit`` that it raised: raised out of a task, it would end the loop for all other tasks.
    """
    try:
        await work
    except SystemExit as error:
        return error
    finally:
        candidate.work_stopped(term)
    return None


def _name_of(work: object) -> str:
    return getattr(work, "__qualname__", repr(work))


def checked_metadata(metadata: Mapping[Any, Any] | None) -> Metadata:
    """Return a copy of plain ``str``: no method of a user's class is called on the renewal thread."""
    if metadata is None:
        return NO_METADATA
    given: object = metadata
    if not isinstance(given, Mapping):
        raise ConfigError(f"metadata must be a mapping of text to text, not {given!r:.80}")
    copied: dict[str, str] = {}
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ConfigError(f"metadata must map text to text, and has {key!r}: {value!r}")
        copied[_plain(key)] = _plain(value)
    for key, value in copied.items():
        if any("\0" in text or (not text.isascii() and _has_surrogates(text)) for text in (key, value)):
            raise ConfigError(f"metadata must hold no NUL and no lone surrogate, and has {key!r}: {value!r}")
    return FrozenDict(copied)


def _plain(text: str) -> str:
    """Return *text* as a ``str``, and not as a subclass, whose methods are user code."""
    return str.__str__(text)


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _check_conditions(stall_after: object, health: object, overrun: object) -> None:
    positive = isinstance(stall_after, (int, float)) and not isinstance(stall_after, bool) and stall_after > 0
    if stall_after is not None and not positive:
        raise ConfigError(f"stall_after must be a positive number of seconds, or None, not {stall_after!r}")
    if health is not None and not isinstance(health, HealthCheck) and not callable(health):
        raise ConfigError(f"health must be a function that returns whether the work is healthy, not {health!r}")
    refuse_generator("health", health)
    if overrun not in ("report", "exit"):
        raise ConfigError(f"overrun must be 'report' or 'exit', not {overrun!r}")
