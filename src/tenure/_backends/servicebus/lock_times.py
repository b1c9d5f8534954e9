"""When the locks of a queue began, as this process knows it."""

from __future__ import annotations

import math

DRIFT = 0.001
"""By which share two clocks may run at different rates."""


class LockTimes:
    """When the locks of one queue began, on this process's clock.

    The service says when a lock ends by its own clock. The ends of two locks differ by as much as their beginnings do,
    whatever the two clocks show. So from a lock whose beginning is known to lie after a question, the beginnings of
    others can be told: of messages that were read long after they were sent.
    """

    def __init__(self) -> None:
        self._base: float | None = None  # the latest beginning by our clock, minus the end by the service's
        self._at = -math.inf

    def learn(self, locked_until: float, asked_at: float, now: float) -> None:
        """Note that a lock that ends at *locked_until* began after *asked_at*."""
        found = asked_at - locked_until
        if self._base is None or found > self._base - DRIFT * (now - self._at):
            self._base, self._at = found, now

    def began(self, locked_until: float, asked_at: float, read_at: float) -> float:
        """Return the earliest moment at which a lock can have begun that was given between *asked_at* and *read_at*."""
        if self._base is None:
            return asked_at
        told = self._base + locked_until - DRIFT * max(0.0, read_at - self._at)
        return min(read_at, max(asked_at, told))
