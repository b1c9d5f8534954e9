"""Clocks for tests in real time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tenure._runtime.alarms import Alarms
from tenure._runtime.clock import Clock, SystemClock


class TurnedClock:
    """The machine's clock, plus the seconds by which it was moved forward."""

    def __init__(self) -> None:
        self.turned = 0.0
        self._clock = SystemClock()

    def now(self) -> float:
        return self._clock.now() + self.turned

    def turn_loop(self) -> None:
        """Let the timers of the running loop follow this clock: those that are due then fire at once.

        What waits for an answer gives it up then, too, as after a suspend.
        """
        loop = asyncio.get_running_loop()
        true_time = loop.time
        loop.time = lambda: true_time() + self.turned  # type: ignore[method-assign]

    @asynccontextmanager
    async def hurried(self, times: int = 10) -> AsyncIterator[None]:
        """Let the clock run up to *times* times as fast inside the block, where no request is answered.

        Each is given up sooner then. Only with :meth:`turn_loop`.
        """
        hurry = asyncio.create_task(self._hurry(times))
        try:
            yield
        finally:
            hurry.cancel()

    async def _hurry(self, times: int) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.turned += 0.01 * (times - 1)


def ring_alarms(clock: Clock) -> None:
    """Let the alarms on *clock* that are due ring soon, on their loops: nobody tells them that it was moved."""
    for alarms in list(Alarms._known):
        if alarms._clock is clock and not alarms._loop.is_closed():
            alarms._loop.call_soon_threadsafe(alarms._ring)
