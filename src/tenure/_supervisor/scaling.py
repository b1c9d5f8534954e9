"""How many processes a backlog needs. Pure.

Rules:

- As many as can hold the whole backlog at once: ``ceil((ready + locked) / concurrency)``, of the queue that needs most.
  Of a paused queue, only what is locked counts; of one with ``max_locked``, that many at most.
  Messages that are being handled count, so that no process is retired because all of its messages are in work.
- Up at once, but at most doubled, as the next look shows whether more are needed.
- Down slowly: by one, each time that fewer were enough for ``calm`` seconds without a break.
- If the store does not answer, nothing is known: the number stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Backlog(NamedTuple):
    """The backlog of one queue, and how much of it one process holds."""

    messages: int
    """Those that are ready, and those that are locked to any consumer."""
    concurrency: int


def needed(backlogs: Iterable[Backlog]) -> int:
    """Return how many processes hold the whole backlog at once."""
    return max((-(-one.messages // max(one.concurrency, 1)) for one in backlogs), default=0)


class Scaling:
    """The number of processes wanted, between *least* and *most*.

    Args:
        least: The fewest processes; at least one.
        most: The most.
        calm: For how many seconds fewer must be enough, before one is retired.
    """

    def __init__(self, least: int, most: int, calm: float) -> None:
        self.wanted = least
        self._bounds = least, most
        self._shift = 0  # by hand
        self._calm = calm
        self._low_since: float | None = None  # since when fewer are enough

    def look(self, backlogs: Iterable[Backlog] | None, now: float) -> int:
        """Take note of the backlogs, or of None if the store did not answer; return how many are wanted now."""
        if backlogs is None:
            return self.wanted
        enough = self._bounded(needed(backlogs))
        if enough >= self.wanted:
            self._low_since = None
            self.wanted = min(enough, 2 * self.wanted)
        elif self._low_since is None:
            self._low_since = now
        elif now - self._low_since >= self._calm:
            self.wanted -= 1
            self._low_since = now
        return self.wanted

    def move(self, by: int) -> int:
        """Shift the bounds and the number by hand; return how many are wanted now, at least one."""
        self._shift = max(self._shift + by, 1 - self._bounds[1])
        self.wanted = self._bounded(self.wanted + by)
        self._low_since = None
        return self.wanted

    def _bounded(self, number: int) -> int:
        least, most = (max(bound + self._shift, 1) for bound in self._bounds)
        return min(max(number, least), most)
