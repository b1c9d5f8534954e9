"""The timers of a machine: when to wake, and for what."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(order=True, slots=True)
class _Timer:
    at: float
    count: int
    kind: str = field(compare=False)
    of: str | int = field(compare=False)


class Timers:
    """A queue of timers. A timer can't be cancelled: its owner ignores one that has become pointless."""

    def __init__(self) -> None:
        self._timers: list[_Timer] = []
        self._count = 0

    @property
    def wake_at(self) -> float:
        """When the first timer is due; infinity for never."""
        return self._timers[0].at if self._timers else math.inf

    def set(self, when: float, kind: str, of: str | int = 0) -> None:
        """Set a timer of *kind*, for the name or the round *of*."""
        if when < math.inf:
            self._count += 1
            heapq.heappush(self._timers, _Timer(when, self._count, kind, of))

    def due(self, now: float) -> Iterator[tuple[str, str | int]]:
        """Yield the timers that are due, in their order; also those that are set meanwhile."""
        while self._timers and self._timers[0].at <= now:
            timer = heapq.heappop(self._timers)
            yield timer.kind, timer.of
