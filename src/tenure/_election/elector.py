"""The room where an election's work runs: ``Election`` and ``Term`` as users meet them.

The machine and its questions live on the renewal loop; work runs on the caller's. What crosses between the two is
either a plain number (until when a term is trusted) or a callback posted to the other loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import random
import secrets
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from types import MappingProxyType, TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

from tenure._election.driver import Candidacy, Driver, is_cancelled
from tenure._election.machine import Input, Machine, Resign, Stop, WorkEnded
from tenure._election.store import NAME_MAX, require_name
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Grant, HeldBy, Leader, Metadata, Vacant
from tenure._runtime.clock import Clock
from tenure._runtime.renewal_thread import LoopProbe, RenewalThread
from tenure._runtime.signals import on_shutdown_signal
from tenure._runtime.threads import in_thread
from tenure._runtime.watchdog import EXIT_OVERRUN, Deadline, Watchdog, end_process
from tenure._telemetry.hook import tell_hook
from tenure._telemetry.log import is_logged, log_event
from tenure._timing import Timing
from tenure.errors import ConfigError, TermLost, Unavailable, in_words, refuse_generator
from tenure.events import Event, Overrun, Reason

HOLDER_BYTES = 16
"""How much chance follows the label in a holder's identity, as two characters each."""

_this_process = object()
"""What stands for this process: a forked child has another one, and no need to ask for its number."""


def _note_fork() -> None:
    global _this_process
    _this_process = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)

NOT_WELL = "the health callback said no"

WHY: Mapping[Reason, str] = MappingProxyType(
    {
        "denied": "the store says that the lease is over or somebody else's",
        "unanswered": "the store did not confirm the lease in time",
        "stalled": "the lease was not renewed because the work made no progress",
        "asked": "the leader was asked to step down",
        "resigned": "this candidate resigned",
        "stopped": "the campaign was stopped",
        "ended": "the work has ended",
    }
)


