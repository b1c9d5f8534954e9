"""When a consumer claims next, where a message that was abandoned comes back by time alone."""

from __future__ import annotations

import random

import pytest

from tenure._queue.claiming import ClaimTimes
from tenure._queue.pump_settings import PumpSettings
from tenure._timing import Timing


@pytest.fixture
def times() -> ClaimTimes:
    settings = PumpSettings(Timing(30.0), hints=True, poll_every=5.0, until_empty=True)
    return ClaimTimes(settings, random.Random(1), now=0.0)


@pytest.mark.parametrize(("asked_at", "now", "then"), [(1.0, 1.1, 3.0), (2.9, 3.1, 3.1)], ids=["before", "across"])
def test_a_claim_before_an_abandoned_message_is_back_is_followed_by_one_after(
    times: ClaimTimes, asked_at: float, now: float, then: float
) -> None:
    times.retry_at = 3.0
    times.asked(0.0)
    assert not times.found_nothing(asked_at, None, is_held_back=False)
    times.answered(asked_at, False, None, now)
    assert times.next_at == then
    times.asked(0.0)
    assert times.found_nothing(then, None, is_held_back=False)
    times.answered(then, False, None, then + 0.1)
    assert times.next_at > then + 1.0


def test_no_claim_is_made_before_the_time_that_the_broker_is_left_alone(times: ClaimTimes) -> None:
    times.retry_at = 3.0
    times.hold_off(10.0)
    times.answered(1.0, False, None, 1.1)
    assert times.next_at == 10.0
