"""What becomes of a message when a delivery of it ends: each rule spelled out, then what holds for all of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tenure._queue.delivery_ends import (
    GONE,
    LOCK_ENDED,
    TIME_IS_OVER,
    Cause,
    EndedDelivery,
    Ending,
    Outcome,
    expired,
    found_dead,
    noted,
    outcome_of,
    reason_of_death,
)
from tenure._queue.failures import Failure
from tenure._queue.message import EXPIRED, HISTORY_MAX, MAX_DELIVERIES, Attempt
from tenure._queue.notes import Notes
from tenure._queue.verdicts import (
    COMPLETE,
    GIVE_BACK,
    SETTLED_DEAD,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
)

NOW = 1_700_000_000.0
ERROR, EARLIER = Failure("ValueError", "no such customer"), Failure("E", "the first time")
FAILED = Abandon(0.0, ERROR)
LATER = Abandon(7.5, ERROR)
REJECT = DeadLetter("bad", "no such customer", ERROR)
EXHAUSTED = Cause(MAX_DELIVERIES, "delivered 3 times, and never completed")
ENDINGS: list[Ending] = [COMPLETE, Abandon(), FAILED, LATER, GIVE_BACK, Defer(), REJECT, DeadLetter("odd"), LOCK_ENDED]


def attempt(number: int, outcome: str, error: Failure | None = None) -> Attempt:
    return Attempt(number, NOW, outcome, error)  # type: ignore[arg-type]


LIVE = EndedDelivery(2)
LAST = EndedDelivery(3)
LATE = EndedDelivery(2, is_expired=True)
LAST_AND_LATE = EndedDelivery(3, is_expired=True)
DEFERRED = EndedDelivery(2, is_expired=True, is_deferred=True)
LAST_DEFERRED = EndedDelivery(3, is_deferred=True)
LETTER = EndedDelivery(3, is_dead=True)
NEVER_RECEIVED = EndedDelivery(0, is_dead=True)

FAILED_2, ENDED_2 = attempt(2, "abandoned", ERROR), attempt(2, "expired")
FAILED_3, ENDED_3 = attempt(3, "abandoned", ERROR), attempt(3, "expired")
REJECTED_2, REJECTED_3 = attempt(2, "rejected", ERROR), attempt(3, "rejected", ERROR)
BAD = Cause("bad", "no such customer")


@pytest.mark.parametrize(
    ("ending", "delivered", "wanted"),
    [
        (COMPLETE, LIVE, GONE),
        (COMPLETE, LAST_AND_LATE, GONE),
        (COMPLETE, LETTER, GONE),
        (Complete((), 9.0), LETTER, GONE),
        (FAILED, LIVE, Outcome("ready", 2, 0.0, FAILED_2)),
        (Abandon(), LIVE, Outcome("ready", 2, 0.0, attempt(2, "abandoned"))),
        (LATER, LIVE, Outcome("delayed", 2, 7.5, FAILED_2)),
        (LOCK_ENDED, LIVE, Outcome("ready", 2, 0.0, ENDED_2)),
        (GIVE_BACK, LIVE, Outcome("ready", 1)),
        (Defer(), LIVE, Outcome("deferred", 2)),
        (REJECT, LIVE, Outcome("dead", 2, 0.0, REJECTED_2, BAD)),
        # the last delivery
        (FAILED, LAST, Outcome("dead", 3, 0.0, FAILED_3, EXHAUSTED, SETTLED_DEAD)),
        (LATER, LAST, Outcome("dead", 3, 0.0, FAILED_3, EXHAUSTED, SETTLED_DEAD)),
        (LOCK_ENDED, LAST, Outcome("dead", 3, 0.0, ENDED_3, EXHAUSTED, SETTLED_DEAD)),
        (GIVE_BACK, LAST, Outcome("ready", 2)),
        (Defer(), LAST, Outcome("deferred", 3)),
        (REJECT, LAST, Outcome("dead", 3, 0.0, REJECTED_3, BAD)),
        # expired under the lock
        (FAILED, LATE, Outcome("dead", 2, 0.0, FAILED_2, TIME_IS_OVER, SETTLED_DEAD)),
        (LATER, LATE, Outcome("dead", 2, 0.0, FAILED_2, TIME_IS_OVER, SETTLED_DEAD)),
        (LOCK_ENDED, LATE, Outcome("dead", 2, 0.0, ENDED_2, TIME_IS_OVER, SETTLED_DEAD)),
        (GIVE_BACK, LATE, Outcome("dead", 1, 0.0, None, TIME_IS_OVER, SETTLED_DEAD)),
        (Defer(), LATE, Outcome("deferred", 2)),
        (REJECT, LATE, Outcome("dead", 2, 0.0, REJECTED_2, BAD)),
        # both: it was tried as often as it may be
        (FAILED, LAST_AND_LATE, Outcome("dead", 3, 0.0, FAILED_3, EXHAUSTED, SETTLED_DEAD)),
        (LOCK_ENDED, LAST_AND_LATE, Outcome("dead", 3, 0.0, ENDED_3, EXHAUSTED, SETTLED_DEAD)),
        (GIVE_BACK, LAST_AND_LATE, Outcome("dead", 2, 0.0, None, TIME_IS_OVER, SETTLED_DEAD)),
        # received by its sequence
        (LATER, DEFERRED, Outcome("deferred", 2, 0.0, FAILED_2)),
        (LOCK_ENDED, DEFERRED, Outcome("deferred", 2, 0.0, ENDED_2)),
        (GIVE_BACK, DEFERRED, Outcome("deferred", 1)),
        (FAILED, LAST_DEFERRED, Outcome("dead", 3, 0.0, FAILED_3, EXHAUSTED, SETTLED_DEAD)),
        (GIVE_BACK, LAST_DEFERRED, Outcome("deferred", 2)),
        # a dead letter
        (FAILED, LETTER, Outcome("dead", 3)),
        (LATER, LETTER, Outcome("dead", 3, 7.5)),
        (LOCK_ENDED, LETTER, Outcome("dead", 3)),
        (GIVE_BACK, LETTER, Outcome("dead", 3)),
        (REJECT, LETTER, Outcome("dead", 3, 0.0, REJECTED_3, BAD)),
        (REJECT, NEVER_RECEIVED, Outcome("dead", 0, 0.0, attempt(1, "rejected", ERROR), BAD)),
        (DeadLetter("odd"), NEVER_RECEIVED, Outcome("dead", 0, 0.0, attempt(1, "rejected"), Cause("odd", ""))),
    ],
    ids=repr,
)
def test_the_end_of_a_delivery(ending: Ending, delivered: EndedDelivery, wanted: Outcome) -> None:
    assert outcome_of(ending, delivered, 3, NOW) == wanted


def test_a_lower_limit_counts_when_a_delivery_ends() -> None:
    outcome = outcome_of(FAILED, EndedDelivery(7), 3, NOW)
    assert outcome.cause == Cause(MAX_DELIVERIES, "delivered 7 times, and never completed")
    assert outcome_of(GIVE_BACK, EndedDelivery(7), 3, NOW) == Outcome("ready", 6)


def test_a_message_that_waits_expires_without_an_attempt() -> None:
    assert expired(2) == Outcome("dead", 2, 0.0, None, TIME_IS_OVER, SETTLED_DEAD)


def every() -> list[tuple[Ending, EndedDelivery, int]]:
    facts = itertools.product((0, 1, 2, 3, 9), (False, True), (False, True), (False, True))
    return [(ending, EndedDelivery(*one), most) for ending in ENDINGS for one in facts for most in (1, 3)]


def test_what_holds_for_every_end() -> None:
    for ending, delivered, most in every():
        found, case = outcome_of(ending, delivered, most, NOW), (ending, delivered, most)
        assert (found.place == "gone") == isinstance(ending, Complete), case
        died = found.place == "dead" and not delivered.is_dead
        assert found.answer.dead == (died and not isinstance(ending, DeadLetter)), case
        assert (found.delay > 0) <= (ending is LATER and found.place in ("delayed", "dead")), case
        assert (found.place == "delayed") <= (found.delay > 0), case
        if found.cause is None:
            assert (found.place == "dead") == (delivered.is_dead and not isinstance(ending, Complete)), case
        else:
            assert found.place == "dead", case
        if found.attempt is not None:
            assert found.attempt.number >= 1, case  # else stores can't read it again
            assert found.attempt.at == NOW, case
        if delivered.is_dead and found is not GONE:
            assert found.deliveries == delivered.number, case
        if found is not GONE:
            back = ending is GIVE_BACK and not delivered.is_dead
            assert found.deliveries == max(0, delivered.number - back), case


def test_the_reason_of_a_death_is_that_of_the_outcome() -> None:
    for ending, delivered, most in every():
        found = outcome_of(ending, delivered, most, NOW)
        if ending != LOCK_ENDED and found.cause is not None and not delivered.is_dead:
            case = ending, delivered, most
            assert reason_of_death(ending, found.answer, delivered.number, most) == found.cause.reason, case
            assert reason_of_death(ending, SETTLED_DEAD, delivered.number, most) == found.cause.reason, case
    assert reason_of_death(GIVE_BACK, SETTLED_DEAD, 3, 3) == EXPIRED


def test_the_answer_tells_the_reason_that_was_decided_by_the_limit_of_then() -> None:
    """A process that knows an older limit would take a wrong one for the reason."""
    answer = outcome_of(Abandon(), EndedDelivery(3), 3, NOW).answer
    assert answer == SETTLED_DEAD
    assert reason_of_death(Abandon(), answer, 3, 5) == MAX_DELIVERIES
    answer = outcome_of(Abandon(), EndedDelivery(3, is_expired=True), 5, NOW).answer
    assert reason_of_death(Abandon(), answer, 3, 3) == EXPIRED


# --- found later ---


def test_a_message_that_is_found_after_its_last_lock_is_dead() -> None:
    notes = Notes(history=(Attempt(1, 5.0, "abandoned"),))
    for is_expired in (False, True):
        found = found_dead(3, notes, 3, NOW, is_expired=is_expired)
        assert found == Outcome("dead", 3, 0.0, ENDED_3, EXHAUSTED, SETTLED_DEAD)
    assert found_dead(2, notes, 3, NOW, is_expired=True) == expired(2)
    assert found_dead(2, notes, 3, NOW, is_expired=False) is None
    assert found_dead(0, Notes(), 1, NOW, is_expired=False) is None


def test_a_message_whose_last_end_is_noted_has_one_more_delivery() -> None:
    """A lower limit counts when a delivery ends: that one has ended under a higher one."""
    notes = Notes(history=(Attempt(3, 1.0, "rejected"), Attempt(3, 5.0, "abandoned")), before=1)
    assert found_dead(3, notes, 2, NOW, is_expired=False) is None
    assert found_dead(3, notes, 2, NOW, is_expired=True) == expired(3)
    before_a_redrive = replace(notes, before=2)
    outcome = found_dead(3, before_a_redrive, 3, NOW, is_expired=False)
    assert outcome is not None
    assert outcome.cause == EXHAUSTED


# --- notes ---


def test_a_death_is_noted_with_the_newest_error() -> None:
    notes = Notes(deliveries=1, history=(Attempt(1, 5.0, "abandoned", EARLIER),))
    dead = noted(notes, outcome_of(LOCK_ENDED, EndedDelivery(2), 2, NOW), NOW)
    assert dead == Notes(
        deliveries=2,
        history=(*notes.history, attempt(2, "expired")),
        reason=MAX_DELIVERIES,
        description="delivered 2 times, and never completed",
        dead_at=NOW,
        error=EARLIER,
    )


def test_a_dead_letter_keeps_why_it_died_until_it_gets_another_reason() -> None:
    dead = noted(Notes(), outcome_of(REJECT, EndedDelivery(1), 3, NOW), NOW)
    for ending in (FAILED, LATER, GIVE_BACK, LOCK_ENDED):
        assert noted(dead, outcome_of(ending, EndedDelivery(1, is_dead=True), 3, NOW + 1), NOW + 1) == dead
    again = noted(dead, outcome_of(DeadLetter("odd"), EndedDelivery(1, is_dead=True), 3, NOW + 1), NOW + 1)
    assert (again.reason, again.description, again.dead_at, again.deliveries) == ("odd", "", NOW + 1, 1)
    assert [(one.number, one.at, one.error) for one in again.history] == [(1, NOW, ERROR), (1, NOW + 1, None)]
    assert again.error == ERROR
    without = replace(dead, history=())  # there was no room for it
    assert noted(without, outcome_of(DeadLetter("odd"), EndedDelivery(1, is_dead=True), 3, NOW), NOW).error == ERROR


def test_no_locks_are_noted_of_a_dead_letter() -> None:
    letter = Notes(deliveries=3, reason="bad", dead_at=5.0)
    again = noted(letter, outcome_of(DeadLetter("odd"), LETTER, 3, NOW), NOW, fills=True)
    assert again.history == (attempt(3, "rejected"),)


def test_a_message_that_lives_on_has_no_cause() -> None:
    assert noted(Notes(deliveries=1), outcome_of(GIVE_BACK, EndedDelivery(2), 3, NOW), NOW) == Notes(deliveries=1)


# --- lives ---


def shape(notes: Notes) -> object:
    attempts = [(one.number, one.outcome, one.error) for one in notes.history]
    return notes.deliveries, notes.reason, notes.description, notes.error, notes.before, attempts


@pytest.mark.parametrize("seed", range(300))
def test_a_store_that_notes_no_ended_locks_finds_them_again(seed: int) -> None:
    """Some servers end locks by themselves, and only count. What is filled in later is what was there."""
    rng = random.Random(seed)
    most = rng.choice([1, 2, 3, 6, 70])
    notes = counting = Notes()
    for _ in range(2):  # lives
        while notes.reason is None:
            ending: Ending = rng.choice([LOCK_ENDED, LOCK_ENDED, FAILED, Abandon(), GIVE_BACK, REJECT])
            if ending is REJECT and rng.random() < 0.7:
                continue
            outcome = outcome_of(ending, EndedDelivery(notes.deliveries + 1), most, NOW)
            notes = noted(notes, outcome, NOW)
            if ending is LOCK_ENDED and outcome.cause is None:
                counting = replace(counting, deliveries=outcome.deliveries)
            else:
                counting = noted(counting, outcome, NOW, fills=True)
        assert shape(counting) == shape(notes)
        assert notes.deliveries <= most
        lives = notes.history[notes.before :]
        assert [one.number for one in lives] == list(range(notes.deliveries + 1))[-len(lives) :]
        assert len(notes.history) <= HISTORY_MAX
        notes, counting = notes.redriven(), counting.redriven()
        assert shape(notes)[0] == 0  # type: ignore[index]
