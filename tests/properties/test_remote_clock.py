"""The clock of a store, as it is learned: never further off than an answer leaves open, and steady between answers."""

from __future__ import annotations

import math
import random
import time
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure._checks import LONGEST
from tenure._runtime.remote_clock import RemoteClock, http_date

SLACK = 1e-5
"""Seconds that floats of this size may be rounded by."""


class Answer(NamedTuple):
    """A request that is sent after a pause, reaches the store, and is answered; times in seconds."""

    pause: float
    there: float
    back: float
    resolution: float
    """Of the moment that it tells; 0 if it is exact."""
    set_by: float = 0.0
    """By how much the store's clock is set in the pause."""


class Local:
    def __init__(self) -> None:
        self.time = 1_000.0

    def now(self) -> float:
        return self.time


def findings(kind: type[RemoteClock], answers: list[Answer], *, ahead: float = 0.0, drift: float = 0.0) -> set[str]:
    """Let a clock learn from *answers* of a store that is *ahead* and runs faster by *drift*; return what is wrong."""
    local = Local()
    clock, found, off_before, was_set = kind(local), set[str](), math.inf, False

    def of_store() -> float:
        return 1.7e9 + ahead + local.time * (1 + drift)

    for answer in answers:
        ahead += answer.set_by
        was_set |= answer.set_by != 0.0
        local.time += answer.pause
        asked_at, before = local.now(), clock.now() - local.now()
        local.time += answer.there
        told = of_store()
        if answer.resolution:
            told = math.floor(told / answer.resolution) * answer.resolution
        local.time += answer.back
        clock.learn(told, asked_at, answer.resolution)
        least, most = told - local.now(), told + answer.resolution - asked_at
        after = clock.now() - local.now()
        off = abs(clock.now() - of_store())
        took = local.now() - asked_at
        if off > took * (1 + abs(drift)) + answer.resolution + SLACK:
            found.add("it is further off than the answer leaves open")
        if off_before < math.inf and least + SLACK <= before <= most - SLACK and abs(after - before) > SLACK:
            found.add("an answer that agrees moves it")
        if off > off_before + SLACK and not drift and not answer.set_by:
            found.add("an answer makes it worse")
        if off_before == math.inf and not drift and clock.now() > of_store() + SLACK:
            found.add("it is ahead, by the first answer")
        if clock.learned_at != local.now() or not clock.is_known:
            found.add("it does not know when it learned")
        off_before = off
    return found


SECONDS = st.floats(0.0, 60.0)
ANSWERS = st.lists(
    st.builds(Answer, SECONDS, SECONDS, SECONDS, st.sampled_from([0.0, 0.001, 1.0]), st.just(0.0)), max_size=30
)
SET = st.lists(
    st.builds(Answer, SECONDS, SECONDS, SECONDS, st.sampled_from([0.0, 1.0]), st.floats(-1e6, 1e6)), max_size=20
)


@given(ANSWERS, st.floats(-1e6, 1e6), st.sampled_from([0.0, 1e-3, -1e-3]))
def test_it_is_no_further_off_than_the_newest_answer_leaves_open(
    answers: list[Answer], ahead: float, drift: float
) -> None:
    assert findings(RemoteClock, answers, ahead=ahead, drift=drift) == set()


@given(SET)
def test_a_clock_that_is_set_is_learned_by_the_next_answer(answers: list[Answer]) -> None:
    assert findings(RemoteClock, answers) == set()


def test_before_anything_is_learned_it_is_the_local_wall_clock() -> None:
    clock = RemoteClock(Local())
    before = time.time()
    assert before <= clock.now() <= time.time()
    was_known = clock.is_known
    clock.take_local()
    assert (was_known, clock.is_known) == (False, True)
    assert clock.now() >= before


def test_a_time_to_be_stored_is_one_that_can_be_read_again() -> None:
    clock = RemoteClock(Local())
    clock.learn(100.0, 1_000.0)
    assert clock.after(5.0) == 105.0
    assert clock.after(1e300) == LONGEST


def test_a_date_tells_whole_seconds_and_what_is_none_tells_nothing() -> None:
    local = Local()
    clock = RemoteClock(local)
    for date in (None, "", "soon", "Fri, 31 Dec 9999 23:59:59 GMT", "Thu, 01 Jan 2026 00:00:00 +99999999999", b"x"):
        clock.learn_date(date, local.now())
        assert not clock.is_known
    date = "Thu, 01 Jan 2026 00:00:00 GMT"
    clock.learn(http_date(date) + 0.9, local.now())
    clock.learn_date(date, local.now())
    assert clock.now() == http_date(date) + 0.9


# --- planted bugs ------------------------------------------------------------------------------------------------


class LastAnswer(RemoteClock):
    """Each answer moves it."""

    def learn(self, moment: float, asked_at: float, resolution: float = 0.0) -> None:
        self._offset = None
        super().learn(moment, asked_at, resolution)


class FirstAnswer(RemoteClock):
    """Nothing moves it."""

    def learn(self, moment: float, asked_at: float, resolution: float = 0.0) -> None:
        kept = self._offset
        super().learn(moment, asked_at, resolution)
        self._offset = self._offset if kept is None else kept


class Middle(RemoteClock):
    """It is put into the middle of what an answer leaves open."""

    def learn(self, moment: float, asked_at: float, resolution: float = 0.0) -> None:
        super().learn(moment, asked_at, resolution)
        self._offset = (moment - self.learned_at + moment + resolution - asked_at) / 2


class FromItsEnd(RemoteClock):
    """A request is taken to be as old as its answer."""

    def learn(self, moment: float, asked_at: float, resolution: float = 0.0) -> None:
        super().learn(moment, self.local.now(), resolution)


def drawn(seed: int) -> list[Answer]:
    rng = random.Random(seed)
    return [
        Answer(
            rng.uniform(0, 60), rng.uniform(0, 5), rng.uniform(0, 5), rng.choice([0.0, 1.0]), rng.choice([0.0, -9.0])
        )
        for _ in range(20)
    ]


@pytest.mark.parametrize("planted", [LastAnswer, FirstAnswer, Middle, FromItsEnd])
def test_a_planted_bug_of_a_clock_is_found(planted: type[RemoteClock]) -> None:
    assert any(findings(planted, drawn(seed)) for seed in range(20))


def test_an_answer_to_an_earlier_request_that_comes_later_says_nothing() -> None:
    local = Local()
    clock = RemoteClock(local)
    early = local.now()
    clock.learn(5_000.0, early)
    local.time += 5.0
    clock.learn(8_600.0, local.now())  # it was set forward
    local.time += 5.0
    clock.learn(5_002.0, early)
    assert clock.now() == pytest.approx(8_605.0)
