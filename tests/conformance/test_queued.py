"""A queued store in memory, under the suites: so each of their tests can be passed."""

from __future__ import annotations

from tenure.testing.conformance import FaultyLeaseStore, LeaseFaultSuite, LeaseQueueSuite, LeaseStoreSuite
from tests.conformance.queued_memory import TRAITS, QueuedMemoryLeases, Queues
from tests.stores.memory.test_suites import MemoryHarness


class QueuedHarness(MemoryHarness):
    traits = TRAITS
    leases = QueuedMemoryLeases

    def __init__(self) -> None:
        super().__init__()
        self._queues = Queues()

    async def open(self) -> FaultyLeaseStore:
        return FaultyLeaseStore(self.leases(self._clock, self._queues))

    async def close(self) -> None:
        self._queues.notifier.close()
        await super().close()


class TestQueuedLeases(LeaseStoreSuite):
    harness = QueuedHarness


class TestQueuedLeaseFaults(LeaseFaultSuite):
    harness = QueuedHarness


class TestQueuedWaiting(LeaseQueueSuite):
    harness = QueuedHarness
