"""One candidate's election, as a pure state machine: events and ``now`` in, effects and ``wake_at`` out.

House rules:

- No I/O, no clock, no loop, no randomness of its own. ``handle(event, now)`` returns what is to be done; ``wake_at``
  says
  when to call again with ``Tick``. Nobody polls.
- Three answers: yes, no, don't know. "No" ends the term at once. "Don't know" is asked again inside the time left.
- A grant is believed from *before the question was sent*; see :func:`tenure._lease.trusted_until`.
- Never hand a lease back while work runs. What ends a term is ``WorkEnded``, not our wish.
- Every acquisition has a holder name of its own, so that a lost answer can be asked for again, and a late one can be
  told from the present one.

::

              Tick: time to ask                 Granted
    STANDBY ────────────────────▶ CAMPAIGNING ──────────▶ LEADING ◀──────────┐
      ▲  ▲                             │                   │   │             │ Granted,
      │  └─── HeldBy, no answer ───────┘                   │   │ Tick: time  │ no answer
      │                                                    │   ▼ to renew    │
      │                          Lost, no time left,       │  RENEWING ──────┘
      │                          asked to resign, resign,  │   │
      │                          work has ended            ▼   ▼
      └────────── work has ended, lease handed back ──── RESIGNING ──▶ STOPPED   (Stop)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from tenure._jitter import Rng, later, sooner
from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer, Released, trusted_until
from tenure._timing import RENEWALS_TOGETHER, Timing
from tenure.events import (
    CampaignFailed,
    Event,
    HandBackMissed,
    HandedBack,
    Overrun,
    Reason,
    RenewalMissed,
    Renewed,
    StandingBy,
    TermBegan,
    TermEnded,
    TermEnding,
    TokenFell,
)

NEVER = math.inf


class State(Enum):
    """Where a candidate stands."""

    STANDBY = "standby"  # waits for a vacancy, or for the time to look again
    CAMPAIGNING = "campaigning"  # has asked for the name
    LEADING = "leading"  # holds the lease; work runs
    RENEWING = "renewing"  # leads, and has asked for more time
    RESIGNING = "resigning"  # leaves office: work is ending, or the lease is being handed back
    STOPPED = "stopped"  # will never ask again


TRANSITIONS: dict[State, frozenset[State]] = {
    State.STANDBY: frozenset({State.CAMPAIGNING, State.LEADING, State.STOPPED}),  # LEADING: a late, still good, yes
    State.CAMPAIGNING: frozenset({State.STANDBY, State.LEADING, State.STOPPED}),
    State.LEADING: frozenset({State.RENEWING, State.RESIGNING}),
    State.RENEWING: frozenset({State.LEADING, State.RESIGNING}),
    State.RESIGNING: frozenset({State.STANDBY, State.STOPPED}),
    State.STOPPED: frozenset(),
}
"""Every legal change of state; the machine refuses any other, whatever it is fed."""


# --- what comes in -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """``wake_at`` has come."""


@dataclass(frozen=True, slots=True)
class Hint:
    """The store says that something may have changed. It may lie."""


@dataclass(frozen=True, slots=True)
class Together:
    """Another candidate of this process renews now: renew along with it, if it is nearly time."""


@dataclass(frozen=True, slots=True)
class Withheld:
    """The renewal was not sent, because the work makes no progress."""

    why: str


Answer = Granted | HeldBy | Lost | Released | NoAnswer | Withheld


@dataclass(frozen=True, slots=True)
class Answered:
    """The question number *ask* has come back. Each question does, once, however late."""

    ask: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class WorkEnded:
    """The work of the term *token* has really ended; *again* tells whether to campaign anew."""

    token: int
    again: bool = True


@dataclass(frozen=True, slots=True)
class Resign:
    """The candidate's owner wants this term to end; the candidacy goes on."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The candidate's owner wants no further term. Work that runs may finish first."""


Input = Tick | Hint | Together | Answered | WorkEnded | Resign | Stop


# --- what goes out -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acquire:
    """Ask the store for the name, as *holder*."""

    ask: int
    holder: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Ask the store for more time, if the work makes progress."""

    ask: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class Release:
    """Hand the claim back."""

    ask: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class StartWork:
    """A term has begun: run the work, trusting the term until *trusted_until*."""

    grant: Grant
    trusted_until: float


