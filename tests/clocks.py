"""Clocks for tests in real time."""

from __future__ import annotations

from tenure._runtime.alarms import Alarms
from tenure._runtime.clock import Clock, SystemClock


class TurnedClock:
    """The machine's clock, plus the seconds by which it was moved forward."""

    def __init__(self) -> None:
        self.turned = 0.0
        self._clock = SystemClock()

    def now(self) -> float:
        return self._clock.now() + self.turned


def ring_alarms(clock: Clock) -> None:
    """Let the alarms on *clock* that are due ring soon, on their loops: nobody tells them that it was moved."""
    for alarms in list(Alarms._known):
        if alarms._clock is clock and not alarms._loop.is_closed():
            alarms._loop.call_soon_threadsafe(alarms._ring)
