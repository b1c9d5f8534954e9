"""The handle of one candidacy, used from two threads: by its owner, and by the driver as the host of the work.

The machine and its requests live on the renewal loop; work runs on the owner's loop. Only two things cross between
them: a plain number (until when a term is trusted), and callbacks posted to the other loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from tenure._election.driver import Candidacy, Driver
from tenure._election.effects import Input, Resign, Stop, WorkEnded
from tenure._election.health import HealthCheck
from tenure._election.machine import Machine, State
from tenure._election.status import CandidateState, CandidateStatus
from tenure._election.term import MakeTerm, TermBase
from tenure._lease import Grant, Metadata
from tenure._runtime.renewal_thread import LoopProbe, RenewalThread
from tenure._runtime.watchdog import EXIT_OVERRUN, Watchdog, end_process
from tenure._telemetry.hook import call_hook
from tenure._telemetry.log import is_logged, log_event
from tenure._timing import Timing
from tenure.errors import Unavailable
from tenure.events import Event, Overrun, Reason

HOLDER_BYTES = 16
"""Random bytes that follow the label in a holder's identity, as two characters each."""


_STATES: Mapping[State, CandidateState] = MappingProxyType(
    {
        State.STANDBY: "standing by",
        State.CAMPAIGNING: "standing by",
        State.LEADING: "leading",
        State.RENEWING: "leading",
        State.RESIGNING: "ending",
        State.STOPPED: "idle",
    }
)


@dataclass(frozen=True, slots=True)
class CandidateSettings:
    """The settings of an election, as one candidacy needs them."""

    name: str
    timing: Timing
    label: str
    metadata: Metadata
    stall_after: float | None
    health: HealthCheck | None
    overrun: Literal["report", "exit"]
    on_event: Callable[[Event], None] | None
    make_term: MakeTerm
    context: contextvars.Context | None
    """The context in which hooks, log handlers and the health callback are called; None: the owner's."""
    once: bool = False
    """Whether it asks once, and leads for one term at most; see :class:`~tenure._election.machine.Machine`."""


