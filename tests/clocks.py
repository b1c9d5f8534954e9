"""Clocks for tests in real time."""

from __future__ import annotations

from tenure._runtime.clock import SystemClock


class TurnedClock:
    """The machine's clock, plus the seconds by which it was moved forward."""

    def __init__(self) -> None:
        self.turned = 0.0
        self._clock = SystemClock()

    def now(self) -> float:
        return self._clock.now() + self.turned
