"""The users that docs/redis.md gives least rights: what each may do works, and what it may not is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest

pytest.importorskip("redis")

from redis import asyncio as aioredis
from redis.exceptions import NoPermissionError

import tenure
from tenure._backends import redis
from tenure._url import Url
from tests.docs.pages import commands
from tests.durations import until
from tests.servers import Redis, patient, private
from tests.stores.rights import (
    AT_ONCE,
    LATER,
    TTL,
    Act,
    Change,
    Refusal,
    acting,
    ends_in_time,
    lead,
    outlasts,
    plan,
    refused,
)

PERMIT = "does not permit this user", "docs/redis.md"
USERS = ["tenure", "candidate", "orders", "observer"]
"""All that the page has."""


@pytest.fixture(scope="module")
def server() -> Iterator[Redis]:
    """Yield a server with the users of the page, two queues, a dead letter, a schedule, and a name that was led."""

    async def prepare(own: Redis) -> None:
        async with aioredis.Redis.from_url(own.url) as client:
            for begin in ("ACL SETUSER tenure", "ACL SETUSER candidate"):
                for line in commands("docs/redis.md", "Rights", begin).splitlines():
                    await client.execute_command(*line.split())  # type: ignore[no-untyped-call]
        async with acting(own.url) as owner:
            await owner.queue("orders").send_batch([tenure.Outgoing(b"first"), tenure.Outgoing(b"second")])
            await owner.queue("others").send(b"dead")
            [message] = await owner.queue("others").receive()
            await message.dead_letter("bad")
            await owner.queue("others").send(b"x")
            await plan(owner, "hourly", "others")
            await lead(owner, "led")

    with private(Redis) as own:
        asyncio.run(prepare(own))
        yield own


def url_of(server: Redis, user: str) -> str:
    return server.url.replace("redis://", f"redis://{user}:password@")


async def test_the_first_user_does_all(server: Redis) -> None:
    async with acting(url_of(server, "tenure")) as backend:
        with suppress(tenure.TermLost):  # the leader steps down as soon as it learns of the wish
            async with backend.election("held", ttl=TTL).campaign():
                assert {"held", "led"} <= set(await backend.leaders())
                assert await backend.election("held").ask_to_resign()
        queue = backend.queue("all", max_deliveries=5)
        await queue.declare(lock=99)
        await queue.send_batch([tenure.Outgoing(b"%d" % number) for number in range(4)])
        [one, two, three] = await queue.receive(max=3)
        await one.complete()
        await two.abandon()
        await three.renew()
        await three.dead_letter("bad")
        assert await queue.dead_letters.redrive()
        assert (await queue.stats()).ready == 3
        await plan(backend, "daily", "others")
        await backend.queue("others").schedules.remove("daily")
        assert "all" in await backend.queues()
        assert await queue.purge() == 3
        await queue.delete()
        assert (await backend.diagnose()).traits
    opened = redis.open(Url.parse(patient(url_of(server, "tenure"))))
    assert await anext(opened.leases.hints("job")) is None
    await opened.close()


async def test_a_candidate_leads_and_gets_hints(server: Redis) -> None:
    async with acting(url_of(server, "candidate")) as backend:
        assert [await lead(backend, "job"), await lead(backend, "job")] == [1, 2]
        assert "led" in await backend.leaders()
        assert not await backend.election("job").ask_to_resign()
    opened = redis.open(Url.parse(patient(url_of(server, "candidate"))))
    assert await anext(opened.leases.hints("job")) is None
    await opened.close()


@pytest.mark.parametrize(
    "act",
    [
        lambda backend: backend.queue("orders").send(b"x"),
        lambda backend: backend.queue("orders").receive(),
        lambda backend: backend.queue("orders").stats(),
        lambda backend: backend.queue("orders").declare(lock=99),
        lambda backend: backend.queues(),
    ],
    ids=["send", "receive", "stats", "declare", "names"],
)
async def test_a_candidate_has_no_right_on_queues(server: Redis, act: Act) -> None:
    async with acting(url_of(server, "candidate")) as backend:
        await refused(backend, act, *PERMIT)


async def test_a_user_of_one_queue_sends_and_receives_there(server: Redis) -> None:
    async with acting(url_of(server, "orders")) as backend:
        queue = backend.queue("orders", max_deliveries=5)
        await queue.send(b"third", session="s", id="third")
        [message, _] = await queue.receive(max=2)
        await message.dead_letter("bad")
        assert (await queue.stats()).dead == 1
        assert await queue.dead_letters.purge() == 1
    opened = redis.open(Url.parse(patient(url_of(server, "orders"))))
    await anext(opened.broker.hints("orders"))
    assert opened.broker.traits.hints
    await opened.close()


@pytest.mark.parametrize(
    "act",
    [
        lambda backend: backend.queue("others").send(b"x"),
        lambda backend: backend.queue("others").receive(),
        lambda backend: backend.queue("others").stats(),
        lambda backend: lead(backend, "led"),
        lambda backend: backend.leaders(),
    ],
    ids=["send elsewhere", "receive elsewhere", "stats elsewhere", "lead", "leaders"],
)
async def test_a_user_of_one_queue_has_no_right_elsewhere(server: Redis, act: Act) -> None:
    async with acting(url_of(server, "orders")) as backend:
        await refused(backend, act, *PERMIT)


async def test_an_observer_sees_leaders_settings_and_numbers(server: Redis) -> None:
    async with acting(url_of(server, "observer")) as backend:
        assert "led" in await backend.leaders()
        assert await backend.election("led").leader() is None
        assert await backend.queues() == ["orders", "others"]
        assert (await backend.queue("others").stats()).ready == 1
        assert [one.body for one in await backend.queue("others").peek()] == [b"x"]
        assert (await backend.queue("others").settings()).lock
        assert [one.name for one in await backend.schedules()] == ["hourly"]
        assert (await backend.diagnose()).traits


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda backend: lead(backend, "led"), AT_ONCE),
        (lambda backend: backend.queue("others").send(b"x"), AT_ONCE),
        (lambda backend: backend.queue("others").receive(), AT_ONCE),
        (lambda backend: backend.queue("others").purge(), LATER),
        (lambda backend: backend.queue("others").declare(lock=99), AT_ONCE),
        (lambda backend: backend.queue("others").delete(force=True), LATER),
        (lambda backend: backend.queue("others").dead_letters.receive(), AT_ONCE),
        (lambda backend: backend.queue("others").dead_letters.redrive(), AT_ONCE),
        (lambda backend: backend.queue("others").dead_letters.purge(), AT_ONCE),
        (lambda backend: backend.queue("others").schedules.pause("hourly"), LATER),
        (lambda backend: backend.queue("others").schedules.remove("hourly"), LATER),
        (lambda backend: backend.election("held").ask_to_resign(), AT_ONCE),
    ],
    ids=[
        *("lead", "send", "receive", "purge", "declare", "delete"),
        *("receive dead letters", "redrive", "purge dead letters", "pause a schedule", "remove a schedule"),
        "resign",
    ],
)
async def test_an_observer_changes_nothing(server: Redis, act: Act, error: Refusal) -> None:
    async with (
        aioredis.Redis.from_url(server.url) as client,
        acting(server.url) as owner,
        owner.election("held", ttl=TTL).campaign(),
        acting(url_of(server, "observer")) as backend,
    ):
        before = {key: await client.dump(key) for key in await client.keys()}
        await refused(backend, act, *PERMIT, error=error)
        assert {key: await client.dump(key) for key in await client.keys()} == before


async def test_a_campaign_without_the_right_goes_on_if_looking_has_worked(server: Redis) -> None:
    async with acting(url_of(server, "observer")) as backend:
        assert "led" in await backend.leaders()
        await refused(backend, lambda backend: lead(backend, "led"), *PERMIT, error=LATER)


@asynccontextmanager
async def changing(server: Redis) -> AsyncIterator[tuple[Change, Change]]:
    """Yield what takes all keys from the candidate, and what gives them back, as is done at the end."""
    [line] = [
        line
        for line in commands("docs/redis.md", "Rights", "ACL SETUSER candidate").splitlines()
        if line.startswith("ACL SETUSER candidate")
    ]
    async with aioredis.Redis.from_url(server.url) as client:

        async def revoke() -> None:
            await client.execute_command("ACL", "SETUSER", "candidate", "resetkeys")  # type: ignore[no-untyped-call]

        async def grant() -> None:
            await client.execute_command(*line.split())  # type: ignore[no-untyped-call]

        try:
            yield revoke, grant
        finally:
            await grant()


async def test_a_term_outlasts_a_right_that_comes_back(server: Redis) -> None:
    async with changing(server) as (revoke, grant):
        await outlasts(url_of(server, "candidate"), "outlasting", revoke=revoke, grant=grant)


async def test_a_term_whose_right_is_gone_ends_before_another_begins(server: Redis) -> None:
    async with changing(server) as (revoke, _):
        await ends_in_time(url_of(server, "candidate"), server.url, "ending", revoke=revoke)


async def test_an_observer_reads_no_numbers_while_a_delay_that_has_ended_waits_for_another_process(
    server: Redis,
) -> None:
    async with (
        aioredis.Redis.from_url(server.url) as client,
        acting(server.url) as owner,
        acting(url_of(server, "observer")) as backend,
    ):
        await owner.queue("delays").send(b"x", delay=3600)
        assert (await backend.queue("delays").stats()).delayed == 1
        [number] = await client.zrange("tenure:queue:{delays}:delayed", 0, -1)
        assert isinstance(number, bytes)
        await client.zadd("tenure:queue:{delays}:delayed", {number: 1})  # as if the hour were over
        with pytest.raises(tenure.Unavailable, match=PERMIT[0]):  # it was permitted before
            await backend.queue("delays").stats()
        assert (await owner.queue("delays").stats()).ready == 1
        assert (await backend.queue("delays").stats()).ready == 1
        await owner.queue("delays").delete(force=True)


@pytest.mark.parametrize(
    ("user", "key"), [("orders", "tenure:queues"), ("candidate", "tenure:leases")], ids=["queues", "elections"]
)
async def test_a_user_can_hide_the_names_of_what_it_has_no_right_on(server: Redis, user: str, key: str) -> None:
    """As the page says of what Redis can't keep apart: all names are in one key."""
    async with aioredis.Redis.from_url(server.url) as client, acting(server.url) as owner:
        names = await client.smembers(key)
        look = owner.queues if user == "orders" else owner.leaders
        assert len(await look()) == len(names) > 0
        try:
            async with aioredis.Redis.from_url(url_of(server, user)) as own:
                assert await own.delete(key) == 1
            assert not await look()
        finally:
            await client.sadd(key, *names)