class CandidateHandle:
    """One candidacy: its owner waits for terms here; the driver uses it as the ``WorkHost``."""

    def __init__(self, settings: CandidateSettings, driver: Driver, renewal_thread: RenewalThread) -> None:
        self._settings = settings
        self._driver = driver
        self._renewal_thread = renewal_thread
        self._loop = asyncio.get_running_loop()
        self._is_renewal_loop = self._loop is renewal_thread.loop  # tenure.sync, and tests in virtual time
        self.metadata: Metadata = settings.metadata
        self.probe: LoopProbe | None = None if self._is_renewal_loop else driver.probe_of(self._loop)
        self.health_check: object | None = settings.health
        self.is_active = False
        """Whether the owner has entered and not left it."""
        self.term: TermBase[Any] | None = None
        """The newest term; written on the renewal loop, read on both."""
        self._candidacy: Candidacy | None = None
        self._new_term: TermBase[Any] | None = None  # begun, and not yet returned by next_term()
        self._current_term: TermBase[Any] | None = None  # returned by next_term(), and not yet ended
        self._cancel: Callable[[], object] | None = None
        self._cancelled_term: TermBase[Any] | None = None  # the newest term whose work was cancelled
        self._stopped_term: TermBase[Any] | None = None  # the newest term whose work has ended
        self._was_term_over = False  # whether that term was over when its work ended
        self._is_withdrawn = False  # read and written on the renewal loop only
        self._has_ended = False
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._context = settings.context or contextvars.copy_context()
        self._watchdog: Watchdog | None = None

    async def __aenter__(self) -> CandidateHandle:
        settings, driver = self._settings, self._driver
        if settings.overrun == "exit":
            self._watchdog = self._started_watchdog()

        async def start() -> None:
            if self._is_withdrawn:
                return
            # New for each candidacy: 128 random bits, so that it is unique whatever the label, host name or pid.
            holder = f"{settings.label}-{secrets.token_hex(HOLDER_BYTES)}"
            machine = Machine(
                settings.name,
                holder,
                settings.timing,
                random.Random(),
                hints=driver.store.traits.hints,
                queued=driver.store.traits.queued,
                takes_back=driver.store.traits.takes_back,
                now=driver.clock.now(),
                once=settings.once,
            )
            self._candidacy = driver.start_candidacy(machine, self)

        self.is_active = True
        try:
            await self._renewal_thread.call(start)
        except BaseException:
            # Cancelled while the candidacy was being started. It may have started, or may start in a moment, and must
            # not go on: a candidate without an owner would hold the lease for ever, and do no work.
            self.is_active = False
            if not self.is_forked:
                with suppress(RuntimeError):  # the renewal loop is closed: there are no candidacies any more
                    self._renewal_thread.loop.call_soon_threadsafe(self._withdraw)
            raise
        return self

    def _started_watchdog(self) -> Watchdog | None:
        try:
            return self._renewal_thread.watchdog(self._driver.clock)
        except RuntimeError as error:
            raise Unavailable(
                f"overrun='exit' needs a thread of its own, and the system can't start one: {error}; this process does "
                f"not campaign for {self._settings.name!r} without it; free threads, and campaign again"
            ) from error

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child: the candidacy, and the thread that renews it, stayed with the parent."""
        return self._renewal_thread.is_forked

    def _withdraw(self) -> None:
        self._is_withdrawn = True
        if self._candidacy:
            self._candidacy.feed(Stop())
            self._candidacy.feed(Resign())

    async def __aexit__(self, *_: object) -> None:
        """Stop campaigning, and wait until the lease is released or has run out."""
        if self.is_forked:
            return
        self.stop(at_once=True)
        if self._current_term:  # its work never started, or raised before it could be awaited
            self.end_term(self._current_term, again=False)
        try:
            while not self._has_ended:
                self._changed.clear()
                await self._changed.wait()
        finally:
            self.is_active = False

    # --- called by the owner ---

    async def next_term(self) -> TermBase[Any] | None:
        """Wait until this candidate is elected, and return the term; None if it will not be elected any more.

        Raises:
            TenureError: The candidacy has failed.
        """
        while True:
            while self._new_term is None and not self._has_ended:
                self._changed.clear()
                await self._changed.wait()
            self._current_term = term = self._new_term
            self._new_term = None
            if term is None and self._error is not None:
                raise self._error
            if term is None or term._note_work_start():
                return term
            self.end_term(term, again=True)  # this loop was blocked for so long that the term is over

    def work_started(self, term: TermBase[Any], cancel: Callable[[], object]) -> None:
        """Note that the work of *term* has started; calling *cancel* cancels it."""
        self._cancel = cancel
        if self._cancelled_term is term:
            cancel()

    def work_stopped(self, term: TermBase[Any]) -> bool:
        """Note that the work of *term* has ended; return whether the term was over at the first of these calls."""
        if self._stopped_term is not term:
            term._note_work_end()
            self._cancel = None
            self._stopped_term = term
            self._was_term_over = self._cancelled_term is term or term.remaining() == 0.0
        return self._was_term_over

    def end_term(self, term: TermBase[Any], *, again: bool) -> None:
        """End *term*, whose work has ended: the lease may be released. *again*: campaign for the next one."""
        term._note_work_end()
        self._current_term = None
        self._on_renewal_loop(self._feed_work_ended, term, again)

    def stop(self, *, at_once: bool) -> None:
        """Campaign for no further term; *at_once* also cancels the work."""
        self._feed(Stop())
        if at_once:
            self._feed(Resign())

    async def resign(self, wait: bool) -> bool:
        """End the present term, and *wait* until its lease is released; return whether there was one."""

        async def resign() -> bool:
            return await self._candidacy.resign(wait) if self._candidacy else False

        return await self._renewal_thread.call(resign)

    async def status(self) -> CandidateStatus:
        """Return the status of this candidate, asked for on the renewal loop: no answer comes if that is blocked."""

        async def look() -> CandidateStatus:
            candidacy = self._candidacy
            if candidacy is None:
                return CandidateStatus(self._settings.name)
            if candidacy.ended.is_set():  # and if it has failed, its machine doesn't know about work that still runs
                overran = self.term is not None and self.term._work_runs and self.term.remaining() == 0.0
                return CandidateStatus(self._settings.name, overran=overran, is_live=not overran)
            return _status_of(candidacy.machine, self._driver.clock.now())

        return await self._renewal_thread.call(look)

    def _feed(self, event: Input) -> None:
        if self._candidacy is not None:
            self._on_renewal_loop(self._candidacy.feed, event)

    def _on_renewal_loop(self, call: Callable[..., object], *arguments: Any) -> None:
        if self._is_renewal_loop:
            call(*arguments)
        elif not self.is_forked:
            with suppress(RuntimeError):  # the renewal loop is closed: the candidacy has ended, and was reported
                self._renewal_thread.loop.call_soon_threadsafe(call, *arguments)

    # --- called on the renewal loop: the WorkHost ---

    def start_work(self, grant: Grant, trusted_until: float) -> None:
        term = self._settings.make_term(grant, trusted_until, self._driver.clock)
        if self._watchdog is not None:
            term._exit_deadline = self._watchdog.deadline(trusted_until, self._exit_message(grant.token))
        self.term = term
        self._post(self._on_term_begun, term)

    def set_trust(self, token: int, until: float) -> None:
        # A plain number, written here and read by check() on any thread, whatever loop is blocked.
        if self.term and self.term.token == token:
            self.term._trusted_until = until

    def _feed_work_ended(self, term: TermBase[Any], again: bool) -> None:
        # Tokens may fall when a store is restored from a copy, so two terms of ours may have the same number.
        if self._candidacy is not None and self.term is term:
            self._candidacy.feed(WorkEnded(term.token, again))

    def cancel_work(self, token: int, reason: Reason) -> None:
        if self.term and self.term.token == token:
            self.term._end_reason = reason
            self._post(self._on_work_cancelled, self.term)

    def set_overrun_time(self, at: float) -> None:
        if self.term is not None and self.term._exit_deadline is not None:
            self.term._exit_deadline.move(at)

    def work_overran(self, token: int) -> None:
        if self._settings.overrun == "exit" and self.term is not None and self.term._work_runs:
            end_process(self._exit_message(token))

    def _exit_message(self, token: int) -> str:
        return (
            f"work of term {token} of {self._settings.name!r} still runs although its lease ends now; "
            f"overrun='exit' ends this process with code {EXIT_OVERRUN}"
        )

    def stall_reason(self) -> str | None:
        limit, term = self._settings.stall_after, self.term
        if limit is None or term is None:
            return None
        since_beat = self._driver.clock.now() - term._beat_at
        return f"no term.beat() for {since_beat:.3g} s, and stall_after is {limit:g} s" if since_beat > limit else None

    async def health_problem(self, within: float) -> str | None:
        if self._settings.health is None:
            return None
        # No user code on the renewal thread: where that is the owner's loop too, the callback gets a thread.
        loop = None if self._is_renewal_loop else self._loop
        return await self._settings.health.problem(within, loop, self._context)

    def candidacy_failed(self, error: BaseException) -> None:
        self._post(self._on_failed, error)

    def candidacy_ended(self) -> None:
        self._post(self._on_ended)

    def emit(self, event: Event) -> None:
        if isinstance(event, Overrun):  # at once, as the loop where the work runs may be blocked
            self._context.copy().run(log_event, event)
        elif is_logged(event):
            self._post(log_event, event)  # a log handler that blocks must not block the renewal thread
        if self._settings.on_event is not None:
            self._post(call_hook, self._settings.on_event, event)

    def _post(self, callback: Callable[..., object], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args, context=self._context)
        except RuntimeError:
            # The owner's loop was closed while work ran on it, so the work can't run any more: end the term.
            if self._candidacy and (grant := self._candidacy.machine.grant):
                self._renewal_thread.loop.call_soon(self._candidacy.feed, WorkEnded(grant.token, again=False))

    # --- posted from the renewal loop to the owner's loop ---

    def _on_term_begun(self, term: TermBase[Any]) -> None:
        self._new_term = term
        self._changed.set()

    def _on_work_cancelled(self, term: TermBase[Any]) -> None:
        self._cancelled_term = term
        term.lost.set()
        if self._new_term is term:  # cancelled before its work started
            self._new_term = None
            self.end_term(term, again=True)
        elif self._cancel:
            self._cancel()

    def _on_failed(self, error: BaseException) -> None:
        self._error = error

    def _on_ended(self) -> None:
        self._has_ended = True
        self._changed.set()


def _status_of(machine: Machine, now: float) -> CandidateStatus:
    state = _STATES[machine.state]
    timing = machine.timing
    trusted_for = max(0.0, machine.trusted_until - now)
    answered_ago = now - machine.answered_at
    overran = now >= machine.overruns_at
    is_answered = answered_ago <= timing.ttl + 2 * timing.retry_every
    return CandidateStatus(
        name=machine.name,
        state=state,
        token=machine.token,
        trusted_for=trusted_for,
        answered_ago=None if math.isinf(answered_ago) else answered_ago,
        problem=machine.problem,
        overran=overran,
        is_live=not overran,
        is_ready=(state == "leading" and trusted_for > 0.0) or (state == "standing by" and is_answered),
    )
