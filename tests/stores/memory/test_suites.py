"""Leases and queues in memory, under the suites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager

from tenure._backends.memory import TRAITS, Memory, MemoryBroker, MemoryLeases
from tenure._backends.memory.queue import QUEUE_TRAITS
from tenure._election.store import LeaseStore
from tenure._queue.broker import Broker
from tenure.testing import ManualClock
from tenure.testing.conformance import (
    BrokerFaultSuite,
    BrokerSuite,
    ConsumerSuite,
    FaultyBroker,
    FaultyLeaseStore,
    GiveUp,
    LeaseFaultSuite,
    LeaseHarness,
    LeaseStoreSuite,
    LiveMessagesSuite,
    LockExpirySuite,
    QueueHarness,
    ShortUseSuite,
    StoredAgainSuite,
)
from tenure.testing.faultproxy import Begin, Direction, Kill


class OldClock(ManualClock):
    """A clock that requests which were given up see as it was when they were sent."""

    def back_to_now(self) -> AbstractContextManager[None]:
        """Return a block inside which it shows the time of this call."""
        return self._back_to(self._now)

    @contextmanager
    def _back_to(self, then: float) -> Iterator[None]:
        now, self._now = self._now, then
        try:
            yield
        finally:
            self._now = now


class MemoryHarness(LeaseHarness):
    traits = TRAITS
    is_exact = True
    faults = frozenset({"lose_answer", "cut", "cut_one", "late", "hold"})

    def __init__(self) -> None:
        self._clock = OldClock()
        self._memory = Memory()

    async def open(self) -> FaultyLeaseStore:
        return FaultyLeaseStore(MemoryLeases(self._clock, self._memory))

    async def close(self) -> None:
        self._memory.notifier.close()

    async def pass_time(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def lose_answer(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        assert isinstance(store, FaultyLeaseStore)
        return store.lose_answer()

    def cut(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        assert isinstance(store, FaultyLeaseStore)
        return store.cut()

    def cut_one(self, store: LeaseStore, name: str) -> AbstractAsyncContextManager[None]:
        assert isinstance(store, FaultyLeaseStore)
        return store.cut_one(name)

    def late(self, store: LeaseStore) -> AbstractAsyncContextManager[GiveUp]:
        assert isinstance(store, FaultyLeaseStore)
        return store.late(self._clock.back_to_now())

    def hold(self, store: LeaseStore, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        assert isinstance(store, FaultyLeaseStore)
        return store.hold(direction)


class TestMemoryLeases(LeaseStoreSuite):
    harness = MemoryHarness


class TestMemoryLeaseFaults(LeaseFaultSuite):
    harness = MemoryHarness


class MemoryQueueHarness(QueueHarness):
    is_exact = True
    counts_bytes = True
    traits = QUEUE_TRAITS
    faults = frozenset({"lose_answer", "cut", "late", "hold", "kill"})
    uses = 1_000

    def __init__(self) -> None:
        self._clock = OldClock()
        self._memory = Memory()

    async def open(self) -> Broker:
        return FaultyBroker.around(MemoryBroker(self._clock, self._memory))

    async def close(self) -> None:
        self._memory.notifier.close()

    async def pass_time(self, seconds: float) -> None:
        self._clock.advance(seconds)

    async def left_behind(self) -> dict[str, int]:
        queues = self._memory.queues.values()
        parts = [part for queue in queues for part in (queue.live, queue.dead)]
        return {
            "entries": sum(len(part.ready) + len(part.oldest) + len(part.due) for part in parts),
            "sessions": sum(len(part.sessions) + len(part.free_sessions) for part in parts),
            "listeners": sum(one() is not None for refs in self._memory.notifier._listeners.values() for one in refs),
        }

    def lose_answer(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        assert isinstance(broker, FaultyBroker)
        return broker.lose_answer()

    def cut(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        assert isinstance(broker, FaultyBroker)
        return broker.cut()

    def kill(self, broker: Broker, after: int) -> Kill:
        assert isinstance(broker, FaultyBroker)
        return broker.kill(after)

    def late(self, broker: Broker) -> AbstractAsyncContextManager[GiveUp]:
        assert isinstance(broker, FaultyBroker)
        return broker.late(self._clock.back_to_now())

    def hold(self, broker: Broker, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        assert isinstance(broker, FaultyBroker)
        return broker.hold(direction)


class TestMemoryQueues(BrokerSuite):
    harness = MemoryQueueHarness


class TestMemoryLiveMessages(LiveMessagesSuite):
    harness = MemoryQueueHarness


class TestMemoryLocks(LockExpirySuite):
    harness = MemoryQueueHarness


class TestMemoryConsumers(ConsumerSuite):
    harness = MemoryQueueHarness


class TestMemoryShortUse(ShortUseSuite):
    harness = MemoryQueueHarness


class TestMemoryStoredAgain(StoredAgainSuite):
    harness = MemoryQueueHarness


class TestMemoryQueueFaults(BrokerFaultSuite):
    harness = MemoryQueueHarness
