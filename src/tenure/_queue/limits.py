"""The limits of a queue: how many more messages a claim may bring now. Pure: a store keeps what is needed, and asks.

A rate is kept by a log of what was delivered in its last window. It is strict: in no window of so many seconds,
wherever it begins, are there more deliveries than it allows; and a queue that was idle gets all of them at once. (A
fixed window lets twice as many through around its ends, a token bucket nearly so.) Deliveries that follow within a 64th
of the window share an entry, which counts until the last of them is over: so a log has 66 entries at most, and costs a
64th of the rate at most. A delivery is never taken back: the work may have begun. If the clock of the store was set
back, entries that lie ahead count as of now; a store whose clock may be set back keeps that, by ``noted`` with 0 more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

Rate = tuple[int, float] | float
"""At most so many deliveries in any so many seconds: ``(count, seconds)``; ``math.inf`` for no limit."""

HELD_UP_MAX = 60.0
"""Seconds for which a message is delayed at most until the rate of its session is looked at again: it may be raised."""

PARTS = 64
"""A window's length, in the longest time between the first and the last delivery of one entry."""


class Burst(NamedTuple):
    """An entry of a log: so many deliveries, the first when it *began*, the last *at* that moment."""

    began: float
    at: float
    number: int


class Allowance(NamedTuple):
    """How many more may be delivered now; if none, in how many seconds time alone allows one (None: it never does)."""

    most: float
    free_in: float | None = None


UNLIMITED = Allowance(math.inf)


def allowed_by(rate: Rate, log: Sequence[Burst], now: float) -> Allowance:
    """Return how many deliveries *rate* allows after those of *log*, which need not be pruned."""
    if not isinstance(rate, tuple):
        return UNLIMITED
    most, seconds = rate
    counting = _counting(log, seconds, now)
    left = most - sum(burst.number for burst in counting)
    if left > 0:
        return Allowance(left)
    for burst in counting:  # oldest first; if the rate was lowered, several must end
        left += burst.number
        if left > 0:
            return Allowance(0, burst.at + seconds - now)
    raise AssertionError(f"{rate} allows nothing after nothing")


def delay_by(allowance: Allowance) -> float:
    """Return for how many seconds to delay a message of which the rate of its session allows none now."""
    assert allowance.free_in is not None
    return min(allowance.free_in, HELD_UP_MAX)


def noted(rate: Rate, log: Sequence[Burst], now: float, count: int) -> list[Burst]:
    """Return *log*, pruned, with *count* deliveries more."""
    if not isinstance(rate, tuple):
        return []
    seconds = rate[1]
    counting = _counting(log, seconds, now)
    if count:
        if counting and now - counting[-1].began < seconds / PARTS:
            last = counting.pop()
            counting.append(Burst(last.began, now, last.number + count))
        else:
            counting.append(Burst(now, now, count))
    return counting


def _counting(log: Sequence[Burst], seconds: float, now: float) -> list[Burst]:
    """Return the bursts whose deliveries may still count; those of the future, as the clock was set, are of now."""
    return [Burst(min(burst.began, now), min(burst.at, now), burst.number) for burst in log if burst.at + seconds > now]


def both(one: Allowance, other: Allowance) -> Allowance:
    """Return what two limits allow together."""
    if one.most and other.most:
        return Allowance(min(one.most, other.most))
    waits = [each.free_in for each in (one, other) if not each.most]
    return Allowance(0, None if None in waits else max(wait for wait in waits if wait is not None))


class Limits(Protocol):
    """The settings of a queue that limit it."""

    @property
    def paused(self) -> bool: ...  # described in QueueSettings, as the others are
    @property
    def max_locked(self) -> float: ...
    @property
    def rate(self) -> Rate: ...


def allowance_of(settings: Limits, locked: int, log: Sequence[Burst], now: float) -> Allowance:
    """Return what a queue with these *settings* allows, while so many messages are *locked*."""
    if settings.paused:
        return Allowance(0)
    return both(Allowance(max(0, settings.max_locked - locked)), allowed_by(settings.rate, log, now))


def sooner_of(one: float | None, other: float | None) -> float | None:
    """Return the sooner of two moments or times; None is never."""
    return other if one is None else one if other is None else min(one, other)
