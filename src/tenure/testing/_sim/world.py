"""A discrete-event world under one seed: a heap of calls, one source of random numbers, clocks of different rates."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

BLUR = 1e-6
"""Times are compared with this much room, for the rounding of clocks that run at odd rates."""

STEPS_MAX = 2_000_000
"""More steps than any run takes that ends; a run that reaches this would never end."""


class World:
    """True time and the calls that are scheduled. It is the only source of time and random numbers in a run.

    Args:
        seed: Decides everything: the same seed gives the same run, call for call.
        trace: Whether :meth:`log` keeps lines that a human can read.
    """

    def __init__(self, seed: int, *, trace: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.traced = trace
        self.lines: list[str] = []
        self._heap: list[tuple[float, float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., object], *args: Any) -> None:
        """Call *call* at *when*, in true time; calls due at the same moment come in an order drawn from the seed."""
        self._count += 1
        if when < self.now:
            when = self.now
        heapq.heappush(self._heap, (when, self.rng.random(), self._count, call, args))

    def after(self, delay: float, call: Callable[..., object], *args: Any) -> None:
        """Call *call* in *delay* seconds of true time."""
        self.at(self.now + delay, call, *args)

    def run(self, until: float) -> None:
        """Make every call that is due up to *until*."""
        heap, take = self._heap, heapq.heappop
        while heap and heap[0][0] <= until:
            self.now, _, _, call, args = take(heap)
            self.steps += 1
            if self.steps > STEPS_MAX:
                raise RuntimeError(f"the world stands still at {self.now:g} s, calling {call}")
            call(*args)
        self.now = max(self.now, until)

    def run_until(self, condition: Callable[[], bool], *, step: float, end: float) -> bool:
        """Go on until *condition* holds, looked at every *step* seconds, or to the *end*; return whether it holds."""
        while not (holds := condition()) and self.now < end:
            self.run(min(self.now + step, end))
        return holds

    def digest(self) -> str:
        """Return what is equal for equal runs. It ends the run, as it draws."""
        return f"{self.steps:x}-{self.rng.getrandbits(64):016x}"

    def log(self, subject: str, what: str) -> None:
        """Write one line into the log. Callers ask ``traced`` first, so that untraced runs do not build the text."""
        if self.traced:
            self.lines.append(f"{self.now:10.3f}  {subject:<7} {what}")


def rate(rng: random.Random, worst: float, best: float) -> float:
    """Draw how fast a clock runs: the ends of the range are where a promise breaks first."""
    kind = rng.random()
    return worst if kind < 0.4 else best if kind < 0.6 else rng.uniform(min(worst, best), max(worst, best))


class SkewedClock:
    """A monotonic clock that reads ``offset + rate × true time``."""

    __slots__ = ("offset", "rate")

    def __init__(self, rate: float, offset: float) -> None:
        self.rate = rate
        self.offset = offset

    def reading(self, moment: float) -> float:
        """Return what the clock shows at the true *moment*."""
        return self.offset + self.rate * moment

    def moment(self, reading: float) -> float:
        """Return the true moment at which the clock shows *reading*."""
        return (reading - self.offset) / self.rate