class Flag(Protocol):
    """An event, of asyncio or of threading."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...


FlagT = TypeVar("FlagT", bound=Flag)


class TermBase(Generic[FlagT]):
    """A claim to lead, and until when it may be believed: what terms for loops and terms for threads share."""

    name: str
    holder: str
    token: int
    lost: FlagT

    def __init__(self, grant: Grant, trusted_until: float, clock: Clock, lost: FlagT) -> None:
        self.name = grant.name
        self.holder = grant.holder
        self.token = grant.token
        self.lost = lost
        self._trusted_until = trusted_until
        self._clock = clock
        self._beat_at = clock.now()
        self._reason: Reason | None = None
        self._process = _this_process
        self._pid = os.getpid()
        self._deadline: Deadline | None = None  # with overrun="exit": when the process ends, if work still runs
        self._works = False  # written where the work runs

    def remaining(self) -> float:
        """Return for how many seconds this term may still be trusted, if nothing more is heard; 0.0 if it is over.

        In a forked child it is 0.0: the term is that of the process that won it.
        """
        if self._process is not _this_process:
            return 0.0
        return max(0.0, self._trusted_until - self._clock.now())

    def check(self) -> None:
        """Do nothing if this term may be trusted right now; call it before every act that only a leader may do.

        It compares the clock with the deadline, here and now: there is no flag that a blocked thread had to set.

        Raises:
            TermLost: The term is over, and the next leader has a newer token; or this is a forked child, and the term
                is that of the process that won it.
        """
        if self._clock.now() >= self._trusted_until or self._process is not _this_process:
            raise TermLost(self.loss_message())

    def beat(self) -> None:
        """Prove that the work makes progress: with ``stall_after``, the lease is renewed only while beats come."""
        self._beat_at = self._clock.now()

    def _begin(self) -> bool:
        """Note that the work begins, unless the term is over; return whether it may."""
        self._works = True  # before the look at the clock, so that nothing comes between that nobody answers for
        if self._deadline is not None:
            self._deadline.begin()
        return self.remaining() > 0.0

    def _end(self) -> None:
        """Note that the work has ended, on its own thread: from here on nothing ends the process for its sake."""
        self._works = False
        if self._deadline is not None and self._process is _this_process:
            self._deadline.lift()

    def loss_message(self) -> str:
        """Say why this term is over, and what to do about it."""
        if self._process is not _this_process:
            return (
                f"term {self.token} of {self.name!r} belongs to process {self._pid}, which won it, and this is "
                f"{os.getpid()}, its child by fork; act as the leader there, or hand the child what it needs to know: "
                "term.token is no secret"
            )
        return (
            f"term {self.token} of {self.name!r} is over: {WHY[self._reason or 'unanswered']}; stop acting as the "
            "leader, and send term.token along with every write, so that the resource can refuse an old one"
        )

    def __repr__(self) -> str:
        left = self.remaining()
        return f"<Term {self.token} of {self.name!r}, {f'{left:.3g} s left' if left else 'over'}>"


class Term(TermBase[asyncio.Event]):
    """A term of office: who leads what, under which fencing token, and for how long that may be believed.

    Attributes:
        name: What the election is about.
        holder: The identity that won; new for each acquisition.
        token: The fencing token. It rises with every acquisition, by whomever, and never falls.
        lost: An ``asyncio.Event``, set once the work has been told to stop.
    """

    def __init__(self, grant: Grant, trusted_until: float, clock: Clock) -> None:
        super().__init__(grant, trusted_until, clock, asyncio.Event())


Work = Callable[[Term], Awaitable[Any]]
MakeTerm = Callable[[Grant, float, Clock], TermBase[Any]]
Health = Callable[[], bool | Awaitable[bool]]


class Election:
    """One name to lead, and our candidacy for it. Made by ``backend.election(name, …)``."""

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
        health: Health | None = None,
        overrun: Literal["report", "exit"] = "report",
        on_event: Callable[[Event], None] | None = None,
        make_term: MakeTerm = Term,
    ) -> None:
        require_name(name)
        self.name: str = _plain(name)
        self.timing = timing
        self.metadata: Metadata = _checked_metadata(metadata)
        _check_gates(stall_after, health, overrun)
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
        self.context: contextvars.Context | None = None
        """Where hooks, log handlers and the health callback are called; unset, where ``run`` is."""
        self._candidate: CandidateHandle | None = None
        self._is_asking = False  # whether the health callback is at work, in a thread

    async def run(
        self, work: Work, *, again: bool = False, stop: asyncio.Event | None = None, sigterm: bool | None = None
    ) -> None:
        """Campaign for the name and run *work* during every term won.

        *work* is cancelled ``grace`` before its term can no longer be trusted, which is before the store would give the
        name to anyone else. After a loss, the candidate contends again, for ever, and starts *work* with a new term.
        The lease is handed back once *work* has really ended, never before. A thread that it awaits, as by
        ``asyncio.to_thread``, is no part of it: if *work* is cancelled there, it has ended, and the thread runs on.

        Args:
            work: ``async def work(term)``. When it returns, the campaign ends; see *again*. When it raises, the
                candidate steps down and the error comes out of ``run``.
            again: Campaign anew when *work* returns.
            stop: Set it to stop contending. Work that runs may finish; the lease is handed back after it.
            sigterm: Whether SIGTERM or a first SIGINT ends the campaign: the work is cancelled, the lease handed back,
                and ``run`` returns. They do where tenure leads or consumes in the main thread, and nothing else has
                handled the signal before; with False, never. A consumer inside of *work* is cancelled with it: to let
                its handlers finish, give False here, and end *work* when ``consume`` returns.

        Raises:
            ConfigError: The store can never be used as it is. Nobody leads because of it.

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
        told = asyncio.Event()
        with on_shutdown_signal(told.set, sigterm):
            async with self._stand() as candidate:
                stopping = [asyncio.create_task(_stop_when(told, candidate, at_once=True))]
                if stop is not None:
                    stopping.append(asyncio.create_task(_stop_when(stop, candidate, at_once=False)))
                try:
                    while (term := await candidate.elected()) is not None:
                        if told.is_set() or (stop is not None and stop.is_set()):  # it was set while we won
                            candidate.ended(term, again=False)
                        else:
                            await self._serve(candidate, term, work, again)
                finally:
                    for one in stopping:
                        one.cancel()

    def campaign(self, *, cancel: bool = True) -> Campaign:
        """Campaign for the name as a block: entered once elected, left with the lease handed back.

        When the term is lost, the block is cancelled, and ``TermLost`` comes out of it. A thread that it awaits, as by
        ``asyncio.to_thread``, is not: it runs on after the lease has been handed back.

        Args:
            cancel: False leaves the block running when the term is lost; it must watch ``term.lost`` itself.

        Raises:
            TermLost: The term ended before the block did.
            ConfigError: The store can never be used as it is.

        Example::

            async with election.campaign() as term:
                await rebuild_index(fence=term.token)
        """
        return Campaign(self, cancel)

    async def leader(self) -> Leader | None:
        """Return who leads now, or None if nobody does.

        Raises:
            Unavailable: The store could not be asked.
        """
        return leader_of(await self._renewal_thread.call(lambda: self._driver.store.inspect(self.name)))

    async def observe(self) -> AsyncGenerator[Leader | None, None]:
        """Yield who leads, at first and then at every change; None stands for a vacancy.

        While the store can't be reached, nothing is yielded: what was said last is the last that is known. Changes that
        follow one another within a round trip may be told as one.
        """
        loop = asyncio.get_running_loop()
        seen: asyncio.Queue[HeldBy | Vacant | Exception] = asyncio.Queue()

        async def watch() -> None:  # on the renewal loop, to its end: a generator can't be closed from another
            try:
                async with aclosing(self._driver.watch(self.name, self.timing.retry_every, self.timing.ttl)) as changes:
                    async for found in changes:
                        loop.call_soon_threadsafe(seen.put_nowait, found)
            except Exception as error:
                loop.call_soon_threadsafe(seen.put_nowait, error)

        watching = self._renewal_thread.submit(watch)
        try:
            while not isinstance(found := await seen.get(), Exception):
                yield leader_of(found)
            raise found
        finally:
            watching.cancel()

    async def resign(self, *, wait: bool = True) -> bool:
        """End our own term: the work is cancelled, and the lease handed back once it has ended.

        The candidacy goes on, but lets others go first. Returns whether there was a term to end.

        Args:
            wait: Return only once the lease has been handed back. (Work that waits for this is cancelled meanwhile.)
        """
        return await self._candidate.resign(wait) if self._candidate else False

    async def ask_to_resign(self) -> bool:
        """Ask the present leader, whoever it is, to step down; it hears of it with its next renewal or by hint.

        Returns whether there was a leader to ask.

        Raises:
            Unavailable: The store could not be asked.
        """
        return await self._renewal_thread.call(lambda: self._driver.store.ask_to_resign(self.name))

    def __repr__(self) -> str:
        term = None if self._candidate is None else self._candidate._term
        if self._candidate is None:
            state = "no candidate"
        elif term is not None and (left := term.remaining()):
            state = f"leading in term {term.token}, {left:.3g} s left"
        else:
            state = "standing by"
        return f"<Election {self.name!r}, ttl {self.timing.ttl:g} s, {state}>"

    # --- inside ---

    def _stand(self) -> CandidateHandle:
        if self._candidate is not None:
            raise ConfigError(
                f"this object campaigns for {self.name!r} already; one object is one candidate: make another with "
                f"backend.election({self.name!r})"
            )
        return CandidateHandle(self)

    async def _serve(self, candidate: CandidateHandle, term: Any, work: Work, again: bool) -> None:
        """Run *work* for one term, to its real end."""
        call: object = work(term)
        if not inspect.isawaitable(call):
            raise ConfigError(
                f"work must be an async function, and {_named(work)} returned {type(call).__name__}; "
                "for plain functions there is tenure.sync"
            )
        task = asyncio.ensure_future(_vacating(call, candidate, term))
        candidate.occupy(term, task.cancel)
        outside: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as cancelled:
                # We are being cancelled ourselves. The lease can't go before the work has ended, so see it out.
                outside = cancelled
                candidate.stop(at_once=True)
        if inspect.iscoroutine(call):
            call.close()  # if it was cancelled before it began
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            error = task.result()
        lost = candidate.vacate(term)
        if isinstance(error, TermLost) and lost:
            error = None  # that is how work notices
        unasked = task.cancelled() and not lost and outside is None  # the work cancelled itself
        candidate.ended(term, again=(again or lost) and error is None and outside is None and not unasked)
        if error is not None:
            raise error
        if outside is not None:
            raise outside
        if unasked:
            raise asyncio.CancelledError("the work cancelled itself")


