"""Properties of the candidate's machine: every input in every reachable state, and long random runs."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tenure._election.effects import (
    Answer,
    Hint,
    HintsAbsent,
    Input,
    Inspect,
    Release,
    Renew,
    RenewalWithheld,
    RenewTogether,
    Resign,
    Stop,
    Tick,
    Withdraw,
    Withdrawn,
    WorkEnded,
)
from tenure._election.machine import PACE_MIN, TRANSITIONS, State
from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer, Released, Vacant
from tenure._timing import ATTEMPTS_MIN, Timing
from tenure.testing._sim.elections.plan import TIMINGS
from tenure.testing._sim.elections.script import Zeros
from tests.properties.watched_machine import MOVES, WatchedMachine

Step = Callable[[WatchedMachine], object]

REQUESTS_MAX = 3
STEPS_MAX = 25_000


def _feeds(event: Input) -> Step:
    return lambda watched: watched.feed(event)


def _waits(until: Callable[[WatchedMachine], float]) -> Step:
    def step(watched: WatchedMachine) -> None:
        watched.now = max(watched.now, until(watched))
        watched.feed(Tick())

    return step


def _answers(ask: int, answer: Answer) -> Step:
    return lambda watched: watched.answer(ask, answer)


def _all_answers(grant: Grant) -> Iterator[Answer]:
    other = Grant(grant.name, "m#1", grant.token + 1)
    for each in (grant, other):
        yield Granted(each)
        yield Lost(each)
        yield Released(each)
    yield Granted(grant, resign_asked=True)
    yield Granted(grant, age=3.0)
    yield Granted(grant, age=20.0)
    yield HeldBy("election", "m#1", 3, None)
    yield HeldBy("election", "m#1", 3, 0.0)
    yield HeldBy("election", "m#1", 3, 9.0)
    yield NoAnswer("lost")
    yield Vacant("election")
    yield Withdrawn()
    yield RenewalWithheld("stalled")


def _all_steps(watched: WatchedMachine) -> Iterator[Step]:
    """Yield all possible next steps: every input, right or wrong, and the passing of time."""
    for event in (Tick(), Hint(), HintsAbsent(), RenewTogether(), Resign(), Stop(), WorkEnded(99)):
        yield _feeds(event)
    if watched.work is not None:
        yield _feeds(WorkEnded(watched.work.token))
        yield _feeds(WorkEnded(watched.work.token, again=False))
    for ask in watched.open:
        for answer in _all_answers(watched.grant_for(ask, 7)):
            yield _answers(ask, answer)
    yield _answers(12345, NoAnswer("to an unknown request"))
    if len(watched.open) <= REQUESTS_MAX and watched.now < watched.machine.wake_at < math.inf:
        yield _waits(lambda late: late.machine.wake_at)
    yield _waits(lambda late: late.now + 60.0)


def _explore(timing: Timing, *, hints: bool, queued: bool = False) -> int:
    """Explore all possible steps breadth first, and return the number of different situations."""
    start = WatchedMachine(timing, Zeros(), hints=hints, queued=queued, now=0.0)
    met = {start.fingerprint()}
    edge = deque([start])
    steps = 0
    while edge and steps < STEPS_MAX:
        here = edge.popleft()
        for step in _all_steps(here):
            there = here.clone()
            step(there)
            steps += 1
            assert there.clone().becomes_idle()
            mark = there.fingerprint()
            if mark not in met:
                met.add(mark)
                edge.append(there)
    return len(met)


@pytest.fixture(scope="module")
def situations() -> tuple[int, ...]:
    """Explore some settings, and return the number of situations of each."""
    MOVES.clear()
    return (
        _explore(Timing(), hints=True),
        _explore(Timing(ttl=6.0, grace=0.0), hints=False),
        _explore(Timing(), hints=True, queued=True),
    )


def test_every_input_in_every_reachable_state_is_legal(situations: tuple[int, ...]) -> None:
    assert min(situations) > 1_000


def test_the_table_of_transitions_has_no_unused_and_no_missing_row(situations: tuple[int, ...]) -> None:
    reached = {state: frozenset(to for was, to in MOVES if was is state) for state in State}
    assert reached == dict(TRANSITIONS)


class CandidateRuns(RuleBasedStateMachine):
    """A long run of one candidate, with any random numbers, any valid timing, and answers in any order."""

    @initialize(
        timing=st.sampled_from(TIMINGS),
        seed=st.integers(0, 2**32),
        hints=st.booleans(),
        queued=st.booleans(),
        now=st.floats(-9e3, 9e3),
    )
    def begins(self, timing: Timing, seed: int, hints: bool, queued: bool, now: float) -> None:
        self.tokens = 0
        self.watched = WatchedMachine(timing, random.Random(seed), hints=hints, queued=queued, now=now)

    @rule(share=st.floats(0.0, 1.2))
    def time_passes(self, share: float) -> None:
        self.watched.now += share * self.watched.timing.ttl
        self.watched.feed(Tick())

    @rule()
    def wakes(self) -> None:
        if self.watched.machine.wake_at < math.inf:
            self.watched.now = max(self.watched.now, self.watched.machine.wake_at)
        self.watched.feed(Tick())

    @rule(event=st.sampled_from((Hint(), HintsAbsent(), RenewTogether(), Tick())))
    def receives(self, event: Input) -> None:
        self.watched.feed(event)

    @rule()
    def resigns(self) -> None:
        self.watched.feed(Resign())

    @precondition(lambda self: self.watched.now % 7 < 1)  # rarely, so that runs are long
    @rule()
    def stops(self) -> None:
        self.watched.feed(Stop())

    @precondition(lambda self: self.watched.work is not None)
    @rule(again=st.integers(0, 9))
    def work_ends(self, again: int) -> None:
        assert self.watched.work is not None
        self.watched.feed(WorkEnded(self.watched.work.token, again=again > 0))

    @precondition(lambda self: self.watched.open)
    @rule(data=st.data())
    def yes(self, data: st.DataObject) -> None:
        ask = data.draw(st.sampled_from(sorted(self.watched.open)))
        question, _ = self.watched.open[ask]
        self.tokens += 1
        grant = self.watched.grant_for(ask, self.tokens)
        age = data.draw(st.just(0.0) | st.floats(0.0, 1.5)) * self.watched.timing.ttl
        yes: dict[type, Answer] = {
            Withdraw: Withdrawn(),
            Release: Released(grant),
            Inspect: Vacant("election"),
        }
        self.watched.answer(ask, yes.get(type(question), Granted(grant, age=age)))

    @precondition(lambda self: any(not isinstance(asked, Withdraw) for asked, _ in self.watched.open.values()))
    @rule(data=st.data())
    def no(self, data: st.DataObject) -> None:
        deniable = [ask for ask, (asked, _) in self.watched.open.items() if not isinstance(asked, Withdraw)]
        ask = data.draw(st.sampled_from(sorted(deniable)))
        question, _ = self.watched.open[ask]
        held = HeldBy("election", "m#1", 3, data.draw(st.none() | st.floats(0.0, 30.0)))
        self.watched.answer(ask, Lost(question.grant) if isinstance(question, (Renew, Release)) else held)

    @precondition(lambda self: self.watched.open)
    @rule(data=st.data())
    def any_answer(self, data: st.DataObject) -> None:
        ask = data.draw(st.sampled_from(sorted(self.watched.open)))
        answers = list(_all_answers(self.watched.grant_for(ask, self.tokens)))
        self.watched.answer(ask, data.draw(st.sampled_from(answers)))

    @invariant()
    def does_not_spin(self) -> None:
        assert self.watched.clone().becomes_idle()


CandidateRuns.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestCandidateRuns = CandidateRuns.TestCase


def _attempts(timing: Timing, age: float) -> int:
    """Return how often a term asks to be renewed that began with a grant of this *age*, and gets no answer."""
    watched = WatchedMachine(timing, Zeros(), hints=False, now=0.0)
    watched.feed(Tick())
    watched.answer(1, Granted(watched.grant_for(1, 7), age=age))
    count = 0
    while not watched.is_cancelled:
        watched.now = watched.machine.wake_at
        count += sum(isinstance(effect, Renew) for effect in watched.feed(Tick()))
    return count


@pytest.mark.parametrize(
    "timing",
    [
        Timing(),
        Timing(4.0),
        Timing(120.0),
        Timing(retry_every=3.0),
        Timing(renew_every=2.0, retry_every=4.5),
        Timing(renew_every=1.4, retry_every=2.0, grace=8.0),
    ],
    ids=str,
)
def test_a_term_that_begins_with_an_old_grant_has_time_for_as_many_renewals(timing: Timing) -> None:
    for hundredths in range(100 - round(100 * PACE_MIN)):
        assert _attempts(timing, timing.work_window * hundredths / 100) == timing.attempts >= ATTEMPTS_MIN
