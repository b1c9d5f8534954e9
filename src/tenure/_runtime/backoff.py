"""The pauses between attempts that fail."""

from __future__ import annotations

import asyncio
import math
import random

FIRST, LONGEST = 0.05, 5.0
"""Seconds of the first pause and of the longest, unless others are given."""

STEADY = 1.0
"""Seconds that something must last so that it counts as got back: a server may accept it, and end it at once."""


class Backoff:
    """The pauses between attempts to get something back: a subscription, a connection, the deletion of a node.

    They double from the first up to the longest. Each is shortened at random, by half at most, so that those who lost a
    server together do not come back together ("equal jitter" in Marc Brooker, *Exponential Backoff and Jitter*, 2015).

    Args:
        first: Seconds of the first pause.
        longest: Seconds of the longest pause.
    """

    __slots__ = ("_first", "_longest", "_next")

    def __init__(self, first: float = FIRST, longest: float = LONGEST) -> None:
        self._first = self._next = min(first, longest)
        self._longest = longest

    def next(self, at_most: float = math.inf) -> float:
        """Return the seconds to wait now, *at_most* so many; the next pause is twice as long, up to the longest."""
        pause = min(self._next, at_most)
        self._next = min(2.0 * self._next, self._longest)
        return pause * random.uniform(0.5, 1.0)

    async def rest(self, at_most: float = math.inf) -> None:
        """Wait for the pause that is next."""
        await asyncio.sleep(self.next(at_most))

    def reset(self) -> None:
        """Begin with the first pause again: an attempt has succeeded."""
        self._next = self._first

    def reset_after(self, lasted: float) -> None:
        """Begin with the first pause again if what was got back has *lasted* long enough, in seconds."""
        if lasted >= STEADY:
            self.reset()
