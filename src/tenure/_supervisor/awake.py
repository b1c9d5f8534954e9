"""The time for which this process runs.

A supervisor that was stopped has read nothing meanwhile, and where the whole machine stood still, its processes have
done nothing. So that time counts for no limit: it would kill those that work.
"""

from __future__ import annotations

import math

READ_EVERY = 1.0
"""Seconds within which it is read while this process runs."""

LATE = 0.5
"""Seconds by which a reading may be late on a busy machine; with more, this process did not run."""


class AwakeTime:
    """Seconds for which this process ran, from those of a clock that always runs.

    It is read at least once in ``READ_EVERY`` seconds; what is missing was lost.

    Args:
        now: The time of that clock.
    """

    def __init__(self, now: float) -> None:
        self._read_at = now
        self._lost = 0.0

    def read(self, now: float) -> float:
        """Return the time at *now*; it never goes back."""
        since, self._read_at = now - self._read_at, now
        if since > READ_EVERY + LATE:
            self._lost += since - READ_EVERY
        return now - self._lost

    def clock_time(self, moment: float) -> float:
        """Return what that clock shows at *moment*, if this process runs until then; read then, it is not earlier."""
        at = moment + self._lost
        while at - self._lost < moment:  # rounded down: who waits for it would be woken too early, again and again
            at = math.nextafter(at, math.inf)
        return at
