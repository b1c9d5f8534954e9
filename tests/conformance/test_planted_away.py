"""The suites must find stores that stay unavailable after an outage, or end their candidates and consumers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tenure._backends.memory import MemoryBroker, MemoryLeases
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, Vacant
from tenure._queue.broker import Broker, Claim
from tenure._queue.message import Delivery, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Lapsed, Renewed, Settled, Settlement
from tenure.errors import ConfigError, TenureError, Unavailable
from tenure.testing.conformance import BrokerFaultSuite, FaultyLeaseStore, LeaseFaultSuite, LeaseHarness, QueueHarness
from tests.conformance.planted import failing_tests
from tests.stores.memory.test_suites import MemoryHarness, MemoryQueueHarness

TESTS = {
    LeaseFaultSuite: ("test_the_store_is_used_again_when_it_is_back", "test_candidates_go_on_when_the_store_is_back"),
    BrokerFaultSuite: (
        "test_the_store_is_used_again_when_it_is_back",
        "test_a_consumer_goes_on_when_the_store_is_back",
    ),
}

state = {"away": False, "was away": False}  # of the test's only store


class Leases(MemoryLeases):
    """Leases in memory that can be away, as they should be."""

    def _check(self) -> None:
        if state["away"]:
            raise Unavailable("the store is away, as the test wants it")

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        self._check()
        return await super().acquire(name, holder, ttl, metadata)

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        self._check()
        return await super().renew(grants, ttl)

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        self._check()
        return await super().inspect_many(names)


class LeasesGoAwayToo(Leases):
    def _check(self) -> None:
        if state["away"]:
            self._memory.claims.clear()
        super()._check()


class LeasesAreNotFoundAgain(Leases):
    def _check(self) -> None:
        if state["was away"]:
            raise Unavailable("the store is away, as the test wants it")


class LeasesAreLost(Leases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        return [Lost(grant) for grant in grants] if state["away"] else await super().renew(grants, ttl)


class Messages(MemoryBroker):
    """A broker in memory that can be away, as it should be."""

    error: type[TenureError] = Unavailable

    def _check(self) -> None:
        if state["away"]:
            raise self.error("the broker is away, as the test wants it")

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        self._check()
        return await super().send(queue, messages)

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        self._check()
        return await super().receive(queue, limit, lock)

    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        self._check()
        return await super().renew(held, lock)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        self._check()
        return await super().settle(settlements)

    async def stats(self, queue: str) -> Stats:
        self._check()
        return await super().stats(queue)


class MessagesAreForbidden(Messages):
    error = ConfigError


class MessagesAreNotFoundAgain(Messages):
    def _check(self) -> None:
        if state["was away"]:
            raise Unavailable("the broker is away, as the test wants it")


class LocksAreLost(Messages):
    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        return [Lapsed()] * len(held) if state["away"] else await super().renew(held, lock)


Plant = type[Leases] | type[Messages]


@asynccontextmanager
async def away() -> AsyncIterator[None]:
    state["away"] = state["was away"] = True
    try:
        yield
    finally:
        state["away"] = False


def findings(plant: Plant) -> set[str]:
    """Run the suites against *plant*; return the tests that fail."""

    class PlantedLeases(MemoryHarness):
        faults = frozenset({"away"})

        async def open(self) -> FaultyLeaseStore:
            assert issubclass(plant, Leases)
            return FaultyLeaseStore(plant(self._clock, self._memory))

        def away(self):  # type: ignore[no-untyped-def]
            return away()

    class PlantedQueues(MemoryQueueHarness):
        faults = frozenset({"away"})

        async def open(self) -> Broker:
            assert issubclass(plant, Messages)
            return plant(self._clock, self._memory)

        def away(self):  # type: ignore[no-untyped-def]
            return away()

    is_store = issubclass(plant, Leases)
    suite = LeaseFaultSuite if is_store else BrokerFaultSuite

    def make_harness() -> LeaseHarness | QueueHarness:
        state["was away"] = False
        return PlantedLeases() if is_store else PlantedQueues()

    return failing_tests(make_harness, suite, is_meant=lambda name: name in TESTS[suite], in_real_time=True)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from tenure.testing._conformance.leases import faults as lease_faults
    from tenure.testing._conformance.queues import faults as queue_faults

    for module in (lease_faults, queue_faults):
        monkeypatch.setattr(module, "BACK_WITHIN", 0.5)


@pytest.mark.parametrize("store", [Leases, Messages])
def test_without_a_plant_nothing_is_found(store: Plant) -> None:
    assert findings(store) == set()


@pytest.mark.parametrize("plant", [LeasesGoAwayToo, LeasesAreLost, LocksAreLost])
def test_a_no_in_place_of_no_answer_is_found(plant: Plant) -> None:
    assert "test_the_store_is_used_again_when_it_is_back" in findings(plant)


@pytest.mark.parametrize(
    "plant", [LeasesAreLost, LeasesAreNotFoundAgain, MessagesAreForbidden, MessagesAreNotFoundAgain]
)
def test_a_store_that_ends_its_waiters_is_found(plant: Plant) -> None:
    assert len(findings(plant)) == 2
