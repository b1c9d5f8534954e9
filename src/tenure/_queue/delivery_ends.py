"""What becomes of a message when a delivery of it ends, or when its time is over: the rule of every store. Pure.

A delivery ends with a verdict, or with its lock. Where the message goes then, with which count, and what is noted of
it, follows from a few facts; :func:`outcome_of` has the rule, :func:`noted` writes it into the notes of a message:

- A delivery counts from its claim on. ``GiveBack`` takes it off the count again, and leaves no trace in the history.
- Every other end but ``Complete`` and ``Defer`` is an attempt in the history: ``abandoned``, ``expired`` or
  ``rejected``, under the number of its delivery.
- If its last delivery has failed, it is dead, ``max_deliveries``. That comes before what follows: it was tried as often
  as it may be. A lower ``max_deliveries`` counts when a delivery ends, not when the next one begins.
- If it was received by its sequence, as it was deferred, it is deferred again: without a delay, and it doesn't expire.
- If its time is over, it is dead, ``expired``. Under a lock, it doesn't expire.
- Otherwise it is delivered again, after the delay of the verdict. The delay may be longer than it lives: then it dies
  without another delivery, at the end of the delay at the latest.
- A dead letter stays one, unless it is completed. To receive it is not counted, and neither the end of its lock nor
  ``Abandon`` or ``GiveBack`` is noted. ``DeadLetter`` gives it another reason, description and moment of death, and one
  more attempt, under the number of its last delivery.
- A message that is redriven has all its deliveries again, no delay, and no end; its history is kept.

All stores in Python ask this module; what Service Bus decides by itself is not theirs. PostgreSQL and Redis have the
same rule in their own languages. ``OutcomeTests`` of the suites compare each store with this module.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal, NamedTuple, TypeVar

from tenure._queue.message import EXPIRED, EXPIRED_DESCRIPTION, MAX_DELIVERIES, Attempt, exhausted_description
from tenure._queue.notes import Notes
from tenure._queue.verdicts import (
    SETTLED,
    SETTLED_EXHAUSTED,
    SETTLED_EXPIRED,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    GiveBack,
    Settled,
    Verdict,
)

N = TypeVar("N", bound=Notes)

Place = Literal["gone", "ready", "delayed", "deferred", "dead"]
"""Where a message is after a delivery; ``gone`` for good, or ``dead`` among the dead letters."""


LOCK_ENDED: Final = "lock ended"
"""The lock of a delivery has ended without a verdict: its consumer has crashed, or hangs."""

Ending = Verdict | Literal["lock ended"]
"""How a delivery ends."""


class EndedDelivery(NamedTuple):
    """What a store knows of a message whose delivery ends."""

    number: int
    """How often it was handed out, this time included; of a dead letter, how often before it died."""
    is_expired: bool = False
    """Whether its time is over."""
    is_deferred: bool = False
    """Whether it was received by its sequence, as a deferred message."""
    is_dead: bool = False
    """Whether it is a dead letter."""


class Cause(NamedTuple):
    """Why a message dies."""

    reason: str
    """A word or two; see ``Death``."""
    description: str
    """More about it, as text."""


TIME_IS_OVER: Final = Cause(EXPIRED, EXPIRED_DESCRIPTION)
"""Why a message dies that has expired: also of one that waits, without any end of a delivery."""


class Outcome(NamedTuple):
    """What becomes of a message."""

    place: Place
    deliveries: int = 0
    """How many deliveries are counted of it from now on."""
    delay: float = 0.0
    """In how many seconds it can be received, if it is ``delayed``, or was ``dead`` before and stays it; else 0."""
    attempt: Attempt | None = None
    """What is added to its history; None for nothing."""
    cause: Cause | None = None
    """Why it dies now; None if it lives on, or was dead before and keeps the cause that it has."""
    answer: Settled = SETTLED
    """The answer to the verdict; after the end of a lock, ``dead`` tells that it died."""


GONE: Final = Outcome("gone")


def outcome_of(ending: Ending, delivered: EndedDelivery, max_deliveries: float, now: float) -> Outcome:
    """Return what becomes of a message whose delivery ends in this way.

    Args:
        ending: The verdict, which came under a good lock; or ``LOCK_ENDED``.
        delivered: What is known of the message.
        max_deliveries: How often a message of its queue is handed out; it doesn't matter for a dead letter.
        now: The store's wall clock, in Unix seconds.
    """
    number = delivered.number
    if isinstance(ending, Complete):
        return GONE
    if isinstance(ending, DeadLetter):
        attempt = Attempt(max(1, number), now, "rejected", ending.error)  # 1 if it expired before it was received
        return Outcome("dead", number, 0.0, attempt, Cause(ending.reason, ending.description))
    delay = max(0.0, ending.delay) if isinstance(ending, Abandon) else 0.0
    if delivered.is_dead:
        return Outcome("dead", number, delay)
    if isinstance(ending, Defer):
        return Outcome("deferred", number)
    if isinstance(ending, GiveBack):
        return _lives_on(delivered, max(0, number - 1), 0.0, None)
    if isinstance(ending, Abandon):
        attempt = Attempt(max(1, number), now, "abandoned", ending.error)
    else:
        attempt = Attempt(max(1, number), now, "expired")
    if number >= max_deliveries:
        cause = Cause(MAX_DELIVERIES, exhausted_description(number))
        return Outcome("dead", number, 0.0, attempt, cause, SETTLED_EXHAUSTED)
    return _lives_on(delivered, number, delay, attempt)


def _lives_on(delivered: EndedDelivery, deliveries: int, delay: float, attempt: Attempt | None) -> Outcome:
    """Return what becomes of a message that has deliveries left: it may have expired."""
    if delivered.is_deferred:
        return Outcome("deferred", deliveries, 0.0, attempt)
    if delivered.is_expired:
        return expired(deliveries, attempt)
    return Outcome("delayed" if delay > 0 else "ready", deliveries, delay, attempt)


def expired(deliveries: int, attempt: Attempt | None = None) -> Outcome:
    """Return what becomes of a message whose time is over, and that is under no lock any more."""
    return Outcome("dead", deliveries, 0.0, attempt, TIME_IS_OVER, SETTLED_EXPIRED)


def reason_of_death(verdict: Verdict, answer: Settled, delivery_count: int, max_deliveries: float) -> str:
    """Return the reason of a message that died of a verdict; if its answer doesn't tell it, the most probable one."""
    if isinstance(verdict, DeadLetter):
        return verdict.reason
    if answer.reason is not None:
        return answer.reason
    return MAX_DELIVERIES if delivery_count >= max_deliveries and not isinstance(verdict, GiveBack) else EXPIRED


