"""Tests of Redis alone: Locks of redis-py, slots, rights, certificates, replicas, memory limits, subscriptions."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from redis import asyncio as aioredis
from redis.crc import key_slot
from redis.exceptions import LockNotOwnedError

import tenure
from tenure._backends import redis
from tenure._backends.redis import wake
from tenure._backends.redis.address import address_of
from tenure._backends.redis.connections import REFUSALS
from tenure._election.store import LeaseStore
from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer, Released, Vacant
from tenure._opened import Fact
from tenure._queue.broker import EVERYTHING, Broker
from tenure._queue.message import SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Abandon, Complete, DeadLetter, Renewed, Settled, Settlement
from tenure._runtime import shared_hints
from tenure._secret import Secret
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tests.docs.pages import commands
from tests.explained import facts_by_name
from tests.servers import Authority, Redis, patient, private, shared, url_of

TTL = 60.0  # nothing here waits for its end, and no test takes as long


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[redis.RedisBackend]:
    backend = redis.open(Url.parse(patient(url)))
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def native(url: str) -> AsyncIterator[aioredis.Redis]:
    client = aioredis.Redis.from_url(url)
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def through_proxy(server: Redis, options: str = "") -> AsyncIterator[tuple[FaultProxy, redis.RedisBackend]]:
    """Open a backend through a proxy that can inject faults."""
    async with (
        FaultProxy("127.0.0.1", server.port) as proxy,
        opened(f"redis://{proxy.host}:{proxy.port}{options}") as backend,
    ):
        yield proxy, backend


async def won(store: LeaseStore, name: str, holder: str = "ann#1") -> Grant:
    answer = await store.acquire(name, holder, TTL)
    assert isinstance(answer, Granted), answer
    return answer.grant


@pytest.fixture
def url() -> str:
    return url_of(Redis)


async def test_requests_get_connections_in_the_order_of_their_arrival(url: str) -> None:
    client = redis.client.Client(address_of(Url.parse(url), redis.Options()), redis.Options(connections=1))
    answered = [0] * 4
    lead = 0

    async def fetch(number: int) -> None:
        nonlocal lead
        for _ in range(20):
            await client.command("PING")
            answered[number] += 1
            lead = max(lead, answered[number] - min(answered))

    try:
        async with asyncio.timeout(30):
            await asyncio.gather(*(fetch(number) for number in range(len(answered))))
    finally:
        await client.close()
    assert lead == 1, f"one was {lead} answers ahead of another"


async def test_a_connection_that_can_not_be_opened_takes_no_turn(url: str) -> None:
    async with FaultProxy("127.0.0.1", shared(Redis).port) as proxy:
        options = redis.Options(connections=2)
        client = redis.client.Client(address_of(Url.parse(f"redis://{proxy.host}:{proxy.port}"), options), options)
        try:
            proxy.refuse()
            for _ in range(4):
                with pytest.raises(Unavailable):
                    await client.command("PING")
            proxy.heal()
            assert await client.command("PING")
            cancelled = [asyncio.create_task(client.command("PING")) for _ in range(6)]
            await asyncio.sleep(0)
            for one in cancelled:
                one.cancel()
            await asyncio.wait(cancelled)
            assert await asyncio.gather(*(client.command("PING") for _ in range(6)))
        finally:
            await client.close()


async def test_connections_that_lead_to_no_primary_are_closed_at_once_if_they_are_idle(url: str) -> None:
    """Not when requests over them must have ended, as of a pool whose connections are in use."""
    options = redis.Options(connections=4, timeout=60)
    client = redis.client.Client(address_of(Url.parse(url), options), options)
    try:
        await asyncio.gather(*(client.command("PING") for _ in range(4)))
        connections = client._connections()
        idle = list(connections.redis.connection_pool._available_connections)
        assert len(idle) == 4
        for _ in range(REFUSALS):
            connections.refused("acquire")
        await until(lambda: not any(one.is_connected for one in idle))
        assert await client.command("PING")
    finally:
        await client.close()


# --- beside redis-py's Lock --------------------------------------------------------------------------------------


async def test_a_lock_keeps_a_candidate_out(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as client:
        first = await won(backend.leases, name)
        await backend.leases.release(first)
        lock = client.lock(f"tenure:lease:{name}", timeout=60)
        assert await lock.acquire(blocking=False)
        seen = await backend.leases.acquire(name, "ann#2", TTL)
        assert isinstance(seen, HeldBy)
        assert (seen.holder.encode(), seen.token) == (lock.local.token, first.token)
        assert seen.remaining == pytest.approx(60, abs=5)
        assert await backend.leases.ask_to_resign(name) is False  # a Lock can't resign
        [shown] = await backend.leases.inspect_many([name])
        assert isinstance(shown, HeldBy)
        assert replace(shown, remaining=seen.remaining) == seen
        assert list(await backend.leases.renew([first], TTL)) == [Lost(first)]
        assert await backend.leases.release(first) == Lost(first)
        await lock.release()
        assert (await won(backend.leases, name, "ann#2")).token > first.token


async def test_a_lock_that_follows_a_candidate_is_not_shown_as_asked_to_resign(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as client:
        await won(backend.leases, name)
        assert await backend.leases.ask_to_resign(name) is True
        await client.delete(f"tenure:lease:{name}")  # as if it had expired
        assert await client.lock(f"tenure:lease:{name}", timeout=60).acquire(blocking=False)
        seen = await backend.leases.inspect(name)
        assert isinstance(seen, HeldBy)
        assert not seen.resign_asked


async def test_a_thousand_leases_are_inspected_in_one_round_trip(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reads their keys, and little else: each member that shares partitions asks every few seconds."""
    async with opened(url) as backend, native(url) as server:
        client, sent = backend.leases._client, 0

        async def received() -> int:
            return int((await server.info("stats"))["total_net_input_bytes"])

        async def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal sent
            sent += 1
            return await redis.client.Client.send(client, *arguments, **options)

        monkeypatch.setattr(client, "send", counted)
        names = [f"{name}-{number}" for number in range(1_000)]
        await backend.leases.inspect_many(names[:1])  # which connects, and makes the script known
        sent, before = 0, await received()
        assert await backend.leases.inspect_many(names) == [Vacant(each) for each in names]
        assert sent == 1
        keys = sum(len(f"tenure:lease:{each}") for each in names)
        assert keys < await received() - before < keys + 10 * len(names) + 2_000
        assert await backend.leases.inspect_many([]) == []
        assert sent == 1


