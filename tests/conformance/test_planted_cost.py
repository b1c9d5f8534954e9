"""The suites of cost must find requests that visit more than they return."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, TypeVar

import pytest

from tenure._backends.memory import MemoryBroker, MemoryLeases
from tenure._election.store import LeaseStore
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, Released, Vacant
from tenure._queue.broker import Broker, Claim, NoSession, Selection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.message import DeadMessage, Delivery, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Lapsed, Renewed, Settled, Settlement
from tenure.testing.conformance import BrokerCostSuite, FaultyBroker, FaultyLeaseStore, LeaseCostSuite, Scale
from tests.conformance.counting import lines_run
from tests.conformance.planted import failing_tests
from tests.conformance.test_cost import CountedMemory, CountedMemoryQueues

T = TypeVar("T")

SCALE = Scale("lines", shallow=20, deep=200, noise=60, times=3)


# --- queues ---


class WalksQueues(MemoryBroker):
    """The plants below visit every message of a queue."""

    def walk(self, name: str) -> None:
        stored = self._memory.queues.get(name.removesuffix(DEAD_SUFFIX))
        for subqueue in (stored.live, stored.dead) if stored else ():
            for message in subqueue.messages.values():
                assert message.sequence


class ReceiveWalks(WalksQueues):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        self.walk(queue)
        return await super().receive(queue, limit, lock)


class RenewWalks(WalksQueues):
    async def renew(self, held: Sequence[Delivery | SessionLock], lock: float) -> Sequence[Renewed | Lapsed]:
        self.walk(held[0].queue)
        return await super().renew(held, lock)


class SettleWalks(WalksQueues):
    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        self.walk(settlements[0].delivery.queue)
        return await super().settle(settlements)


class StatsWalk(WalksQueues):
    async def stats(self, queue: str) -> Stats:
        self.walk(queue)
        return await super().stats(queue)


class SendWalks(WalksQueues):
    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        self.walk(queue)
        return await super().send(queue, messages)


class IdsAreCompared(WalksQueues):
    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        for message in messages if messages[0].id else ():
            for known in self._queue(queue).sent._until:
                assert known != message.id or known
        return await super().send(queue, messages)


class BatchesAreQuadratic(WalksQueues):
    async def send(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        for _ in messages if messages[0].id else ():
            for other in messages:
                assert other.id
        return await super().send(queue, messages)


class InboxIsWalked(WalksQueues):
    async def handled(self, queue: str, ids: Sequence[str]) -> Sequence[bool]:
        for known in self._queue(queue).inbox._until:
            assert known
        return await super().handled(queue, ids)


class AcceptLooksForTheFreeOnes(WalksQueues):
    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        for one in self._queue(queue).live.sessions.values():
            assert one.name
        return await super().accept(queue, session, lock)


class ASessionIsWalked(WalksQueues):
    async def receive_session(self, held: SessionLock, limit: int) -> Claim | Lapsed:
        for sequence in self._queue(held.queue).live.sessions[held.session].ready:
            assert sequence
        return await super().receive_session(held, limit)


class ReleaseWalks(WalksQueues):
    async def release(self, held: SessionLock) -> Settled | Lapsed:
        self.walk(held.queue)
        return await super().release(held)


class StateIsSearched(WalksQueues):
    async def read_state(self, held: SessionLock) -> bytes | Lapsed | None:
        for one in self._queue(held.queue).live.sessions.values():
            assert one.name
        return await super().read_state(held)


class QueuesAreSearched(WalksQueues):
    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        for name in self._memory.queues:
            assert name
        return await super().receive(queue, limit, lock)


class PeekWalks(WalksQueues):
    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        self.walk(queue)
        return await super().peek_dead(queue, which, limit)


class DeferredAreSearched(WalksQueues):
    async def receive_deferred(self, queue: str, sequences: Sequence[int], lock: float) -> Claim:
        self.walk(queue)
        return await super().receive_deferred(queue, sequences, lock)


# --- leases ---


class WalksLeases(MemoryLeases):
    """The plants below visit every lease."""

    def walk(self) -> None:
        for claim in self._memory.claims.values():
            assert claim.token


class AcquireWalks(WalksLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        self.walk()
        return await super().acquire(name, holder, ttl, metadata)


class RenewalWalks(WalksLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        self.walk()
        return await super().renew(grants, ttl)


class LeaseReleaseWalks(WalksLeases):
    async def release(self, grant: Grant) -> Released | Lost:
        self.walk()
        return await super().release(grant)


class InspectWalks(WalksLeases):
    async def inspect(self, name: str) -> HeldBy | Vacant:
        self.walk()
        return await super().inspect(name)


class InspectionOfManyWalks(WalksLeases):
    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        if len(names) > 1:
            self.walk()
        return await super().inspect_many(names)


class EveryTermIsKept(WalksLeases):
    terms: ClassVar[list[int]] = []

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        for term in self.terms:
            assert term
        answer = await super().acquire(name, holder, ttl, metadata)
        self.terms.append(1)
        return answer


PLANTED_QUEUES = WalksQueues.__subclasses__()
PLANTED_LEASES = WalksLeases.__subclasses__()


def findings(plant: type[MemoryBroker | MemoryLeases]) -> set[str]:
    """Run the suite of cost against *plant*; return the first test that fails."""

    class Queues(CountedMemoryQueues):
        scale = SCALE

        async def open(self) -> Broker:
            assert issubclass(plant, MemoryBroker)
            return FaultyBroker.around(plant(self._clock, self._memory))

        async def work_of(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
            return await lines_run(ask, __file__)

    class Leases(CountedMemory):
        scale = SCALE

        async def open(self) -> LeaseStore:  # type: ignore[override]
            assert issubclass(plant, MemoryLeases)
            return FaultyLeaseStore(plant(self._clock, self._memory))

        async def work_of(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
            return await lines_run(ask, __file__)

    if issubclass(plant, MemoryBroker):
        return failing_tests(Queues, BrokerCostSuite, failures=(AssertionError,), first_only=True)
    return failing_tests(Leases, LeaseCostSuite, failures=(AssertionError,), first_only=True)


@pytest.mark.parametrize("store", [MemoryBroker, MemoryLeases])
def test_without_a_plant_nothing_is_found(store: type[MemoryBroker | MemoryLeases]) -> None:
    assert findings(store) == set()


@pytest.mark.parametrize("plant", [*PLANTED_QUEUES, *PLANTED_LEASES])
def test_a_planted_bug_is_found(plant: type[MemoryBroker | MemoryLeases]) -> None:
    assert findings(plant), f"no test fails on {plant.__name__}"
