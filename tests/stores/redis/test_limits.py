"""The limits of queues in Redis: their logs, beside lost claims, a clock that was set, and older processes."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import ANY

import pytest
from redis import asyncio as aioredis

from tenure._backends import redis
from tenure._queue.broker import Claim, QueueOptions, QueueSettings
from tenure._queue.limits import Burst, allowed_by, noted
from tenure._queue.message import SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Abandon, Complete, DeadLetter, Defer, Settlement, Verdict
from tenure._url import Url
from tenure.errors import Unavailable
from tenure.testing.faultproxy import FaultProxy
from tests.servers import Redis, private

LOCK = 60.0
VERDICTS: list[Verdict] = [
    COMPLETE,
    Abandon(),
    GIVE_BACK,
    Defer(),
    DeadLetter("because"),
    Complete(remember=60.0),
    COMPLETE,
]


@pytest.fixture(scope="module")
def server() -> Iterator[Redis]:
    with private(Redis, turnable=True, options=[("appendfsync", "no")]) as server:
        yield server


@asynccontextmanager
async def opened(server: Redis) -> AsyncIterator[tuple[FaultProxy, redis.RedisBroker, aioredis.Redis]]:
    async with FaultProxy("127.0.0.1", server.port) as proxy, aioredis.Redis.from_url(server.url) as client:
        backend = redis.open(Url.parse(f"redis://{proxy.host}:{proxy.port}"))
        try:
            yield proxy, backend.broker, client
        finally:
            await backend.close()


def log_of(text: Any) -> list[Burst]:
    """Return the kept log of deliveries, in seconds."""
    bursts = (one.split("|") for one in text.decode().split())
    return [Burst(float(began) / 1_000, float(at) / 1_000, int(number)) for began, at, number in bursts]


@asynccontextmanager
async def hints_of(client: aioredis.Redis, name: str) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Return a function that counts the hints that were published since its last call."""
    channel = f"tenure:queue:{{{name}}}:live"
    async with client.pubsub(ignore_subscribe_messages=True) as pubsub:
        await pubsub.subscribe(channel)

        async def count() -> int:
            await pubsub.ping("end")
            found = 0
            while (message := await pubsub.get_message(timeout=5.0)) is None or message["type"] != "pong":
                found += message is not None
            await client.delete(f"{channel}:quiet")  # so that no further hint is suppressed
            return found

        await count()
        yield count


async def clock_of(client: aioredis.Redis) -> float:
    seconds, microseconds = await client.time()
    return float(seconds) + float(microseconds) / 1e6


async def claimed_in(broker: redis.RedisBroker, name: str, session: str, limit: int = 10) -> int:
    """Receive in a session and release it; return how many came."""
    held = await broker.accept(name, session, LOCK)
    assert isinstance(held, SessionLock)
    claim = await broker.receive_session(held, limit)
    assert isinstance(claim, Claim)
    await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
    await broker.release(held)
    return len(claim.deliveries)


@pytest.mark.parametrize("seed", range(3))
async def test_a_log_is_kept_by_the_rules(server: Redis, name: str, seed: int) -> None:
    rng = random.Random(seed)
    rate = (rng.choice([3, 20]), rng.choice([1.0, 30.0]))
    async with opened(server) as (_, broker, client):
        await broker.declare(name, {"rate": rate})
        await broker.send(name, [Outgoing()] * 900)
        log: list[Burst] = []
        delivered: list[tuple[float, int]] = []
        for _ in range(150):
            server.turn(rng.choice([0.0, rate[1] / 300, rate[1] / 20, rate[1] / 3]))
            limit = rng.randint(1, 5)
            before = await clock_of(client)
            claim = await broker.receive(name, limit, 100 * LOCK)
            after = await clock_of(client)
            kept = log_of(await client.get(f"tenure:queue:{{{name}}}:delivered") or b"")
            if claim.deliveries:
                now = kept[-1].at
                assert before - 1e-3 <= now <= after + 1e-3
                assert len(claim.deliveries) == min(limit, allowed_by(rate, log, now).most)
                log = noted(rate, log, now, len(claim.deliveries))
                assert [one.number for one in kept] == [one.number for one in log]
                assert [(one.began, one.at) for one in kept] == [
                    pytest.approx((one.began, one.at), abs=1e-5) for one in log
                ]
                delivered += [(now, len(claim.deliveries))]
            else:
                assert claim.is_held_back
                assert claim.due_in is not None
                soonest, latest = allowed_by(rate, log, after).free_in, allowed_by(rate, log, before).free_in
                assert latest is not None
                assert (soonest or 0.0) <= claim.due_in <= latest + 2e-3
        for start, _ in delivered:
            assert sum(number for at, number in delivered if start <= at < start + rate[1] - 1e-5) <= rate[0]


