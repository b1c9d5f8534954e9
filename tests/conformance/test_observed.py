"""A store in memory whose leases end as they are observed, under the suites: so each of their tests can be passed."""

from __future__ import annotations

from tenure.testing.conformance import FaultyLeaseStore, LeaseFaultSuite, LeaseStoreSuite
from tests.conformance.observed_memory import TRAITS, ObservedMemoryLeases, Records
from tests.stores.memory.test_suites import MemoryHarness


class ObservedHarness(MemoryHarness):
    traits = TRAITS
    leases = ObservedMemoryLeases
    is_exact = False  # the client that holds a lease may renew it after its end, if nobody has taken the name since

    def __init__(self) -> None:
        super().__init__()
        self._records = Records()

    async def open(self) -> FaultyLeaseStore:
        return FaultyLeaseStore(self.leases(self._clock, self._records))

    async def close(self) -> None:
        self._records.close()
        await super().close()


class TestObservedLeases(LeaseStoreSuite):
    harness = ObservedHarness


class TestObservedLeaseFaults(LeaseFaultSuite):
    harness = ObservedHarness
