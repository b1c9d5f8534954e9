"""One candidate's election, as a pure state machine: inputs and ``now`` in, effects and ``wake_at`` out.

Rules:

- No I/O, no clock, no loop, no randomness of its own. ``handle(event, now)`` returns the effects to perform;
  ``wake_at`` says when to call again with ``Tick``. There is no polling.
- Three answers: yes, no, don't know. "No" ends the term at once. After "don't know" the request is repeated inside the
  time left.
- A grant is trusted from *before the request was sent*, or from earlier if the store says so (``Granted.age``); see
  :func:`tenure._lease.trusted_until`.
- Never release a lease while work runs. A term ends with ``WorkEnded``, not with our decision to end it.
- Every acquisition has a holder name of its own, so that a request whose answer was lost can be repeated, and a late
  answer can be distinguished from the current one.
- Nobody asks for the name again while the store is silent: who has got it unawares would keep it from all others. It
  looks who has it, until an answer comes.
- In a store with a queue, a candidate asks again often enough to keep its place, and leaves no place behind.

::

              Tick: time to ask                 Granted
    STANDBY ────────────────────▶ CAMPAIGNING ──────────▶ LEADING ◀──────────┐
      ▲  ▲                             │                   │   │             │ Granted,
      │  └─── HeldBy, no answer ───────┘                   │   │ Tick: time  │ no answer
      │                                                    │   ▼ to renew    │
      │                          Lost, no time left,       │  RENEWING ──────┘
      │                          asked to resign, resign,  │   │
      │                          work has ended            ▼   ▼
      └──────────── work has ended, lease released ───── RESIGNING ──▶ STOPPED   (Stop)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from tenure._election.acquire_times import AcquireTimes
from tenure._election.effects import (
    Acquire,
    Answer,
    Answered,
    CancelWork,
    Effect,
    Emit,
    Hint,
    HintsAbsent,
    Input,
    Inspect,
    Release,
    Renew,
    RenewalWithheld,
    RenewTogether,
    Resign,
    StartWork,
    Stop,
    Tick,
    Trust,
    Withdraw,
    WorkEnded,
    WorkOverran,
)
from tenure._election.requests import Request, Requests, TokenOrder
from tenure._jitter import Rng, sooner
from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer, Released, Vacant, trusted_until
from tenure._timing import EARLY_RENEWAL_SHARE, Timing
from tenure.events import (
    CampaignFailed,
    Overrun,
    Reason,
    ReleasedUnused,
    ReleaseMissed,
    RenewalMissed,
    Renewed,
    StandingBy,
    TermBegan,
    TermEnded,
    TermEnding,
)

NEVER = math.inf

PACE_MIN = 1 / 4
"""The shortest wait of a term, however old its grant is: this share of ``renew_every`` or ``retry_every``."""


class State(Enum):
    """The states of a candidate."""

    STANDBY = "standby"  # waits for a vacancy, or until it is time to ask again
    CAMPAIGNING = "campaigning"  # has asked for the name, or who has it
    LEADING = "leading"  # holds the lease; work runs
    RENEWING = "renewing"  # leads, and has asked for more time
    RESIGNING = "resigning"  # the term ends: work is ending, or the lease is being released
    STOPPED = "stopped"  # will never ask again


TRANSITIONS: dict[State, frozenset[State]] = {
    State.STANDBY: frozenset({State.CAMPAIGNING, State.LEADING, State.STOPPED}),  # LEADING: a late, still good, yes
    State.CAMPAIGNING: frozenset({State.STANDBY, State.LEADING, State.STOPPED}),
    State.LEADING: frozenset({State.RENEWING, State.RESIGNING}),
    State.RENEWING: frozenset({State.LEADING, State.RESIGNING}),
    State.RESIGNING: frozenset({State.STANDBY, State.STOPPED}),
    State.STOPPED: frozenset(),
}
"""Every legal change of state; the machine refuses any other, whatever its input."""


# --- state ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _TermState:
    """The present term, from the win until its lease is released or has run out."""

    grant: Grant
    trusted_until: float
    pace: float  # the share of their usual length that its waits have, see _pace
    renew_at: float
    asked_at: float  # when the newest renewal was sent
    hinted_at: float  # when the newest one that followed a hint is, or was, due; first, when the name was asked for
    is_ours: bool = True  # False once the store has said no
    stalled: bool = False  # the newest renewal was withheld
    end_reason: Reason | None = None
    stop_by: float = NEVER  # work that runs beyond this has overrun
    overran: bool = False
    work_runs: bool = True
    release_missed: bool = False  # its lease could not be released at once, and that was reported


class Machine:
    """Decide for one candidate: when to send requests, how long to trust a lease, when to stop the work and to resign.

    Args:
        name: What the election is about.
        holder: This candidate's identity; each acquisition appends its own number.
        timing: The durations of the election.
        rng: Source of jitter.
        hints: Whether the store can report vacancies; while it doesn't, a candidate asks every ``timing.retry_every``.
        queued: Whether candidates stand in a queue in the store.
        takes_back: Whether the store takes back a claim that it could not answer for, see ``LeaseTraits``.
        now: The present time; the first request is due at once.
        once: Ask once, and lead for one term at most: it stops if it is refused or gets no answer, and after its term.
            Requests to resign are left to its owner.
    """

    ALLOWED: ClassVar[dict[State, frozenset[State]]] = TRANSITIONS
    TIMES: ClassVar[type[AcquireTimes]] = AcquireTimes

    def __init__(
        self,
        name: str,
        holder: str,
        timing: Timing,
        rng: Rng,
        *,
        hints: bool,
        now: float,
        queued: bool = False,
        takes_back: bool = False,
        once: bool = False,
    ) -> None:
        self.name = name
        self.timing = timing
        self.state: State = State.STANDBY
        self._holder = holder
        self._rng = rng
        self._queued = queued
        self._takes_back = takes_back
        self.once = once
        self._place: str | None = None  # the holder name that may have a place in the store's queue
        self._requests = Requests()
        self._tokens = TokenOrder()
        self._acquisition = 1
        self._acquire_times = self.TIMES(timing, rng, hints=hints, queued=queued, now=now)
        self._hinted = False  # a hint came while a request was unanswered
        self._stopping = False
        self._announced_leader: tuple[str, int] = ("", 0)  # the last leader reported by an event, and its token
        self._term: _TermState | None = None
        self.answered_at: float = -math.inf
        """When the store last answered, whatever it said."""
        self.problem: str = ""
        """Why the newest request got no answer, or was withheld; empty if the store has answered since."""

    # --- what the driver reads ---

    @property
    def wake_at(self) -> float:
        """When to call ``handle(Tick(), now)``, by the same clock as ``now``; infinity for never."""
        term = self._term
        match self.state:
            case State.STANDBY:
                return self._acquire_times.due
            case State.CAMPAIGNING:
                return self._requests.answer_due
            case State.LEADING if term:
                return min(term.renew_at, self._cancel_at(term))
            case State.RENEWING if term:
                return min(self._requests.answer_due, self._cancel_at(term))
            case State.RESIGNING if term and term.work_runs:
                return NEVER if term.overran else term.stop_by
            case State.RESIGNING:
                return self._requests.answer_due
        return NEVER

    @property
    def overruns_at(self) -> float:
        """When the work of the present term overruns unless a renewal succeeds; infinity if no work runs."""
        term = self._term
        if term is None or not term.work_runs:
            return NEVER
        return term.stop_by if self.state is State.RESIGNING else term.trusted_until

    @property
    def trusted_until(self) -> float:
        """Until when the present term is trusted; minus infinity if there is none."""
        return self._term.trusted_until if self._term else -math.inf

    @property
    def grant(self) -> Grant | None:
        """The present term's grant, from the win until the work has ended."""
        return self._term.grant if self._term and self._term.work_runs else None

    @property
    def token(self) -> int | None:
        """The present term's token, from the win until its lease is released or given up; None if there is no term."""
        return self._term.grant.token if self._term else None

    @property
    def has_term(self) -> bool:
        """Whether there is a term, from the win until its lease is released or given up."""
        return self._term is not None

    @property
    def renewable_from(self) -> float:
        """From when ``RenewTogether`` makes this candidate renew; infinity while it doesn't lead."""
        term = self._term
        if self.state is not State.LEADING or term is None:
            return NEVER
        return term.renew_at - EARLY_RENEWAL_SHARE * (term.renew_at - term.asked_at)

    @property
    def place(self) -> str | None:
        """The holder name that may have a place in the store's queue; None if there is none."""
        return self._place

    @property
    def is_finished(self) -> bool:
        """Whether it has stopped and every request was answered."""
        return self.state is State.STOPPED and not self._requests.unanswered

    # --- the only entry point ---

    def handle(self, event: Input, now: float) -> list[Effect]:
        """Process *event* at *now* and return the effects, to be performed in this order."""
        effects: list[Effect] = []
        # First the time: an input that arrives after the term has expired finds it ended.
        self._check_expiry(now, effects)
        match event:
            case Tick():
                self._on_tick(now, effects)
            case Hint():
                self._acquire_times.hints_come()
                self._on_hint(now)
                self._on_tick(now, effects)
            case HintsAbsent():  # a term goes on: the answers to its renewals say whether it was asked to resign
                self._acquire_times.hints_absent(now)
            case RenewTogether():
                if now >= self.renewable_from:
                    self._renew(now, effects)
            case Answered(request_id, answer):
                self._on_any_answer(request_id, answer, now, effects)
            case WorkEnded(token, again):
                self._on_work_ended(token, again, now, effects)
            case Resign():
                if self.state in (State.LEADING, State.RENEWING):
                    self._end_term("stopped" if self._stopping else "resigned", now, effects)
            case Stop():
                self._stop(now, effects)
        return effects

    # --- time ---

    def _check_expiry(self, now: float, effects: list[Effect]) -> None:
        term = self._term
        if term is None:
            return
        if self.state in (State.LEADING, State.RENEWING) and now >= self._cancel_at(term):
            self._end_term("stalled" if term.stalled else "unanswered", now, effects)
        if term.work_runs and not term.overran and now >= term.stop_by:
            term.overran = True
            effects.append(WorkOverran(term.grant.token))  # first: passing on the event may block
            effects.append(Emit(Overrun(now, self.name, term.grant.holder, term.grant.token)))

    def _on_tick(self, now: float, effects: list[Effect]) -> None:
        term = self._term
        match self.state:
            case State.STANDBY if now >= self._acquire_times.due:
                self._set_state(State.CAMPAIGNING)
                self._acquire_times.asked(now)
                if self._may_ask():
                    self._acquire(now, effects)
                else:
                    effects.append(Inspect(self._new_request(Inspect, self._holder_now(), now)))
            case State.CAMPAIGNING if now >= self._requests.answer_due:
                self._requests.abandon()
                self._acquire_later(f"no answer within {self.timing.retry_every:g} s", now, effects)
            case State.LEADING if term and now >= term.renew_at:
                self._renew(now, effects)
            case State.RENEWING if term and now >= self._requests.answer_due:
                waited = self._requests.answer_due - term.asked_at
                self._requests.abandon()
                self._renewal_missed(term, f"no answer within {waited:.3g} s", now, effects)
                self._renew(now, effects)
            case State.RESIGNING if term and not term.work_runs and now >= self._requests.answer_due:
                self._requests.abandon()
                self._release_missed(term, f"no answer within {self.timing.retry_every:g} s", now, effects)
                self._release(term, now, effects)

    def _on_hint(self, now: float) -> None:
        match self.state:
            case State.STANDBY:
                self._acquire_times.hinted(now)
            case State.LEADING if self._term:
                self._renew_early(self._term, now)
            case State.CAMPAIGNING | State.RENEWING:
                self._hinted = True

    def _renew_early(self, term: _TermState, now: float) -> None:
        # The next answer says whether we were asked to resign, or are deposed. Hints may be wrong, so there is a pause
        # between those that are followed; a single one is followed at once.
        at = max(now, term.hinted_at + self.timing.retry_every / 4)
        if at < term.renew_at:
            term.renew_at = term.hinted_at = at

    # --- requests ---

    def _holder_now(self) -> str:
        return f"{self._holder}#{self._acquisition}"

    def _new_request(
        self,
        kind: type[Acquire] | type[Inspect] | type[Renew] | type[Release],
        holder: str,
        now: float,
        within: float | None = None,
    ) -> int:
        """Note a request whose answer is awaited *within* so many seconds, or ``retry_every``; return its number."""
        awaited = self.timing.retry_every if within is None else within
        return self._requests.add(Request(now, kind, holder), answer_due=now + awaited)

    def _may_ask(self) -> bool:
        return self._requests.is_heard or self._takes_back

    def _acquire(self, now: float, effects: list[Effect]) -> None:
        holder = self._holder_now()
        self._place = holder if self._queued else None
        effects.append(Acquire(self._new_request(Acquire, holder, now), holder))

    def _renew(self, now: float, effects: list[Effect]) -> None:
        term = self._term
        assert term is not None
        self._set_state(State.RENEWING)
        self._hinted = False
        term.asked_at = now
        number = self._new_request(Renew, term.grant.holder, now, self._retry_after(term))
        effects.append(Renew(number, term.grant))

    # --- answers ---

    def _on_any_answer(self, request_id: int, answer: Answer, now: float, effects: list[Effect]) -> None:
        found = self._requests.answered(request_id)
        if found is None:
            return
        request, was_awaited = found
        if not isinstance(answer, (NoAnswer, RenewalWithheld)):
            self.answered_at, self.problem = now, ""
            self._requests.is_heard = True
        fell = self._tokens.check(self.name, request, answer, now)
        if fell is not None:
            effects.append(Emit(fell))
        on_answer = self._on_answer if was_awaited else self._on_late_answer
        on_answer(request, answer, now, effects)

    def _on_answer(self, request: Request, answer: Answer, now: float, effects: list[Effect]) -> None:
        term = self._term
        match self.state, answer:
            case State.CAMPAIGNING, Granted(grant) if request.kind is Acquire:
                self._begin_term(request, answer, now, effects)
            case State.CAMPAIGNING, HeldBy() | Vacant() if request.kind is Inspect and self._may_get(answer):
                self._acquire(now, effects)
            case State.CAMPAIGNING, HeldBy(holder=holder, token=token, remaining=remaining):
                self._announce_leader((holder, token), now, effects)
                self._stand_by(remaining, now, effects)
            case State.CAMPAIGNING, NoAnswer(why):
                self._acquire_later(why, now, effects)
            case State.RENEWING, Granted(grant) if term and grant == term.grant:
                self._on_renewed(term, request, answer, now, effects)
            case State.RENEWING, Lost(grant) if term and grant == term.grant:
                self._lease_lost(term, now, effects)
            case State.RENEWING, NoAnswer(why) if term:
                self._renewal_missed(term, why, now, effects)
            case State.RENEWING, RenewalWithheld(why) if term:
                self._renewal_missed(term, why, now, effects)
                term.stalled = True
            case State.RESIGNING, Released() | Lost() if term and not term.work_runs:
                self._close_term(term, now)
            case State.RESIGNING, NoAnswer(why) if term and not term.work_runs:
                self._requests.answer_due = now + self.timing.retry_every
                self._release_missed(term, why, now, effects)
            case _, NoAnswer():
                raise AssertionError(f"a candidate that is {self.state.value} waits for no answer")
            case _:  # an answer to another request, or about another grant: it counts as "don't know"
                unknown = NoAnswer(f"the store answered {answer!r} to {request.kind.__name__.lower()}")
                self._on_answer(request, unknown, now, effects)

    def _may_get(self, found: HeldBy | Vacant) -> bool:
        """Return whether to ask for the name that was *found* so: it is free, ours already, or there is a queue."""
        return isinstance(found, Vacant) or found.holder == self._holder_now() or self._queued

    def _on_late_answer(self, request: Request, answer: Answer, now: float, effects: list[Effect]) -> None:
        """Process an answer that is no longer awaited. Its trusted time still counts from its own request."""
        term = self._term
        match answer:
            case Granted(grant) if term is not None and grant == term.grant:
                if self.state in (State.LEADING, State.RENEWING):
                    self._on_late_yes(term, request, answer, now, effects)
            case Granted(grant) if request.kind is Acquire:
                if request.holder == self._holder_now() and self.state in (State.STANDBY, State.CAMPAIGNING):
                    self._requests.abandon()
                    self._begin_term(request, answer, now, effects)
                else:
                    self._release_unused(grant, now, effects)
            case HeldBy() if self._queued and request.kind is Acquire and request.holder != self._holder_now():
                self._withdraw(request.holder, now, effects)  # of an earlier acquisition, and carried out after its end
            case Lost(grant) if term is not None and grant == term.grant and request.kind is Renew:
                if self.state in (State.LEADING, State.RENEWING):
                    self._lease_lost(term, now, effects)
                elif term.work_runs and term.is_ours:  # cancelled already; from now on it is not trusted either
                    self._revoke_trust(term, effects)
                    term.stop_by = min(term.stop_by, now + self.timing.grace)

    def _trust_limit(self, request: Request, granted: Granted) -> float:
        """Return until when a yes to *request* is trusted: counted from the request, however late the answer is."""
        timing = self.timing
        return trusted_until(request.asked_at - granted.age, timing.ttl, timing.drift, timing.margin)

    def _pace(self, granted: Granted) -> float:
        """Return the share of their usual length that the waits of a term have: what a yes leaves of the work's time.

        As all of them are shortened, as many attempts to renew fit in as in a whole lease (``Timing.attempts``).
        """
        return 1 - granted.age / self.timing.work_window

    def _paced(self, seconds: float, pace: float) -> float:
        return max(seconds * pace, PACE_MIN * min(self.timing.renew_every, self.timing.retry_every))

    def _retry_after(self, term: _TermState) -> float:
        """Return how long the answer to a renewal is awaited, and after "don't know" the next attempt."""
        return self._paced(self.timing.retry_every, term.pace)

    def _renewal_due(self, request: Request, pace: float) -> float:
        """Return when to renew after a yes to *request*."""
        return request.asked_at + sooner(self._paced(self.timing.renew_every, pace), self._rng)

    def _begin_term(self, request: Request, granted: Granted, now: float, effects: list[Effect]) -> None:
        grant = granted.grant
        self._acquire_times.granted()
        self._place = None  # it is a claim from now on
        until = self._trust_limit(request, granted)
        if now >= until - self.timing.grace:  # the answer took too long, or the claim is too old
            self._release_unused(grant, now, effects)
            self._acquisition += 1
            self._acquire_later("the lease that was granted leaves no time to lead", now, effects)
            return
        self._set_state(State.LEADING)
        pace, at = self._pace(granted), request.asked_at
        self._term = _TermState(grant, until, pace, self._renewal_due(request, pace), asked_at=at, hinted_at=at)
        effects.append(Emit(TermBegan(now, self.name, grant.holder, grant.token)))
        effects.append(StartWork(grant, until))

    def _on_renewed(
        self, term: _TermState, request: Request, granted: Granted, now: float, effects: list[Effect]
    ) -> None:
        term.stalled = False
        self._extend_trust(term, self._trust_limit(request, granted), now, effects)
        if granted.resign_asked and not self.once:
            self._end_term("asked", now, effects)
            return
        self._set_state(State.LEADING)
        term.pace = self._pace(granted)
        term.renew_at = self._renewal_due(request, term.pace)
        if self._hinted:
            self._renew_early(term, now)

    def _on_late_yes(
        self, term: _TermState, request: Request, granted: Granted, now: float, effects: list[Effect]
    ) -> None:
        until = self._trust_limit(request, granted)
        if until > term.trusted_until:  # then its age counts, and not that of an older grant
            term.pace = self._pace(granted)
            self._extend_trust(term, until, now, effects)
        if granted.resign_asked and not self.once:
            self._end_term("asked", now, effects)

    def _extend_trust(self, term: _TermState, until: float, now: float, effects: list[Effect]) -> None:
        if until > term.trusted_until:
            term.trusted_until = until
            effects.append(Trust(term.grant.token, until))
            effects.append(Emit(Renewed(now, self.name, term.grant.holder, term.grant.token, until)))

    def _renewal_missed(self, term: _TermState, why: str, now: float, effects: list[Effect]) -> None:
        self._set_state(State.LEADING)
        self.problem = why
        term.renew_at = now + sooner(self._retry_after(term), self._rng)
        left = term.trusted_until - now
        effects.append(Emit(RenewalMissed(now, self.name, term.grant.holder, term.grant.token, why, left)))

    def _lease_lost(self, term: _TermState, now: float, effects: list[Effect]) -> None:
        self._revoke_trust(term, effects)
        self._end_term("denied", now, effects)

    def _revoke_trust(self, term: _TermState, effects: list[Effect]) -> None:
        term.is_ours = False
        term.trusted_until = -math.inf
        effects.append(Trust(term.grant.token, -math.inf))

    def _announce_leader(self, leader: tuple[str, int], now: float, effects: list[Effect]) -> None:
        """Report a new leader, once for each. A lease of our own that was not released and runs out is not reported."""
        holder, token = leader
        if leader != self._announced_leader and holder.rpartition("#")[0] != self._holder:
            self._announced_leader = leader
            effects.append(Emit(StandingBy(now, self.name, self._holder, holder, token)))

    def _stand_by(self, remaining: float | None, now: float, effects: list[Effect]) -> None:
        self._set_state(State.STANDBY)
        if self.once:
            self._stop(now, effects)
            return
        self._acquire_times.refused(remaining, now)
        if self._hinted:
            self._hinted = False
            self._acquire_times.hinted(now)

    def _acquire_later(self, why: str, now: float, effects: list[Effect]) -> None:
        if self.state is not State.STANDBY:
            self._set_state(State.STANDBY)
        self._hinted = False
        self.problem = why
        self._acquire_times.failed(now)
        effects.append(Emit(CampaignFailed(now, self.name, self._holder, why)))
        if self.once:
            self._stop(now, effects)

    def _stop(self, now: float, effects: list[Effect]) -> None:
        """Campaign no more; a term that lasts goes on."""
        self._stopping = True
        if self.state in (State.STANDBY, State.CAMPAIGNING):
            self._requests.abandon()
            self._set_state(State.STOPPED)
            if self._place is not None:
                self._withdraw(self._place, now, effects)

    # --- the end of a term ---

    def _cancel_at(self, term: _TermState) -> float:
        return term.trusted_until - self.timing.grace

    def _end_term(self, reason: Reason, now: float, effects: list[Effect]) -> None:
        term = self._term
        assert term is not None
        self._requests.abandon()
        self._set_state(State.RESIGNING)
        term.end_reason = reason
        # After a denial the trusted time is over already: work still gets its grace to notice.
        term.stop_by = term.trusted_until if term.is_ours else now + self.timing.grace
        token, holder = term.grant.token, term.grant.holder
        effects.append(Emit(TermEnding(now, self.name, holder, token, reason, term.stop_by)))
        effects.append(CancelWork(token, reason))

    def _on_work_ended(self, token: int, again: bool, now: float, effects: list[Effect]) -> None:
        term = self._term
        if term is None or term.grant.token != token or not term.work_runs:
            return
        term.work_runs = False
        self._stopping = self._stopping or not again
        if self.state is not State.RESIGNING:
            self._requests.abandon()
            self._set_state(State.RESIGNING)
            term.end_reason = "ended"
        assert term.end_reason is not None
        released = self._can_release(term, now)
        effects.append(Emit(TermEnded(now, self.name, term.grant.holder, token, term.end_reason, released)))
        self._release(term, now, effects)

    def _can_release(self, term: _TermState, now: float) -> bool:
        return term.is_ours and now < term.trusted_until

    def _release(self, term: _TermState, now: float, effects: list[Effect]) -> None:
        """Release the lease; repeat the request until it is answered, or the lease has run out."""
        if self._can_release(term, now):
            effects.append(Release(self._new_request(Release, term.grant.holder, now), term.grant))
        else:
            self._close_term(term, now)

    def _release_missed(self, term: _TermState, why: str, now: float, effects: list[Effect]) -> None:
        """Report, once, that the lease is not released yet."""
        self.problem = why
        if not term.release_missed:
            term.release_missed = True
            left = max(0.0, term.trusted_until - now)
            effects.append(Emit(ReleaseMissed(now, self.name, term.grant.holder, term.grant.token, why, left)))

    def _close_term(self, term: _TermState, now: float) -> None:
        self._requests.abandon()
        self._term = None
        self._acquisition += 1
        self._hinted = False
        if self._stopping or self.once:
            self._set_state(State.STOPPED)
            return
        self._set_state(State.STANDBY)
        self._acquire_times.term_over(now, yields=term.end_reason in ("asked", "resigned"))

    def _withdraw(self, place: str, now: float, effects: list[Effect]) -> None:
        """Give up a *place* in the queue. The answer is not awaited: without one, the place ends after a ttl."""
        effects.append(Withdraw(self._requests.add_unawaited(Request(now, Withdraw, place)), place))
        if place == self._place:
            self._place = None

    def _release_unused(self, grant: Grant, now: float, effects: list[Effect]) -> None:
        """Release a grant that came too late to be used. The answer is not awaited."""
        number = self._requests.add_unawaited(Request(now, Release, grant.holder))
        effects.append(Release(number, grant))
        effects.append(Emit(ReleasedUnused(now, self.name, grant.holder, grant.token)))

    def _set_state(self, to: State) -> None:
        if to not in self.ALLOWED[self.state]:
            raise AssertionError(f"a candidate can't change from {self.state.value} to {to.value}")
        self.state = to