class Campaign:
    """The block form of a campaign: ``async with election.campaign() as term``."""

    def __init__(self, election: Election, cancel: bool) -> None:
        self._election = election
        self._cancel = cancel
        self._is_entered = False

    async def __aenter__(self) -> Term:
        self._candidate = candidate = self._election._stand()
        await candidate.__aenter__()
        try:
            term = await candidate.elected()
            if term is None:
                raise TermLost(
                    f"the campaign for {self._election.name!r} was ended before it won: the backend was closed"
                )
        except BaseException:
            await candidate.__aexit__(*sys.exc_info())
            raise
        self._term = term
        self._interrupted: asyncio.Task[Any] | None = None
        task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()

        def interrupt() -> None:
            if self._cancel:
                self._interrupted = task
                task.cancel()

        candidate.occupy(term, interrupt)
        self._is_entered = True
        return cast("Term", term)  # what make_term has made: in tenure.sync its own kind, which it expects

    async def withdraw(self, error: BaseException | None = None) -> None:
        """Leave, if entered: for a caller who may have been interrupted on the way in, and doesn't know."""
        if self._is_entered:
            await self.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_entered = False
        if self._candidate.is_forked:
            if error is None:
                raise TermLost(self._term.loss_message())
            return  # what ends the child ends it without a word from us
        self._candidate.vacate(self._term)
        over = self._term.remaining() == 0.0
        also_cancelled = False
        if self._interrupted:
            if kind is not asyncio.CancelledError:
                # Our cancel() may still be on its way to the next await. That is ours: take it here.
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
            # As asyncio.timeout does: only if nobody else cancelled the task as well is the end ours to explain.
            ours = self._interrupted.uncancel() <= self._cancelling
            over = ours and (over or kind is asyncio.CancelledError)
            also_cancelled = not ours and kind is not asyncio.CancelledError
        self._candidate.ended(self._term, again=False)
        await self._candidate.__aexit__(kind, error, trace)
        if also_cancelled and error is None:
            raise asyncio.CancelledError
        if over and (error is None or kind is asyncio.CancelledError):
            raise TermLost(self._term.loss_message()) from error


