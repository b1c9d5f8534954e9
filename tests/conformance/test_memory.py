"""Leases in memory, before the suites."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from tenure.backends.memory import TRAITS, Memory, MemoryLeases
from tenure.election.store import LeaseStore
from tenure.testing import ManualClock
from tenure.testing.conformance import LeaseFaultSuite, LeaseHarness, LeaseStoreSuite, Lossy


class MemoryHarness(LeaseHarness):
    traits = TRAITS
    faults = frozenset({"lose_answer"})

    def __init__(self) -> None:
        self._clock = ManualClock()
        self._memory = Memory()

    async def open(self) -> Lossy:
        return Lossy(MemoryLeases(self._clock, self._memory))

    async def close(self) -> None:
        self._memory.bell.close()

    async def pass_time(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def lose_answer(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        assert isinstance(store, Lossy)
        return store.lose_answer()


class TestMemoryLeases(LeaseStoreSuite):
    harness = MemoryHarness


class TestMemoryLeaseFaults(LeaseFaultSuite):
    harness = MemoryHarness
