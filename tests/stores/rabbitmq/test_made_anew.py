"""RabbitMQ: the channels of a queue that was made anew, which the server may not have told, are begun anew, too."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest

pytest.importorskip("aiormq")

from tenure._backends.rabbitmq.errors import AmqpError
from tenure._backends.rabbitmq.held_channels import HeldChannels
from tenure._backends.rabbitmq.names import amqp_name
from tenure._backends.rabbitmq.records import Records
from tenure._backends.rabbitmq.subscription import CALM
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import GIVE_BACK, SETTLED, Settlement
from tests.durations import until
from tests.servers import RabbitMQ, url_of
from tests.stores.rabbitmq.opened import complete, opened, received, until_found


@pytest.fixture
def name() -> str:
    return f"anew-{secrets.token_hex(6)}"


async def declared(broker: Any, name: str) -> None:
    """Declare a queue, of which the broker notes that it is made anew."""
    broker.generations.follow(name)
    await broker.declare(name, {"max_deliveries": 5})


async def made_anew(broker: Any, name: str) -> None:
    """Let the broker see that a queue was made anew, of which the server has told nothing."""

    def write(records: Records) -> None:
        records[name].made = secrets.token_hex(8)

    await broker._records.change(write)
    await broker.settings(name)


async def held_of(broker: Any, name: str, count: int) -> list[Any]:
    await broker.send(name, [Outgoing(b"a") for _ in range(count)])
    got: list[Any] = []
    while len(got) < count:
        got += await received(broker, name)
    return got


async def give_back(broker: Any, got: Any) -> None:
    assert await broker.settle([Settlement(got, GIVE_BACK)]) == [SETTLED]


async def reject(broker: Any, got: Any) -> None:
    held = broker._receipts.forget(got)  # as when its lock has ended
    broker._receipts._give_up(held)


@pytest.mark.parametrize("end", [complete, give_back, reject])
async def test_channels_are_begun_anew_once_nothing_is_held_on_them(end: Any, name: str) -> None:
    """Soon, and not with the next look at the settings; and each verdict has its answer before."""
    async with opened(url_of(RabbitMQ)) as [broker]:
        await declared(broker, name)
        first, last = await held_of(broker, name, 2)
        channels = broker._subscriptions[name].channels
        await made_anew(broker, name)
        await complete(broker, first)
        await channels.arrived()
        assert channels.lost is None
        await end(broker, last)
        await until(lambda: channels.lost is not None)


async def test_who_listens_goes_on_on_channels_that_were_begun_anew(name: str) -> None:
    """What came back to the old ones meanwhile is not counted once more."""
    async with opened(url_of(RabbitMQ)) as [broker]:
        await declared(broker, name)
        [got] = await held_of(broker, name, 1)
        subscription = broker._subscriptions[name]
        channels = subscription.channels
        broker.begin_hints(name)
        await until(lambda: subscription.standing)
        await made_anew(broker, name)
        await reject(broker, got)
        [again] = await until_found(lambda: received(broker, name))
        assert (again.body, again.delivery_count) == (b"a", 2)
        await complete(broker, again)
        await until(lambda: channels.lost is not None)
        await until(lambda: subscription.standing)
        await broker.send(name, [Outgoing(b"b")])
        [got] = await until_found(lambda: received(broker, name))
        assert (got.body, got.delivery_count) == (b"b", 1)
        new = subscription.channels
        await complete(broker, got)
        await new.arrived()
        assert subscription.channels is new
        broker.end_hints(name)


async def test_what_is_on_its_way_when_channels_are_begun_anew_is_not_counted(name: str) -> None:
    """The verdict on a message lets the queue send the next one, later than the answer that proves the verdict."""
    count = 4
    async with opened(url_of(RabbitMQ)) as [broker]:
        await declared(broker, name)
        [got] = await held_of(broker, name, 1)
        channels = broker._subscriptions[name].channels
        broker.begin_hints(name)
        await until(lambda: broker._subscriptions[name].standing)
        receive = channels.first.on_delivery
        channels.first.on_delivery = lambda one: channels.loop.call_later(CALM / 10, receive, one)
        await made_anew(broker, name)
        await broker.send(name, [Outgoing(b"%d" % number) for number in range(count)])
        await complete(broker, got)
        counts: list[int] = []
        while len(counts) < count:
            [got] = await until_found(lambda: received(broker, name))
            counts.append(got.delivery_count)
            await complete(broker, got)
        assert counts == [1] * count
        await until(lambda: channels.lost is not None)
        broker.end_hints(name)


async def test_what_is_on_its_way_to_a_consumer_that_was_begun_just_then_is_not_counted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await declared(broker, name)
        assert await received(broker, name) == ()
        channels: HeldChannels = broker._subscriptions[name].channels
        arrived, begun = channels.arrived, 0

        def arrived_before_another() -> Any:
            nonlocal begun
            answer = arrived()
            if not begun:
                channels.consume("late", 1)
            begun += 1
            return answer

        monkeypatch.setattr(channels, "arrived", arrived_before_another)
        await broker.send(name, [Outgoing(b"a")])
        await made_anew(broker, name)
        await until(lambda: begun)
        [got] = await until_found(lambda: received(broker, name))
        assert got.delivery_count == 1
        await complete(broker, got)
        await until(lambda: channels.lost is not None)


async def test_channels_are_begun_anew_at_once_if_nothing_is_held_on_them(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await declared(broker, name)
        assert await received(broker, name) == ()
        channels = broker._subscriptions[name].channels
        await made_anew(broker, name)
        await until(lambda: channels.lost is not None)


async def test_channels_are_begun_anew_behind_a_claim(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await declared(broker, name)
        assert await received(broker, name) == ()
        subscription = broker._subscriptions[name]
        channels = subscription.channels
        async with subscription._claiming:
            await made_anew(broker, name)
            await until(lambda: subscription._claiming._waiters)
            assert channels.lost is None
        await until(lambda: channels.lost is not None)


async def test_channels_are_idle_when_every_answer_has_come(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.send(name, [Outgoing(b"a") for _ in range(3)])
        channels = HeldChannels(await broker._client.receiving(), amqp_name(name))
        come: list[int] = []
        channels.on_received = lambda one: come.append(one.tag)
        await channels.idle()
        getting = channels.get()
        assert not channels.is_idle
        await getting
        idle = asyncio.create_task(channels.idle())
        acknowledged = channels.begin_ack(come[0])
        await idle
        assert acknowledged.done()
        await channels.get()
        rejected = channels.begin_reject(come[1], requeue=False)
        assert not channels.unacked
        assert not channels.is_idle
        await channels.idle()
        assert rejected.done()
        await channels.get()
        idle = asyncio.create_task(channels.idle())
        await channels.arrived()
        assert not idle.done()
        channels.begin_close()
        with pytest.raises(AmqpError, match="closed"):
            await idle