async def test_a_log_stays_small_and_ends_with_the_window(server: Redis, name: str) -> None:
    async with opened(server) as (_, broker, client):
        await broker.declare(name, {"rate": (1_000, 64.0), "session_rate": (9, 64.0)})
        await broker.send(name, [Outgoing()] * 400)
        delivered: list[tuple[float, float]] = []  # each in between
        for _ in range(200):
            before = await clock_of(client)
            assert len((await broker.receive(name, 1, 9 * LOCK)).deliveries) == 1
            delivered.append((before, await clock_of(client)))
            server.turn(0.5)
        base = f"tenure:queue:{{{name}}}:"
        log = log_of(await client.get(f"{base}delivered"))
        assert len(log) <= 66
        latest, last = delivered[-1]
        inside = sum(before > last - 64.0 for before, _ in delivered)
        at_most = sum(after > latest - 65.0 for _, after in delivered)  # those of one second are forgotten together
        assert inside <= sum(one.number for one in log) <= at_most
        await broker.send(name, [Outgoing(session="s")])
        assert await claimed_in(broker, name, "s") == 1
        keys = [f"{base}delivered", f"{base}delivered_in", f"{base}delivered_until"]
        assert await client.exists(*keys) == 3
        server.turn(64.5)
        assert await client.exists(*keys) == 0


async def test_sessions_whose_window_is_over_are_forgotten(server: Redis, name: str) -> None:
    async with opened(server) as (_, broker, client):
        await broker.declare(name, {"session_rate": (1, 60.0)})
        key = f"tenure:queue:{{{name}}}:delivered_in"
        sizes = []
        for number in range(90):
            await broker.send(name, [Outgoing(session=f"s{number}")])
            assert await claimed_in(broker, name, f"s{number}") == 1
            sizes.append(await client.hlen(key))
            server.turn(3.0)
        assert 18 <= max(sizes) <= 22
        await broker.delete(name, force=True)
        assert await client.keys(f"tenure:queue:{{{name}}}:delivered*") == []


async def test_what_was_delivered_in_the_future_is_of_now(server: Redis, name: str) -> None:
    """After the clock was set back, a rate holds back for no longer than its window."""
    async with opened(server) as (_, broker, _client):
        await broker.declare(name, {"rate": (2, 30.0)})
        await broker.send(name, [Outgoing()] * 4)
        assert len((await broker.receive(name, 2, 9 * LOCK)).deliveries) == 2
        server.turn(-1_000.0)
        claim = await broker.receive(name, 2, 9 * LOCK)
        assert (len(claim.deliveries), claim.is_held_back) == (0, True)
        assert claim.due_in is not None
        assert 29.0 < claim.due_in <= 30.0
        server.turn(31.0)
        try:
            assert len((await broker.receive(name, 2, 9 * LOCK)).deliveries) == 2
        finally:
            server.turn(969.0)


async def test_a_lost_claim_frees_its_places_and_its_deliveries_count(server: Redis, name: str) -> None:
    async with opened(server) as (proxy, broker, client), opened(server) as (_, other, _client):
        await broker.declare(name, {"max_locked": 2, "rate": (5, 600.0)})
        await broker.send(name, [Outgoing(b"%d" % number) for number in range(9)])
        await broker.receive(f"{name}-other", 1, LOCK)  # the script is known
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            await broker.receive(name, 2, LOCK)
        proxy.heal()
        assert (await other.receive(name, 9, LOCK)).is_held_back
        async with hints_of(client, name) as hints:
            claim = await broker.receive(name, 1, LOCK)  # gives them back, and takes one
            assert [(one.body, one.delivery_count) for one in claim.deliveries] == [(b"0", 1)]
            assert await hints() == 1
        claim = await other.receive(name, 9, LOCK)
        assert [(one.body, one.delivery_count) for one in claim.deliveries] == [(b"1", 1)]
        await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
        assert len((await broker.receive(name, 9, LOCK)).deliveries) == 1  # the fifth delivery
        claim = await broker.receive(name, 9, LOCK)
        assert (len(claim.deliveries), claim.is_held_back) == (0, True)