class CandidateHandle:
    """One candidacy as its owner's loop sees it; the office where its work runs as the renewal thread sees it."""

    def __init__(self, election: Election) -> None:
        self._election = election
        self._loop = asyncio.get_running_loop()
        self._inline = self._loop is election._renewal_thread.loop
        self.metadata: Metadata = election.metadata
        self.probe: LoopProbe | None = None if self._inline else election._driver.probe_of(self._loop)
        self.has_health: bool = election.health is not None
        self._candidacy: Candidacy | None = None
        self._term: TermBase[Any] | None = None  # written on the renewal loop, read on both
        self._waiting: TermBase[Any] | None = None  # begun, and not yet fetched by elected()
        self._serving: TermBase[Any] | None = None  # fetched, and not yet ended
        self._interrupt: Callable[[], object] | None = None
        self._told_to_stop: TermBase[Any] | None = None  # the newest term whose work was told to stop
        self._vacated: TermBase[Any] | None = None  # the newest term whose work has ended
        self._had_to = False  # whether that was because the term was
        self._withdrawn = False  # the renewal loop alone writes and reads it
        self._over = False
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        self._context = election.context or contextvars.copy_context()
        self._watchdog: Watchdog | None = None

    async def __aenter__(self) -> CandidateHandle:
        election = self._election
        timing, driver = election.timing, election._driver
        if election.overrun == "exit":
            self._watchdog = self._started_watchdog()

        async def stand() -> None:
            if self._withdrawn:
                return
            # New for each candidacy: 128 bits that nobody else has, whatever the label, the host name or the pid.
            holder = f"{election.label}-{secrets.token_hex(HOLDER_BYTES)}"
            hints, now = driver.store.traits.hints, driver.clock.now()
            machine = Machine(election.name, holder, timing, random.Random(), hints=hints, now=now)
            self._candidacy = driver.stand(machine, self)

        election._candidate = self
        try:
            await election._renewal_thread.call(stand)
        except BaseException:
            # Cancelled while we asked to stand. Whether we do by now, or shall in a moment, we must not: a candidate
            # without an owner would lead for ever, and do nothing.
            election._candidate = None
            if not self.is_forked:
                with suppress(RuntimeError):  # the renewal loop is closed: nobody stands there any more
                    election._renewal_thread.loop.call_soon_threadsafe(self._withdraw)
            raise
        return self

    def _started_watchdog(self) -> Watchdog | None:
        try:
            return self._election._renewal_thread.watchdog(self._election._driver.clock)
        except RuntimeError as error:
            raise Unavailable(
                f"overrun='exit' needs a thread of its own, and the system gives none: {error}; "
                f"nobody stands for {self._election.name!r} here without it; free threads, and campaign again"
            ) from error

    @property
    def is_forked(self) -> bool:
        """Whether we are a forked child: the candidacy, and all that could answer, stayed with the parent."""
        return self._election._renewal_thread.is_forked

    def _withdraw(self) -> None:
        self._withdrawn = True
        if self._candidacy:
            self._candidacy.feed(Stop())
            self._candidacy.feed(Resign())

    async def __aexit__(self, *_: object) -> None:
        """Contend no more, and wait until the lease is handed back or has run out."""
        if self.is_forked:
            return
        self.stop(at_once=True)
        if self._serving:  # its work never began, or raised before it could be awaited
            self.ended(self._serving, again=False)
        try:
            while not self._over:
                self._news.clear()
                await self._news.wait()
        finally:
            self._election._candidate = None

    # --- the owner's side ---

    async def elected(self) -> TermBase[Any] | None:
        """Wait for the next term; None once there will be none.

        Raises:
            TenureError: Why there will be none, if it wasn't asked for.
        """
        while True:
            while self._waiting is None and not self._over:
                self._news.clear()
                await self._news.wait()
            self._serving = term = self._waiting
            self._waiting = None
            if term is None and self._error is not None:
                raise self._error
            if term is None or term._begin():
                return term
            self.ended(term, again=True)  # this loop was blocked for so long that the term is over

    def occupy(self, term: TermBase[Any], interrupt: Callable[[], object]) -> None:
        """Work begins; *interrupt* tells it to stop."""
        self._interrupt = interrupt
        if self._told_to_stop is term:
            interrupt()

    def vacate(self, term: TermBase[Any]) -> bool:
        """Work has ended; return whether it had to, at the moment when this was first called."""
        if self._vacated is not term:
            term._end()
            self._interrupt = None
            self._vacated, self._had_to = term, self._told_to_stop is term or term.remaining() == 0.0
        return self._had_to

    def ended(self, term: TermBase[Any], *, again: bool) -> None:
        """Work of *term* runs no more: the lease may be handed back."""
        term._end()
        self._serving = None
        self._on_keeper(self._work_ended, term, again)

    def stop(self, *, at_once: bool) -> None:
        """Contend no more; *at_once* also cancels the work."""
        self._feed(Stop())
        if at_once:
            self._feed(Resign())

    async def resign(self, wait: bool) -> bool:
        async def leave() -> bool:
            return await self._candidacy.resign(wait) if self._candidacy else False

        return await self._election._renewal_thread.call(leave)

    def _feed(self, event: Input) -> None:
        if self._candidacy is not None:
            self._on_keeper(self._candidacy.feed, event)

    def _on_keeper(self, call: Callable[..., object], *arguments: Any) -> None:
        if self._inline:
            call(*arguments)
        elif not self.is_forked:
            with suppress(RuntimeError):  # the renewal loop is closed: the candidacy has ended, and said so
                self._election._renewal_thread.loop.call_soon_threadsafe(call, *arguments)

    # --- the renewal thread's side (an WorkHost) ---

    def begin(self, grant: Grant, trusted_until: float) -> None:
        term = self._election._make_term(grant, trusted_until, self._election._driver.clock)
        if self._watchdog is not None:
            term._deadline = self._watchdog.deadline(trusted_until, self._why_to_exit(grant.token))
        self._term = term
        self._post(self._on_begun, term)

    def trust(self, token: int, until: float) -> None:
        # A plain number, written here and read by check() on any thread: no blocked loop stands between the two.
        if self._term and self._term.token == token:
            self._term._trusted_until = until

    def _work_ended(self, term: TermBase[Any], again: bool) -> None:
        # Tokens may fall when a store is restored from a copy, so two terms of ours may have one number.
        if self._candidacy is not None and self._term is term:
            self._candidacy.feed(WorkEnded(term.token, again))

    def cancel(self, token: int, reason: Reason) -> None:
        if self._term and self._term.token == token:
            self._term._reason = reason
            self._post(self._on_cancelled, self._term)

    def must_end_by(self, at: float) -> None:
        if self._term is not None and self._term._deadline is not None:
            self._term._deadline.move(at)

    def overran(self, token: int) -> None:
        if self._election.overrun == "exit" and self._term is not None and self._term._works:
            end_process(self._why_to_exit(token))

    def _why_to_exit(self, token: int) -> str:
        return (
            f"work of term {token} of {self._election.name!r} still runs although its lease ends now; "
            f"overrun='exit' ends this process with code {EXIT_OVERRUN}"
        )

    def stalled(self) -> str | None:
        limit, term = self._election.stall_after, self._term
        if limit is None or term is None:
            return None
        silent = self._election._driver.clock.now() - term._beat_at
        return f"no term.beat() for {silent:.3g} s, and stall_after is {limit:g} s" if silent > limit else None

    async def healthy(self, within: float) -> str | None:
        question = self._ask_health()
        try:
            async with asyncio.timeout(within):
                if self._inline:
                    return await question
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(question, self._loop))
        except TimeoutError:
            return f"the health callback did not answer for {within:g} s"
        except RuntimeError as error:
            question.close()
            return f"the loop that runs the work is gone: {error}"
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return "the health callback was cancelled"
        except BaseException as error:  # as a Ctrl-C there, which its own loop has been told of
            return f"the health callback raised {in_words(error)}"

    async def _ask_health(self) -> str | None:
        """Ask the health callback, where it may do what it likes; return why the work is not well."""
        assert self._election.health is not None
        if self._inline:  # tenure.sync works on the renewal thread's own loop, where no user code may run
            if self._election._is_asking:  # one that hangs must not take a thread for each question
                return "the health callback has not answered the last question yet"
            try:
                return await in_thread("tenure-health", self._context.copy().run, self._ask_in_its_own_loop)
            except RuntimeError as error:
                return f"the health callback could not be asked: {error}"
        try:
            well = self._election.health()
            if inspect.isawaitable(well):
                well = await well
            return None if well else NOT_WELL
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return "the health callback was cancelled"
        except (Exception, SystemExit) as error:
            return f"the health callback raised {in_words(error)}"

    def _ask_in_its_own_loop(self) -> str | None:
        """Ask the health callback on this thread, which has no loop, whether it is async or not."""
        assert self._election.health is not None
        self._election._is_asking = True
        try:
            well = self._election.health()
            if inspect.isawaitable(well):
                well = asyncio.run(_awaited(well))
            return None if well else NOT_WELL
        except BaseException as error:  # whatever it is, in a thread it is nobody's but ours
            return f"the health callback raised {in_words(error)}"
        finally:
            self._election._is_asking = False

    def failed(self, error: BaseException) -> None:
        self._post(self._on_failed, error)

    def left(self) -> None:
        self._post(self._on_left)

    def emit(self, event: Event) -> None:
        if isinstance(event, Overrun):  # now, as the loop where the work runs may be what is stuck
            self._context.copy().run(log_event, event)
        elif is_logged(event):
            self._post(log_event, event)  # a log that blocks must not block the renewal thread
        if self._election._on_event is not None:
            self._post(tell_hook, self._election._on_event, event)

    def _post(self, callback: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args, context=self._context)
        except RuntimeError:
            # The owner's loop was closed under its work, so that work can't be running: leave office.
            if self._candidacy and (grant := self._candidacy.machine.grant):
                self._election._renewal_thread.loop.call_soon(self._candidacy.feed, WorkEnded(grant.token, again=False))

    # --- what the renewal thread's side posts here ---

    def _on_begun(self, term: TermBase[Any]) -> None:
        self._waiting = term
        self._news.set()

    def _on_cancelled(self, term: TermBase[Any]) -> None:
        self._told_to_stop = term
        term.lost.set()
        if self._waiting is term:  # cancelled before its work began
            self._waiting = None
            self.ended(term, again=True)
        elif self._interrupt:
            self._interrupt()

    def _on_failed(self, error: BaseException) -> None:
        self._error = error

    def _on_left(self) -> None:
        self._over = True
        self._news.set()