# --- stores that learn of the end of a lock from the next delivery -----------------------------------------------


def found_dead(deliveries: int, notes: Notes, max_deliveries: float, now: float, *, is_expired: bool) -> Outcome | None:
    """Return how a message dies that a store has found in place of handing it out; None if it is to be handed out.

    Its last delivery has ended with its lock, unless there is an attempt of that number: then it was decided when that
    delivery ended that there is a further one.

    Args:
        deliveries: How often it was handed out before.
        notes: What is noted with it.
        max_deliveries: How often a message of its queue is handed out.
        now: The store's wall clock, in Unix seconds.
        is_expired: Whether its time is over.
    """
    if deliveries >= max_deliveries and all(one.number != deliveries for one in notes.history[notes.before :]):
        return outcome_of(LOCK_ENDED, EndedDelivery(deliveries, is_expired), max_deliveries, now)
    return expired(deliveries) if is_expired else None


# --- notes -------------------------------------------------------------------------------------------------------


def noted(notes: N, outcome: Outcome, now: float, *, fills: bool = False) -> N:
    """Return the notes of a message after *outcome*: its count, its history, and why it died.

    With *fills*, deliveries before this one of which no attempt is there have ended with their locks, and are added to
    the history of a live message: where it is the store that ends locks, nobody notes it then.
    """
    notes = history_noted(notes, outcome, now, fills=fills)
    if outcome.cause is not None:
        return notes.dead(*outcome.cause, outcome.deliveries, now)
    return replace(notes, deliveries=outcome.deliveries)


def history_noted(notes: N, outcome: Outcome, now: float, *, fills: bool = False) -> N:
    """Return the notes of a message with the history that it has after *outcome*, as :func:`noted` does."""
    if fills and notes.reason is None:
        notes = notes.with_expired_attempts(outcome.deliveries - (outcome.attempt is not None), now)
    return notes if outcome.attempt is None else notes.with_attempt(outcome.attempt)