LIMITS: dict[str, QueueOptions] = {
    "none": {},
    "rates": {"rate": (9, 60.0), "session_rate": (9, 60.0)},
    "max_locked": {"max_locked": 99},
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
async def test_only_places_that_become_free_are_hinted(server: Redis, name: str, limits: QueueOptions) -> None:
    async with opened(server) as (_, broker, client):
        await broker.declare(name, limits)
        await broker.send(name, [Outgoing()] * 6)
        await broker.send(name, [Outgoing(session="s")])
        got = (await broker.receive(name, 6, LOCK)).deliveries
        held = await broker.accept(name, "s", LOCK)
        assert isinstance(held, SessionLock)
        claim = await broker.receive_session(held, 6)
        assert isinstance(claim, Claim)
        async with hints_of(client, name) as hints:
            for one, verdict in zip((*got, *claim.deliveries), VERDICTS, strict=False):
                await broker.settle([Settlement(one, verdict)])
                assert await hints() == int("max_locked" in limits or verdict in (GIVE_BACK, Abandon())), verdict
            await broker.settle([Settlement(got[0], COMPLETE)])  # too late
            assert await hints() == 0
            await broker.declare(name, {"lock": 20.0})
            assert await hints() == 0
            changes: list[QueueOptions] = [
                {"paused": True},
                {"paused": False},
                {"max_locked": 7},
                {"rate": (8, 1.0)},
                {"session_rate": math.inf},
            ]
            for change in changes:
                await broker.declare(name, change)
                assert await hints() == 1, change


async def test_a_message_that_waits_for_its_rate_may_expire_or_be_purged(server: Redis, name: str) -> None:
    async with opened(server) as (_, broker, _client):
        await broker.declare(name, {"session_rate": (1, 600.0)})
        await broker.send(name, [Outgoing(session="s"), Outgoing(session="s", expires_in=30.0), Outgoing(session="s")])
        assert await claimed_in(broker, name, "s") == 1
        assert (await broker.stats(name)).delayed == 1
        server.turn(31.0)
        assert await claimed_in(broker, name, "s") == 0  # now the next one waits
        stats = await broker.stats(name)
        assert (stats.ready, stats.delayed, stats.dead) == (0, 1, 1)
        server.turn(600.0)
        assert await claimed_in(broker, name, "s") == 1


async def test_places_of_many_dead_consumers_are_found_in_one_claim(server: Redis, name: str) -> None:
    """Also if more locks have ended than one script applies."""
    async with opened(server) as (_, broker, _client):
        await broker.send(name, [Outgoing()] * 500)
        assert len((await broker.receive(name, 400, LOCK)).deliveries) == 400
        await broker.declare(name, {"max_locked": 10})
        server.turn(LOCK + 1)
        assert len((await broker.receive(name, 100, LOCK)).deliveries) == 10
        assert (await broker.stats(name)).locked == 10


async def test_without_limits_a_claim_or_a_verdict_costs_no_more(server: Redis, name: str) -> None:
    async with opened(server) as (_, broker, client):
        await broker.send(name, [Outgoing()] * 20)
        for one in (await broker.receive(name, 2, LOCK)).deliveries:  # the scripts are known
            await broker.settle([Settlement(one, COMPLETE)])
        await client.config_resetstat()
        claim = await broker.receive(name, 10, LOCK)
        await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
        calls = {kind: one["calls"] for kind, one in (await client.info("commandstats")).items()}
        settings = calls["cmdstat_hget"] + calls["cmdstat_hmget"]
        assert settings <= 8  # two layouts, the generation, two times the limits, states twice, bodies
        assert "cmdstat_zcard" not in calls
        assert "cmdstat_publish" not in calls
        assert not await client.exists(f"tenure:queue:{{{name}}}:delivered")


async def test_settings_are_kept_as_they_were_given(server: Redis, name: str) -> None:
    async with opened(server) as (_, broker, client):
        declared = await broker.declare(
            name, {"max_locked": 2**31 - 1, "rate": (7, 60), "session_rate": (1, 0.001), "paused": True}
        )
        assert declared == QueueSettings(max_locked=2**31 - 1, rate=(7, 60.0), session_rate=(1, 0.001), paused=True)
        assert isinstance(declared.max_locked, int)
        assert await client.hgetall(f"tenure:queue:{{{name}}}:settings") == {
            b"made": ANY,
            b"max_locked": b"2147483647",
            b"rate": b"7/60",
            b"session_rate": b"1/0.001",
            b"paused": b"1",
        }
