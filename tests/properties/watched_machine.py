"""A machine under watch: whatever it is fed, what must hold of every single step is looked at after it."""

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
    Release,
    Renew,
    StartWork,
    Stop,
    Tick,
    Trust,
    WorkEnded,
)
from tenure._election.machine import Machine, State
from tenure._jitter import Rng
from tenure._lease import Grant, Granted
from tenure._timing import Timing

MOVES: set[tuple[State, State]] = set()
"""Every change of state that any watched machine has made."""


class _Recording(Machine):
    def _set_state(self, to: State) -> None:
        before = self.state
        super()._set_state(to)
        MOVES.add((before, to))


class WatchedMachine:
    """Feed a machine, keep its questions, and assert what must hold after each step."""

    def __init__(self, timing: Timing, rng: Rng, *, hints: bool, now: float) -> None:
        self.timing = timing
        self.now = now
        self.machine = _Recording("election", "n", timing, rng, hints=hints, now=now)
        self.open: dict[int, tuple[Acquire | Renew | Release, float]] = {}
        self.last_ask = 0
        self.stopping = False
        self.work: Grant | None = None
        self.told = False

    def clone(self) -> WatchedMachine:
        """Return a copy that goes its own way."""
        twin = copy.copy(self)
        twin.open = dict(self.open)
        twin.machine = copy.copy(self.machine)
        twin.machine._requests = dict(self.machine._requests)
        twin.machine._term = copy.copy(self.machine._term)
        return twin

    def fingerprint(self) -> tuple[object, ...]:
        """Return what makes two machines behave alike from here on, with times as distances from now."""

        def ago(moment: float) -> float:
            return round(moment - self.now, 6)

        machine, term = self.machine, self.machine._term
        questions = tuple(
            (ask == machine._awaited_request, type(asked), ago(at), self._holder(asked) == f"n#{machine._acquisition}")
            for ask, (asked, at) in sorted(self.open.items())
        )
        terms = term and (
            *(ago(each) for each in (term.trusted_until, term.renew_at, term.asked_at, term.stop_by)),
            *(term.is_ours, term.stalled, term.end_reason, term.overran, term.work_runs),
        )
        times = tuple(
            ago(each)
            for each in (machine._acquire_at, machine._last_acquire_at, machine._yield_until, machine._answer_due)
        )
        return (machine.state, machine._hinted, machine._stopping, questions, terms, times)

    @staticmethod
    def _holder(question: Acquire | Renew | Release) -> str:
        return question.holder if isinstance(question, Acquire) else question.grant.holder

    def grant_for(self, ask: int, token: int) -> Grant:
        """Return the claim that question *ask* is about; a new one for an acquisition."""
        question, _ = self.open[ask]
        return Grant("election", question.holder, token) if isinstance(question, Acquire) else question.grant

    def answer(self, ask: int, answer: Answer) -> None:
        """Let the open question *ask* come back."""
        self.feed(Answered(ask, answer))

    def feed(self, event: Input) -> Sequence[Effect]:
        """Give *event* to the machine, and look at what it does."""
        before, trusted = self.machine.state, self.machine.trusted_until
        if isinstance(event, Stop) or (isinstance(event, WorkEnded) and self._ends(event) and not event.again):
            self.stopping = True
        if isinstance(event, WorkEnded) and self._ends(event):
            self.work = None
        effects = self.machine.handle(event, self.now)
        asked_at = (
            self.open.pop(event.request_id)[1]
            if isinstance(event, Answered) and event.request_id in self.open
            else None
        )
        for effect in effects:
            self._look_at(effect)
        if before is State.STOPPED:
            assert self.machine.state is State.STOPPED
        self._look_at_trust(event, trusted, asked_at)
        self._look_at_rest()
        return effects

    def _ends(self, event: WorkEnded) -> bool:
        return self.work is not None and event.token == self.work.token

    def _look_at(self, effect: Effect) -> None:
        match effect:
            case Acquire() | Renew() | Release():
                assert effect.request_id > self.last_ask, "questions are numbered upwards"
                self.last_ask = effect.request_id
                self.open[effect.request_id] = (effect, self.now)
                if isinstance(effect, Acquire):
                    assert not self.stopping, "stopped, and asks for the name"
                if isinstance(effect, Release):
                    assert effect.grant != self.work, "handed back while work runs"
            case StartWork(grant, until):
                assert self.work is None, "two terms at a time"
                assert until - self.timing.grace > self.now, "a term without time for work"
                self.work, self.told = grant, False
            case Trust(token) | CancelWork(token):
                assert self.work is not None
                assert token == self.work.token, "about another term"
                self.told = self.told or isinstance(effect, CancelWork)

    def _look_at_trust(self, event: Input, before: float, asked_at: float | None) -> None:
        trusted = self.machine.trusted_until
        if trusted > before:
            assert isinstance(event, Answered), "trust grew by itself"
            assert isinstance(event.answer, Granted), "trust grew by something else than a yes"
            assert asked_at is not None
            assert trusted <= asked_at + self.timing.window + 1e-9, "not counted from the question"

    def _look_at_rest(self) -> None:
        machine = self.machine
        assert machine.grant == self.work
        if self.work is not None and self.now >= machine.trusted_until - self.timing.grace:
            assert self.told, "work goes on though its time is over"
        assert machine.is_finished == (machine.state is State.STOPPED and not self.open)
        overran = machine._term is not None and machine._term.overran
        assert (machine.overruns_at == math.inf) == (self.work is None)
        assert self.now >= machine.overruns_at if overran else machine.wake_at <= machine.overruns_at
        if machine.state is not State.STOPPED and not (self.work is not None and overran):
            assert machine.wake_at < math.inf, f"{machine.state} and never wakes"

    def comes_to_rest(self) -> bool:
        """Tell whether waking it again and again at one moment ends."""
        for _ in range(4):
            if self.machine.wake_at > self.now:
                return True
            self.feed(Tick())
        return self.machine.wake_at > self.now
