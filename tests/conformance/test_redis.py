"""Leases and queues in Redis, before the suites: once on a server whose clock is turned, once on one that is hurt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar

from redis import asyncio as aioredis

from tenure._backends import redis
from tenure._backends.redis.queue import QUEUE_TRAITS
from tenure._backends.redis.scripts import LEASES, QUEUES, scripts
from tenure._election.store import LeaseStore
from tenure._queue.broker import Broker
from tenure._url import Url
from tenure.testing.conformance import (
    BrokerFaultSuite,
    BrokerSuite,
    ConsumerSuite,
    GiveUp,
    LeaseFaultSuite,
    LeaseHarness,
    LeaseStoreSuite,
    LiveMessagesSuite,
    LockExpirySuite,
    QueueHarness,
)
from tenure.testing.faultproxy import FaultProxy, late
from tests.servers import Redis, shared

PATIENCE = 8.0  # seconds; what the clients are told to wait at most: nothing here is met with silence


class House:
    """A Redis for one test, each client on a way of its own, where it can be hurt without hurting the others."""

    options: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Of the server: with others it is another one."""

    async def start(self) -> None:
        self._server = shared(Redis, turnable=True, options=self.options)
        self._ways: dict[int, FaultProxy] = {}
        self._backends: list[redis.RedisBackend] = []
        async with aioredis.Redis.from_url(self._server.url) as client:
            for files in (LEASES, QUEUES):
                for script in scripts(files).values():  # known, so that an answer is that of the script itself
                    await client.script_load(script.text)

    async def backend(self) -> redis.RedisBackend:
        way = await FaultProxy("127.0.0.1", self._server.port).__aenter__()
        backend = redis.open(Url.parse(f"redis://{way.host}:{way.port}/0?timeout={PATIENCE}"))
        self._backends.append(backend)
        await backend.leases.inspect("warm")  # connected, so that what is hurt is the question of the test
        for door in (backend.leases, backend.broker):
            self._ways[id(door)] = way
        return backend

    async def close(self) -> None:
        while self._backends:
            await self._backends.pop().close()
        for way in set(self._ways.values()):
            await way.__aexit__(None, None, None)
        self._ways.clear()

    async def pass_time(self, seconds: float) -> None:
        self._server.turn(seconds)

    @asynccontextmanager
    async def cut(self, door: LeaseStore | Broker) -> AsyncIterator[None]:
        way = self._ways[id(door)]
        way.reset()
        way.refuse()
        try:
            yield
        finally:
            way.heal()

    @asynccontextmanager
    async def lose_answer(self, door: LeaseStore | Broker) -> AsyncIterator[None]:
        way = self._ways[id(door)]
        way.lose_answers()
        try:
            yield
        finally:
            way.heal()

    def late(self, door: LeaseStore | Broker) -> AbstractAsyncContextManager[GiveUp]:
        return late(self._ways[id(door)])

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Take the right to run scripts away, and forget the scripts, as a restore does."""
        async with aioredis.Redis.from_url(self._server.url) as client:
            await client.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                await client.execute_command("ACL", "SETUSER", "default", "+@all")  # type: ignore[no-untyped-call]
                await client.script_flush()

    async def restart(self) -> None:
        """Kill the server as a crash would, and start it again on what it has written."""
        await self.close()
        self._server.kill()
        self._server.start()


LONG = 200.0  # seconds of the server's clock, which also goes by itself: what the test spends must not count


class RedisHarness(House, LeaseHarness):
    traits = redis.TRAITS
    ttl = LONG
    faults = frozenset({"lose_answer", "cut", "late", "away", "restart"})

    async def open(self) -> LeaseStore:
        return (await self.backend()).leases


class RedisQueueHarness(House, QueueHarness):
    traits = QUEUE_TRAITS
    counts_bytes = True
    lock = LONG
    faults = frozenset({"lose_answer", "cut", "late", "away", "restart"})

    async def open(self) -> Broker:
        return (await self.backend()).broker


KILLED = (("databases", "16"),)
"""What is usual, but no other test writes to such a server: when it is started again, it has little to read."""


class KilledRedisHarness(RedisHarness):
    options = KILLED


class KilledRedisQueueHarness(RedisQueueHarness):
    options = KILLED


class TestRedisLeases(LeaseStoreSuite):
    harness = RedisHarness


class TestRedisLeaseFaults(LeaseFaultSuite):
    harness = KilledRedisHarness


class TestRedisQueues(BrokerSuite):
    harness = RedisQueueHarness


class TestRedisLiveMessages(LiveMessagesSuite):
    harness = RedisQueueHarness


class TestRedisLocks(LockExpirySuite):
    harness = RedisQueueHarness


class TestRedisConsumers(ConsumerSuite):
    harness = RedisQueueHarness


class TestRedisQueueFaults(BrokerFaultSuite):
    harness = KilledRedisQueueHarness
