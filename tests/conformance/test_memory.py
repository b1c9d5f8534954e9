"""Leases and queues in memory, before the suites."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from tenure.backends.memory import TRAITS, Memory, MemoryBroker, MemoryLeases
from tenure.backends.memory.queue import QUEUE_TRAITS
from tenure.election.store import LeaseStore
from tenure.queue.broker import Broker
from tenure.testing import ManualClock
from tenure.testing.conformance import (
    BrokerFaultSuite,
    BrokerSuite,
    ConsumerSuite,
    LeaseFaultSuite,
    LeaseHarness,
    LeaseStoreSuite,
    LockSuite,
    Lossy,
    LossyBroker,
    QueueHarness,
)


class MemoryHarness(LeaseHarness):
    traits = TRAITS
    faults = frozenset({"lose_answer", "cut_one"})

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

    def cut_one(self, store: LeaseStore, name: str) -> AbstractAsyncContextManager[None]:
        assert isinstance(store, Lossy)
        return store.cut_one(name)


class TestMemoryLeases(LeaseStoreSuite):
    harness = MemoryHarness


class TestMemoryLeaseFaults(LeaseFaultSuite):
    harness = MemoryHarness


class MemoryQueueHarness(QueueHarness):
    counts_bytes = True
    traits = QUEUE_TRAITS
    faults = frozenset({"lose_answer", "cut"})

    def __init__(self) -> None:
        self._clock = ManualClock()
        self._memory = Memory()

    async def open(self) -> Broker:
        return LossyBroker.around(MemoryBroker(self._clock, self._memory))

    async def close(self) -> None:
        self._memory.bell.close()

    async def pass_time(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def lose_answer(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        assert isinstance(broker, LossyBroker)
        return broker.lose_answer()

    def cut(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        assert isinstance(broker, LossyBroker)
        return broker.cut()


class TestMemoryQueues(BrokerSuite):
    harness = MemoryQueueHarness


class TestMemoryLocks(LockSuite):
    harness = MemoryQueueHarness


class TestMemoryConsumers(ConsumerSuite):
    harness = MemoryQueueHarness


class TestMemoryQueueFaults(BrokerFaultSuite):
    harness = MemoryQueueHarness
