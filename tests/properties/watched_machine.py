"""A machine whose invariants are checked after every step."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from tenure._election.effects import (
    Acquire,
    Answer,
    Answered,
    CancelWork,
    Effect,
    Input,
    Inspect,
    Release,
    Renew,
    RenewalWithheld,
    StartWork,
    Stop,
    Tick,
    Trust,
    Withdraw,
    WorkEnded,
)
from tenure._election.machine import Machine, State
from tenure._jitter import Rng
from tenure._lease import Grant, Granted, NoAnswer
from tenure._timing import Timing

Question = Acquire | Inspect | Renew | Release | Withdraw

MOVES: set[tuple[State, State]] = set()
"""Every change of state that any watched machine has made."""


class _Recording(Machine):
    def _set_state(self, to: State) -> None:
        before = self.state
        super()._set_state(to)
        MOVES.add((before, to))


class WatchedMachine:
    """Feed a machine, keep its open requests, and assert the invariants after each step."""

    def __init__(self, timing: Timing, rng: Rng, *, hints: bool, now: float, queued: bool = False) -> None:
        self.timing = timing
        self.now = now
        self.machine = _Recording("election", "n", timing, rng, hints=hints, queued=queued, now=now)
        self.queued = queued
        self.open: dict[int, tuple[Question, float]] = {}
        self.withdrawn: set[str] = set()
        self.place: str | None = None  # the holder that may stand in the queue of the store, as a client of it
        self.last_ask = 0
        self.stopping = False
        self.work: Grant | None = None
        self.is_cancelled = False
        self.is_heard = True  # the store has answered since the newest request

    def clone(self) -> WatchedMachine:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin.open = dict(self.open)
        twin.withdrawn = set(self.withdrawn)
        twin.machine = copy.copy(self.machine)
        twin.machine._requests = copy.copy(self.machine._requests)
        twin.machine._requests.unanswered = dict(self.machine._requests.unanswered)
        twin.machine._tokens = copy.copy(self.machine._tokens)
        twin.machine._acquire_times = copy.copy(self.machine._acquire_times)
        twin.machine._term = copy.copy(self.machine._term)
        return twin

    def fingerprint(self) -> tuple[object, ...]:
        """Return a value that is equal for machines that behave alike from now on; times are relative to now."""

        def ago(moment: float) -> float:
            return round(moment - self.now, 6)

        machine, unanswered, term = self.machine, self.machine._requests, self.machine._term
        acquire = machine._acquire_times
        requests = tuple(
            (ask == unanswered.awaited, type(asked), ago(at), self._holder(asked) == f"n#{machine._acquisition}")
            for ask, (asked, at) in sorted(self.open.items())
        )
        terms = term and (
            *(ago(each) for each in (term.trusted_until, term.renew_at, term.asked_at, term.stop_by)),
            round(term.pace, 6),
            *(term.is_ours, term.stalled, term.end_reason, term.overran, term.work_runs),
        )
        times = tuple(
            ago(each)
            for each in (
                acquire.due,
                acquire._asked_at,
                acquire._hints_followed_until,
                acquire._yield_until,
                unanswered.answer_due,
            )
        )
        flags = (
            machine._hinted,
            acquire._hints,
            machine._stopping,
            machine.place is None,
            machine._requests.is_heard,
        )
        return (machine.state, *flags, requests, terms, times)

    def _holder(self, request: Question) -> str:
        return self._grant(request, 0).holder

    def grant_for(self, ask: int, token: int) -> Grant:
        """Return the grant of request *ask*; a new one for an acquisition."""
        request, _ = self.open[ask]
        return self._grant(request, token)

    def _grant(self, request: Question, token: int) -> Grant:
        match request:
            case Acquire(_, holder) | Withdraw(_, holder):
                return Grant("election", holder, token)
            case Inspect():
                return Grant("election", f"n#{self.machine._acquisition}", token)
            case Renew(_, grant) | Release(_, grant):
                return grant

    def answer(self, ask: int, answer: Answer) -> None:
        """Answer the open request *ask*."""
        self.feed(Answered(ask, answer))

    def feed(self, event: Input) -> Sequence[Effect]:
        """Feed *event* to the machine, and check its effects."""
        before, trusted = self.machine.state, self.machine.trusted_until
        if isinstance(event, Stop) or (isinstance(event, WorkEnded) and self._ends(event) and not event.again):
            self.stopping = True
        if isinstance(event, WorkEnded) and self._ends(event):
            self.work = None
        self._note_answer(event)
        effects = self.machine.handle(event, self.now)
        asked_at = None
        if isinstance(event, Answered) and event.request_id in self.open:
            request, asked_at = self.open.pop(event.request_id)
            if isinstance(request, Acquire) and isinstance(event.answer, Granted) and request.holder == self.place:
                self.place = None  # it is a claim from now on
        for effect in effects:
            self._check_effect(effect)
            self._note_place(effect)
        if before is State.STOPPED:
            assert self.machine.state is State.STOPPED
        self._check_trust(event, trusted, asked_at)
        self._check_place()
        self._check_state()
        return effects

    def _note_answer(self, event: Input) -> None:
        if isinstance(event, Answered) and event.request_id in self.open:
            self.is_heard = self.is_heard or not isinstance(event.answer, (NoAnswer, RenewalWithheld))

    def _ends(self, event: WorkEnded) -> bool:
        return self.work is not None and event.token == self.work.token

    def _check_effect(self, effect: Effect) -> None:
        match effect:
            case Acquire() | Inspect() | Renew() | Release() | Withdraw():
                assert effect.request_id > self.last_ask, "request numbers rise"
                self.last_ask = effect.request_id
                self.open[effect.request_id] = (effect, self.now)
                if isinstance(effect, Acquire):
                    assert not self.stopping, "stopped, and requests the name"
                    assert self.is_heard, "asks again, though it may have the name already"
                self.is_heard = False
                if isinstance(effect, Release):
                    assert effect.grant != self.work, "released while work runs"
                if isinstance(effect, Withdraw):
                    assert self.queued, "withdraws from a queue that doesn't exist"
                    assert self.work is None or effect.holder != self.work.holder, "withdraws what it was granted"
            case StartWork(grant, until):
                assert self.work is None, "two terms at once"
                assert until - self.timing.grace > self.now, "a term without time for work"
                self.work, self.is_cancelled = grant, False
            case Trust(token) | CancelWork(token):
                assert self.work is not None
                assert token == self.work.token, "about another term"
                self.is_cancelled = self.is_cancelled or isinstance(effect, CancelWork)

    def _note_place(self, effect: Effect) -> None:
        match effect:
            case Acquire(_, holder) if self.queued:
                assert self.place in (None, holder), "asks under another name, and leaves a place behind"
                assert holder not in self.withdrawn, "asks again: its withdrawal may be carried out after that"
                self.place = holder
            case Withdraw(_, holder):
                self.withdrawn.add(holder)
                self.place = None if holder == self.place else self.place

    def _check_place(self) -> None:
        """A place in the queue is kept while the candidate waits, and not left behind when it has stopped."""
        machine, timing = self.machine, self.timing
        assert machine.place == self.place
        if machine.state is State.STOPPED:
            assert self.place is None, "left a place in the queue behind"
        if machine.state is State.STANDBY and self.place is not None:
            longest = max(min(timing.renew_every, timing.ttl / 3), 1.2 * timing.retry_every) + 0.1 * timing.retry_every
            assert machine.wake_at <= self.now + longest + 1e-9, "its place may end before it asks again"

    def _check_trust(self, event: Input, before: float, asked_at: float | None) -> None:
        trusted = self.machine.trusted_until
        if trusted > before:
            assert isinstance(event, Answered), "trust grew by itself"
            assert isinstance(event.answer, Granted), "trust grew without a Granted"
            assert asked_at is not None
            began_at = asked_at - event.answer.age
            assert trusted <= began_at + self.timing.window + 1e-9, "not counted from the request, less the age"

    def _check_state(self) -> None:
        machine = self.machine
        assert machine.grant == self.work
        if self.work is not None and self.now >= machine.trusted_until - self.timing.grace:
            assert self.is_cancelled, "work goes on although its time is over"
        assert machine.is_finished == (machine.state is State.STOPPED and not self.open)
        overran = machine._term is not None and machine._term.overran
        assert (machine.overruns_at == math.inf) == (self.work is None)
        assert self.now >= machine.overruns_at if overran else machine.wake_at <= machine.overruns_at
        if machine.state is not State.STOPPED and not (self.work is not None and overran):
            assert machine.wake_at < math.inf, f"{machine.state} without a wake-up"

    def becomes_idle(self) -> bool:
        """Return whether waking it repeatedly at one time ends."""
        for _ in range(4):
            if self.machine.wake_at > self.now:
                return True
            self.feed(Tick())
        return self.machine.wake_at > self.now
