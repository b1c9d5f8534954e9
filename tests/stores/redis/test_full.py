"""A Redis without memory left, under ``noeviction``: it accepts no message, and does everything else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
from redis import asyncio as aioredis

from tenure._backend import Backend
from tenure._backends import redis
from tenure._diagnosis import TRIAL
from tenure._lease import Granted, Released
from tenure._queue.broker import EVERYTHING, Claim
from tenure._queue.message import Delivery, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    COMPLETE,
    GIVE_BACK,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Lapsed,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure._url import Url
from tenure.errors import Unavailable
from tests.explained import facts_by_name
from tests.servers import Redis, private

TTL = 60.0  # nothing here waits for its end


@pytest.fixture(scope="module")
def server() -> Iterator[Redis]:
    with private(Redis) as server:
        yield server


@pytest.fixture
async def backend(server: Redis) -> AsyncIterator[redis.RedisBackend]:
    backend = redis.open(Url.parse(server.url))
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def full(server: Redis) -> AsyncIterator[aioredis.Redis]:
    """Let the server have no free memory inside the block."""
    async with aioredis.Redis.from_url(server.url) as client:
        await client.config_set("maxmemory", "1")
        try:
            yield client
        finally:
            await client.config_set("maxmemory", "0")


@pytest.mark.parametrize(
    "batch",
    [
        [Outgoing(b"plain")],
        [Outgoing(b"named", id="one"), Outgoing(b"named", id="two")],
        [Outgoing(b"late", delay=TTL), Outgoing(session="s")],
    ],
    ids=["plain", "named", "late"],
)
@pytest.mark.parametrize("queue", ["known", "new"])
async def test_no_message_is_accepted(
    server: Redis, backend: redis.RedisBackend, batch: Sequence[Outgoing], queue: str
) -> None:
    broker = backend.broker
    async with aioredis.Redis.from_url(server.url) as client:
        await client.flushall()
        await broker.send("known", [Outgoing(b"before", id="old")])
        before = await everything(client)
        async with full(server):
            for _ in range(3):
                with pytest.raises(Unavailable, match="out of memory, and changed nothing"):
                    await broker.send(queue, batch)
        assert await everything(client) == before


async def everything(client: aioredis.Redis) -> dict[object, object]:
    """Return all keys and values, without those that suppress hints: they expire."""
    keys = [key for key in await client.keys() if ":quiet" not in str(key)]
    return {key: await client.dump(key) for key in keys}


async def test_an_election_goes_on(server: Redis, backend: redis.RedisBackend) -> None:
    leases = backend.leases
    won = await leases.acquire("full", "ann#1", TTL)
    assert isinstance(won, Granted)
    async with full(server):
        assert list(await leases.renew([won.grant], TTL)) == [won]
        assert await leases.acquire("full", "ann#1", TTL) == won
        assert await leases.ask_to_resign("full")
        assert await leases.release(won.grant) == Released(won.grant)
        again = await leases.acquire("full", "bob#1", TTL, {"at": "home"})
        assert isinstance(again, Granted)
        assert again.grant.token == won.grant.token + 1
        assert isinstance(await leases.acquire("another, while it is full", "ann#1", TTL), Granted)


async def test_queues_are_drained(server: Redis, backend: redis.RedisBackend) -> None:
    broker = backend.broker
    await broker.send("full", [Outgoing(b"%d" % number) for number in range(7)])
    verdicts: list[Verdict] = [
        COMPLETE,
        Complete(sends=(("full-results", Outgoing(b"instead")),), remember=TTL),
        Abandon(TTL),
        Abandon(),
        GIVE_BACK,
        Defer(),
        DeadLetter("bad"),
    ]
    async with full(server):
        await broker.declare("full", {"lock": 10.0})
        got = (await broker.receive("full", 10, TTL)).deliveries
        assert all(isinstance(one, Renewed) for one in await broker.renew(got, TTL))
        settlements = [Settlement(*pair) for pair in zip(got, verdicts, strict=True)]
        assert list(await broker.settle(settlements)) == [Settled()] * 7
        stats = await broker.stats("full")
        assert (stats.ready, stats.delayed, stats.deferred, stats.dead) == (2, 1, 1, 1)
        [deferred] = await broker.peek_deferred("full", 10)
        await settled(broker, await broker.receive_deferred("full", [deferred.sequence], TTL))
        assert await broker.redrive("full", EVERYTHING, None) == 1
        await settled(broker, await broker.receive("full", 10, TTL))
        await settled(broker, await broker.receive("full-results", 10, TTL))
        assert await broker.stats("full") == Stats(delayed=1)


async def test_sessions_are_drained(server: Redis, backend: redis.RedisBackend) -> None:
    broker = backend.broker
    await broker.send("sessions", [Outgoing(b"a", session="s"), Outgoing(b"b", session="s")])
    async with full(server):
        held = await broker.accept("sessions", None, TTL)
        assert isinstance(held, SessionLock)
        assert await broker.write_state(held, b"state") == Settled()
        claim = await broker.receive_session(held, 1)
        assert not isinstance(claim, Lapsed)
        await settled(broker, claim)
        assert all(isinstance(one, Renewed) for one in await broker.renew([held], TTL))
        assert await broker.release(held) == Settled()
        assert (await broker.stats("sessions")).ready == 1


async def settled(broker: redis.RedisBroker, claim: Claim) -> Sequence[Delivery]:
    """Complete all of *claim*."""
    got = claim.deliveries
    assert got
    assert list(await broker.settle([Settlement(one, COMPLETE) for one in got])) == [Settled()] * len(got)
    return got


async def test_doctor_says_so(server: Redis, backend: redis.RedisBackend) -> None:
    async with full(server):
        memory = facts_by_name(await backend.describe())["memory"]
        async with Backend(server.url) as reached:
            found = await reached.diagnose(write=True)
    assert isinstance(found.failure, Unavailable)
    assert "maxmemory" in str(found.failure)
    async with Backend(server.url) as reached:
        assert (await reached.diagnose(write=True)).failure is None
        assert [name for name in await reached.queues() if name.startswith(TRIAL)] == []
    assert "maxmemory 1" in memory.value
    assert "refuses" in memory.advice