@dataclass(frozen=True, slots=True)
class Trust:
    """The term may be trusted until *until*; at once no more, if that is past."""

    token: int
    until: float


@dataclass(frozen=True, slots=True)
class CancelWork:
    """Tell the work to stop, and say ``WorkEnded`` once it has."""

    token: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class WorkOverran:
    """Work still runs although its term is over: report it, or end the process."""

    token: int


@dataclass(frozen=True, slots=True)
class Emit:
    """Let the observers know."""

    event: Event


Effect = Acquire | Renew | Release | StartWork | Trust | CancelWork | WorkOverran | Emit


# --- what is remembered ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Question:
    """An unanswered question: when it was asked, and for which claim."""

    asked_at: float
    kind: type[Acquire] | type[Renew] | type[Release]
    holder: str


@dataclass(slots=True)
class _TermState:
    """A term from its first to its last moment."""

    grant: Grant
    trusted_until: float
    renew_at: float
    asked_at: float  # when the newest question to renew went out
    ours: bool = True  # False once the store has said no
    stalled: bool = False  # the newest renewal was withheld
    ending: Reason | None = None
    stop_by: float = NEVER  # work that runs beyond this has overrun
    overran: bool = False
    work_runs: bool = True
    kept: bool = False  # its lease could not be handed back at once, and that was told