LISTED: dict[str, tuple[str, Act, dict[str, Act]]] = {
    "tenure:queues": (
        "orders",
        lambda backend: backend.queues(),
        {
            "a first send": lambda backend: backend.queue("others").send(b"x"),
            "a declaration": lambda backend: backend.queue("others").declare(lock=30),
            "a claim": lambda backend: backend.queue("others").receive(),
        },
    ),
    "tenure:leases": ("candidate", lambda backend: backend.leaders(), {"a campaign": lambda b: lead(b, "led")}),
}
"""By a list of names: who may write it, what lists them, and what goes on whatever stands there."""


@pytest.mark.parametrize(("key", "what"), [(key, what) for key, (_, _, acts) in LISTED.items() for what in acts])
async def test_other_data_in_a_list_of_names_stops_only_lists(server: Redis, key: str, what: str) -> None:
    user, look, acts = LISTED[key]
    async with aioredis.Redis.from_url(server.url) as client:
        names = await client.smembers(key)
        async with aioredis.Redis.from_url(url_of(server, user)) as own:
            await own.set(key, "other data")
        try:
            async with acting(server.url) as fresh:
                await acts[what](fresh)
                with pytest.raises(tenure.ConfigError, match="has other data under a key that tenure needs"):
                    await look(fresh)
                if user == "orders":
                    with pytest.raises(tenure.ConfigError, match="has other data under a key that tenure needs"):
                        await fresh.queue("made in between").delete()
                await client.delete(key)
                await acts[what](fresh)
                await look(fresh)
        finally:
            await client.delete(key)
            await client.sadd(key, *names)


