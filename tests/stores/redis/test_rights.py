"""The users that docs/redis.md gives least rights: what each may do works, and what it may not is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("redis")

from redis import asyncio as aioredis
from redis.exceptions import NoPermissionError

import tenure
from tenure._backends import redis
from tenure._url import Url
from tests.docs.pages import commands
from tests.servers import Redis, patient, private
from tests.stores.rights import Act, acting, lead, refused

PERMIT = "does not permit this user", "docs/redis.md"


@pytest.fixture(scope="module")
def server() -> Iterator[Redis]:
    """Yield a server with the users of the page, two queues, and a name that was led."""

    async def prepare(own: Redis) -> None:
        async with aioredis.Redis.from_url(own.url) as client:
            for line in commands("docs/redis.md", "Rights", "ACL SETUSER candidate").splitlines():
                await client.execute_command(*line.split())  # type: ignore[no-untyped-call]
        async with acting(own.url) as owner:
            await owner.queue("orders").send_batch([tenure.Outgoing(b"first"), tenure.Outgoing(b"second")])
            await owner.queue("others").send(b"x")
            await lead(owner, "led")

    with private(Redis) as own:
        asyncio.run(prepare(own))
        yield own


def url_of(server: Redis, user: str) -> str:
    return server.url.replace("redis://", f"redis://{user}:password@")


async def test_a_candidate_leads_and_gets_hints(server: Redis) -> None:
    async with acting(url_of(server, "candidate")) as backend:
        assert [await lead(backend, "job"), await lead(backend, "job")] == [1, 2]
        assert "led" in await backend.leaders()
        assert not await backend.election("job").ask_to_resign()
    opened = redis.open(Url.parse(patient(url_of(server, "candidate"))))
    await anext(opened.leases.hints("job"))
    assert opened.leases.traits.hints
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
        assert await backend.schedules() == []
        assert (await backend.diagnose()).traits


@pytest.mark.parametrize(
    "act",
    [
        lambda backend: lead(backend, "led"),
        lambda backend: backend.queue("others").send(b"x"),
        lambda backend: backend.queue("others").receive(),
        lambda backend: backend.queue("others").purge(),
        lambda backend: backend.queue("others").declare(lock=99),
    ],
    ids=["lead", "send", "receive", "purge", "declare"],
)
async def test_an_observer_changes_nothing(server: Redis, act: Act) -> None:
    async with aioredis.Redis.from_url(server.url) as client:
        before = {key: await client.dump(key) for key in await client.keys("*others*")}
        async with acting(url_of(server, "observer")) as backend:
            await refused(backend, act, *PERMIT)
        assert {key: await client.dump(key) for key in await client.keys("*others*")} == before


@pytest.mark.parametrize("user", ["candidate", "orders", "observer"])
@pytest.mark.parametrize(
    "command",
    [
        ("CONFIG", "GET", "requirepass"),
        ("ACL", "LIST"),
        ("FUNCTION", "FLUSH"),
        ("FUNCTION", "LOAD", "REPLACE", "#!lua name=mine"),
        ("SCRIPT", "FLUSH"),
        ("FLUSHALL",),
    ],
    ids=" ".join,
)
async def test_no_role_reads_passwords_or_changes_what_runs_for_others(
    server: Redis, user: str, command: tuple[str, ...]
) -> None:
    async with aioredis.Redis.from_url(url_of(server, user)) as client:
        with pytest.raises(NoPermissionError):
            await client.execute_command(*command)  # type: ignore[no-untyped-call]