async def test_a_candidate_keeps_a_lock_out(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as client:
        grant = await won(backend.leases, name)
        lock = client.lock(f"tenure:lease:{name}", timeout=60)
        assert not await lock.acquire(blocking=False)
        await backend.leases.release(grant)
        assert await lock.acquire(blocking=False)


async def test_a_lock_without_an_end_is_held_for_ever(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as client:
        assert await client.lock(f"tenure:lease:{name}").acquire()
        seen = await backend.leases.inspect(name)
        assert isinstance(seen, HeldBy)
        assert seen.remaining is None


async def test_a_lock_that_ended_can_not_release_the_lease_after_it(name: str) -> None:
    server = shared(Redis, turnable=True)
    async with opened(server.url) as backend, native(server.url) as client:
        lock = client.lock(f"tenure:lease:{name}", timeout=5)
        await lock.acquire()
        server.turn(6)
        grant = await won(backend.leases, name)
        with pytest.raises(LockNotOwnedError):
            await lock.release()
        assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]


async def test_without_a_prefix_the_key_is_the_name(url: str, name: str) -> None:
    async with opened(f"{url}?lease_prefix=") as backend, native(url) as client:
        await won(backend.leases, name)
        assert not await client.lock(name, timeout=60).acquire(blocking=False)
        assert await client.get(name) == b"ann#1"


# --- late requests -----------------------------------------------------------------------------------------------


async def test_a_late_renewal_shortens_no_lease(url: str, name: str) -> None:
    async with opened(url) as backend:
        leases = backend.leases
        grant = await won(leases, name)
        assert list(await leases.renew([grant], TTL / 4)) == [Granted(grant)]
        assert await leases.acquire(name, grant.holder, TTL / 4) == Granted(grant)
        seen = await leases.inspect(name)
        assert isinstance(seen, HeldBy)
        assert seen.remaining is not None
        assert seen.remaining > TTL / 2


async def test_a_late_renewal_shortens_no_lock(url: str, name: str) -> None:
    async with opened(url) as backend:
        broker = backend.broker
        await broker.send(name, [Outgoing(), Outgoing(session="s")])
        [delivery] = (await broker.receive(name, 1, TTL)).deliveries
        session = await broker.accept(name, "s", TTL)
        assert isinstance(session, SessionLock)
        for held in (delivery, session):
            [renewed] = await broker.renew([held], TTL / 4)
            assert isinstance(renewed, Renewed)
            assert renewed.locked_until == held.locked_until


# --- slots of a cluster ------------------------------------------------------------------------------------------


def slot(key: bytes | str) -> int:
    return int(key_slot(key if isinstance(key, bytes) else key.encode()))


@pytest.mark.parametrize("odd", ["plain", "{a}b", "a{b", "a}b{c}", "}{", "{}", "per%cent"])
async def test_the_keys_of_one_script_are_in_one_slot(odd: str) -> None:
    with private(Redis) as server:
        async with opened(server.url) as backend, native(server.url) as client:
            await won(backend.leases, odd)
            lists = {b"tenure:leases", b"tenure:queues"}
            assert len({slot(key) for key in set(await client.keys()) - lists}) == 1
            await client.flushall()
            broker = backend.broker
            await broker.declare(odd, {})
            sent = [
                Outgoing(b"1", id="x", headers={"a": 1}),
                Outgoing(delay=9),
                Outgoing(expires_in=9),
                Outgoing(session="s"),
            ]
            await broker.send(odd, sent)
            claim = await broker.receive(odd, 1, TTL)
            await broker.settle([Settlement(claim.deliveries[0], DeadLetter("why"))])
            assert await broker.accept(odd, None, TTL)
            keys = set(await client.keys()) - lists
            assert len(keys) > 8
            assert len({slot(key) for key in keys}) == 1
            assert await broker.names() == [odd]


# --- rights and certificates -------------------------------------------------------------------------------------


async def test_a_wrong_password_is_reported_at_once_and_not_shown() -> None:
    with private(Redis, password="s3cret") as server:
        async with opened(server.url) as backend, native(server.url) as client:
            grant = await won(backend.leases, "name")
            for wrong in (server.url.replace("s3cret", "gu3ss"), server.url.replace(":s3cret@", "")):
                async with opened(wrong) as other:
                    with pytest.raises(ConfigError, match="password") as caught:
                        await other.leases.inspect("name")
                    assert "gu3ss" not in str(caught.value)
            # A password that worked may work again: the server is being changed.
            await client.config_set("requirepass", "n3w")
            await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # type: ignore[no-untyped-call]
            with pytest.raises(Unavailable, match="password"):
                await backend.leases.renew([grant], TTL)
            await client.config_set("requirepass", "s3cret")
            assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]


