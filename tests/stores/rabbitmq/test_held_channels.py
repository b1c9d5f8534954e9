"""RabbitMQ: a queue of which a process holds messages on several channels."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("aiormq")

from tenure._backends.rabbitmq import held_channels, live
from tenure._backends.rabbitmq.connection import Delivered
from tenure._backends.rabbitmq.held_channels import HeldChannels
from tenure._backends.rabbitmq.live import Pages
from tenure._backends.rabbitmq.names import amqp_name
from tenure._queue.broker import LiveSelection, Selection
from tenure._queue.identity import dead_letters_of
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import DeadLetter, Settlement
from tests.servers import RabbitMQ, url_of
from tests.stores.rabbitmq.opened import complete, opened, received, until_found

PER_CHANNEL = 2
"""Consumers of a channel, here."""


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(held_channels, "CONSUMERS_MAX", PER_CHANNEL)
    return f"rabbit-{secrets.token_hex(6)}"


@asynccontextmanager
async def holding(broker: Any, name: str, bodies: bytes) -> AsyncIterator[tuple[HeldChannels, list[Delivered]]]:
    """Yield the channels of a queue with one message for each byte of *bodies*, and what comes to them."""
    await broker.send(name, [Outgoing(bytes([one])) for one in bodies])
    channels = HeldChannels(await broker._client.receiving(), amqp_name(name))
    come: list[Delivered] = []
    channels.on_received = come.append
    try:
        yield channels, come
    finally:
        channels.begin_close()


async def counted(broker: Any, name: str, count: int) -> list[tuple[bytes, int]]:
    """Take *count* messages; return their bodies and how often they were delivered, in their order."""
    found: list[Any] = []
    while len(found) < count:
        [one] = await until_found(lambda: received(broker, name))
        await complete(broker, one)
        found.append(one)
    return [(one.body, one.delivery_count) for one in found]


class SlowOpening:
    """Further channels of a connection open when they may."""

    def __init__(self, channels: HeldChannels, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_open = asyncio.Event()
        self._open = channels.first.connection.channel
        monkeypatch.setattr(channels.first.connection, "channel", self._channel)

    async def _channel(self) -> Any:
        await self.may_open.wait()
        return await self._open()


async def test_consumers_stand_when_those_of_all_channels_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(url_of(RabbitMQ)) as [broker], holding(broker, name, b"a") as (channels, _):
        opening = SlowOpening(channels, monkeypatch)
        begun = [channels.consume(f"unit-{number}", 1) for number in range(2 * PER_CHANNEL + 1)]
        standing = channels.stand()
        await asyncio.gather(*begun[:PER_CHANNEL])
        await channels.count()  # answered on the first channel behind what it was asked for before
        assert not standing.done()
        opening.may_open.set()
        await standing
        assert all(one.done() for one in begun)
        assert (await channels.count()).consumer_count == len(begun)


async def test_what_the_queue_has_sent_has_arrived_on_all_channels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = b"abcdefg"
    async with opened(url_of(RabbitMQ)) as [broker], holding(broker, name, bodies) as (channels, come):
        opening = SlowOpening(channels, monkeypatch)
        for number in range(len(bodies)):
            channels.consume(f"unit-{number}", 1)
        arrived = channels.arrived()
        await channels.count()
        assert not arrived.done()
        opening.may_open.set()
        await arrived
        assert sorted(one.body for one in come) == [bytes([one]) for one in bodies]


async def test_what_is_given_back_on_several_channels_comes_in_its_order(name: str) -> None:
    """Also if a channel has taken more when others had some already."""
    bodies = b"abcdefgh"
    async with opened(url_of(RabbitMQ)) as [broker]:
        async with holding(broker, name, bodies) as (channels, come):
            for _ in bodies[:-2]:
                await channels.get()
            await channels.begin_ack(come[1].tag)  # so the first channel has room, then the second one
            await channels.begin_ack(come[PER_CHANNEL].tag)
            while await channels.get() is not None:
                pass
            assert len(come) == len(bodies)
            for taken in channels.reject_all():
                await taken
            assert channels.unacked == 0
        assert await counted(broker, name, 6) == [(bytes([one]), 2) for one in b"adefgh"]


@pytest.mark.parametrize("taken_before", [0, PER_CHANNEL])
async def test_what_is_given_back_counts_once_while_a_consumer_was_not_full(taken_before: int, name: str) -> None:
    """It must not come to that, on the same channel or on another one, to be given back from there, too."""
    bodies = b"abcdef"
    async with opened(url_of(RabbitMQ)) as [broker]:
        async with holding(broker, name, bodies) as (channels, come):
            for _ in range(taken_before):
                await channels.get()
            await channels.consume("not-full", 2 * len(bodies))
            await channels.arrived()
            assert len(come) == len(bodies)
            await channels.end_consumers()
            for taken in channels.reject_all():
                await taken
                await channels.arrived()
            assert len(come) == len(bodies)
        assert await counted(broker, name, len(bodies)) == [(bytes([one]), 2) for one in bodies]


class TakenBetween:
    """Before the request of a look at its *turn*, another process takes *count* of the messages that it has counted."""

    def __init__(self, other: Any, place: str, turn: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: list[Any] = []
        self._other, self._place, self._turn, self._count = other, place, turn, count
        look, counted = self, Pages._counted

        async def counted_before(pages: Pages) -> tuple[int, int]:
            found = await counted(pages)
            await look._take()
            return found

        monkeypatch.setattr(Pages, "_counted", counted_before)

    async def _take(self) -> None:
        self._turn -= 1
        while not self._turn and len(self.held) < self._count:
            claim = await self._other.receive(self._place, self._count - len(self.held), 60.0)
            self.held += claim.deliveries


async def test_a_look_at_dead_letters_of_which_others_take_some_counts_each_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several channels, the last of which has a consumer that isn't full."""
    monkeypatch.setattr(live, "PAGE", 2)
    count, dead = 8, dead_letters_of(name)
    async with opened(*[url_of(RabbitMQ)] * 2) as (broker, other):
        await broker.send(name, [Outgoing(b"%d" % number) for number in range(count)])
        while (claim := await broker.receive(name, count, 60.0)).deliveries:
            for one in claim.deliveries:
                await broker.settle([Settlement(one, DeadLetter("test"))])
        between = TakenBetween(other, dead, count // 2, 1, monkeypatch)

        assert len(await broker.peek_dead(name, Selection(), count)) == count - 1
        assert len(between.held) == 1
        await complete(other, *between.held)
        found: list[Any] = []
        while len(found) < count - 1:
            [one] = await until_found(lambda: received(other, dead))
            found.append(other._receipts.find(one).found)
            await complete(other, one)
        bodies = [one.raw.body for one in found]
        assert bodies == sorted(bodies)
        assert max(one.returned for one in found) == 1


async def test_a_look_at_live_messages_of_which_others_take_some_counts_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, left = 40, 2
    async with opened(*[url_of(RabbitMQ)] * 2) as (broker, other):
        await broker.send(name, [Outgoing(b"%d" % number) for number in range(count)])
        between = TakenBetween(other, name, 1, count - left, monkeypatch)
        assert len(await broker.peek(name, LiveSelection(), 10)) == left
        await complete(other, *between.held)
        assert [one for _, one in await counted(other, name, left)] == [1] * left
