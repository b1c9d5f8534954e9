"""Stores that are full, and stores that were cut off on a slow link."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis import asyncio as aioredis

from tenure.queue.broker import Broker
from tenure.testing.conformance import BrokerStrainSuite, LeaseStrainSuite
from tenure.testing.faultproxy import FaultProxy
from tests.conformance.test_azure import AzureQueueHarness
from tests.conformance.test_redis import House, RedisHarness, RedisQueueHarness


@asynccontextmanager
async def slowed(proxies: list[FaultProxy], round_trip: float) -> AsyncIterator[None]:
    """Delay both ways through *proxies* inside the block."""
    for proxy in proxies:
        proxy.delay(round_trip / 2)
    try:
        yield
    finally:
        for proxy in proxies:
            proxy.heal()


# --- Redis ---


class Crowded(House):
    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        async with aioredis.Redis.from_url(self._server.url) as client:
            await client.config_set("maxmemory", "1")
            try:
                yield
            finally:
                await client.config_set("maxmemory", "0")

    @asynccontextmanager
    async def slow(self, broker: Broker, round_trip: float) -> AsyncIterator[None]:
        async with slowed([self._ways[id(broker)]], round_trip):
            yield

    async def reset(self, broker: Broker) -> None:
        self._ways[id(broker)].reset()


class StrainedRedis(Crowded, RedisHarness):
    faults = frozenset({"full"})


class StrainedRedisQueues(Crowded, RedisQueueHarness):
    faults = frozenset({"full", "slow"})


class TestRedisLeaseStrain(LeaseStrainSuite):
    harness = StrainedRedis


class TestRedisQueueStrain(BrokerStrainSuite):
    harness = StrainedRedisQueues


# --- Azure Storage: nobody fills it ---


class StrainedAzureQueues(AzureQueueHarness):
    faults = frozenset({"slow"})

    @asynccontextmanager
    async def slow(self, broker: Broker, round_trip: float) -> AsyncIterator[None]:
        async with slowed([*self._ways[broker].proxies], round_trip):
            yield

    async def reset(self, broker: Broker) -> None:
        for proxy in self._ways[broker].proxies:
            proxy.reset()


class TestAzureQueueStrain(BrokerStrainSuite):
    harness = StrainedAzureQueues