async def test_missing_rights_are_reported_and_nothing_is_changed(url: str, name: str) -> None:
    async with native(url) as client:
        await client.acl_setuser(  # may read everything, and run scripts, and change nothing
            f"u-{name}",
            enabled=True,
            passwords=["+pw"],
            categories=["+@read", "+@scripting", "+@connection"],
            keys=["*"],
        )
        theirs = url.replace("redis://", f"redis://u-{name}:pw@")
        async with opened(theirs) as backend, opened(url) as other:
            with pytest.raises(ConfigError, match=r"docs/redis\.md"):
                await backend.leases.acquire(name, "ann#1", TTL)
            with pytest.raises(ConfigError, match="permit"):
                await backend.broker.send(name, [Outgoing()])
            assert await other.leases.inspect(name) == Vacant(name)
            assert (await other.broker.stats(name)).ready == 0


async def test_rights_that_are_revoked_for_a_while_end_nothing(url: str, name: str) -> None:
    async with native(url) as client:
        await client.execute_command("ACL", "SETUSER", f"u-{name}", "on", ">pw", "~*", "&*", "+@all")  # type: ignore[no-untyped-call]
        async with opened(url.replace("redis://", f"redis://u-{name}:pw@")) as backend:
            grant = await won(backend.leases, name)
            await client.execute_command("ACL", "SETUSER", f"u-{name}", "-evalsha")  # type: ignore[no-untyped-call]
            for send in (lambda: backend.leases.renew([grant], TTL), lambda: backend.broker.receive(name, 1, TTL)):
                with pytest.raises(Unavailable, match=r"docs/redis\.md.*worked before"):
                    await send()
            await client.execute_command("ACL", "SETUSER", f"u-{name}", "+evalsha", "-info")  # type: ignore[no-untyped-call]
            assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]
            assert "permit" in advice(await backend.describe())["server's state"]


ACL = commands("docs/redis.md", "Rights", "ACL SETUSER tenure on").partition(">password ")[2]


async def test_the_rights_that_the_docs_name_are_enough(url: str, name: str) -> None:
    async with native(url) as client:
        await client.execute_command("ACL", "SETUSER", f"u-{name}", "on", ">pw", *ACL.split())  # type: ignore[no-untyped-call]
    async with opened(url.replace("redis://", f"redis://u-{name}:pw@")) as backend:
        hints = backend.leases.hints(name)
        grant = await won(backend.leases, name)
        await asyncio.wait_for(anext(hints), 30)
        await backend.leases.renew([grant], TTL)
        assert await backend.leases.release(grant) == Released(grant)
        await backend.broker.declare(name, {})
        await backend.broker.send(name, [Outgoing(b"a", id="a"), Outgoing(b"b", session="s", expires_in=5.0)])
        claim = await backend.broker.receive(name, 10, TTL)
        verdict = Complete(sends=((f"{name}-2", Outgoing(b"next")),), remember=5.0)
        assert list(await backend.broker.settle([Settlement(claim.deliveries[0], verdict)])) == [Settled()]
        assert (await backend.broker.stats(name)).ready == 1
        assert name in await backend.broker.names()
        assert {"version", "configuration"} <= {fact.name for fact in await backend.describe()}


async def test_a_lease_whose_keys_are_forbidden_keeps_no_other_from_being_renewed(url: str, name: str) -> None:
    async with native(url) as client:

        async def allow(*leases: str) -> None:
            keys = [pattern for one in leases for pattern in (f"~tenure:*{one}", f"~{{tenure:*{one}}}:term")]
            rights = ["resetkeys", "~tenure:leases", *keys, "+@all", "&*"]
            await client.execute_command("ACL", "SETUSER", f"u-{name}", "on", ">pw", *rights)  # type: ignore[no-untyped-call]

        mine, other = f"{name}-1", f"{name}-2"
        await allow(mine, other)
        async with opened(url.replace("redis://", f"redis://u-{name}:pw@")) as backend:
            grants = [await won(backend.leases, one) for one in (mine, other)]
            assert list(await backend.leases.renew(grants, TTL)) == [Granted(one) for one in grants]
            await allow(mine)
            first, second = await backend.leases.renew(grants, TTL)
            assert first == Granted(grants[0])
            assert isinstance(second, NoAnswer)


async def test_a_user_who_may_not_publish_works_without_hints(url: str, name: str) -> None:
    async with native(url) as client:
        rights = ["~*", "+@all", "resetchannels"]
        await client.execute_command("ACL", "SETUSER", f"u-{name}", "on", ">pw", *rights)  # type: ignore[no-untyped-call]
    async with opened(url.replace("redis://", f"redis://u-{name}:pw@")) as backend:
        grant = await won(backend.leases, name)
        assert await backend.leases.release(grant) == Released(grant)
        assert len(await backend.broker.send(name, [Outgoing()])) == 1


