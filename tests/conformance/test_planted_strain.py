"""The capacity suites must find stores that keep what they refuse, or refuse what they must do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from tenure._backends.memory import MemoryBroker, MemoryLeases
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, Released
from tenure._queue.broker import Broker, Claim, Selection
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Lapsed, Renewed, Settled, Settlement
from tenure.errors import Unavailable
from tenure.testing.conformance import BrokerCapacitySuite, FaultyLeaseStore, LeaseCapacitySuite
from tests.conformance.planted import failing_tests
from tests.stores.memory.test_suites import MemoryHarness, MemoryQueueHarness

state = {"full": False, "cut": False}  # of the test's only store


def refuse() -> None:
    """Refuse to grow, if full."""
    if state["full"]:
        raise Unavailable("the store is full, as the test wants it")


class Bounded(MemoryBroker):
    """A broker in memory that can be full, as it should be."""

    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        refuse()
        return await super().send(queue, messages)


class KeepsTheFirst(Bounded):
    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        await MemoryBroker.send(self, queue, messages[:1])
        return await super().send(queue, messages)


class RemembersIds(Bounded):
    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        if state["full"] and messages[0].id:
            self._queue(queue).sent.note(messages[0].id, 1e12)
        return await super().send(queue, messages)


class TakesMessagesWithAnId(Bounded):
    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        return await (MemoryBroker.send(self, queue, messages) if messages[0].id else super().send(queue, messages))


class RefusesToRenew(Bounded):
    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        refuse()
        return await super().renew(held, lock)


class RefusesToReceive(Bounded):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        refuse()
        return await super().receive(queue, limit, lock)


class RefusesToSettle(Bounded):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        refuse()
        return await super().settle(settlements)


class RefusesToRelease(Bounded):
    async def release(self, held: SessionLock) -> Settled | Lapsed:
        refuse()
        return await super().release(held)


class RefusesToPurge(Bounded):
    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        refuse()
        return await super().purge(queue, which, limit)


class SettlesAndRefuses(Bounded):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        answers = await super().settle(settlements)
        refuse()
        return answers


class ClaimsAndRefuses(Bounded):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        claim = await super().receive(queue, limit, lock)
        refuse()
        return claim


class StaysCutOff(Bounded):
    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        if state["cut"]:
            raise Unavailable("it does not come back")
        return await super().send(queue, messages)


class ComesBackSlowly(Bounded):
    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        if state["cut"]:
            await asyncio.sleep(0.8)  # long beside a stall of a busy machine, which would be the rate of before
        return await super().send(queue, messages)


class RefusesLeaseRenewal(MemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        refuse()
        return await super().renew(grants, ttl)


class RefusesLeaseRelease(MemoryLeases):
    async def release(self, grant: Grant) -> Released | Lost:
        refuse()
        return await super().release(grant)


class KeepsAndRefuses(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        answer = await super().acquire(name, holder, ttl, metadata)
        if isinstance(answer, Granted):
            refuse()
        return answer


class RefusesTheNextLeader(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        if not isinstance(await self.inspect(name), HeldBy):
            refuse()
        return await super().acquire(name, holder, ttl, metadata)


class RefusesToAskToResign(MemoryLeases):
    async def ask_to_resign(self, name: str) -> bool:
        refuse()
        return await super().ask_to_resign(name)


Plant = type[MemoryBroker | MemoryLeases]
PLANTED: list[Plant] = [*Bounded.__subclasses__(), RefusesLeaseRenewal, RefusesLeaseRelease, KeepsAndRefuses]
PLANTED += [RefusesTheNextLeader, RefusesToAskToResign]


@asynccontextmanager
async def full() -> AsyncIterator[None]:
    state["full"] = True
    try:
        yield
    finally:
        state["full"] = False


def findings(plant: Plant) -> set[str]:
    """Run the capacity suites against *plant*; return the tests that fail."""

    class Queues(MemoryQueueHarness):
        faults = frozenset({"full", "slow"})

        async def open(self) -> Broker:
            assert issubclass(plant, MemoryBroker)
            return plant(self._clock, self._memory)

        def full(self):  # type: ignore[no-untyped-def]
            return full()

        @asynccontextmanager
        async def slow(self, broker: Broker, round_trip: float) -> AsyncIterator[None]:
            try:
                yield
            finally:
                state["cut"] = False

        async def reset(self, broker: Broker) -> None:
            state["cut"] = True

    class Leases(MemoryHarness):
        faults = frozenset({"full"})

        async def open(self) -> FaultyLeaseStore:
            assert issubclass(plant, MemoryLeases)
            return FaultyLeaseStore(plant(self._clock, self._memory))

        def full(self):  # type: ignore[no-untyped-def]
            return full()

    if issubclass(plant, MemoryBroker):
        return failing_tests(Queues, BrokerCapacitySuite, in_real_time=True)
    return failing_tests(Leases, LeaseCapacitySuite, in_real_time=True)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from tenure.testing._conformance.queues import capacity

    monkeypatch.setattr(capacity, "BACK_WITHIN", 1.0)


@pytest.mark.parametrize("store", [Bounded, MemoryLeases])
def test_without_a_plant_nothing_is_found(store: Plant) -> None:
    assert findings(store) == set()


@pytest.mark.parametrize("plant", [SettlesAndRefuses, ClaimsAndRefuses])
def test_a_change_made_although_it_was_refused_is_found(plant: Plant) -> None:
    assert "test_a_refusal_of_a_full_broker_has_no_effect" in findings(plant)


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found(plant: Plant) -> None:
    assert findings(plant), f"no test fails on {plant.__name__}"
