"""What scripts of other users of the server leave behind there: the settings of cjson, which all scripts share."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("redis")

from redis import asyncio as aioredis

from tenure._backends import redis
from tenure._backends.redis.scripts import Script
from tenure._queue.broker import EVERYTHING, Selection
from tenure._queue.identity import ID_MARK
from tenure._queue.message import EXPIRED, MAX_DELIVERIES, Died
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import DeadLetter, Settlement
from tenure._url import Url
from tenure.errors import TenureError, Unavailable
from tenure.testing.faultproxy import FaultProxy
from tests.docs.pages import commands
from tests.servers import Redis, private

LOCK = 60.0

SETTINGS = [
    "encode_number_precision(1)",
    "encode_max_depth(1)",
    "decode_max_depth(1)",
    "encode_sparse_array(true, 1, 0)",
    "encode_invalid_numbers(true)",
    "decode_invalid_numbers(false)",
    "encode_keep_buffer(false)",
]
"""Every setting that cjson has, each with the value that changes most."""

USED = ["encode_number_precision", "encode_max_depth", "decode_max_depth"]
"""Those on which our scripts depend."""


class Observer:
    """A user with the rights of an observer, who changes the settings before each request of another."""

    def __init__(self, client: aioredis.Redis, settings: list[str]) -> None:
        self._client = client
        self._script = "".join(f"cjson.{setting} " for setting in settings) + "return 1"

    async def change(self) -> None:
        assert await self._client.eval(self._script, 0) == 1

    async def now(self) -> float:
        """Return the time of the server's clock, in Unix seconds."""
        seconds, microseconds = await self._client.time()
        return float(seconds + microseconds / 1e6)


@pytest.fixture(scope="module")
def server() -> Iterator[Redis]:
    with private(Redis, turnable=True, options=[("appendfsync", "no")]) as server:
        yield server


@asynccontextmanager
async def opened(server: Redis, settings: list[str]) -> AsyncIterator[tuple[FaultProxy, redis.RedisBroker, Observer]]:
    async with aioredis.Redis.from_url(server.url) as owner:
        for line in commands("docs/redis.md", "Rights", "ACL SETUSER candidate").splitlines():
            await owner.execute_command(*line.split())  # type: ignore[no-untyped-call]
    login = server.url.replace("redis://", "redis://observer:password@")
    async with FaultProxy("127.0.0.1", server.port) as proxy, aioredis.Redis.from_url(login) as client:
        backend = redis.open(Url.parse(f"redis://{proxy.host}:{proxy.port}"))
        try:
            yield proxy, backend.broker, Observer(client, settings)
        finally:
            await backend.close()


async def check_all_that_is_json(
    server: Redis, proxy: FaultProxy, broker: redis.RedisBroker, observer: Observer, name: str
) -> None:
    """Let every kind of request write and read JSON on the server, each after the settings were changed."""
    other = f"{name}-2"
    await broker.declare(name, {"max_deliveries": 1})
    headers = {"k": "v"}
    await observer.change()
    await broker.send(name, [Outgoing(b"a", id="a|1", headers=headers), Outgoing(b"b"), Outgoing(b"c", id="c")])

    # a verdict notes why, and when
    [first, _] = (await broker.receive(name, 2, LOCK)).deliveries
    earliest = await observer.now()
    await observer.change()
    await broker.settle([Settlement(first, DeadLetter("because", "of this"))])
    await observer.change()
    letters = await broker.peek_dead(name, Selection(ids=frozenset({"a|1"})), 10)
    assert [(one.id, one.headers, one.body) for one in letters] == [("a|1", headers, b"a")]
    letter = letters[0]
    assert (letter.reason, letter.description) == ("because", "of this")
    assert earliest - 0.001 <= letter.dead_at <= await observer.now()
    await observer.change()
    assert len(await broker.peek_dead(name, Selection(reason="because", dead_before=letter.dead_at + 1.0), 10)) == 1

    # the death is reported by the next claim, with the id from the sender
    server.turn(LOCK + 1.0)
    await observer.change()
    claim = await broker.receive(name, 1, LOCK)
    assert list(claim.died) == [Died(2, f"{name}{ID_MARK}2", 1, MAX_DELIVERIES)]
    assert [one.body for one in claim.deliveries] == [b"c"]

    # it is reported again if the answer was lost
    await broker.send(name, [Outgoing(b"d", id="d", expires_in=1.0)])
    server.turn(10.0)
    await observer.change()
    proxy.lose_answers()
    with pytest.raises(Unavailable):
        await broker.receive(name, 1, LOCK)
    proxy.heal()
    await observer.change()
    assert list((await broker.receive(name, 1, LOCK)).died) == [Died(4, "d", 0, EXPIRED)]

    # a dead letter keeps its id in another queue
    await observer.change()
    assert await broker.redrive(name, EVERYTHING, None, to=other) == 3
    await observer.change()
    moved = {one.id: (one.body, one.headers) for one in (await broker.receive(other, 10, LOCK)).deliveries}
    assert moved == {"a|1": (b"a", headers), f"{name}{ID_MARK}2": (b"b", {}), "d": (b"d", {})}


@pytest.mark.parametrize("settings", [*([one] for one in SETTINGS), SETTINGS], ids=[*SETTINGS, "all"])
async def test_scripts_of_others_change_no_answer(server: Redis, name: str, settings: list[str]) -> None:
    async with opened(server, settings) as (proxy, broker, observer):
        await check_all_that_is_json(server, proxy, broker, observer, name)


@pytest.mark.parametrize("unset", USED)
async def test_a_planted_script_that_does_not_set_what_it_uses_is_found(server: Redis, name: str, unset: str) -> None:
    async with opened(server, SETTINGS) as (proxy, broker, observer):
        broker._scripts._scripts = scripts_without(unset, broker._scripts._scripts)
        with pytest.raises((AssertionError, TenureError)):
            await check_all_that_is_json(server, proxy, broker, observer, name)


async def test_deaths_that_a_failed_claim_would_have_reported_are_kept(server: Redis, name: str) -> None:
    async with opened(server, ["encode_max_depth(1)"]) as (_, broker, observer):
        await broker.send(name, [Outgoing(id="a", expires_in=1.0)])
        server.turn(10.0)
        assert (await broker.stats(name)).dead == 1
        whole = broker._scripts._scripts
        broker._scripts._scripts = scripts_without("encode_max_depth", whole)
        await observer.change()
        with pytest.raises(Unavailable):
            await broker.receive(name, 1, LOCK)
        broker._scripts._scripts = whole
        assert list((await broker.receive(name, 1, LOCK)).died) == [Died(1, "a", 0, EXPIRED)]


def scripts_without(setting: str, scripts: Mapping[str, Script]) -> dict[str, Script]:
    """Return *scripts* that don't set this setting of cjson."""
    planted = {
        name: Script.of(re.sub(rf"^ *cjson\.{setting}\(.*\n", "", script.text, flags=re.MULTILINE))
        for name, script in scripts.items()
    }
    assert planted != scripts
    return planted