async def test_a_user_who_may_not_subscribe_polls(url: str, name: str) -> None:
    async with native(url) as client:
        rights = ["~*", "+@all", "resetchannels"]
        await client.execute_command("ACL", "SETUSER", f"u-{name}", "on", ">pw", *rights)  # type: ignore[no-untyped-call]
    async with opened(url.replace("redis://", f"redis://u-{name}:pw@")) as backend:
        for hints in (backend.leases.hints(name), backend.broker.hints(name)):
            assert await asyncio.wait_for(anext(hints), 10) == "absent"
        assert not backend.broker.traits.hints


async def test_many_sends_give_few_hints_and_the_last_is_not_missed(url: str, name: str) -> None:
    async with opened(url) as mine, opened(url) as others, native(url) as client:
        channel = f"tenure:queue:{{{name}}}:live"
        async with client.pubsub() as pubsub:
            await pubsub.subscribe(channel)
            hints, sent, seen = mine.broker.hints(name), 0, 0
            began = time.monotonic()
            for _ in range(100):
                await others.broker.send(name, [Outgoing()])
                sent += 1
            took = time.monotonic() - began
            quiet: list[float] = []  # the seconds after each hint in which there is no other
            while (message := await pubsub.get_message(timeout=0.2)) is not None:
                if message["type"] == "message":
                    quiet.append((int(message["data"]) - 1) / 1_000)
            assert quiet
            assert min(quiet) >= 0.004
            assert sum(quiet[:-1]) <= took, "more hints than there was time for; on a slow machine that is many"
            while seen < sent:  # a consumer that polls after each hint misses nothing
                await asyncio.wait_for(anext(hints), 10)
                seen += len((await mine.broker.receive(name, 1_000, TTL)).deliveries)
            for _ in range(20):
                await others.broker.send(name, [Outgoing()])
                sent += 1
                while seen < sent:
                    await asyncio.wait_for(anext(hints), 3)  # sooner than the next poll without hints
                    seen += len((await mine.broker.receive(name, 1_000, TTL)).deliveries)


async def test_only_the_right_authority_is_trusted() -> None:
    right, wrong = Authority(), Authority("another authority")
    with private(Redis, authority=right) as server:
        async with opened(f"{server.url}?ca={right.certificate}") as backend:
            await won(backend.leases, "name")
            told = f"TLS; the server's certificate and name are verified against {right.certificate}"
            assert facts_by_name(await backend.describe())["TLS"].value == told
        async with opened(f"{server.url}?ca={wrong.certificate}") as backend:
            with pytest.raises(ConfigError, match=r"not trusted.*with ca=FILE"):
                await backend.leases.inspect("name")
        async with opened(server.url) as backend:  # the system's authorities don't know it either
            with pytest.raises(ConfigError, match="not trusted"):
                await backend.leases.inspect("name")
        misnamed = server.url.replace("127.0.0.1", "localhost")
        async with opened(f"{misnamed}?ca={right.certificate}") as backend:
            with pytest.raises(ConfigError, match="certificate is for another host"):
                await backend.leases.inspect("name")
        async with opened(f"{misnamed}?ca={right.certificate}&check_hostname=no") as backend:
            told = f"TLS; the server's certificate is verified against {right.certificate}; its name is not"
            assert facts_by_name(await backend.describe())["TLS"].value == f"{told} (check_hostname=no)"


async def test_a_plain_connection_to_a_tls_port_is_unavailable() -> None:
    with private(Redis, authority=Authority()) as server:
        async with opened(server.url.replace("rediss", "redis") + "?timeout=1") as backend:
            with pytest.raises(Unavailable):
                await backend.leases.inspect("name")


# --- a server in trouble -----------------------------------------------------------------------------------------


async def test_a_replica_refuses_leases() -> None:
    with private(Redis) as primary, private(Redis, options=[("replicaof", f"127.0.0.1 {primary.port}")]) as replica:
        async with opened(replica.url) as backend:
            with pytest.raises(Unavailable, match="replica"):
                await backend.leases.acquire("name", "ann#1", TTL)
            with pytest.raises(Unavailable, match="replica"):
                await backend.broker.send("name", [Outgoing()])
            assert "replica refuses writes" in advice(await backend.describe())["role"]


async def test_behind_one_address_the_new_primary_is_found() -> None:
    with private(Redis) as first, private(Redis, options=[("replicaof", f"127.0.0.1 {first.port}")]) as second:
        async with through_proxy(first) as (proxy, backend), native(first.url) as old, native(second.url) as new:
            await asyncio.gather(
                *(won(backend.leases, f"other {number}") for number in range(5))
            )  # over five connections
            grant = await won(backend.leases, "name")

            async def is_replica() -> bool:
                return bool((await new.info("replication"))["master_link_status"] == "up")

            await until(is_replica, within=60)
            await old.execute_command("FAILOVER")  # type: ignore[no-untyped-call]
            proxy.redirect("127.0.0.1", second.port)

            async def is_primary() -> bool:
                return bool((await new.info("replication"))["role"] == "master")

            await until(is_primary, within=60)
            with pytest.raises(Unavailable, match="replica"):  # the open connections are to the old primary
                await backend.leases.renew([grant], TTL)
            assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]
            sends = (backend.broker.send("queue", [Outgoing()]) for _ in range(5))
            assert len(await asyncio.gather(*sends)) == 5


