"""The rates of queues: strict in every window, never slower than a 64th, however the claims come and the clock goes."""

from __future__ import annotations

import math
from bisect import bisect_right

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tenure
from tenure._queue.broker import QueueSettings
from tenure._queue.limits import PARTS, UNLIMITED, Allowance, Burst, Rate, allowance_of, allowed_by, both, noted

COUNTS = st.integers(1, 300)
SECONDS = st.floats(0.01, 1e5)
STEPS = st.lists(st.tuples(st.floats(0.0, 1.5), st.integers(1, 500)), min_size=1, max_size=80)
"""How much time passes, in windows, and how many messages are asked for then."""


def delivered(rate: tuple[int, float], steps: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Claim as much as the rate allows at each step; return when how many were delivered."""
    log: list[Burst] = []
    now = 1_000.0
    found: list[tuple[float, int]] = []
    for windows, wanted in steps:
        now += windows * rate[1]
        count = int(min(wanted, allowed_by(rate, log, now).most))
        log = noted(rate, log, now, count)
        assert len(log) <= PARTS + 2
        found.append((now, count))
    return found


@given(COUNTS, SECONDS, STEPS)
def test_no_window_has_more_than_the_rate(count: int, seconds: float, steps: list[tuple[float, int]]) -> None:
    found = delivered((count, seconds), steps)
    moments = [moment for moment, number in found for _ in range(number)]
    for place, moment in enumerate(moments):
        until = bisect_right(moments, moment + seconds * (1 - 1e-9), lo=place)
        assert until - place <= count


@given(COUNTS, SECONDS, STEPS)
def test_what_was_delivered_a_window_and_a_part_ago_is_free(
    count: int, seconds: float, steps: list[tuple[float, int]]
) -> None:
    """The rate is used up to a 64th: what is refused is explained by what was delivered in the last 65 parts."""
    log: list[Burst] = []
    now = 1_000.0
    found: list[tuple[float, int]] = []
    for windows, wanted in steps:
        now += windows * seconds
        allowed = allowed_by((count, seconds), log, now)
        recent = sum(number for moment, number in found if moment > now - seconds * (1 + 1 / PARTS) - 1e-6)
        assert allowed.most >= count - recent
        taken = int(min(wanted, allowed.most))
        log = noted((count, seconds), log, now, taken)
        found.append((now, taken))


@given(COUNTS, SECONDS, STEPS)
def test_when_it_says_so_one_more_is_allowed(count: int, seconds: float, steps: list[tuple[float, int]]) -> None:
    rate = (count, seconds)
    log: list[Burst] = []
    now = 1_000.0
    for windows, wanted in steps:
        now += windows * seconds
        log = noted(rate, log, now, int(min(wanted, allowed_by(rate, log, now).most)))
        allowed = allowed_by(rate, log, now)
        if allowed.most:
            assert allowed.free_in is None
            continue
        assert allowed.free_in is not None
        assert 0 < allowed.free_in <= seconds * (1 + 1e-9)
        assert allowed_by(rate, log, now + allowed.free_in * (1 + 1e-9) + 1e-6).most >= 1


@given(COUNTS, SECONDS, STEPS, COUNTS, SECONDS)
def test_a_rate_may_be_changed_at_any_time(
    count: int, seconds: float, steps: list[tuple[float, int]], other: int, others: float
) -> None:
    log: list[Burst] = []
    now = 1_000.0
    for place, (windows, wanted) in enumerate(steps):
        rate: Rate = (count, seconds) if place % 2 else (other, others)
        assert isinstance(rate, tuple)
        now += windows * seconds
        allowed = allowed_by(rate, log, now)
        if not allowed.most:
            assert allowed.free_in is not None
            assert allowed_by(rate, log, now + allowed.free_in * (1 + 1e-9) + 1e-6).most >= 1
        log = noted(rate, log, now, int(min(wanted, allowed.most)))


@given(COUNTS, SECONDS, st.floats(0.0, 1e9))
def test_a_clock_that_is_set_back_holds_nothing_up_for_longer_than_a_window(
    count: int, seconds: float, back: float
) -> None:
    rate = (count, seconds)
    log = noted(rate, [], 1e9, count)
    now = 1e9 - back
    log = noted(rate, log, now, 0)
    assert allowed_by(rate, log, now).most == 0
    assert allowed_by(rate, log, now + seconds * (1 + 1e-9) + 1e-6).most == count


def test_a_queue_that_was_idle_gets_all_at_once() -> None:
    assert allowed_by((100, 60.0), [], 5.0) == Allowance(100)
    log = noted((100, 60.0), [], 5.0, 100)
    assert log == [Burst(5.0, 5.0, 100)]
    assert allowed_by((100, 60.0), log, 35.0) == Allowance(0, 30.0)
    assert allowed_by((100, 60.0), log, 65.0) == Allowance(100)
    assert noted((100, 60.0), log, 65.0, 0) == []


def test_limits_together_allow_what_each_allows() -> None:
    assert both(UNLIMITED, UNLIMITED) == UNLIMITED
    assert both(Allowance(3), Allowance(5)) == Allowance(3)
    assert both(Allowance(0, 2.0), Allowance(5)) == Allowance(0, 2.0)
    assert both(Allowance(0, 2.0), Allowance(0, 3.0)) == Allowance(0, 3.0)
    assert both(Allowance(0), Allowance(0, 3.0)) == Allowance(0)
    full = noted((1, 60.0), [], 5.0, 1)
    assert allowance_of(QueueSettings(paused=True), 0, [], 5.0) == Allowance(0)
    assert allowance_of(QueueSettings(max_locked=2), 3, [], 5.0) == Allowance(0)
    assert allowance_of(QueueSettings(max_locked=2, rate=(1, 60.0)), 1, full, 5.0) == Allowance(0, 60.0)
    assert allowance_of(QueueSettings(max_locked=2, rate=(1, 60.0)), 1, [], 5.0) == Allowance(1)
    assert allowance_of(QueueSettings(), 10**6, [], 5.0) == UNLIMITED


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_locked", 0, "max_locked must be a whole number of at least 1, not 0"),
        ("max_locked", 2.5, "max_locked must be a whole number of at least 1, not 2.5"),
        ("max_locked", True, "max_locked must be a whole number of at least 1, not True"),
        ("max_locked", math.nan, "max_locked must be a whole number of at least 1, not nan"),
        ("max_locked", 2**40, "max_locked must not be more than"),
        ("rate", 100, "rate must be \\(count, seconds\\), such as \\(100, 60\\), or math.inf for no limit, not 100"),
        ("rate", "100/60", "rate must be"),
        ("rate", [100, 60], "rate must be"),
        ("rate", (100,), "rate must be"),
        ("rate", (0, 60), "the count of rate must be a whole number of at least 1, not 0"),
        ("rate", (math.inf, 60), "the count of rate must be a whole number"),
        ("rate", (1, 0), "the time of rate must be at least 0.001, not 0"),
        ("session_rate", (1, math.inf), "the time of session_rate must be a finite number of seconds, not inf"),
        ("session_rate", -math.inf, "session_rate must be"),
        ("paused", 1, "paused must be True or False, not 1"),
    ],
)
def test_what_can_not_work_is_refused(name: str, value: object, said: str) -> None:
    with pytest.raises(tenure.ConfigError, match=said):
        QueueSettings(**{name: value})  # type: ignore[arg-type]
