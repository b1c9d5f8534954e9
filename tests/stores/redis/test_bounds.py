"""The work that one script does at most, however much waits; and claims whose answer was lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from redis import asyncio as aioredis

from tenure._backends import redis
from tenure._backends.redis import claims
from tenure._queue.broker import CLAIM_BYTES, EVERYTHING, Claim, LiveSelection, NoSession
from tenure._queue.identity import ID_MARK, dead_letters_of
from tenure._queue.message import EXPIRED, Died, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Defer, Settled, Settlement
from tenure._url import Url
from tenure.errors import Unavailable
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tests.servers import Redis, private

LOCK = 60.0
DEEP = 384
"""Three times the messages that one script handles; all of them in one script would be 2,200 commands, or more."""
MOST = 1_500
"""Commands in one script: more would take longer than some 10 ms."""


@pytest.fixture(scope="module")
def server() -> Iterator[Redis]:
    with private(Redis, turnable=True, options=[("appendfsync", "no")]) as server:
        yield server


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@asynccontextmanager
async def through_proxy(server: Redis, options: str = "") -> AsyncIterator[tuple[FaultProxy, redis.RedisBroker]]:
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        backend = redis.open(Url.parse(f"redis://{proxy.host}:{proxy.port}{options}"))
        try:
            yield proxy, backend.broker
        finally:
            await backend.close()


# --- cost --------------------------------------------------------------------------------------------------------


async def expired(server: Redis, broker: redis.RedisBroker, name: str, depth: int) -> None:
    await broker.send(name, [Outgoing(expires_in=1.0)] * depth)
    server.turn(LOCK)


async def orphaned(server: Redis, broker: redis.RedisBroker, name: str, depth: int) -> None:
    await broker.send(name, [Outgoing()] * depth)
    assert len((await broker.receive(name, depth, LOCK)).deliveries) == depth
    server.turn(LOCK + 1)


async def delayed(server: Redis, broker: redis.RedisBroker, name: str, depth: int) -> None:
    await broker.send(name, [Outgoing(delay=1.0)] * depth)
    server.turn(LOCK)


async def in_a_session(server: Redis, broker: redis.RedisBroker, name: str, depth: int) -> None:
    await broker.send(name, [Outgoing(session="s")] * depth)
    held = await broker.accept(name, None, LOCK)
    assert isinstance(held, SessionLock)
    claim = await broker.receive_session(held, depth)
    assert isinstance(claim, Claim)
    assert len(claim.deliveries) == depth
    server.turn(LOCK + 1)


VERBS: list[Callable[[redis.RedisBroker, str], Awaitable[object]]] = [
    lambda broker, name: broker.receive(name, 10, LOCK),
    lambda broker, name: broker.accept(name, None, LOCK),
    lambda broker, name: broker.stats(name),
]


async def commands_in_a_script(client: aioredis.Redis, verb: Awaitable[object]) -> float:
    """Return how many commands each script of *verb* has called."""
    await client.config_resetstat()
    await verb
    calls: dict[str, int] = {kind: one["calls"] for kind, one in (await client.info("commandstats")).items()}
    scripts = calls.pop("cmdstat_evalsha", 0) + calls.pop("cmdstat_eval", 0)
    return (sum(calls.values()) - calls.get("cmdstat_config|resetstat", 0)) / max(1, scripts)


@pytest.mark.parametrize("verb", VERBS, ids=["receive", "accept", "stats"])
@pytest.mark.parametrize("waits", [expired, orphaned, delayed, in_a_session])
async def test_no_script_does_more_the_more_waits(
    server: Redis,
    name: str,
    waits: Callable[[Redis, redis.RedisBroker, str, int], Awaitable[None]],
    verb: Callable[[redis.RedisBroker, str], Awaitable[object]],
) -> None:
    async with through_proxy(server) as (_, broker), aioredis.Redis.from_url(server.url) as client:
        await verb(broker, f"{name}-other")  # its script is known
        await waits(server, broker, name, DEEP)
        assert await commands_in_a_script(client, verb(broker, name)) < MOST


async def test_no_claim_in_a_session_does_more_the_more_has_expired_there(server: Redis, name: str) -> None:
    async with through_proxy(server) as (_, broker), aioredis.Redis.from_url(server.url) as client:
        await broker.send(name, [Outgoing(session="s", expires_in=1.0)] * DEEP)
        held = await broker.accept(name, "s", LOCK)
        assert isinstance(held, SessionLock)
        assert isinstance(await broker.receive_session(held, 1), Claim)  # its script is known
        server.turn(2.0)
        cost = await commands_in_a_script(client, broker.receive_session(held, 10))
        assert cost < MOST * 1.2  # each is removed from its session, too


@pytest.mark.parametrize("by_number", [False, True])
async def test_a_peek_at_the_first_reads_no_more_than_it_needs(server: Redis, name: str, *, by_number: bool) -> None:
    """It takes a script for due messages, one or two for the selected ones, and no more if many are delayed."""
    async with through_proxy(server) as (_, broker), aioredis.Redis.from_url(server.url) as client:
        await broker.send(name, [Outgoing(b"%d" % number, delay=1_000.0) for number in range(DEEP)])
        which = LiveSelection(sequences=frozenset(range(1, DEEP + 1)) if by_number else None)
        await broker.peek(name, which, 1)  # its scripts are known
        await client.config_resetstat()
        assert [one.body for one in await broker.peek(name, which, 1)] == [b"0"]
        calls = await client.info("commandstats")
        assert calls["cmdstat_evalsha"]["calls"] <= 4
        rare = LiveSelection(sent_before=0.0)
        assert await broker.peek(name, rare, 1) == []
        assert len(await broker.peek(name, which, DEEP - 1)) == DEEP - 1


async def test_a_purge_by_number_begins_behind_what_was_seen(server: Redis, name: str) -> None:
    async with through_proxy(server) as (_, broker):
        await broker.send(name, [Outgoing()] * 4)
        which = LiveSelection(sequences=frozenset([1, 2, 3, 4]), after=2)
        assert await broker.purge_live(name, which, dry_run=True) == 2
        assert await broker.purge_live(name, which) == 2
        assert (await broker.stats(name)).ready == 2


LOOKS: dict[str, Callable[[redis.RedisBroker, str], Awaitable[object]]] = {
    "stats": lambda broker, name: broker.stats(name),
    "peek_dead": lambda broker, name: broker.peek_dead(name, EVERYTHING, 1),
    "peek_deferred": lambda broker, name: broker.peek_deferred(name, 1),
    "dead letters": lambda broker, name: broker.receive(dead_letters_of(name), 1, LOCK),
    "deferred": lambda broker, name: broker.receive_deferred(name, [7], LOCK),
    "accept": lambda broker, name: broker.accept(name, "s", LOCK),
    "delete": lambda broker, name: broker.delete(name),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
async def test_deaths_found_by_one_process_are_reported_to_the_next_that_claims(
    server: Redis, name: str, look: Callable[[redis.RedisBroker, str], Awaitable[object]]
) -> None:
    async with through_proxy(server) as (_, broker), through_proxy(server) as (_, other):
        await broker.send(name, [Outgoing(id="ä|1", headers={"k": "v"}, expires_in=1.0), Outgoing(expires_in=1.0)])
        server.turn(LOCK)
        await look(other, name)
        died = [*(await broker.receive(name, 1, LOCK)).died, *(await other.receive(name, 1, LOCK)).died]
        assert sorted(died) == [Died(1, "ä|1", 0, EXPIRED), Died(2, f"{name}{ID_MARK}2", 0, EXPIRED)]


@pytest.mark.parametrize("verb", ["receive", "accept", "receive_session"])
async def test_deaths_in_a_lost_answer_are_reported_again_once(server: Redis, name: str, verb: str) -> None:
    async with through_proxy(server) as (proxy, broker), through_proxy(server) as (_, other):
        await broker.send(name, [Outgoing(b"lives", session="s"), Outgoing(id="late", expires_in=10.0)])
        held = await broker.accept(name, "s", 10 * LOCK)
        assert isinstance(held, SessionLock)
        await broker.receive_session(held, 0)  # so that the server knows the scripts
        await broker.receive(f"{name}-other", 1, LOCK)
        server.turn(LOCK)
        verbs: dict[str, Callable[[], Awaitable[object]]] = {
            "receive": lambda: broker.receive(name, 1, LOCK),
            "accept": lambda: broker.accept(name, None, LOCK),
            "receive_session": lambda: broker.receive_session(held, 1),
        }
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            await verbs[verb]()
        proxy.heal()
        assert (await other.receive(name, 1, LOCK)).died == ()
        died = [*(await broker.receive(name, 1, LOCK)).died, *(await broker.receive(name, 1, LOCK)).died]
        assert died == [Died(2, "late", 0, EXPIRED)]
        assert (await other.receive(name, 1, LOCK)).died == ()


async def test_each_of_many_deaths_is_reported_also_if_a_part_has_no_answer(
    server: Redis, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with through_proxy(server) as (proxy, broker):
        await expired(server, broker, name, DEEP)
        receiving, parts = broker._receiving, count()
        receive_part = receiving._receive_part

        async def cut_before_the_second(queue: str, limit: int, lock: float) -> Claim:
            if next(parts) == 1:
                proxy.refuse()
                proxy.reset()
            return await receive_part(queue, limit, lock)

        monkeypatch.setattr(receiving, "_receive_part", cut_before_the_second)
        with pytest.raises(Unavailable):
            await broker.receive(name, 10, LOCK)
        proxy.heal()
        claim = await broker.receive(name, 10, LOCK)
        assert sorted(one.sequence for one in claim.died) == list(range(1, DEEP + 1))
        assert (await broker.receive(name, 10, LOCK)).died == ()


async def test_ids_are_forgotten_a_few_at_a_time(server: Redis, name: str) -> None:
    async with through_proxy(server) as (_, broker), aioredis.Redis.from_url(server.url) as client:
        await broker.send(name, [Outgoing(id=f"{number}") for number in range(DEEP)])
        server.turn(3_600.0)
        await broker.send(name, [Outgoing(id="0")])
        assert (await broker.stats(name)).ready == DEEP + 1  # ids that are not deleted yet have expired nevertheless
        assert DEEP / 2 < await client.zcard(f"tenure:queue:{{{name}}}:ids") < DEEP


async def test_expired_messages_in_front_hide_no_others(server: Redis, name: str) -> None:
    async with through_proxy(server) as (_, broker):
        await broker.send(name, [Outgoing(expires_in=1.0)] * DEEP)
        await broker.send(name, [Outgoing(b"live")])
        server.turn(LOCK)
        [got] = (await broker.receive(name, 10, LOCK)).deliveries
        assert got.body == b"live"
        assert await broker.stats(name) == Stats(locked=1, dead=DEEP)


async def test_a_session_with_many_deliveries_is_released_whole(server: Redis, name: str) -> None:
    async with through_proxy(server) as (_, broker):
        await broker.send(name, [Outgoing(session="s")] * DEEP)
        held = await broker.accept(name, "s", LOCK)
        assert isinstance(held, SessionLock)
        await broker.receive_session(held, DEEP)
        assert await broker.release(held) == Settled()
        assert (await broker.stats(name)).ready == DEEP
        again = await broker.accept(name, None, LOCK)
        assert isinstance(again, SessionLock)
        claim = await broker.receive_session(again, 1)
        assert isinstance(claim, Claim)
        assert claim.deliveries[0].delivery_count == 1


@pytest.mark.parametrize("session", [None, "s"])
async def test_a_claim_ends_with_its_bytes(server: Redis, name: str, session: str | None) -> None:
    sizes = [10, CLAIM_BYTES // 2, CLAIM_BYTES // 2 - 10, 1, CLAIM_BYTES + 1, 1]
    async with through_proxy(server) as (_, broker):
        await broker.send(name, [Outgoing(b"x" * size, session=session) for size in sizes])
        held = await broker.accept(name, session, LOCK) if session else None
        came = []
        for _ in range(4):
            if isinstance(held, SessionLock):
                claim = await broker.receive_session(held, 10)
                assert isinstance(claim, Claim)
            else:
                claim = await broker.receive(name, 10, LOCK)
            came.append([len(one.body) for one in claim.deliveries])
            assert (claim.due_in == 0) == (sum(map(len, came)) < len(sizes))
        assert came == [sizes[:3], sizes[3:5], sizes[5:], []]


# --- claims without an answer ------------------------------------------------------------------------------------


async def test_a_claim_whose_answer_was_lost_is_given_back(server: Redis, name: str) -> None:
    async with through_proxy(server) as (proxy, broker):
        await broker.send(name, [Outgoing(b"%d" % number) for number in range(3)])
        for _ in range(20):  # more often than a message may be delivered
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                await broker.receive(name, 2, LOCK)
            proxy.heal()
            got = (await broker.receive(name, 1, LOCK)).deliveries
            assert [(one.body, one.delivery_count) for one in got] == [(b"0", 1)]
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                await broker.receive(name, 2, LOCK)
            proxy.heal()
            rest = (await broker.receive(name, 10, LOCK)).deliveries
            assert [(one.body, one.delivery_count) for one in rest] == [(b"1", 1), (b"2", 1)]
            server.turn(0.001)
            await broker.settle([Settlement(one, COMPLETE) for one in (*got, *rest)])
            await broker.send(name, [Outgoing(b"%d" % number) for number in range(3)])


async def test_a_claim_of_deferred_messages_whose_answer_was_lost_is_given_back(server: Redis, name: str) -> None:
    async with through_proxy(server) as (proxy, broker):
        await broker.send(name, [Outgoing(body) for body in (b"a", b"b", b"c")])
        got = (await broker.receive(name, 3, LOCK)).deliveries
        await broker.settle([Settlement(one, Defer()) for one in got])
        numbers = [one.sequence for one in got]
        [in_hand] = (await broker.receive_deferred(name, numbers[:1], LOCK)).deliveries
        for _ in range(10):  # more often than a message may be delivered
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                await broker.receive_deferred(name, numbers, LOCK)
            proxy.heal()
            again = (await broker.receive_deferred(name, numbers[1:], LOCK)).deliveries
            assert [(one.body, one.delivery_count) for one in again] == [(b"b", 2), (b"c", 2)]
            assert list(await broker.settle([Settlement(one, GIVE_BACK) for one in again])) == [Settled()] * 2
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            await broker.receive_deferred(name, numbers, LOCK)
        proxy.heal()
        assert (await broker.receive(name, 9, LOCK)).deliveries == ()  # any claim from the queue gives it back
        assert await broker.stats(name) == Stats(locked=1, deferred=2)
        assert list(await broker.settle([Settlement(in_hand, COMPLETE)])) == [Settled()]


async def test_a_claim_that_is_executed_late_is_given_back(server: Redis, name: str) -> None:
    async with through_proxy(server) as (proxy, broker):
        await broker.send(name, [Outgoing(b"a")])
        other = redis.open(Url.parse(server.url))
        await broker.receive(f"{name}-other", 1, LOCK)  # the script is known
        proxy.stall("up")
        client = broker._client
        patient, client.options = client.options, replace(client.options, timeout=0.3)
        with pytest.raises(Unavailable):
            await broker.receive(name, 1, LOCK)
        client.options = patient
        proxy.heal()  # now it arrives, when its sender has given up

        async def is_claimed() -> bool:
            return (await other.broker.stats(name)).locked == 1

        await until(is_claimed)
        [got] = (await broker.receive(name, 1, LOCK)).deliveries
        assert (got.body, got.delivery_count) == (b"a", 1)
        await other.close()


@pytest.mark.parametrize("session", [None, "s"])
async def test_a_claim_that_was_never_executed_gives_nothing_back(
    server: Redis, name: str, session: str | None
) -> None:
    """Not even the messages of the claim before it, which Redis still keeps as the newest of that lane."""
    async with through_proxy(server) as (proxy, broker):
        await broker.send(name, [Outgoing(b"a", session=session), Outgoing(b"b", session=session)])
        held = await broker.accept(name, session, LOCK) if session else None

        async def claim(limit: int) -> Claim:
            if not isinstance(held, SessionLock):
                return await broker.receive(name, limit, LOCK)
            found = await broker.receive_session(held, limit)
            assert isinstance(found, Claim)
            return found

        [in_hand] = (await claim(1)).deliveries
        proxy.refuse()
        proxy.reset()
        with pytest.raises(Unavailable):
            await claim(1)
        proxy.heal()
        assert [(one.body, one.delivery_count) for one in (await claim(10)).deliveries] == [(b"b", 1)]
        assert list(await broker.settle([Settlement(in_hand, COMPLETE)])) == [Settled()]


async def test_a_lost_claim_takes_nothing_from_a_later_consumer(server: Redis, name: str) -> None:
    other = redis.open(Url.parse(server.url))
    async with through_proxy(server) as (proxy, broker):
        await broker.send(name, [Outgoing(b"a", session="s")])
        old = await broker.accept(name, "s", LOCK)
        assert isinstance(old, SessionLock)
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            await broker.receive_session(old, 1)
        proxy.heal()
        assert await broker.release(old) == Settled()
        new = await other.broker.accept(name, "s", LOCK)
        assert isinstance(new, SessionLock)
        claim = await other.broker.receive_session(new, 1)
        assert isinstance(claim, Claim)
        assert (await broker.receive(name, 10, LOCK)).deliveries == ()  # it looks for the lost claim
        assert list(await other.broker.settle([Settlement(claim.deliveries[0], COMPLETE)])) == [Settled()]
    await other.close()


async def test_a_lost_claim_of_a_session_keeps_its_order(server: Redis, name: str) -> None:
    async with through_proxy(server) as (proxy, broker):
        await broker.send(name, [Outgoing(body, session="s") for body in (b"1", b"2", b"3")])
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            await broker.accept(name, None, LOCK)
        proxy.heal()
        held = await broker.accept(name, None, LOCK)
        assert isinstance(held, SessionLock)
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            await broker.receive_session(held, 2)
        proxy.heal()
        claim = await broker.receive_session(held, 10)
        assert isinstance(claim, Claim)
        assert [(one.body, one.delivery_count) for one in claim.deliveries] == [(b"1", 1), (b"2", 1), (b"3", 1)]
        assert isinstance(await broker.accept(name, None, LOCK), NoSession)


async def test_messages_of_a_lost_claim_in_a_session_are_given_back_once(server: Redis, name: str) -> None:
    async with through_proxy(server) as (proxy, broker):
        await broker.send(name, [Outgoing(b"1", session="s")])
        held = await broker.accept(name, None, LOCK)
        assert isinstance(held, SessionLock)
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            await broker.receive_session(held, 2)
        proxy.heal()
        assert (await broker.receive(name, 1, LOCK)).deliveries == ()  # this request gives it back
        assert await broker.release(held) == Settled()
        held = await broker.accept(name, None, LOCK)
        assert isinstance(held, SessionLock)
        claim = await broker.receive_session(held, 10)
        assert isinstance(claim, Claim)
        assert [one.delivery_count for one in claim.deliveries] == [1]


def test_a_lost_claim_is_looked_for_until_its_lock_must_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [100.0]
    monkeypatch.setattr(claims, "time", SimpleNamespace(monotonic=lambda: moments[-1]))
    known = claims.Claims("me")
    with known.asking(10.0) as lost:
        pass  # no answer
    for moment in (100.0, 109.0, 111.0):  # counted from the first answer after it
        moments.append(moment)
        with known.asking(10.0) as asking:
            assert [(one.lane, one.mark) for one in asking.lost] == [(lost.lane, lost.mark)]
            assert asking.lane != lost.lane  # the lost claim may still arrive, and overwrite the newest one of its lane
            asking.found = []
    with known.asking(10.0) as found:
        assert found.lost == []
    with known.asking(10.0) as asking:
        asking.found = [found.lane.encode()]
    with known.asking(10.0) as asking:
        assert asking.lost == []
        asking.found = []