async def test_out_of_memory_is_reported_and_nothing_is_half_done() -> None:
    with private(Redis, options=[("maxmemory", "4mb")]) as server:
        async with opened(server.url) as backend, native(server.url) as client:
            broker, batch = backend.broker, [Outgoing(b"x" * 100_000) for _ in range(5)]
            kept = 0
            with pytest.raises(Unavailable, match="out of memory"):
                while kept < 1_000:
                    await broker.send("queue", batch)
                    kept += len(batch)
            await client.config_set("maxmemory", "0")
            assert (await broker.stats("queue")).ready == kept


async def test_a_key_with_other_data_is_reported(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as client:
        await client.rpush(f"tenure:lease:{name}", "a list")
        with pytest.raises(ConfigError, match="prefix"):
            await backend.leases.acquire(name, "ann#1", TTL)


async def test_forgotten_scripts_are_loaded_again(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as client:
        grant = await won(backend.leases, name)
        await client.script_flush()
        assert list(await backend.leases.renew([grant, grant], TTL)) == [Granted(grant), Granted(grant)]
        await client.script_flush()
        assert [one.token for one in await backend.leases.inspect_many([name, f"{name}-free"])] == [grant.token, 0]
        await client.script_flush()
        assert await backend.leases.release(grant) == Released(grant)
        await client.script_flush()
        assert len(await backend.broker.send(name, [Outgoing()])) == 1


async def test_a_paused_server_is_reported_in_time_and_works_afterwards() -> None:
    with private(Redis) as server:
        async with opened(f"{server.url}?timeout=0.3") as backend, opened(server.url) as patient:
            grant = await won(patient.leases, "name")
            await until(lambda: answers(backend))
            server.pause()
            for send in requests_of(backend, grant):
                begun = time.monotonic()
                with pytest.raises(Unavailable):
                    await send()
                assert time.monotonic() - begun < 4.0  # without the option it would be five
            server.resume()
            await until(lambda: answers(backend))
            assert list(await patient.leases.renew([grant], TTL)) == [Granted(grant)]


async def test_a_killed_server_is_found_again() -> None:
    with private(Redis) as server:
        async with opened(server.url) as backend:
            grant = await won(backend.leases, "name")
            await backend.broker.send("queue", [Outgoing(b"%d" % number) for number in range(100)])
            claim = await backend.broker.receive("queue", 50, 60.0)
            server.kill()
            for send in requests_of(backend, grant):
                with pytest.raises(Unavailable):
                    await send()
            server.start()
            assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]
            done = await backend.broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
            assert list(done) == [Settled()] * 50
            assert len((await backend.broker.receive("queue", 100, 60.0)).deliveries) == 50


async def answers(backend: redis.RedisBackend) -> bool:
    """Return whether a request was answered: with a short time-out, on a busy machine, it may not be."""
    try:
        await backend.leases.inspect("name")
    except Unavailable:
        return False
    return True


def requests_of(backend: redis.RedisBackend, grant: Grant) -> list[Callable[[], Awaitable[object]]]:
    leases, broker = backend.leases, backend.broker
    return [
        lambda: leases.acquire("other", "ann#1", TTL),
        lambda: leases.renew([grant], TTL),
        lambda: leases.release(grant),
        lambda: leases.inspect("name"),
        lambda: leases.names(),
        lambda: broker.send("queue", [Outgoing()]),
        lambda: broker.receive("queue", 1, 60.0),
        lambda: broker.stats("queue"),
        lambda: backend.describe(),
    ]


async def test_a_request_that_arrives_late_belongs_to_its_sender(url: str, name: str) -> None:
    server = shared(Redis)
    async with through_proxy(server) as (proxy, backend), opened(server.url) as other:
        before = await won(backend.leases, name)  # script and name are known, and the connection stands
        await backend.leases.release(before)
        proxy.stall("up")
        client = backend.leases._client
        patient, client.options = client.options, replace(client.options, timeout=0.3)
        with pytest.raises(Unavailable):
            await backend.leases.acquire(name, "ann#1", TTL)
        client.options = patient
        assert await other.leases.inspect(name) == Vacant(name, before.token)
        proxy.heal()  # now it arrives, when its sender has given up

        async def held() -> bool:
            return isinstance(await other.leases.inspect(name), HeldBy)

        await until(held)
        seen = await other.leases.inspect(name)
        assert isinstance(seen, HeldBy)
        assert await other.leases.acquire(name, "ann#1", TTL) == Granted(Grant(name, "ann#1", seen.token))


async def test_of_silent_connections_only_the_first_costs_time(name: str) -> None:
    async with through_proxy(shared(Redis), "?timeout=2") as (proxy, backend):
        grant = await won(backend.leases, name)
        await asyncio.gather(*(backend.leases.inspect(name) for _ in range(8)))
        assert proxy.open > 1
        proxy.stall_existing()
        with pytest.raises(Unavailable, match="no answer"):
            await backend.leases.renew([grant], TTL)
        answers = await asyncio.gather(*(backend.leases.renew([grant], TTL) for _ in range(8)))
        assert [list(answer) for answer in answers] == [[Granted(grant)]] * 8


async def test_a_cancelled_caller_costs_one_connection_and_not_all(url: str, name: str) -> None:
    async with through_proxy(shared(Redis), "?timeout=60&connections=4") as (proxy, backend), opened(url) as other:
        await won(other.leases, f"{name}-other")  # so that the script is known
        for number in range(4):
            await asyncio.gather(*(backend.leases.inspect(name) for _ in range(8)))
            proxy.stall("down")
            pending = asyncio.create_task(backend.leases.acquire(f"{name}-{number}", "ann#1", TTL))

            async def is_sent(lease: str = f"{name}-{number}") -> bool:
                return isinstance(await other.leases.inspect(lease), HeldBy)

            await until(is_sent)
            pending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pending
            proxy.heal()
        # An answer to a cancelled request is not taken for another's answer.
        assert await asyncio.gather(*(backend.leases.inspect(name) for _ in range(8))) == [Vacant(name)] * 8

        async def few() -> bool:
            return proxy.open <= 4

        await until(few)


async def test_a_request_about_a_lease_or_a_lock_leaves_time_to_repeat_it(name: str) -> None:
    async with through_proxy(shared(Redis), "?timeout=60") as (proxy, backend):
        grant = await won(backend.leases, name)
        await backend.broker.send(name, [Outgoing()])
        claim = await backend.broker.receive(name, 1, TTL)
        proxy.stall()
        ttl = 3.0
        for send in (
            lambda: backend.leases.acquire(f"{name}-2", "ann#1", ttl),
            lambda: backend.leases.renew([grant], ttl),
            lambda: backend.broker.renew(claim.deliveries, ttl),
        ):
            begun = time.monotonic()
            with pytest.raises(Unavailable, match="no answer"):
                await send()
            assert time.monotonic() - begun < 30.0


# --- subscriptions -----------------------------------------------------------------------------------------------


async def test_a_broken_subscription_is_renewed_with_one_hint(name: str) -> None:
    server = shared(Redis)
    async with through_proxy(server) as (proxy, backend), opened(server.url) as other:
        hints = backend.broker.hints(name)
        await asyncio.wait_for(anext(hints), 30)  # it listens
        proxy.refuse()
        proxy.reset()
        await other.broker.send(name, [Outgoing(b"while not subscribed")])
        proxy.heal()
        await asyncio.wait_for(anext(hints), 30)  # it listens again
        assert len((await backend.broker.receive(name, 10, TTL)).deliveries) == 1
        hint = asyncio.ensure_future(anext(hints))
        await asyncio.sleep(0)
        await other.broker.send(name, [Outgoing(b"now")])
        await asyncio.wait_for(hint, 30)


async def test_a_silent_subscription_is_renewed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake, "HEARTBEAT", 0.1)
    server = shared(Redis)
    async with through_proxy(server, "?timeout=0.3") as (proxy, backend):
        hints = backend.leases.hints(name)
        await asyncio.wait_for(anext(hints), 30)
        proxy.stall()  # a black hole: no end of the connection, no error
        accepted = proxy.accepted
        await until(lambda: proxy.accepted > accepted)  # it gave up, and connected again
        proxy.heal()
        await asyncio.wait_for(anext(hints), 30)


