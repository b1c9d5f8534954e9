"""The time of a test's clients: their clock is turned together with the store's, and answers may be late by it."""

from __future__ import annotations

import asyncio
import math
import time

from tenure.testing import ManualClock
from tenure.testing._conformance.harness import LeaseHarness, QueueHarness

LATE_SHARE = 0.8
"""By which share of the time that a client waits for them answers are late."""


class ClientTime:
    """The clock of clients, which is turned together with that of their store."""

    def __init__(self, harness: LeaseHarness | QueueHarness) -> None:
        self.clock = ManualClock()
        self._harness = harness
        self._turned_at = time.monotonic()

    async def pass_time(self, seconds: float) -> None:
        """Let so many seconds pass, for all of them."""
        began = time.monotonic()
        await self._harness.pass_time(seconds)
        now = time.monotonic()
        turned = 0.0 if now - began >= seconds else seconds  # else it has slept
        # The clock of a server that is turned also runs by itself.
        self.clock.advance(seconds if self._harness.is_exact else turned + now - self._turned_at)
        self._turned_at = now


class LateAnswers:
    """The answers to one client, which come some seconds late, by *clock*; at once, if those are none."""

    def __init__(self, clock: ManualClock, late_by: float) -> None:
        self._clock = clock
        self._late_by = late_by
        self._waiting: list[tuple[float, asyncio.Event]] = []

    @property
    def waiting(self) -> int:
        """How many answers are late now."""
        return len(self._waiting)

    @property
    def due(self) -> float:
        """When the next answer comes."""
        return min((at for at, _ in self._waiting), default=math.inf)

    def let_through(self) -> None:
        """Let the answers come that are due."""
        now = self._clock.now()
        for at, come in self._waiting:
            if at <= now:
                come.set()
        self._waiting = [one for one in self._waiting if one[0] > now]

    def end(self) -> None:
        """Let all answers come at once, from now on."""
        self._late_by = 0.0
        for _, come in self._waiting:
            come.set()
        self._waiting.clear()

    async def hold_back(self) -> None:
        """Return when an answer may come that the store gives now."""
        if self._late_by:
            come = asyncio.Event()
            waiting = (self._clock.now() + self._late_by, come)
            self._waiting.append(waiting)
            try:
                await come.wait()
            finally:  # whoever has asked may give up
                if waiting in self._waiting:
                    self._waiting.remove(waiting)
