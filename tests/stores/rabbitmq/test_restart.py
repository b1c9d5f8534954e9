"""A server that reads the logs of its queues again: what was completed stays so, and nothing else is gone."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("aiormq")

from tenure._backends.rabbitmq import held_channels
from tenure._backends.rabbitmq.names import RECORDS, amqp_name
from tenure._queue.outgoing import Outgoing
from tests.durations import until
from tests.servers import RabbitMQ, private
from tests.stores.rabbitmq.opened import complete, opened

pytestmark = pytest.mark.timeout(180)

HELD, COMPLETED, SENT = 40, 20, 60
"""Messages that a consumer holds when it is lost, each by a consumer of RabbitMQ's; more than 32 make a hash table."""


@pytest.fixture
def server() -> Iterator[RabbitMQ]:
    with private(RabbitMQ) as server:
        yield server


@pytest.fixture
def name() -> str:
    return f"rabbit-{secrets.token_hex(6)}"


async def received_one_by_one(broker: Any, name: str, count: int) -> list[Any]:
    """Receive so few at once that each comes to a consumer of its own."""
    got: list[Any] = []
    while len(got) < count:
        got += (await broker.receive(name, min(4, count - len(got)), 60.0)).deliveries
    return got


def are_on_disk(server: RabbitMQ, name: str) -> bool:
    """Return whether the server has noted its queues, which it does half a second later: it would begin them anew."""
    [file] = server.folder.glob("data/*/quorum/*/names.dets")
    return all(one.encode() in file.read_bytes() for one in (amqp_name(name), RECORDS))


async def left_after_a_restart(server: RabbitMQ, name: str) -> tuple[Counter[str], Counter[str]]:
    """Return which messages are there, and which should be, after a consumer was lost, and then the server."""
    async with opened(server.url, server.url) as (lost, other):
        await other.send(name, [Outgoing(b"a", id=f"m{number}") for number in range(SENT)])
        await received_one_by_one(lost, name, HELD)
        (await lost._client.connection("receiving"))._wire.drop(reset=True)

        async def is_back() -> bool:
            return bool((await other.stats(name)).ready == SENT)

        await until(is_back)
        done = await received_one_by_one(other, name, COMPLETED)
        await complete(other, *done)
    await until(lambda: are_on_disk(server, name))
    server.kill()
    server.start()
    async with opened(server.url) as [broker]:
        found = await received_one_by_one(broker, name, SENT - COMPLETED)
        await complete(broker, *found)
    expected = {f"m{number}" for number in range(SENT)} - {one.id for one in done}
    return Counter(one.id for one in found), Counter(expected)


async def test_what_a_lost_consumer_held_comes_in_the_order_of_the_log(server: RabbitMQ, name: str) -> None:
    """Else its log would complete other messages when it is read again."""
    found, expected = await left_after_a_restart(server, name)
    assert found == expected


@pytest.mark.parametrize("consumers_max", [SENT])
async def test_a_planted_channel_of_too_many_consumers_is_found(
    consumers_max: int, server: RabbitMQ, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_channels, "CONSUMERS_MAX", consumers_max)
    found, expected = await left_after_a_restart(server, name)
    assert found != expected
