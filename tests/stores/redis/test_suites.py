"""Leases and queues in Redis, under the suites: on a server with a moved clock, and with faults."""

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
from tenure.testing._conformance.queues.steps import place
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
    ShortUseSuite,
    StoredAgainSuite,
)
from tenure.testing.faultproxy import Begin, Direction, FaultProxy, Kill, hold, kill, late
from tests.durations import ANSWERED_WITHIN
from tests.servers import Redis, shared


class RedisSetup:
    """A Redis for one test; each client has its own proxy, so that faults concern it alone."""

    options: ClassVar[tuple[tuple[str, str], ...]] = ()
    """The server's options; other options start another server."""

    async def start(self) -> None:
        self._server = shared(Redis, turnable=True, options=self.options)
        self._proxies: dict[int, FaultProxy] = {}
        self._backends: list[redis.RedisBackend] = []
        async with aioredis.Redis.from_url(self._server.url) as client:
            for files in (LEASES, QUEUES):
                for script in scripts(files).values():  # loaded, so that an answer is that of the script itself
                    await client.script_load(script.text)

    async def backend(self) -> redis.RedisBackend:
        proxy = await FaultProxy("127.0.0.1", self._server.port).__aenter__()
        backend = redis.open(Url.parse(f"redis://{proxy.host}:{proxy.port}/0?timeout={ANSWERED_WITHIN}"))
        self._backends.append(backend)
        await backend.leases.inspect("warm")  # connected, so that a fault concerns the test's request
        for port in (backend.leases, backend.broker):
            self._proxies[id(port)] = proxy
        return backend

    async def close(self) -> None:
        while self._backends:
            await self._backends.pop().close()
        for proxy in set(self._proxies.values()):
            await proxy.__aexit__(None, None, None)
        self._proxies.clear()

    async def pass_time(self, seconds: float) -> None:
        self._server.turn(seconds)

    @asynccontextmanager
    async def cut(self, port: LeaseStore | Broker) -> AsyncIterator[None]:
        proxy = self._proxies[id(port)]
        proxy.reset()
        proxy.refuse()
        try:
            yield
        finally:
            proxy.heal()

    @asynccontextmanager
    async def lose_answer(self, port: LeaseStore | Broker) -> AsyncIterator[None]:
        proxy = self._proxies[id(port)]
        proxy.lose_answers()
        try:
            yield
        finally:
            proxy.heal()

    def late(self, port: LeaseStore | Broker) -> AbstractAsyncContextManager[GiveUp]:
        return late(self._proxies[id(port)])

    def hold(self, port: LeaseStore | Broker, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        return hold(self._proxies[id(port)], direction=direction)

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Revoke the right to run scripts, and forget the scripts, as a restore does."""
        async with aioredis.Redis.from_url(self._server.url) as client:
            await client.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                await client.execute_command("ACL", "SETUSER", "default", "+@all")  # type: ignore[no-untyped-call]
                await client.script_flush()

    async def restart(self) -> None:
        """Kill the server, and restart it from its files."""
        await self.close()
        self._server.kill()
        self._server.start()


LONG = 200.0  # seconds of the server's clock, which also runs by itself; much longer than a test


LEASE_EDITS: dict[str, tuple[str, bytes]] = {
    "metadata that is no JSON": ("metadata", b"{"),
    "metadata of other types": ("metadata", b'{"x": [1], "y": "\\ud800"}'),
    "deep metadata": ("metadata", b"[" * 100_000),
    "metadata that is no text": ("metadata", b"\xff"),
    "the last token": ("token", b"9223372036854775807"),
    "a token as text": ("token", b"new"),
    "a token with a fraction": ("token", b"1.5"),
    "a token below zero": ("token", b"-1"),
    "a holder that is no text": ("holder", b"\xff"),
    "a resignation as text": ("resign", b"yes"),
    "an odd end": ("released", b"x y"),
}
"""What an administrator may set in the term of a lease, by what that is: the field, and its value."""

MESSAGE_EDITS: dict[str, tuple[str, bytes | None]] = {
    "a head that is no JSON": ("head", b"["),
    "a head that is no list": ("head", b"7"),
    "a head of other types": ("head", b'[7, {"x": [1], "y": null, "z": 1e999}, [1], {}]'),
    "a deep head": ("head", b"[" * 100_000),
    "a state that is none": ("state", b"x"),
    "a state without fields": ("state", b"1|2"),
    "a state of other types": ("state", b"a|b|c|d|q||"),
    "a count below zero": ("state", b"-1|0|0|0|q||"),
    "huge numbers": ("state", b"9" * 400 + b"|" + b"9" * 400 + b"|0|0|q||"),
    "a history that is none": ("history", b"x"),
    "a history of other types": ("history", b"1|x|y|z\n2|3|expired|[["),
    "a death that is no JSON": ("death", b"["),
    "a death of other types": ("death", b'[7, [], "soon"]'),
    "no body": ("body", None),
}
"""What an administrator may set of a message, by what that is: the hash, and its value; None removes it."""


class RedisHarness(RedisSetup, LeaseHarness):
    traits = redis.TRAITS
    foreign = tuple(LEASE_EDITS)
    ttl = LONG
    faults = frozenset({"lose_answer", "cut", "late", "hold", "away", "restart"})

    async def open(self) -> LeaseStore:
        return (await self.backend()).leases

    async def write_foreign(self, name: str, how: str) -> None:
        _, term = self._backends[0].leases._keys(name)
        async with aioredis.Redis.from_url(self._server.url) as client:
            await client.hset(term, *LEASE_EDITS[how])


class RedisQueueHarness(RedisSetup, QueueHarness):
    traits = QUEUE_TRAITS
    counts_bytes = True
    lock = LONG
    uses = 100
    foreign = tuple(MESSAGE_EDITS)
    edits = ("delete", "forget")
    faults = frozenset({"lose_answer", "cut", "late", "hold", "away", "restart", "kill"})

    async def open(self) -> Broker:
        return (await self.backend()).broker

    async def left_behind(self) -> dict[str, int]:
        async with aioredis.Redis.from_url(self._server.url) as client:
            connections = (await client.info("clients"))["connected_clients"]
            channels = len(await client.pubsub_channels()) + await client.pubsub_numpat()
            return {"connections": connections, "channels": channels, "keys": await client.dbsize()}

    def kill(self, broker: Broker, after: int) -> Kill:
        return kill(self._proxies[id(broker)], after=after)

    async def write_foreign(self, queue: str, how: str) -> None:
        broker, body = self._backends[0].broker, f"foreign: {how}".encode()
        await place(broker, self, queue, body)
        base, (part, value) = broker._scripts.base(queue), MESSAGE_EDITS[how]
        async with aioredis.Redis.from_url(self._server.url) as client:
            bodies = await client.hgetall(f"{base}body")
            [sequence] = [one for one, found in bodies.items() if found == body]
            await (client.hdel(base + part, sequence) if value is None else client.hset(base + part, sequence, value))

    async def edit(self, queue: str, how: str) -> None:
        scripts = self._backends[0].broker._scripts
        async with self.native() as client:
            if how == "forget":
                await client.delete(f"{scripts.base(queue)}settings")
                return
            await client.delete(*[key async for key in client.scan_iter(f"{scripts.base(queue)}*")])
            await client.srem(scripts._names, queue)

    def native(self) -> aioredis.Redis:
        """Return a client of another program."""
        return aioredis.Redis.from_url(self._server.url)


KILLED = (("databases", "16"),)
"""The default; but no other test uses such a server, so that it restarts quickly."""


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


class TestRedisShortUse(ShortUseSuite):
    harness = RedisQueueHarness


class TestRedisStoredAgain(StoredAgainSuite):
    harness = RedisQueueHarness


class TestRedisQueueFaults(BrokerFaultSuite):
    harness = KilledRedisQueueHarness
