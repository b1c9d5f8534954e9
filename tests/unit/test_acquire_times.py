"""When a candidate asks for its name: not in step with the others, and less often while the store does not answer."""

from __future__ import annotations

import random

from tenure._election.acquire_times import AcquireTimes, outage_pause
from tenure._timing import Timing

TIMING = Timing(15.0)


def candidates(*, hints: bool, queued: bool = False) -> list[AcquireTimes]:
    return [AcquireTimes(TIMING, random.Random(seed), hints=hints, queued=queued, now=0.0) for seed in range(200)]


def test_candidates_that_were_refused_together_don_t_ask_together() -> None:
    for hints, least, longest in ((True, 7.5, 15.0), (False, 1.0, 2.0)):
        due = []
        for one in candidates(hints=hints):
            one.refused(15.0, 100.0)
            due.append(one.due - 100.0)
        assert least <= min(due) < least + 0.1 * (longest - least)
        assert longest - 0.1 * (longest - least) < max(due) <= longest


def test_candidates_that_have_waited_ask_at_the_end_of_the_lease_or_at_most_a_renewal_before() -> None:
    due = []
    for one in candidates(hints=True):
        one.refused(13.0, 100.0)
        one.asked(111.0)
        one.refused(14.2, 111.0)
        due.append(one.due - 111.0)
    before = [at for at in due if at < 14.2]
    assert 0.4 < len(before) / len(due) < 0.6
    assert 14.2 - TIMING.renew_every <= min(before) < 14.2 - 0.9 * TIMING.renew_every
    assert max(due) <= 14.4  # as for all who wait for the same moment


def test_a_candidate_that_gets_hints_asks_at_least_once_in_its_own_ttl() -> None:
    for remaining in (14.95, 15.0, 60.0):
        for one in candidates(hints=True):
            one.refused(13.0, 100.0)
            one.refused(remaining, 111.0)
            assert one.due <= 111.0 + TIMING.ttl


def test_after_a_hint_or_a_failure_candidates_may_begin_to_wait_together() -> None:
    for happens in (AcquireTimes.hinted, AcquireTimes.failed):
        due = []
        for one in candidates(hints=True):
            one.refused(13.0, 100.0)
            happens(one, 111.0)
            one.refused(15.0, 111.0)
            due.append(one.due - 111.0)
        assert max(sum(at <= each < at + 1.0 for each in due) for at in due) < len(due) / 4


def test_a_lease_that_was_not_renewed_is_asked_for_soon_after_its_end() -> None:
    for hints in (True, False):
        for one in candidates(hints=hints):
            one.refused(1.5, 100.0)
            assert 101.5 <= one.due <= 101.7


def test_a_hint_is_followed_at_once() -> None:
    for one in candidates(hints=True):
        one.refused(12.0, 100.0)
        one.hinted(101.0)
        assert one.due == 101.0


def test_a_hint_after_the_end_of_the_lease_reports_another_leader_and_is_not_followed_in_step() -> None:
    due = []
    for one in candidates(hints=True):
        one.refused(1.5, 100.0)
        one.hinted(101.51)
        due.append(one.due)
    assert max(due) - min(due) > 0.9 * TIMING.retry_every
    assert 101.51 <= min(due) <= max(due) <= 101.51 + TIMING.retry_every


def test_a_second_hint_after_the_end_of_the_lease_does_not_put_the_request_off_again() -> None:
    for one in candidates(hints=True):
        one.refused(1.5, 100.0)
        one.hinted(101.51)
        due = one.due
        one.hinted(101.52)
        assert one.due <= due


def outage(one: AcquireTimes, seconds: float) -> list[float]:
    """Let *one* ask without an answer for so long; return the pauses."""
    pauses, now = [], one.due
    end = now + seconds
    while now < end:
        one.asked(now)
        one.failed(now)
        pauses.append(one.due - now)
        now = one.due
    return pauses


def test_a_candidate_asks_less_often_after_a_ttl_without_an_answer() -> None:
    for one in candidates(hints=True):
        pauses = outage(one, 60.0)
        retry_every = TIMING.retry_every
        assert retry_every <= pauses[0] <= 1.2 * retry_every
        assert 5.0 == outage_pause(TIMING) <= pauses[-1] <= 1.2 * outage_pause(TIMING)
        assert len(pauses) > 13


def test_a_candidate_in_a_queue_asks_as_often_as_ever() -> None:
    for one in candidates(hints=True, queued=True):
        assert max(outage(one, 60.0)) <= 1.2 * TIMING.retry_every


def test_the_first_hint_after_an_outage_is_spread_and_no_other_is() -> None:
    due, again = [], []
    for one in candidates(hints=True):
        outage(one, 60.0)
        now = 61.0
        one.hinted(now)  # before the store has answered
        due.append(one.due - now)
        one.refused(14.0, now)
        one.hinted(now + 1.0)
        again.append(one.due - now - 1.0)
        one.hinted(now + 1.1)  # this one may report a release
        assert one.due <= now + 1.1
    assert max(due) > 4.0
    assert max(again) > 4.0


def test_after_a_short_outage_hints_are_followed_at_once() -> None:
    for one in candidates(hints=True):
        outage(one, 8.0)
        one.refused(14.0, 13.0)
        one.hinted(14.0)
        assert one.due == 14.0


def test_an_outage_that_ended_with_a_win_is_forgotten_by_the_end_of_the_term() -> None:
    for one in candidates(hints=True):
        outage(one, 1.0)
        one.granted()
        one.term_over(3_600.0, yields=False)
        one.refused(14.0, 3_603.0)
        one.hinted(3_604.0)
        assert one.due == 3_604.0


def test_a_wrong_hint_after_the_end_of_the_lease_delays_no_successor_beyond_retry_every() -> None:
    for one in candidates(hints=True):
        one.refused(5.0, 100.0)
        one.hinted(105.15)
        assert one.due <= 105.0 + TIMING.retry_every
    for one in candidates(hints=True):
        one.refused(0.0, 100.0)  # the store says that it ends just now
        due = one.due
        one.hinted(100.05)
        assert one.due <= due