def leader_of(found: HeldBy | Vacant) -> Leader | None:
    """Tell a store's answer in the user's words."""
    if isinstance(found, Vacant):
        return None
    return Leader(found.holder, found.token, found.metadata, found.remaining)


async def _stop_when(stop: asyncio.Event, candidate: CandidateHandle, *, at_once: bool) -> None:
    await stop.wait()
    candidate.stop(at_once=at_once)


async def _vacating(work: Awaitable[Any], candidate: CandidateHandle, term: TermBase[Any]) -> SystemExit | None:
    """Await *work*, and note its end at once: what blocks the loop from then on is no work of this term.

    Returns an exit that it has called for: raised by a task of its own, it would end the loop under all others.
    """
    try:
        await work
    except SystemExit as error:
        return error
    finally:
        candidate.vacate(term)
    return None


async def _awaited(well: Awaitable[bool]) -> bool:
    return await well


def _named(work: object) -> str:
    return getattr(work, "__qualname__", repr(work))


def _checked_metadata(metadata: Mapping[Any, Any] | None) -> Metadata:
    """Return a copy of nothing but plain text: the user's own is looked at here, and not on the renewal thread."""
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
    """Return *text* as a ``str`` and no subclass, whose methods could do anything."""
    return str.__str__(text)


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _check_gates(stall_after: object, health: object, overrun: object) -> None:
    positive = isinstance(stall_after, (int, float)) and not isinstance(stall_after, bool) and stall_after > 0
    if stall_after is not None and not positive:
        raise ConfigError(f"stall_after must be a positive number of seconds, or None, not {stall_after!r}")
    if health is not None and not callable(health):
        raise ConfigError(f"health must be a function that returns whether all is well, not {health!r}")
    refuse_generator("health", health)
    if overrun not in ("report", "exit"):
        raise ConfigError(f"overrun must be 'report' or 'exit', not {overrun!r}")