async def test_a_request_without_an_answer_lets_the_subscription_be_checked(name: str) -> None:
    server = shared(Redis)
    async with through_proxy(server, "?timeout=0.3") as (proxy, backend):
        hints = backend.leases.hints(name)
        await asyncio.wait_for(anext(hints), 30)
        proxy.stall()
        accepted = proxy.accepted
        with pytest.raises(Unavailable):
            await backend.leases.inspect(name)
        await until(lambda: proxy.accepted > accepted)  # the subscription's: no further request is sent
        proxy.heal()
        await asyncio.wait_for(anext(hints), 30)


async def test_a_listener_that_ended_is_forgotten(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_hints, "UNUSED_AFTER", 0.05)
    async with opened(url) as backend, native(url) as client:
        first, second = backend.leases.hints(name), backend.leases.hints(f"{name}-2")
        for hints in (first, second):
            await asyncio.wait_for(anext(hints), 30)
        channel = f"tenure:lease:{name}"
        assert (await client.pubsub_numsub(channel))[0][1] == 1
        del first, hints

        async def unsubscribed() -> bool:
            return bool((await client.pubsub_numsub(channel))[0][1] == 0)

        await until(unsubscribed)
        await won(backend.leases, f"{name}-2")
        await asyncio.wait_for(anext(second), 30)


# --- loops, addresses, facts -------------------------------------------------------------------------------------


async def test_each_loop_has_connections_of_its_own(url: str, name: str) -> None:
    async with opened(url) as backend:
        grant = await won(backend.leases, name)
        answers: list[object] = []
        ready, stop = threading.Event(), threading.Event()

        async def elsewhere() -> None:
            for _ in range(20):
                answers.extend(await backend.leases.renew([grant], TTL))
                await backend.broker.send(name, [Outgoing()])
            hints = backend.broker.hints(name)
            await asyncio.wait_for(anext(hints), 30)
            ready.set()
            while not stop.is_set():  # so that its connections are closed from here, on a loop that turns
                await asyncio.sleep(0.01)

        thread = threading.Thread(target=asyncio.run, args=(elsewhere(),))
        thread.start()
        try:
            for _ in range(20):
                assert list(await backend.leases.renew([grant], TTL)) == [Granted(grant)]
                await backend.broker.receive(name, 10, TTL)
            await until(lambda: ready.is_set() or not thread.is_alive(), within=60)
            await backend.close()
        finally:
            stop.set()
            await asyncio.to_thread(thread.join)
        assert answers == [Granted(grant)] * 20
        with pytest.raises(ConfigError, match="closed"):
            await backend.leases.inspect(name)


