"""Tests of a Redis Cluster: slots that move, nodes that go and come back, an address that names one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from redis.crc import key_slot

import tenure
from tenure._backends import redis
from tenure._backends.redis.queue import QUEUE_TRAITS
from tenure._lease import Granted, HeldBy, NoAnswer, Vacant
from tenure._queue.message import Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, LAPSED, SETTLED, Complete, Renewed, Settlement
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.testing import until
from tests.explained import facts_by_name
from tests.servers import Redis, patient, private, shared, url_of
from tests.servers.redis_cluster import RedisCluster, client_of

TTL = 600.0  # no test takes as long, also one that waits for a node to come back
NAMES = [f"name-{number}" for number in range(12)]  # enough to lie on all three


@pytest.fixture
def cluster() -> RedisCluster:
    return shared(RedisCluster)


@pytest.fixture
def own() -> Iterator[RedisCluster]:
    with private(RedisCluster) as cluster:
        yield cluster


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[redis.RedisBackend]:
    backend = redis.open(Url.parse(patient(url)))
    try:
        yield backend
    finally:
        await backend.close()


@contextmanager
def moving(cluster: RedisCluster, key: str) -> Iterator[Callable[[], None]]:
    """Begin to move the slot of *key* to another node; yield a function that completes it."""
    slot, source = key_slot(key.encode()), cluster.node_of(key)
    target = next(node for node in cluster.nodes if node is not source)
    with client_of(source) as old, client_of(target) as new:
        ids = {node: client.execute_command("CLUSTER MYID").decode() for node, client in ((0, old), (1, new))}
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])

        def move() -> None:
            if keys := old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
                old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5_000, "KEYS", *keys)
            for client in (new, old):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])

        yield move


async def test_each_node_leads_to_all_the_others(cluster: RedisCluster) -> None:
    tokens = set()
    for node in cluster.nodes:
        async with opened(f"{node.url}?cluster=true") as backend:
            for name in NAMES:
                won = await backend.leases.acquire(f"lead-{name}", "me#1", TTL)
                assert isinstance(won, Granted)
                tokens.add(won.grant)
            assert set(await backend.leases.names()) >= {f"lead-{name}" for name in NAMES}
            grants = list(tokens)
            assert list(await backend.leases.renew(grants, TTL)) == [Granted(grant) for grant in grants]
    assert len(tokens) == len(NAMES)


async def test_scripts_that_all_nodes_forgot_are_loaded_once_for_many_leases(
    own: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(own.url) as backend:
        grants = [
            won.grant for name in NAMES if isinstance(won := await backend.leases.acquire(name, "a", TTL), Granted)
        ]
        for node in own.nodes:
            with client_of(node) as client:
                client.script_flush()
        alone: list[object] = []
        monkeypatch.setattr(backend.leases._client, "run", alone.append)
        seen = await backend.leases.inspect_many([*NAMES, "never"])
        assert [(one.name, one.token) for one in seen] == [*((one.name, one.token) for one in grants), ("never", 0)]
        assert alone == []


async def test_leases_are_inspected_on_all_nodes_or_none(own: RedisCluster) -> None:
    async with opened(f"{own.url}&timeout=1") as backend:
        for name in NAMES:
            await backend.leases.acquire(name, "a", TTL)
        own.nodes[1].pause()
        with pytest.raises(Unavailable):
            await backend.leases.inspect_many(NAMES)
        own.nodes[1].resume()
        assert all(isinstance(one, HeldBy) for one in await backend.leases.inspect_many(NAMES))


async def test_a_hint_is_received_at_its_node_and_at_no_other(cluster: RedisCluster) -> None:
    async with opened(cluster.url) as mine, opened(cluster.url) as others:
        for name in NAMES:
            hints = mine.broker.hints(name)
            await asyncio.wait_for(anext(hints), 10)  # it is subscribed
            await others.broker.send(name, [Outgoing(b"a")])
            await asyncio.wait_for(anext(hints), 10)
            changed = mine.leases.hints(name)
            await asyncio.wait_for(anext(changed), 10)
            await others.leases.acquire(name, "me#1", TTL)
            await asyncio.wait_for(anext(changed), 10)
    for node in cluster.nodes:
        with client_of(node) as client:
            info = client.execute_command("CLUSTER INFO")
            assert int(info.get("cluster_stats_messages_publish_sent", 0)) == 0
            assert client.info("commandstats")["cmdstat_spublish"]["calls"] > 0


async def test_a_consumer_is_woken_after_its_queue_has_moved_or_its_node_was_away(own: RedisCluster) -> None:
    base = "tenure:queue:{orders}:"
    target = next(node for node in own.nodes if node is not own.node_of(base))
    handled: list[bytes] = []

    async def handle(message: tenure.Message) -> None:
        handled.append(message.body)

    def listeners() -> int:
        with client_of(target) as client:
            return int(client.execute_command("PUBSUB", "SHARDNUMSUB", f"{base}live")[1])

    async with opened(own.url) as others, tenure.connect(f"{own.url}&timeout=1") as backend:
        queue = backend.queue("orders")
        consuming = asyncio.ensure_future(queue.consume(handle, poll_every=3_600.0))

        async def are_handled(*bodies: bytes) -> None:
            for body in bodies:  # it polls once an hour, so a hint wakes it for each

                async def is_sent(body: bytes = body) -> bool:
                    try:
                        await others.broker.send("orders", [Outgoing(body)])
                    except Unavailable:
                        return False
                    return True

                await until(is_sent, within=30)
                await until(lambda body=body: handled[-1:] == [body], within=30)  # type: ignore[misc]

        await are_handled(b"1", b"2")
        with moving(own, base) as move:
            move()
        await until(lambda: listeners() == 1, within=30)
        await are_handled(b"3", b"4", b"5")
        target.kill()
        target.start()
        await until(lambda: listeners() == 1, within=30)
        await are_handled(b"6", b"7", b"8")
        await queue.drain()
        await consuming


async def test_messages_of_a_complete_are_sent_first_and_only_under_the_lock(cluster: RedisCluster) -> None:
    async with opened(cluster.url) as backend:
        broker = backend.broker
        assert QUEUE_TRAITS.transactions
        assert not broker.traits.transactions
        await broker.send("orders", [Outgoing(b"1"), Outgoing(b"2")])
        one, two = (await broker.receive("orders", 2, TTL)).deliveries
        assert list(await broker.settle([Settlement(two, COMPLETE)])) == [SETTLED]
        sends = tuple((f"results-{name}", Outgoing(b"result")) for name in NAMES)
        answers = await broker.settle([Settlement(one, Complete(sends)), Settlement(two, Complete(sends))])
        assert list(answers) == [SETTLED, LAPSED]
        for name in NAMES:
            [result] = (await broker.receive(f"results-{name}", 9, TTL)).deliveries
            assert result.body == b"result"
            await broker.settle([Settlement(result, COMPLETE)])


async def test_verdicts_and_renewals_may_be_about_many_queues(cluster: RedisCluster) -> None:
    async with opened(cluster.url) as backend:
        broker, held = backend.broker, list[Delivery]()
        for name in NAMES:
            await broker.send(f"many-{name}", [Outgoing(b"a"), Outgoing(b"b")])
            held += (await broker.receive(f"many-{name}", 2, TTL)).deliveries
        mixed = held[::2] + held[1::2]
        assert LAPSED not in await broker.renew(mixed, TTL)
        assert list(await broker.settle([Settlement(one, COMPLETE) for one in mixed])) == [SETTLED] * len(mixed)


async def test_verdicts_and_renewals_of_a_node_that_is_away_cost_no_other(cluster: RedisCluster) -> None:
    gone = cluster.nodes[1]

    def is_there(delivery: Delivery) -> bool:
        return cluster.node_of(f"tenure:queue:{{{delivery.queue}}}:") is not gone

    async with opened(f"{cluster.url}&timeout=2") as backend:
        broker, held = backend.broker, list[Delivery]()
        for name in NAMES:
            await broker.send(f"away-{name}", [Outgoing(b"a")])
            held += (await broker.receive(f"away-{name}", 1, TTL)).deliveries
        verdicts = [Settlement(one, COMPLETE) for one in held]
        away = [one for one in held if not is_there(one)]
        assert 0 < len(away) < len(held)
        gone.kill()
        try:
            for one, renewed in zip(held, await broker.renew(held, TTL), strict=True):
                assert isinstance(renewed, Renewed if is_there(one) else NoAnswer)
            for one, answer in zip(held, await broker.settle(verdicts), strict=True):
                assert answer == SETTLED if is_there(one) else isinstance(answer, NoAnswer)
            with pytest.raises(Unavailable):
                await broker.renew(away, TTL)
            with pytest.raises(Unavailable):
                await broker.settle([Settlement(one, COMPLETE) for one in away])
        finally:
            gone.start()
            cluster.until_well()
        for one, answer in zip(held, await broker.settle(verdicts), strict=True):
            assert answer == (LAPSED if is_there(one) else SETTLED)


async def test_a_slot_that_moves_is_unavailable_and_then_found(own: RedisCluster) -> None:
    async with opened(own.url) as backend:
        broker = backend.broker
        await broker.send("orders", [Outgoing(b"a")])
        with moving(own, "tenure:queue:{orders}:") as move:
            with pytest.raises(Unavailable, match="moving the keys"):
                await broker.receive("orders", 1, TTL)
            move()
        [message] = (await broker.receive("orders", 1, TTL)).deliveries
        assert message.body == b"a"
        assert list(await broker.settle([Settlement(message, COMPLETE)])) == [SETTLED]


async def test_a_node_that_is_away_is_unavailable_and_found_again(own: RedisCluster) -> None:
    async with opened(f"{own.url}&timeout=2") as backend:
        tokens = {}
        for name in NAMES:
            won = await backend.leases.acquire(name, "me#1", TTL)
            assert isinstance(won, Granted)
            tokens[name] = won.grant.token
        gone = own.nodes[0]  # the one in the URL
        gone.kill()
        away = 0
        for name in NAMES:
            here = own.node_of(f"tenure:lease:{name}") is not gone
            if here:
                assert isinstance(await backend.leases.acquire(name, "me#1", TTL), Granted)
                continue
            away += 1
            with pytest.raises(Unavailable):
                await backend.leases.acquire(name, "me#1", TTL)
        assert 0 < away < len(NAMES)
        gone.start()

        async def all_well() -> bool:
            try:
                again = [await backend.leases.acquire(name, "me#1", TTL) for name in NAMES]
            except Unavailable:
                return False
            return [one.grant.token for one in again if isinstance(one, Granted)] == list(tokens.values())

        await until(all_well, within=60)


async def test_a_silent_node_makes_only_its_own_leases_unavailable(own: RedisCluster) -> None:
    silent = own.nodes[0]  # the one in the URL
    here = [name for name in NAMES if own.node_of(f"tenure:lease:{name}") is not silent]
    there = next(name for name in NAMES if name not in here)
    async with opened(f"{own.url}&timeout=2") as backend:
        for name in NAMES:
            assert isinstance(await backend.leases.acquire(name, "me#1", TTL), Granted)
        silent.pause()
        for name in here[:3]:
            with pytest.raises(Unavailable):
                await backend.leases.acquire(there, "me#1", TTL)
            assert isinstance(await backend.leases.acquire(name, "me#1", TTL), Granted)
        silent.resume()


@pytest.mark.parametrize("away", ["silent", "killed"])
async def test_a_node_that_is_away_costs_the_leases_of_no_other(own: RedisCluster, away: str) -> None:
    gone = own.nodes[1]
    async with opened(f"{own.url}&timeout=2") as backend:
        grants = []
        for name in NAMES:
            won = await backend.leases.acquire(name, "me#1", TTL)
            assert isinstance(won, Granted)
            grants.append(won.grant)
        if away == "killed":
            gone.kill()
        else:
            gone.pause()
        answers = await backend.leases.renew(grants, TTL)
        for grant, answer in zip(grants, answers, strict=True):
            if own.node_of(f"tenure:lease:{grant.name}") is gone:
                assert isinstance(answer, NoAnswer)
            else:
                assert answer == Granted(grant)
        assert sum(isinstance(answer, NoAnswer) for answer in answers) > 0
        with pytest.raises(Unavailable):
            await backend.leases.renew(
                [grant for grant in grants if own.node_of(f"tenure:lease:{grant.name}") is gone], 3.0
            )
        if away == "silent":
            gone.resume()


async def test_a_cancelled_caller_leaves_the_slot_map_unchanged(own: RedisCluster) -> None:
    slow = own.nodes[0]
    there = next(name for name in NAMES if own.node_of(f"tenure:lease:{name}") is slow)

    def looks_at_the_map() -> int:
        count = 0
        for node in own.nodes:
            with client_of(node) as client:
                count += client.info("commandstats").get("cmdstat_cluster|slots", {"calls": 0})["calls"]
        return count

    async with opened(own.url) as backend:
        for name in NAMES:
            assert isinstance(await backend.leases.acquire(name, "me#1", TTL), Granted)
        before = looks_at_the_map()
        slow.pause()
        pending = asyncio.create_task(backend.leases.acquire(there, "me#1", TTL))
        for _ in range(20):  # until it is sent
            await asyncio.sleep(0)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        slow.resume()
        for name in NAMES:
            assert isinstance(await backend.leases.acquire(name, "me#1", TTL), Granted)
        assert looks_at_the_map() == before > 0


async def test_a_cluster_without_the_option_is_named(cluster: RedisCluster) -> None:
    elsewhere = next(name for name in NAMES if cluster.node_of(f"tenure:lease:{name}") is not cluster.nodes[0])
    async with opened(cluster.nodes[0].url) as backend:
        with pytest.raises(ConfigError, match="add cluster=true"):
            await backend.leases.inspect(elsewhere)


async def test_a_server_that_is_no_cluster_is_named() -> None:
    async with opened(f"{url_of(Redis)}?cluster=true") as backend:
        with pytest.raises(ConfigError, match="remove cluster=true"):
            await backend.leases.inspect("name")
    with pytest.raises(ConfigError, match="has database 0 only"):
        redis.open(Url.parse("redis://127.0.0.1/3?cluster=true"))


async def test_doctor_reports_every_primary(cluster: RedisCluster) -> None:
    async with opened(cluster.url) as backend:
        assert isinstance(await backend.leases.inspect("name"), Vacant)
        facts = facts_by_name(await backend.describe())
    assert facts["cluster"].value == "3 primaries"
    assert {f"durability of 127.0.0.1:{node.port}" for node in cluster.nodes} <= set(facts)
