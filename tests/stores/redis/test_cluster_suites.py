"""Leases and queues in a Redis Cluster, under the suites, on three servers whose clocks are moved together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from tenure._backends import redis
from tenure._backends.redis.queue import QUEUE_TRAITS
from tenure._election.store import LeaseStore
from tenure._queue.broker import Broker
from tenure._url import Url
from tenure.testing.conformance import (
    BrokerSuite,
    LeaseFaultSuite,
    LeaseHarness,
    LeaseStoreSuite,
    LiveMessagesSuite,
    PartitionSuite,
    QueueHarness,
)
from tests.servers import Redis, shared
from tests.servers.redis_cluster import RedisCluster

LONG = 200.0  # seconds of the servers' clocks, which also run by themselves


class ClusterSetup:
    """A cluster for one test."""

    async def start(self) -> None:
        self._cluster = shared(RedisCluster, turnable=True)
        self._backends: list[redis.RedisBackend] = []

    async def backend(self) -> redis.RedisBackend:
        backend = redis.open(Url.parse(self._cluster.url))
        self._backends.append(backend)
        return backend

    async def close(self) -> None:
        while self._backends:
            await self._backends.pop().close()

    async def pass_time(self, seconds: float) -> None:
        self._cluster.turn(seconds)

    @asynccontextmanager
    async def without(self, node: Redis) -> AsyncIterator[None]:
        """Make this node unavailable inside the block."""
        node.kill()
        try:
            yield
        finally:
            node.start()
            self._cluster.until_well()


class ClusterHarness(ClusterSetup, LeaseHarness):
    traits = redis.TRAITS
    ttl = LONG
    faults = frozenset({"cut_one"})

    async def open(self) -> LeaseStore:
        return (await self.backend()).leases

    def stored_apart(self, name: str, other: str) -> bool:
        return self._node_of(name) is not self._node_of(other)

    def cut_one(self, store: LeaseStore, name: str) -> AbstractAsyncContextManager[None]:
        return self.without(self._node_of(name))

    def _node_of(self, name: str) -> Redis:
        return self._cluster.node_of(f"tenure:lease:{name}")


class ClusterQueueHarness(ClusterSetup, QueueHarness):
    traits = replace(QUEUE_TRAITS, transactions=False)
    counts_bytes = True
    lock = LONG

    async def open(self) -> Broker:
        return (await self.backend()).broker


class TestClusterLeases(LeaseStoreSuite):
    harness = ClusterHarness


class TestClusterLeaseFaults(LeaseFaultSuite):
    harness = ClusterHarness


class TestClusterPartitions(PartitionSuite):
    harness = ClusterHarness


class TestClusterQueues(BrokerSuite):
    harness = ClusterQueueHarness


class TestClusterLiveMessages(LiveMessagesSuite):
    harness = ClusterQueueHarness