async def test_a_consumer_without_the_right_goes_on_if_looking_has_worked(
    server: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async with acting(url_of(server, "observer")) as backend:
        with pytest.raises(tenure.ConfigError, match=PERMIT[0]):
            await backend.queue("orders").consume(print)
        await backend.leaders()
        caplog.clear()
        consuming = asyncio.ensure_future(backend.queue("orders").consume(print))
        await until(lambda: consuming.done() or PERMIT[0] in caplog.text)
        assert not consuming.done()
        consuming.cancel()
        await asyncio.wait([consuming])


WRITES: dict[str, tuple[str, ...]] = {
    "candidate": ("tenure:lease",),
    "orders": ("tenure:queues", "tenure:idle", "tenure:queue:{orders}:"),
    "observer": (),
}
"""By user: how each key begins, without a brace before it, that it may write."""


@pytest.mark.parametrize("user", WRITES)
async def test_a_user_writes_no_key_of_another_role(server: Redis, user: str) -> None:
    """Neither of elections, of other queues, nor of another program."""
    async with aioredis.Redis.from_url(server.url) as client, acting(server.url) as owner:
        await client.set("billing", "x")
        async with owner.election("held", ttl=TTL).campaign():
            keys = {key.decode() for key in await client.keys() if isinstance(key, bytes)}
            assert {"tenure:lease:held", "tenure:queues", "billing"} <= keys
            assert {one.partition(":{")[2].partition("}")[0] for one in keys} >= {"orders", "others"}
            own = {key for key in keys if key.removeprefix("{").startswith(WRITES[user] or "none")}
            assert bool(own) == bool(WRITES[user])
            for key in keys:
                for words in (("DEL", key), ("SET", key, "x"), ("RENAME", key, key)):
                    answer = await client.execute_command("ACL", "DRYRUN", user, *words)  # type: ignore[no-untyped-call]
                    assert (key, words[0], answer == b"OK") == (key, words[0], key in own)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    "command",
    [
        ("CONFIG", "GET", "requirepass"),
        ("CONFIG", "SET", "requirepass", "mine"),
        ("ACL", "LIST"),
        ("ACL", "GETUSER", "default"),
        ("ACL", "SETUSER", "mine", "on", "nopass", "+@all"),
        ("FUNCTION", "FLUSH"),
        ("FUNCTION", "LOAD", "REPLACE", "#!lua name=mine"),
        ("SCRIPT", "KILL"),
        ("SCRIPT", "DEBUG", "SYNC"),
        ("SCRIPT", "FLUSH"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("CLIENT", "PAUSE", "1"),
        ("CLIENT", "UNBLOCK", "1"),
        ("CLIENT", "LIST"),
        ("CLUSTER", "RESET"),
        ("MEMORY", "PURGE"),
        ("LATENCY", "RESET"),
        ("PUBSUB", "CHANNELS"),
        ("MODULE", "LIST"),
        ("SLOWLOG", "GET"),
        ("MONITOR",),
        ("KEYS", "*"),
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("SWAPDB", "0", "1"),
    ],
    ids=" ".join,
)
async def test_no_role_reads_passwords_or_changes_what_runs_for_others(
    server: Redis, user: str, command: tuple[str, ...]
) -> None:
    async with aioredis.Redis.from_url(url_of(server, user)) as client:
        with pytest.raises(NoPermissionError):
            await client.execute_command(*command)  # type: ignore[no-untyped-call]


OF_CONTAINERS = {
    "acl": {"cat", "genpass", "whoami"},
    "client": {  # all of them about the user's own connection
        *("caching", "capa", "getname", "getredir", "id", "info", "no-touch", "reply", "setinfo", "setname"),
        *("tracking", "trackinginfo"),
    },
    "cluster": {  # they show the nodes and the slots
        *("countkeysinslot", "getkeysinslot", "info", "keyslot", "links", "myid", "myshardid", "nodes", "shards"),
        *("slot-stats", "slots"),
    },
    "command": {"count", "docs", "getkeys", "getkeysandflags", "info", "list"},
    "script": {"load"},
}
"""The commands of Redis 7.0 to 8, and of Valkey, that consist of two words, concern no key, and may be permitted."""


@pytest.mark.parametrize("user", USERS)
async def test_no_command_of_a_container_is_permitted_but_these(server: Redis, user: str) -> None:
    """Also none that a later version of Redis adds, before somebody has looked at it."""
    async with aioredis.Redis.from_url(server.url) as client:
        client.response_callbacks.clear()
        permitted, containers = set(), set()
        for *_, parts in await client.execute_command("COMMAND"):  # type: ignore[no-untyped-call]
            for name, arity, *_, keys, _ in parts:
                container, _, word = name.decode().partition("|")
                containers.add(container)
                words = (container, word, *["x"] * (abs(arity) - 2))
                answer = await client.execute_command("ACL", "DRYRUN", user, *words)  # type: ignore[no-untyped-call]
                if answer == b"OK" and not keys and word != "help":
                    permitted.add((container, word))
    assert {"acl", "client", "cluster", "config", "function", "latency", "memory", "pubsub", "script"} <= containers
    assert {one for one in permitted if one[1] not in OF_CONTAINERS.get(one[0], ())} == set()
    assert ("script", "load") in permitted


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("category", ["admin", "dangerous"])
async def test_no_command_that_redis_calls_dangerous_is_permitted_but_info(
    server: Redis, user: str, category: str
) -> None:
    async with aioredis.Redis.from_url(server.url) as client:
        permitted = set()
        client.response_callbacks.clear()
        for found in await client.execute_command("ACL", "CAT", category):  # type: ignore[no-untyped-call]
            name = found.decode()
            [[_, arity, *_]] = await client.execute_command("COMMAND", "INFO", name)  # type: ignore[no-untyped-call]
            words = name.split("|")
            words += ["x"] * (abs(arity) - len(words))
            if await client.execute_command("ACL", "DRYRUN", user, *words) == b"OK":  # type: ignore[no-untyped-call]
                permitted.add(name)
    assert permitted == ({"info"} if category == "dangerous" and user in ("tenure", "observer") else set())


@pytest.mark.parametrize("user", USERS)
async def test_each_role_goes_on_when_redis_has_forgotten_the_scripts(server: Redis, user: str) -> None:
    """Requests about several names load a script by SCRIPT LOAD; all others by EVAL."""
    async with aioredis.Redis.from_url(server.url) as client, acting(url_of(server, user)) as backend:
        for _ in range(2):
            await client.script_flush()
            if user == "orders":
                await backend.queue("orders").send(b"x")
                [message] = await backend.queue("orders").receive()
                await message.complete()
            else:
                assert "led" in await backend.leaders()