async def test_a_subscription_may_end_while_it_is_checked(url: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(url) as backend:
        hints = backend.broker.hints(name)
        await anext(hints)
        [subscriber] = backend._wake.here().values()
        pubsub = subscriber._pubsub
        assert pubsub is not None
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(pubsub.connection, "connect", pubsub.aclose)
            await subscriber._check(pubsub)
        await backend.broker.send(name, [Outgoing(b"a")])
        await asyncio.wait_for(anext(hints), 30)


async def test_who_begins_to_listen_during_a_subscription_gets_hints(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url) as backend:
        first, second = backend.broker.hints(name), backend.broker.hints(f"{name}-2")
        hinted: list[asyncio.Future[Any]] = []
        subscribe = wake.Subscriber._execute

        async def interrupted(subscriber: wake.Subscriber, *given: Any) -> None:
            await subscribe(subscriber, *given)
            if not hinted:
                hinted.append(asyncio.ensure_future(anext(second)))
                await until(lambda: len(subscriber.topics) == 2)

        monkeypatch.setattr(wake.Subscriber, "_execute", interrupted)
        await asyncio.wait_for(anext(first), 30)
        await asyncio.wait_for(hinted[0], 30)


def test_an_address_is_taken_apart() -> None:
    address = address_of(Url.parse("rediss://us%40er:p%2Fw@example.org:7000/3"), redis.Options())
    assert (address.host, address.port, address.database) == ("example.org", 7000, 3)
    assert (address.username, address.password, address.is_tls) == ("us@er", Secret("p/w"), True)
    assert "p/w" not in str(address) + repr(address)
    plain = address_of(Url.parse("redis://localhost"), redis.Options())
    assert (plain.port, plain.database, plain.username, plain.password) == (6379, 0, None, None)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("redis://", "no host"),
        ("redis:localhost", "no host"),
        ("redis://localhost/one", "number"),
        ("redis://localhost:port", "port"),
        ("redis://localhost?timeout=0", "timeout"),
        ("redis://localhost?conections=3", "connections"),
        ("redis://localhost?connections=0", "connections"),
        ("redis://localhost?prefix={a}", "braces"),
        ("redis://localhost?ca=/ca.pem", "rediss"),
    ],
)
def test_a_wrong_address_is_refused(wrong: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        redis.open(Url.parse(wrong))


async def test_a_server_that_does_not_run_is_unavailable() -> None:
    async with opened("redis://127.0.0.1:1?timeout=1") as backend:
        with pytest.raises(Unavailable, match="127"):
            await backend.leases.inspect("name")


def advice(facts: Iterable[Fact]) -> dict[str, str]:
    return {name: fact.advice for name, fact in facts_by_name(facts).items()}


async def test_doctor_warns_of_dangers_to_the_promises() -> None:
    with private(Redis) as server:
        async with opened(server.url) as backend, native(server.url) as client:
            assert not any(advice(await backend.describe()).values())
            await client.config_set("appendfsync", "everysec")
            await client.config_set("maxmemory", "1gb")
            await client.config_set("maxmemory-policy", "allkeys-lru")
            advised = advice(await backend.describe())
            assert "power failure" in advised["durability"]
            assert "noeviction" in advised["maxmemory-policy"]
            await client.config_set("appendonly", "no")
            assert "snapshot" in advice(await backend.describe())["durability"]
            rights = ["~*", "&*", "+@all", "-config"]
            await client.execute_command("ACL", "SETUSER", "blind", "on", ">pw", *rights)  # type: ignore[no-untyped-call]
        async with opened(server.url.replace("redis://", "redis://blind:pw@")) as backend:
            assert "ask an administrator" in advice(await backend.describe())["configuration"]


# --- through the public interface --------------------------------------------------------------------------------


async def test_one_resigns_and_the_next_leads_at_once(url: str, name: str) -> None:
    async with tenure.connect(url) as first, tenure.connect(url) as second, native(url) as client:

        async def both_listen() -> bool:
            return bool((await client.pubsub_numsub(f"tenure:lease:{name}"))[0][1] == 2)

        old = first.election(name, ttl=TTL)
        async with old.campaign() as term:
            waiting = asyncio.create_task(lead_once(second.election(name, ttl=TTL, retry_every=15.0)))
            await until(both_listen)
            left_at = time.monotonic()
        token, led_at = await asyncio.wait_for(waiting, 30)
        assert token > term.token
        assert led_at - left_at < 10.0  # the next poll is after 15 s


async def lead_once(election: tenure.Election) -> tuple[int, float]:
    async with election.campaign() as term:
        return term.token, time.monotonic()


async def test_history_is_kept_to_its_newest_part(url: str, name: str) -> None:
    async with opened(url) as backend:
        broker: Broker = backend.broker
        await broker.declare(name, {"max_deliveries": 60})
        await broker.send(name, [Outgoing(b"poison")])
        for _ in range(60):
            claim = await broker.receive(name, 1, TTL)
            await broker.settle([Settlement(claim.deliveries[0], Abandon())])
        [dead] = await broker.peek_dead(name, EVERYTHING, 1)
        assert [attempt.number for attempt in dead.history] == list(range(11, 61))


async def test_counts_are_exact_however_much_has_come_due(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as client:
        broker, moment = backend.broker, 0.001
        for _ in range(5):
            await broker.send(name, [Outgoing(expires_in=moment)] * 5_000)
        await broker.send(name, [Outgoing(delay=moment)] * 3_000)
        sent_at = await client.time()

        async def all_due() -> bool:
            return tuple(await client.time()) >= (sent_at[0], sent_at[1] + 10_000)

        await until(all_due)
        stats = await broker.stats(name)
        assert (stats.ready, stats.delayed, stats.dead) == (3_000, 0, 25_000)


# --- the layout of keys ---


async def test_keys_without_a_version_are_of_the_first_layout(url: str, name: str) -> None:
    base, lock = f"tenure:queue:{{{name}}}:", f"tenure:lease:{name}"
    async with native(url) as client, opened(url) as backend:
        await client.sadd("tenure:queues", name)
        await client.set(f"{base}sequence", 1)
        await client.hset(f"{base}settings", "max_deliveries", 7)
        await client.hset(f"{base}state", "1", f"0|{int(time.time() * 1_000)}|0|0|q||")
        await client.hset(f"{base}body", "1", b"old")
        await client.zadd(f"{base}ready", {"1": 9 * 2**48 + 1})
        await client.hset(f"{{{lock}}}:term", mapping={"token": 41, "holder": "", "metadata": "", "resign": "0"})
        assert (await backend.broker.settings(name)).max_deliveries == 7
        [got] = (await backend.broker.receive(name, 1, TTL)).deliveries
        assert (got.body, got.sequence) == (b"old", 1)
        assert list(await backend.broker.settle([Settlement(got, COMPLETE)])) == [Settled()]
        assert (await won(backend.leases, name)).token == 42


@pytest.mark.parametrize("layout", ["2", "17", "x"])
async def test_a_later_layout_is_refused_and_left_alone(url: str, name: str, layout: str) -> None:
    base, lock = f"tenure:queue:{{{name}}}:", f"tenure:lease:{name}"
    async with native(url) as client, opened(url) as backend:
        broker, leases = backend.broker, backend.leases
        await broker.send(name, [Outgoing(b"a"), Outgoing(b"b")])
        [got] = (await broker.receive(name, 1, TTL)).deliveries
        grant = await won(leases, name)
        # Now a process of a later version takes over, as during a rolling update.
        await client.hset(f"{base}settings", "layout", layout)
        await client.hset(f"{{{lock}}}:term", "layout", layout)
        before = [await client.dump(key) for key in sorted(await client.keys(f"*{name}*")) if key != lock.encode()]
        requests: list[Callable[[], Awaitable[object]]] = [
            lambda: broker.send(name, [Outgoing(b"c")]),
            lambda: broker.receive(name, 1, TTL),
            lambda: broker.renew([got], TTL),
            lambda: broker.settle([Settlement(got, COMPLETE)]),
            lambda: broker.accept(name, None, TTL),
            lambda: broker.stats(name),
            lambda: broker.settings(name),
            lambda: broker.declare(name, {"max_deliveries": 3}),
            lambda: broker.redrive(name, EVERYTHING, None),
            lambda: broker.delete(name, force=True),
            lambda: leases.acquire(name, "bob#1", TTL),
            lambda: leases.renew([grant], TTL),
            lambda: leases.release(grant),
            lambda: leases.inspect(name),
        ]
        for request in requests:
            with pytest.raises(ConfigError, match=f"in layout {layout}, and this tenure knows layout 1 only; update"):
                await request()
        after = [await client.dump(key) for key in sorted(await client.keys(f"*{name}*")) if key != lock.encode()]
        assert after == before
        await broker.send(f"{name}-other", [Outgoing(b"a")])  # what the new version has not touched goes on


@pytest.mark.parametrize("written", ["none", "CERT_NONE"])
async def test_doctor_says_that_nothing_is_verified(written: str) -> None:
    with private(Redis, authority=Authority(), password="s3cret") as server:
        backend = redis.open(Url.parse(f"{server.url}?ssl_cert_reqs={written}"))
        try:
            facts = facts_by_name(await backend.describe())
        finally:
            await backend.close()
    assert facts["TLS"].value == f"TLS; nothing is verified (ssl_cert_reqs={written})"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("ssl_cert_reqs=none&ca=ca.pem", "ssl_cert_reqs=none verifies nothing, and ca="),
        ("ssl_cert_reqs=none&check_hostname=false", "ssl_cert_reqs=none verifies nothing"),
        ("ssl_cert_reqs=nothing", "'ssl_cert_reqs' must be one of none, optional, required, CERT_NONE"),
    ],
)
def test_verifying_nothing_excludes_what_is_to_be_verified(query: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        redis.open(Url.parse(f"rediss://h?{query}"))


@pytest.mark.parametrize(
    ("written", "database"),
    [("redis://h?db=3", 3), ("redis://h/3?db=3", 3), ("redis://h/?db=3", 3), ("redis://h/0", 0), ("redis://h", 0)],
)
def test_a_database_may_be_an_option(written: str, database: int) -> None:
    url = Url.parse(written)
    assert address_of(url, url.options(redis.Options)).database == database