class Machine:
    """Decide for one candidate: when to ask, what to believe and until when, when to stop the work and to resign.

    Args:
        name: What the election is about.
        holder: This candidate's identity; each acquisition appends its own number.
        timing: The times to keep.
        dice: Source of jitter.
        hints: Whether the store tells of vacancies; without, a candidate looks every ``timing.retry_every``.
        now: The present moment; the first question goes out at once.
    """

    MAY: ClassVar[dict[State, frozenset[State]]] = TRANSITIONS

    def __init__(self, name: str, holder: str, timing: Timing, rng: Rng, *, hints: bool, now: float) -> None:
        self.name = name
        self.timing = timing
        self.state: State = State.STANDBY
        self._holder = holder
        self._rng = rng
        self._hints = hints
        self._questions: dict[int, _Question] = {}
        self._asked = 0  # number of the newest question
        self._current = 0  # number of the question we wait for; 0 for none
        self._deadline = NEVER  # how long we wait for it
        self._acquisition = 1
        self._look_at = now  # when to ask for the name
        self._looked_at = -math.inf  # when it was asked for last
        self._give_way_until = -math.inf  # until then, the others have their turn
        self._hinted = False  # a hint came while a question was under way
        self._stopping = False
        self._newest: tuple[int, str] = (0, "")  # the highest token heard of, and whose it is
        self._newest_at = -math.inf  # when that was heard
        self._met: tuple[str, int] = ("", 0)  # the last leader that we told of, and its token
        self._term: _TermState | None = None

    # --- what others may read ---

    @property
    def wake_at(self) -> float:
        """When to call ``handle(Tick(), now)``, by the same clock as ``now``; infinity for never."""
        term = self._term
        match self.state:
            case State.STANDBY:
                return self._look_at
            case State.CAMPAIGNING:
                return self._deadline
            case State.LEADING if term:
                return min(term.renew_at, self._cancel_at(term))
            case State.RENEWING if term:
                return min(self._deadline, self._cancel_at(term))
            case State.RESIGNING if term and term.work_runs:
                return NEVER if term.overran else term.stop_by
            case State.RESIGNING:
                return self._deadline
        return NEVER

    @property
    def overruns_at(self) -> float:
        """When the work of the present term will have overrun if nothing more is heard; infinity if no work runs."""
        term = self._term
        if term is None or not term.work_runs:
            return NEVER
        return term.stop_by if self.state is State.RESIGNING else term.trusted_until

    @property
    def trusted_until(self) -> float:
        """Until when the present term may be trusted; minus infinity if there is none."""
        return self._term.trusted_until if self._term else -math.inf

    @property
    def grant(self) -> Grant | None:
        """The present term's claim, from the win until the work has ended."""
        return self._term.grant if self._term and self._term.work_runs else None

    @property
    def has_term(self) -> bool:
        """Whether there is a term, from the win until its lease is handed back or given up."""
        return self._term is not None

    @property
    def renewable_from(self) -> float:
        """From when ``Together`` makes this candidate renew; infinity while it doesn't lead."""
        if self.state is not State.LEADING or self._term is None:
            return NEVER
        return self._term.renew_at - RENEWALS_TOGETHER * self.timing.renew_every

    @property
    def settled(self) -> bool:
        """Whether it has stopped and every question it asked has come back."""
        return self.state is State.STOPPED and not self._questions

    # --- the one way in ---

    def handle(self, event: Input, now: float) -> list[Effect]:
        """Take in *event* at *now* and return what is to be done, in this order."""
        effects: list[Effect] = []
        # Time goes first: whatever arrives after the term has lapsed finds it ended.
        self._lapse(now, effects)
        match event:
            case Tick():
                self._tick(now, effects)
            case Hint():
                self._hint(now)
                self._tick(now, effects)
            case Together():
                if now >= self.renewable_from:
                    self._renew(now, effects)
            case Answered(ask, answer):
                question = self._questions.pop(ask, None)
                if question is not None:
                    self._compare_token(question, answer, now, effects)
                    if ask == self._current:
                        self._current = 0
                        self._deadline = NEVER
                        self._take(question, answer, now, effects)
                    else:
                        self._take_late(question, answer, now, effects)
            case WorkEnded(token, again):
                self._work_ended(token, again, now, effects)
            case Resign():
                if self.state in (State.LEADING, State.RENEWING):
                    self._leave("stopped" if self._stopping else "resigned", now, effects)
            case Stop():
                self._stopping = True
                if self.state in (State.STANDBY, State.CAMPAIGNING):
                    self._abandon_question()
                    self._move(State.STOPPED)
        return effects

    # --- time ---

    def _lapse(self, now: float, effects: list[Effect]) -> None:
        term = self._term
        if term is None:
            return
        if self.state in (State.LEADING, State.RENEWING) and now >= self._cancel_at(term):
            self._leave("stalled" if term.stalled else "unanswered", now, effects)
        if term.work_runs and not term.overran and now >= term.stop_by:
            term.overran = True
            effects.append(WorkOverran(term.grant.token))  # first: who tells of it may be what is stuck
            effects.append(Emit(Overrun(now, self.name, term.grant.holder, term.grant.token)))

    def _tick(self, now: float, effects: list[Effect]) -> None:
        term = self._term
        match self.state:
            case State.STANDBY if now >= self._look_at:
                self._move(State.CAMPAIGNING)
                self._looked_at = now
                holder = f"{self._holder}#{self._acquisition}"
                effects.append(Acquire(self._ask(Acquire, holder, now), holder))
            case State.CAMPAIGNING if now >= self._deadline:
                self._abandon_question()
                self._look_again(f"no answer within {self.timing.retry_every:g} s", now, effects)
            case State.LEADING if term and now >= term.renew_at:
                self._renew(now, effects)
            case State.RENEWING if term and now >= self._deadline:
                self._abandon_question()
                self._missed(term, f"no answer within {self.timing.retry_every:g} s", now, effects)
                self._renew(now, effects)
            case State.RESIGNING if term and not term.work_runs and now >= self._deadline:
                self._abandon_question()
                self._keep_lease(term, f"no answer within {self.timing.retry_every:g} s", now, effects)
                self._hand_back(term, now, effects)

    def _hint(self, now: float) -> None:
        match self.state:
            case State.STANDBY:
                self._look_at = min(self._look_at, self._soonest_look(now))
            case State.LEADING if self._term:
                self._renew_early(self._term, now)
            case State.CAMPAIGNING | State.RENEWING:
                self._hinted = True

    def _renew_early(self, term: _TermState, now: float) -> None:
        # The next answer tells whether we were asked to resign. Hints may lie, so they can't make us ask without pause.
        term.renew_at = min(term.renew_at, max(now, term.asked_at + self.timing.retry_every / 4))

    def _soonest_look(self, now: float) -> float:
        # Nor can they, or a store that says "held, 0 s left" again and again, make us ask for the name without pause.
        return max(now, self._looked_at + self.timing.retry_every / 10, self._give_way_until)

    # --- questions ---

    def _ask(self, kind: type[Acquire] | type[Renew] | type[Release], holder: str, now: float) -> int:
        self._asked += 1
        self._questions[self._asked] = _Question(now, kind, holder)
        self._current = self._asked
        self._deadline = now + self.timing.retry_every
        return self._asked

    def _abandon_question(self) -> None:
        """Wait no longer. Its answer will be late, and is looked at then."""
        self._current = 0
        self._deadline = NEVER

    def _renew(self, now: float, effects: list[Effect]) -> None:
        assert self._term is not None
        self._move(State.RENEWING)
        self._hinted = False
        self._term.asked_at = now
        effects.append(Renew(self._ask(Renew, self._term.grant.holder, now), self._term.grant))

    # --- answers ---

    def _take(self, question: _Question, answer: Answer, now: float, effects: list[Effect]) -> None:
        term = self._term
        match self.state, answer:
            case State.CAMPAIGNING, Granted(grant):
                self._win(question, grant, now, effects)
            case State.CAMPAIGNING, HeldBy(holder=holder, token=token, remaining=remaining):
                self._meet((holder, token), now, effects)
                self._stand_by(remaining, now)
            case State.CAMPAIGNING, NoAnswer(why):
                self._look_again(why, now, effects)
            case State.RENEWING, Granted(grant, resign_asked) if term and grant == term.grant:
                self._extend(term, question, resign_asked, now, effects)
            case State.RENEWING, Lost(grant) if term and grant == term.grant:
                self._denied(term, now, effects)
            case State.RENEWING, NoAnswer(why) if term:
                self._missed(term, why, now, effects)
            case State.RENEWING, Withheld(why) if term:
                self._missed(term, why, now, effects)
                term.stalled = True
            case State.RESIGNING, Released() | Lost() if term and not term.work_runs:
                self._close(term, now)
            case State.RESIGNING, NoAnswer(why) if term and not term.work_runs:
                self._deadline = now + self.timing.retry_every
                self._keep_lease(term, why, now, effects)
            case _, NoAnswer():
                raise AssertionError(f"a candidate that is {self.state.value} waits for no answer")
            case _:  # an answer to another question, or about another claim: whatever it says, we don't know
                unknown = NoAnswer(f"the store answered {answer!r} to {question.kind.__name__.lower()}")
                self._take(question, unknown, now, effects)

    def _compare_token(self, question: _Question, answer: Answer, now: float, effects: list[Effect]) -> None:
        """Say it if the store has gone back behind what it told before we asked."""
        newest, whose = self._newest
        match answer:
            case Granted(Grant(holder=holder, token=token)):
                fell = token < newest or (token == newest and holder != whose)
            case HeldBy(holder=holder, token=token) if token > 0:  # 0 where the store can't tell
                fell = token < newest
            case _:
                return
        if fell and question.asked_at < self._newest_at:
            return  # it was true when it was answered
        if fell:
            effects.append(Emit(TokenFell(now, self.name, holder, token, newest)))
        if fell or token > newest:
            self._newest, self._newest_at = (token, holder), now

    def _take_late(self, question: _Question, answer: Answer, now: float, effects: list[Effect]) -> None:
        """Look at an answer that we no longer waited for. It still counts from its own question."""
        term = self._term
        match answer:
            case Granted(grant) if term is not None and grant == term.grant:
                if self.state in (State.LEADING, State.RENEWING):
                    self._trust(term, self._counted(question), now, effects)
            case Granted(grant) if question.kind is Acquire:
                if question.holder == f"{self._holder}#{self._acquisition}" and self.state in (
                    State.STANDBY,
                    State.CAMPAIGNING,
                ):
                    self._abandon_question()
                    self._win(question, grant, now, effects)
                else:
                    self._return_unused(grant, now, effects)
            case Lost(grant) if term is not None and grant == term.grant and question.kind is Renew:
                if self.state in (State.LEADING, State.RENEWING):
                    self._denied(term, now, effects)
                elif term.work_runs and term.ours:  # told to stop already; now its trust is over as well
                    self._disown(term, effects)
                    term.stop_by = min(term.stop_by, now + self.timing.grace)

    def _counted(self, question: _Question) -> float:
        """Return how long a yes to *question* may be believed: counted from the question, however late it is heard."""
        return trusted_until(question.asked_at, self.timing.ttl, self.timing.drift, self.timing.margin)

    def _win(self, question: _Question, grant: Grant, now: float, effects: list[Effect]) -> None:
        until = self._counted(question)
        if now >= until - self.timing.grace:  # the answer was so long on its way that no time for work is left
            self._return_unused(grant, now, effects)
            self._acquisition += 1
            self._look_again("the answer came too late to lead", now, effects)
            return
        self._move(State.LEADING)
        renew_at = question.asked_at + sooner(self.timing.renew_every, self._rng)
        self._term = _TermState(grant, until, renew_at, question.asked_at)
        effects.append(Emit(TermBegan(now, self.name, grant.holder, grant.token)))
        effects.append(StartWork(grant, until))

    def _extend(
        self, term: _TermState, question: _Question, resign_asked: bool, now: float, effects: list[Effect]
    ) -> None:
        term.stalled = False
        self._trust(term, self._counted(question), now, effects)
        if resign_asked:
            self._leave("asked", now, effects)
            return
        self._move(State.LEADING)
        term.renew_at = question.asked_at + sooner(self.timing.renew_every, self._rng)
        if self._hinted:
            self._renew_early(term, now)

    def _trust(self, term: _TermState, until: float, now: float, effects: list[Effect]) -> None:
        if until > term.trusted_until:
            term.trusted_until = until
            effects.append(Trust(term.grant.token, until))
            effects.append(Emit(Renewed(now, self.name, term.grant.holder, term.grant.token, until)))

    def _missed(self, term: _TermState, why: str, now: float, effects: list[Effect]) -> None:
        self._move(State.LEADING)
        term.renew_at = now + sooner(self.timing.retry_every, self._rng)
        left = term.trusted_until - now
        effects.append(Emit(RenewalMissed(now, self.name, term.grant.holder, term.grant.token, why, left)))

    def _denied(self, term: _TermState, now: float, effects: list[Effect]) -> None:
        self._disown(term, effects)
        self._leave("denied", now, effects)

    def _disown(self, term: _TermState, effects: list[Effect]) -> None:
        term.ours = False
        term.trusted_until = -math.inf
        effects.append(Trust(term.grant.token, -math.inf))

    def _meet(self, leader: tuple[str, int], now: float, effects: list[Effect]) -> None:
        """Say who leads, once for each; not of a lease of our own, that was not handed back and runs out."""
        holder, token = leader
        if leader != self._met and holder.rpartition("#")[0] != self._holder:
            self._met = leader
            effects.append(Emit(StandingBy(now, self.name, self._holder, holder, token)))

    def _stand_by(self, remaining: float | None, now: float) -> None:
        self._move(State.STANDBY)
        retry = self.timing.retry_every
        if self._hinted:
            wait = 0.0
        elif remaining is None:
            wait = later(retry, self._rng)
        else:
            # The lease may be renewed meanwhile, then we look again after that. Where nobody tells of an early release,
            # look sooner. A tenth of retry_every spreads those who wait for the same moment.
            # Hints may be lost, so look at least as often as our own lease would last, however long theirs is.
            longest = self.timing.ttl if self._hints else retry
            wait = min(remaining, longest) + 0.1 * retry * self._rng.random()
        self._hinted = False
        self._look_at = max(now + wait, self._soonest_look(now))

    def _look_again(self, why: str, now: float, effects: list[Effect]) -> None:
        if self.state is not State.STANDBY:
            self._move(State.STANDBY)
        self._hinted = False
        self._look_at = now + later(self.timing.retry_every, self._rng)
        effects.append(Emit(CampaignFailed(now, self.name, self._holder, why)))

    # --- leaving office ---

    def _cancel_at(self, term: _TermState) -> float:
        return term.trusted_until - self.timing.grace

    def _leave(self, reason: Reason, now: float, effects: list[Effect]) -> None:
        term = self._term
        assert term is not None
        self._abandon_question()
        self._move(State.RESIGNING)
        term.ending = reason
        # Denied, the trusted time is over already: work still gets its grace to notice.
        term.stop_by = term.trusted_until if term.ours else now + self.timing.grace
        token, holder = term.grant.token, term.grant.holder
        effects.append(Emit(TermEnding(now, self.name, holder, token, reason, term.stop_by)))
        effects.append(CancelWork(token, reason))

    def _work_ended(self, token: int, again: bool, now: float, effects: list[Effect]) -> None:
        term = self._term
        if term is None or term.grant.token != token or not term.work_runs:
            return
        term.work_runs = False
        self._stopping = self._stopping or not again
        if self.state is not State.RESIGNING:
            self._abandon_question()
            self._move(State.RESIGNING)
            term.ending = "ended"
        assert term.ending is not None
        released = self._can_release(term, now)
        effects.append(Emit(TermEnded(now, self.name, term.grant.holder, token, term.ending, released)))
        self._hand_back(term, now, effects)

    def _can_release(self, term: _TermState, now: float) -> bool:
        return term.ours and now < term.trusted_until

    def _hand_back(self, term: _TermState, now: float, effects: list[Effect]) -> None:
        """Release the lease, until it is answered or has run out by itself."""
        if self._can_release(term, now):
            effects.append(Release(self._ask(Release, term.grant.holder, now), term.grant))
        else:
            self._close(term, now)

    def _keep_lease(self, term: _TermState, why: str, now: float, effects: list[Effect]) -> None:
        """Say, once, that the lease is not handed back yet."""
        if not term.kept:
            term.kept = True
            left = max(0.0, term.trusted_until - now)
            effects.append(Emit(HandBackMissed(now, self.name, term.grant.holder, term.grant.token, why, left)))

    def _close(self, term: _TermState, now: float) -> None:
        self._abandon_question()
        self._term = None
        self._acquisition += 1
        self._hinted = False
        if self._stopping:
            self._move(State.STOPPED)
            return
        self._move(State.STANDBY)
        # Who left of its own will lets the others go first, whatever the hints say: they tell of our own release.
        gives_way = term.ending in ("asked", "resigned")
        self._look_at = now + later((2 if gives_way else 1) * self.timing.retry_every, self._rng)
        if gives_way:
            self._give_way_until = self._look_at

    def _return_unused(self, grant: Grant, now: float, effects: list[Effect]) -> None:
        """Hand back a grant that came too late to be used. Nobody waits for the answer."""
        self._asked += 1
        self._questions[self._asked] = _Question(now, Release, grant.holder)
        effects.append(Release(self._asked, grant))
        effects.append(Emit(HandedBack(now, self.name, grant.holder, grant.token)))

    def _move(self, to: State) -> None:
        if to not in self.MAY[self.state]:
            raise AssertionError(f"a candidate can't go from {self.state.value} to {to.value}")
        self.state = to
