"""RabbitMQ: queues shared with aio-pika and pika, wrong inputs, and what only this backend does."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import aio_pika
import pika
import pytest

import tenure
from tenure._backends import rabbitmq
from tenure._backends.rabbitmq import client, connection, records
from tenure._backends.rabbitmq.address import address_of
from tenure._backends.rabbitmq.connection import Delivered
from tenure._backends.rabbitmq.delays import DELAY_MAX
from tenure._backends.rabbitmq.held_channels import HeldChannels
from tenure._backends.rabbitmq.names import amqp_name
from tenure._lease import NoAnswer
from tenure._queue.broker import EVERYTHING
from tenure._queue.message import EXPIRED, MAX_DELIVERIES, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    COMPLETE,
    LAPSED,
    Abandon,
    DeadLetter,
    GiveBack,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tenure.testing.faultproxy import FaultProxy
from tests.durations import ANSWERED_WITHIN, until
from tests.explained import facts_by_name
from tests.servers import Authority, RabbitMQ, free_port, patient, private, shared, url_of
from tests.servers.rabbitmq import ALL, US
from tests.servers.turned_process import CAN_TURN
from tests.stores.rabbitmq.opened import gotten, is_lost, received, until_found


@pytest.fixture
def name() -> str:
    return f"rabbit-{secrets.token_hex(6)}"


@pytest.fixture
async def backend() -> AsyncIterator[tenure.Backend]:
    async with tenure.connect(patient(url_of(RabbitMQ))) as backend:
        yield backend


@pytest.fixture
async def channel() -> AsyncIterator[Any]:
    """A channel of aio-pika, with confirms."""
    connection = await aio_pika.connect(url_of(RabbitMQ))
    async with connection:
        yield await connection.channel(publisher_confirms=True)


# --- interop: aio-pika ---


async def test_a_message_of_aio_pika_is_received_with_its_properties(
    backend: tenure.Backend, channel: Any, name: str
) -> None:
    queue = backend.queue(name)
    await queue.send(b"declares the queue")
    [first] = await queue.receive(wait=5)
    await first.complete()
    sent_at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    headers: dict[str, Any] = {"text": "Ünï", "n": -7, "yes": True, "f": 1.5}
    headers |= {"table": {"a": [1, 2]}, "when": sent_at, "raw": bytearray(b"\xff")}  # what we show as text
    message = aio_pika.Message(
        b"\x00\xff",
        headers=headers,
        content_type="application/json",
        content_encoding="identity",
        message_id="theirs",
        correlation_id="call",
        reply_to="answers",
        priority=3,
        timestamp=sent_at,
        type="order",
        app_id="shop",
        delivery_mode=2,
    )
    await channel.default_exchange.publish(message, routing_key=name)
    [got] = await queue.receive(wait=5)
    assert (got.body, got.id, got.reply_to, got.correlation_id, got.priority) == (
        b"\x00\xff",
        "theirs",
        "answers",
        "call",
        3,
    )
    assert got.enqueued_at == sent_at.timestamp()
    assert dict(got.headers) == {
        "content-type": "application/json",
        "text": "Ünï",
        "n": -7,
        "yes": True,
        "f": 1.5,
        "table": '{"a": [1, 2]}',
        "when": sent_at.isoformat(),
        "raw": "\\xff",
    }
    # Abandoned, it is a copy: with everything that its sender has set.
    await got.abandon()
    theirs = await channel.declare_queue(name, passive=True)
    [again] = await until_found(lambda: gotten(theirs))
    assert (again.body, again.content_encoding, again.type, again.app_id) == (
        b"\x00\xff",
        "identity",
        "order",
        "shop",
    )
    assert (again.message_id, again.content_type, again.priority) == ("theirs", "application/json", 3)
    assert shown(again.headers) == headers
    await again.ack()


async def test_a_message_of_ours_is_read_by_aio_pika(backend: tenure.Backend, channel: Any, name: str) -> None:
    await backend.queue(name).send(
        b"body",
        id="ours",
        headers={"text": "Ünï", "n": 2**40, "yes": True, "content-type": "text/plain"},
        reply_to="answers",
        correlation_id="call",
        expires_in=60.0,
    )
    theirs = await channel.declare_queue(name, passive=True)
    got = await theirs.get(timeout=5)
    assert (got.body, got.message_id, got.content_type) == (b"body", "ours", "text/plain")
    assert (got.reply_to, got.correlation_id, got.delivery_mode) == ("answers", "call", 2)
    assert got.expiration == 60
    assert abs(got.timestamp.timestamp() - time.time()) < 5
    assert shown(got.headers) == {"text": "Ünï", "n": 2**40, "yes": True}
    await got.ack()
    await until(lambda: is_empty(backend.queue(name)))


async def test_both_compete_for_one_queue(backend: tenure.Backend, channel: Any, name: str) -> None:
    queue = backend.queue(name)
    await queue.send_batch([tenure.Outgoing(b"%d" % number) for number in range(200)])
    ours: list[bytes] = []
    theirs: list[bytes] = []

    async def handle(message: tenure.Message) -> None:
        ours.append(message.body)
        await asyncio.sleep(0.002)

    async def take(message: Any) -> None:
        theirs.append(message.body)
        await message.ack()

    async def is_done() -> bool:
        # All are settled: a message whose handler still runs when its consumer is stopped goes to the other one.
        return len(ours) + len(theirs) >= 200 and await queue.stats() == Stats()

    await channel.set_qos(prefetch_count=5)
    await (await channel.declare_queue(name, passive=True)).consume(take)
    consuming = asyncio.create_task(queue.consume(handle, concurrency=5))
    await until(is_done)
    await stopped(consuming)
    assert sorted([*ours, *theirs]) == sorted(b"%d" % number for number in range(200))
    assert theirs


async def test_a_consumer_that_is_stopped_gives_its_messages_to_another(
    backend: tenure.Backend, channel: Any, name: str
) -> None:
    queue = backend.queue(name)
    await queue.send_batch([tenure.Outgoing(b"%d" % number) for number in range(20)])
    begun: list[bytes] = []
    theirs: list[tuple[bytes, int]] = []

    async def hang(message: tenure.Message) -> None:
        begun.append(message.body)
        await asyncio.sleep(30)

    async def take(message: Any) -> None:
        theirs.append((message.body, message.headers.get("x-delivery-count", 0)))
        await message.ack()

    consuming = asyncio.create_task(queue.consume(hang, concurrency=5))
    await until(lambda: len(begun) == 5)
    await (await channel.declare_queue(name, passive=True)).consume(take)
    stopped_at = time.monotonic()
    await stopped(consuming)
    await until(lambda: len(theirs) == 20)
    assert time.monotonic() - stopped_at < 0.9  # what came to it meanwhile would wait there for a second
    assert sorted(theirs) == sorted((b"%d" % number, 0) for number in range(20))

    await queue.send_batch([tenure.Outgoing(b"%d" % number) for number in range(20, 60)])  # some to what was left free
    await until(lambda: len(theirs) == 60)
    assert sorted(theirs) == sorted((b"%d" % number, 0) for number in range(60))

    async def nobody_else_listens() -> bool:
        found = await channel.declare_queue(name, passive=True)
        return bool(found.declaration_result.consumer_count == 1)

    await until(nobody_else_listens)


async def test_a_stop_in_a_stream_counts_no_delivery(backend: tenure.Backend, channel: Any, name: str) -> None:
    """RabbitMQ takes back what is on its way to a consumer that is ended, and counts it; most stops would meet that."""
    queue = backend.queue(name)
    await queue.send(b"declares the queue")
    stops, ended, rate = 12, 0, 800.0
    counts: list[int] = []
    counted: set[int] = set()  # the stops that were followed by messages that had been counted

    async def note(message: tenure.Message) -> None:
        counts.append(message.delivery_count)
        if message.delivery_count > 1:
            counted.add(ended)

    async def stream() -> None:
        sending: set[asyncio.Task[Any]] = set()
        while True:
            await asyncio.sleep(1 / rate)
            publish = channel.default_exchange.publish(aio_pika.Message(b"x", delivery_mode=2), routing_key=name)
            sending.add(task := asyncio.ensure_future(publish))
            task.add_done_callback(sending.discard)

    streaming = asyncio.create_task(stream())
    while ended < stops:
        had, consuming = len(counts), asyncio.create_task(queue.consume(note))
        await until(lambda had=had: len(counts) > had + 20)  # type: ignore[misc]
        await stopped(consuming)
        ended += 1
    await stopped(streaming)
    await queue.consume(note, until_empty=True)
    again = sum(count > 1 for count in counts)
    print(f"{again} of {len(counts)} messages were counted by {len(counted)} of {stops} stops")
    assert not again


async def test_a_message_sent_right_after_one_was_received_is_not_counted(
    backend: tenure.Backend, channel: Any, name: str
) -> None:
    """The receiver listens no more then."""
    rounds, again = 6, 0
    for number in range(rounds):
        queue = backend.queue(f"{name}-{number}")  # a new one, so that few have come lately
        receiving = asyncio.create_task(queue.receive(2, wait=60))
        await until(partial(has_consumers, channel, queue.name))
        await queue.send(b"first")
        [first] = await receiving
        await first.complete()
        await queue.send_batch([tenure.Outgoing(b"a"), tenure.Outgoing(b"b")])
        left: list[tenure.Message] = []
        while len(left) < 2:
            left += await queue.receive(2, wait=60)
        again += any(one.delivery_count > 1 for one in left)
        for one in left:
            await one.complete()
    assert not again


async def has_consumers(channel: Any, name: str) -> bool:
    try:
        found = await channel.declare_queue(name, passive=True)
    except aio_pika.exceptions.ChannelNotFoundEntity:
        await channel.reopen()
        return False
    return bool(found.declaration_result.consumer_count)


async def test_a_stop_right_after_a_verdict_counts_no_delivery(backend: tenure.Backend, name: str) -> None:
    """The acknowledgement makes room for the next message, which is sent once it is written: during the stop."""
    for number in range(20):
        # A delivery that nobody had would end a message. Another queue each time: in one from which this process has
        # just received, its last consumer may still be ending.
        queue = backend.queue(f"{name}-{number}", max_deliveries=1)
        await queue.send_batch([tenure.Outgoing(b"a"), tenure.Outgoing(b"b")])

        async def stop(message: tenure.Message) -> None:
            await message.complete()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            await queue.consume(stop, concurrency=1, prefetch=0)
        left = await queue.receive(2, wait=5)
        assert [one.delivery_count for one in left] == [1], await queue.dead_letters.peek()
        await left[0].complete()


async def test_an_answer_goes_to_the_reply_queue_of_aio_pika(backend: tenure.Backend, channel: Any, name: str) -> None:
    queue = backend.queue(name)
    await queue.send(b"declares the queue")
    replies = await channel.declare_queue(exclusive=True)  # classic, with a name of the server's
    question = aio_pika.Message(b"2+2", reply_to=replies.name, correlation_id="sum")
    await channel.default_exchange.publish(question, routing_key=name)

    async def answer(message: tenure.Message) -> None:
        if message.reply_to:
            await message.reply(b"4")

    await queue.consume(answer, until_empty=True)
    got = await replies.get(timeout=5)
    assert (got.body, got.correlation_id) == (b"4", "sum")
    assert replies.name not in await backend.queues()


# --- interop: pika ---


async def test_pika_sends_to_us_and_reads_from_us(backend: tenure.Backend, name: str) -> None:
    queue = backend.queue(name)
    await queue.send(b"from tenure", id="ours", headers={"n": 1})

    def exchange() -> tuple[Any, Any, Any]:
        connection = pika.BlockingConnection(pika.URLParameters(url_of(RabbitMQ)))
        channel = connection.channel()
        got: tuple[Any, Any, Any] = channel.basic_get(name, auto_ack=True)
        channel.confirm_delivery()
        properties = pika.BasicProperties(message_id="theirs", headers={"n": 2}, delivery_mode=2)
        channel.basic_publish("", name, b"from pika", properties, mandatory=True)
        connection.close()
        return got

    _, properties, body = await asyncio.to_thread(exchange)
    assert (body, properties.message_id, properties.headers["n"]) == (b"from tenure", "ours", 1)
    [got] = await queue.receive(wait=5)
    assert (got.body, got.id, dict(got.headers)) == (b"from pika", "theirs", {"n": 2})
    await got.complete()


async def test_a_message_that_was_passed_on_with_its_headers_is_delivered_for_the_first_time(
    backend: tenure.Backend, channel: Any, name: str
) -> None:
    """The server leaves the count of another queue in place until it delivers the message a second time."""
    queue = backend.queue(name, max_deliveries=3)
    await queue.send(b"declares the queue")
    counts: list[int] = []

    async def handle(message: tenure.Message) -> None:
        counts.append(message.delivery_count)
        if message.body == b"passed on" and message.delivery_count < 3:
            raise ValueError("not yet")

    consuming = asyncio.create_task(queue.consume(handle, retry=tenure.RetryPolicy(initial=0.0, jitter=0.0)))
    await until(lambda: counts == [1])
    message = aio_pika.Message(b"passed on", headers={"x-delivery-count": 10, "n": 1})
    await channel.default_exchange.publish(message, routing_key=name)
    await until(lambda: len(counts) == 4)
    await stopped(consuming)
    assert counts == [1, 1, 2, 3]
    assert not await queue.dead_letters.peek()


# --- dead letters ---


async def test_the_count_of_another_queue_is_not_that_of_a_dead_letter(
    backend: tenure.Backend, channel: Any, name: str
) -> None:
    queue = backend.queue(name)
    await queue.declare(lock=5)
    message = aio_pika.Message(b"short", headers={"x-delivery-count": 10}, expiration=0.05)
    await channel.default_exchange.publish(message, routing_key=name)
    for _ in range(2):  # to look at it is counted in the queue of dead letters
        [letter] = await until_found(queue.dead_letters.peek)
        assert (letter.reason, letter.delivery_count, letter.history) == (EXPIRED, 0, ())


async def test_a_dead_letter_tells_other_programs_why(backend: tenure.Backend, channel: Any, name: str) -> None:
    queue = backend.queue(name, max_deliveries=2)
    await queue.send(b"bad", id="x")

    async def fail(message: tenure.Message) -> None:
        raise ValueError("no such customer")

    await queue.consume(fail, until_empty=True, retry=tenure.RetryPolicy(initial=0.0, jitter=0.0))
    dead = await channel.declare_queue(f"{name}:dead", passive=True)
    letter = await dead.get(timeout=5)
    assert (letter.body, letter.message_id) == (b"bad", "x")
    assert letter.headers["x-tenure-reason"] == MAX_DELIVERIES
    assert "2 times" in letter.headers["x-tenure-description"]
    history = json.loads(letter.headers["x-tenure-history"])
    assert [(one["number"], one["outcome"], one["error"]["message"]) for one in history] == [
        (1, "abandoned", "no such customer"),
        (2, "abandoned", "no such customer"),
    ]
    await letter.nack()
    [found] = await until_found(queue.dead_letters.peek)
    assert (found.id, found.reason, found.delivery_count) == ("x", MAX_DELIVERIES, 2)


async def test_the_server_moves_what_expires(backend: tenure.Backend, channel: Any, name: str) -> None:
    queue = backend.queue(name)
    await queue.send(b"declares the queue")
    await channel.default_exchange.publish(
        aio_pika.Message(b"short", message_id="short", expiration=0.2), routing_key=name
    )
    await (await queue.receive(wait=5))[0].complete()
    [letter] = await until_found(queue.dead_letters.peek)
    assert (letter.id, letter.body, letter.reason) == ("short", b"short", EXPIRED)
    assert await queue.dead_letters.redrive() == 1
    [again] = await queue.receive(wait=5)
    assert (again.id, again.delivery_count) == ("short", 1)
    await again.complete()


# --- locks ---


async def test_a_native_crash_counts(backend: tenure.Backend, name: str) -> None:
    queue = backend.queue(name)
    await queue.send(b"a")
    connection = await aio_pika.connect(url_of(RabbitMQ))
    theirs = await (await connection.channel()).declare_queue(name, passive=True)
    await theirs.get(timeout=5)
    await connection.close()  # unacknowledged
    [got] = await queue.receive(wait=5)
    assert got.delivery_count == 2
    await got.complete()


async def test_a_request_that_is_given_up_costs_no_lock(name: str) -> None:
    """aiormq closes a channel on which a request is cancelled: none is."""
    backend = rabbitmq.open(Url.parse(patient(url_of(RabbitMQ))))
    broker = backend.broker
    try:
        await broker.send(name, [Outgoing(b"held"), *(Outgoing(b"other") for _ in range(20))])
        [held] = (await broker.receive(name, 1, 20.0)).deliveries
        requests: list[Callable[[], Awaitable[object]]] = [
            lambda: broker.renew([held], 20.0),
            lambda: broker.receive(name, 20, 2.0),
            lambda: broker.receive(name, 3, 2.0),
            lambda: broker.stats(name),
            lambda: broker.send(name, [Outgoing(b"other")]),
        ]
        for request in requests:
            for steps in (*range(1, 20), 30, 50):
                asking = asyncio.ensure_future(request())
                for _ in range(steps):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        assert isinstance((await broker.renew([held], 20.0))[0], Renewed)
        assert await broker.settle([Settlement(held, COMPLETE)]) == [Settled()]
    finally:
        await backend.close()


@pytest.mark.parametrize(
    "verdict", [Abandon(), GiveBack(), DeadLetter("why", "because")], ids=["abandon", "give-back", "dead-letter"]
)
async def test_a_verdict_that_is_given_up_leaves_one_copy(name: str, verdict: Verdict) -> None:
    """It has two steps, and goes on; so the same verdict once more is no second one."""
    backend = rabbitmq.open(Url.parse(patient(url_of(RabbitMQ))))
    broker = backend.broker
    try:
        for steps in (*range(1, 16), 20, 25, 30, 40, 60):
            await broker.send(name, [Outgoing(b"a")])
            [got] = (await broker.receive(name, 1, 20.0)).deliveries
            settling = asyncio.ensure_future(broker.settle([Settlement(got, verdict)]))
            for _ in range(steps):
                await asyncio.sleep(0)
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)
            [again] = await broker.settle([Settlement(got, verdict)])
            assert again in (Settled(), LAPSED)
            place = f"{name}$dead" if isinstance(verdict, DeadLetter) else name
            [copy] = await until_found(lambda place=place: received(broker, place))  # type: ignore[misc]
            assert await broker.settle([Settlement(copy, COMPLETE)]) == [Settled()]
            assert await received(broker, place) == ()
    finally:
        await backend.close()


async def test_messages_of_one_id_are_all_kept(name: str) -> None:
    """The driver tells by the id which message came back, as there was no queue of that name."""
    backend = rabbitmq.open(Url.parse(patient(url_of(RabbitMQ))))
    broker = backend.broker
    try:
        await broker.send(name, [Outgoing(b"%d" % number, id="same") for number in range(20)])
        got = (await broker.receive(name, 100, 20.0)).deliveries
        assert sorted(int(one.body) for one in got) == list(range(20))
        assert await broker.settle([Settlement(one, COMPLETE) for one in got]) == [Settled()] * 20
    finally:
        await backend.close()


async def test_an_acknowledgement_of_several_includes_none_that_comes_late(name: str) -> None:
    """The answer to a get may be overtaken by what comes to a consumer, though it has the lower number."""
    backend = rabbitmq.open(Url.parse(patient(url_of(RabbitMQ))))
    try:
        await backend.broker.send(name, [Outgoing(b"%d" % number) for number in range(4)])
        raw = await backend._client.receiving()
        held = HeldChannels(raw, amqp_name(name))
        come: list[Delivered] = []
        raw.on_delivery, receive = come.append, raw.on_delivery
        await held.consume("late", 4)
        await until(lambda: len(come) == 4)
        late = come.pop(0)
        for one in come[:2]:
            receive(one)
        acks = [held.begin_ack(one.tag) for one in come[:2]]
        await asyncio.gather(*acks)
        receive(late)
        receive(come[2])
        await asyncio.gather(held.begin_ack(come[2].tag))
        assert held.unacked == 1
        raw.begin_close()
        [left] = await until_found(lambda: received(backend.broker, name))
        assert left.body == late.body
        assert await backend.broker.settle([Settlement(left, COMPLETE)]) == [Settled()]
        assert await received(backend.broker, name) == ()
    finally:
        await backend.close()


async def test_a_message_that_the_driver_drops_is_delivered_again(name: str) -> None:
    backend = rabbitmq.open(Url.parse(patient(url_of(RabbitMQ))))
    try:
        await backend.broker.send(name, [Outgoing(b"dropped"), Outgoing(b"kept")])
        raw = await backend._client.receiving()
        held = HeldChannels(raw, amqp_name(name))
        come: list[Delivered] = []
        raw.on_delivery, receive = come.append, raw.on_delivery
        await held.consume("ended", 2)
        await until(lambda: len(come) == 2)
        await held.cancel("ended")
        receive(come[1])
        await held.arrived()
        [again] = await until_found(lambda: received(backend.broker, name))
        assert (again.body, again.delivery_count) == (b"dropped", 2)
        assert await backend.broker.settle([Settlement(again, COMPLETE)]) == [Settled()]
        await asyncio.gather(held.begin_ack(come[1].tag))
        raw.begin_close()
    finally:
        await backend.close()


async def test_a_silent_server_is_given_up_before_it_gives_the_lock_to_another(name: str) -> None:
    heartbeat = 2
    async with FaultProxy("127.0.0.1", shared(RabbitMQ).port) as proxy:
        backend = rabbitmq.open(Url.parse(f"amqp://{proxy.host}:{proxy.port}/?heartbeat={heartbeat}&timeout=3"))
        other = rabbitmq.open(Url.parse(patient(url_of(RabbitMQ))))
        try:
            await backend.broker.send(name, [Outgoing(b"a")])
            [got] = (await backend.broker.receive(name, 1, 60.0)).deliveries
            proxy.stall()
            stalled_at = time.monotonic()
            await until(lambda: is_lost(backend.broker, got))
            lost_after = time.monotonic() - stalled_at
            [again] = await until_found(lambda: received(other.broker, name))
            found_after = time.monotonic() - stalled_at
            assert await other.broker.settle([Settlement(again, COMPLETE)]) == [Settled()]
        finally:
            proxy.heal()
            await backend.close()
            await other.close()
    assert again.delivery_count == 2
    assert lost_after < 1.8 * heartbeat
    assert found_after > 2 * heartbeat * 0.9


async def test_a_request_without_an_answer_costs_its_channel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE", 1.2)
    backend = rabbitmq.open(Url.parse(f"{url_of(RabbitMQ)}?timeout=2"))
    broker = backend.broker
    try:
        await broker.send(name, [Outgoing(b"a"), Outgoing(b"b")])
        await broker.declare(f"{name}-2", {"max_deliveries": 5})
        await broker.send(f"{name}-2", [Outgoing(b"kept")])
        [kept] = (await broker.receive(f"{name}-2", 1, 60.0)).deliveries
        [got] = (await broker.receive(name, 1, 60.0)).deliveries
        held = broker._subscriptions[name].channels
        assert held is not None
        monkeypatch.setattr(held.first._raw.rpc_frames, "get", asyncio.Event().wait)  # what the driver waits for
        assert isinstance((await broker.renew([got], 60.0))[0], NoAnswer)
        await until(lambda: is_lost(broker, got))
        found = [await until_found(lambda: received(broker, name)) for _ in range(2)]
        assert sorted((one.body, one.delivery_count) for [one] in found) == [(b"a", 2), (b"b", 1)]
        assert await broker.settle([Settlement(one, COMPLETE) for [one] in found]) == [Settled()] * 2
        assert await broker.settle([Settlement(kept, COMPLETE)]) == [Settled()]  # by another channel
    finally:
        await backend.close()


async def test_a_lost_connection_is_a_lost_lock_and_cancels_the_handler(name: str) -> None:
    server = shared(RabbitMQ)
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        cancelled = asyncio.Event()
        counts: list[int] = []

        async def handle(message: tenure.Message) -> None:
            counts.append(message.delivery_count)
            if len(counts) == 1:
                proxy.reset()
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    cancelled.set()
                    raise

        async with tenure.connect(f"amqp://{proxy.host}:{proxy.port}/") as backend:
            queue = backend.queue(name, lock=30.0)  # renewed more often than that would need
            await queue.send(b"a")
            consuming = asyncio.create_task(queue.consume(handle))
            await asyncio.wait_for(cancelled.wait(), 5)
            await until(lambda: len(counts) == 2)
            await stopped(consuming)
        assert counts == [1, 2]


async def test_a_buffer_is_given_back_uncounted(name: str) -> None:
    """A process that listens, but doesn't ask, keeps what came to it for a second only."""
    brokers = [rabbitmq.open(Url.parse(patient(url_of(RabbitMQ)))) for _ in range(2)]
    busy, idle = (one.broker for one in brokers)
    try:
        await busy.send(name, [Outgoing(b"first")])
        hints = busy.hints(name)
        await anext(hints)
        assert len((await busy.receive(name, 5, 10.0)).deliveries) == 1  # and room for four more
        await idle.send(name, [Outgoing(b"%d" % number) for number in range(3)])
        found: dict[bytes, int] = {}

        async def take() -> bool:
            for one in (await idle.receive(name, 5, 10.0)).deliveries:
                found[one.body] = one.delivery_count
            return len(found) == 3

        await until(take)
        assert found == {b"0": 1, b"1": 1, b"2": 1}
        del hints
    finally:
        for one in brokers:
            await one.close()


async def test_a_lock_longer_than_the_servers_is_refused(name: str) -> None:
    async with tenure.connect(f"{url_of(RabbitMQ)}?consumer_timeout=20") as backend:
        with pytest.raises(ConfigError, match="consumer_timeout"):
            await backend.queue(name, lock=30.0).receive()


async def test_no_lock_is_renewed_beyond_the_servers_limit(name: str) -> None:
    backend = rabbitmq.open(Url.parse(f"{url_of(RabbitMQ)}?consumer_timeout=10"))
    try:
        await backend.broker.send(name, [Outgoing(b"a")])
        [got] = (await backend.broker.receive(name, 1, 2.0)).deliveries
        assert await backend.broker.renew([got], 9.5) == [LAPSED]  # given up, and so delivered again
        [again] = await until_found(lambda: received(backend.broker, name))
        assert again.delivery_count == 2
        assert await backend.broker.settle([Settlement(again, COMPLETE)]) == [Settled()]
    finally:
        await backend.close()


async def test_the_servers_own_limit_is_learned(name: str) -> None:
    """A message that is held for longer costs its channel, once."""
    with private(RabbitMQ, options=(("consumer_timeout", "3000"),)) as server:
        server.evaluate("application:set_env(rabbit, channel_tick_interval, 1000)")  # it looks once a minute else
        backend = rabbitmq.open(Url.parse(server.url))
        broker = backend.broker
        try:
            await broker.send(name, [Outgoing(b"a")])
            [got] = (await broker.receive(name, 1, 60.0)).deliveries
            if CAN_TURN:
                await asyncio.to_thread(server.turn, 3.0)
            await until(lambda: is_lost(broker, got))
            with pytest.raises(ConfigError, match=r"consumer_timeout \(3 s\)"):
                await broker.receive(name, 1, 60.0)
            [again] = await until_found(lambda: received(broker, name))
            assert again.delivery_count == 2
            assert await broker.settle([Settlement(again, COMPLETE)]) == [Settled()]
        finally:
            await backend.close()


# --- delays ---


async def test_delays_end_each_at_its_own_time(backend: tenure.Backend, name: str) -> None:
    """None ends early, and none is kept behind a longer one that was sent before it."""
    queue = backend.queue(name)
    delays = (3_600, 1.5, 0.2, 0.85, 0.05, 0.4)
    earliest: dict[float, float] = {}
    for delay in delays:
        earliest[delay] = time.monotonic() + delay
        await queue.send(str(delay).encode(), delay=delay)
    came: dict[float, float] = {}

    async def note(message: tenure.Message) -> None:
        came[float(message.body)] = time.monotonic()

    consuming = asyncio.create_task(queue.consume(note))
    await until(lambda: len(came) == len(delays) - 1)
    await stopped(consuming)
    assert came.keys() == {*delays} - {3_600}
    assert all(at >= earliest[delay] for delay, at in came.items())


async def test_a_delay_that_is_too_long_is_refused(backend: tenure.Backend, name: str) -> None:
    with pytest.raises(ConfigError, match=r"delay .* must not be more than 9\.7 days"):
        await backend.queue(name).send(b"a", delay=DELAY_MAX + 1)


# --- what can't be done, and wrong inputs ---


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda queue: queue.send(b"a", session="s"), "sessions"),
        (lambda queue: queue.send(b"a", priority=1), "priorities"),
        (lambda queue: queue.peek_deferred(), "deferred"),
    ],
    ids=["session", "priority", "deferred"],
)
async def test_what_rabbitmq_can_not_do_is_refused(
    backend: tenure.Backend, name: str, act: Callable[[Any], Awaitable[object]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        await act(backend.queue(name))


async def test_elections_are_refused(backend: tenure.Backend) -> None:
    with pytest.raises(ConfigError, match="has queues, but no elections; use another store for them"):
        backend.election("leader")
    with pytest.raises(ConfigError, match="no elections"):
        await backend.leaders()
    found = await backend.diagnose(write=True)
    assert found.traits is None
    assert found.queues is not None
    assert found.failure is None
    assert next(fact.value for fact in found.facts if fact.name == "server").startswith("RabbitMQ ")


async def test_a_classic_queue_is_refused(backend: tenure.Backend, channel: Any, name: str) -> None:
    await channel.declare_queue(name, durable=True)
    with pytest.raises(ConfigError, match="quorum queue"):
        await backend.queue(name, lock=20.0).receive()
    await channel.queue_delete(name)


async def test_a_stream_is_named_as_what_is_in_the_way(backend: tenure.Backend, channel: Any, name: str) -> None:
    await channel.declare_queue(name, durable=True, arguments={"x-queue-type": "stream"})
    with pytest.raises(ConfigError, match=r"has a stream of that name: .*use another name or virtual host"):
        await backend.queue(name).receive()
    await channel.queue_delete(name)


async def test_an_exclusive_queue_is_refused_with_what_to_do(backend: tenure.Backend, channel: Any, name: str) -> None:
    await channel.declare_queue(name, exclusive=True)
    with pytest.raises(ConfigError, match=r"belongs to another connection alone: .*; end that, or use another name"):
        await backend.queue(name).receive()


async def test_a_server_that_accepts_and_says_nothing_is_not_reached_within_the_time_to_connect(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not within that of the request, which may be two minutes."""
    monkeypatch.setattr(client, "CONNECTING_SHARE", 0.001)  # so that a busy machine knows the two apart
    async with tenure.connect(f"amqp://{silent}/?timeout=60") as backend:
        with pytest.raises(Unavailable, match=r"can't be reached: no answer within 0\.06 s"):
            await backend.queue("orders").dead_letters.peek()
        with pytest.raises(Unavailable, match=r"can't be reached: no answer within 0\.06 s"):
            await backend.queue("orders").send(b"x")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("amqp://", "names no host"),
        ("amqp:///vhost", "names no host"),
        ("amqp://localhost:port/", "no host:port"),
        ("amqp://localhost/a/b", "second slash"),
        (
            f"amqp://localhost/{'v' * 128}",
            r"the virtual host .* \(128 characters, 128 bytes\) must not be longer than 127",
        ),
        (f"amqp://localhost/{'𝔸' * 64}", r"64 characters, 256 bytes\) must not be longer than 127 characters and 255"),
        (f"amqp://me:{'p' * 2_999}@localhost/", r"user and password of amqp://localhost \(3,001 bytes\) must not be"),
        ("amqp://localhost/?heartbeet=3", "did you mean .heartbeat"),
        ("amqp://localhost/?heartbeat=0", "heartbeat must be"),
        ("amqp://localhost/?timeout=0", "timeout must be"),
        ("amqp://localhost/?ca=/x.pem", "write amqps://"),
    ],
)
def test_a_wrong_url_is_refused(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rabbitmq.open(Url.parse(url))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqps://localhost", "amqps://localhost:5671/"),
        ("amqp://localhost/%2F", "amqp://localhost:5672/"),
        ("amqp://[::1]/a%2Fb", "amqp://[::1]:5672/a%2Fb"),
    ],
)
def test_an_address_is_shown_as_it_is_written(url: str, shown: str) -> None:
    assert str(address_of(Url.parse(url))) == shown


@pytest.mark.parametrize(
    ("login", "path", "said"),
    [("guest:wrong@", "/", "refused the login"), ("guest:guest@", "/none", "refuses the virtual host 'none'")],
)
async def test_a_server_that_refuses_is_an_error_of_configuration(login: str, path: str, said: str) -> None:
    port = shared(RabbitMQ).port
    async with tenure.connect(f"amqp://{login}127.0.0.1:{port}{path}") as backend:
        with pytest.raises(ConfigError, match=said) as caught:
            await backend.queue("q").send(b"a")
        assert "wrong" not in str(caught.value)


async def test_names_and_passwords_may_be_long(name: str) -> None:
    server = shared(RabbitMQ)
    user, password, vhost = f"{name:u<300}", "p" * 2_700, f"{name:v<127}"
    server.order(f'rabbit_auth_backend_internal:add_user(<<"{user}">>, <<"{password}">>, {US})')
    server.order(f'rabbit_vhost:add(<<"{vhost}">>, {US})')
    rights = f'<<"{user}">>, <<"{vhost}">>, {ALL}, {ALL}, {ALL}, {US}'
    server.order(f"rabbit_auth_backend_internal:set_permissions({rights})")
    async with tenure.connect(f"amqp://{user}:{password}@127.0.0.1:{server.port}/{vhost}") as backend:
        await backend.queue("q").send(b"a")
    server.order(f'rabbit_vhost:delete(<<"{vhost}">>, {US})')
    server.order(f'rabbit_auth_backend_internal:delete_user(<<"{user}">>, {US})')


async def test_no_server_is_unavailable() -> None:
    port = free_port()  # reserved, and nobody listens
    async with tenure.connect(f"amqp://127.0.0.1:{port}/") as backend:
        with pytest.raises(Unavailable, match="can't be reached"):
            await backend.queue("q").send(b"a")


async def test_over_tls() -> None:
    with private(RabbitMQ, authority=Authority()) as server:
        async with tenure.connect(server.url) as backend:
            await backend.queue("q").send(b"a")
            [got] = await backend.queue("q").receive(wait=5)
            await got.complete()
            facts = facts_by_name((await backend.diagnose(write=False)).facts)
            assert facts["TLS"].value.startswith("TLS 1.3; the server's certificate and name are verified against /")
        async with tenure.connect(server.address) as backend:
            with pytest.raises(ConfigError, match="certificate is not trusted"):
                await backend.queue("q").send(b"a")


# --- names and records ---


@pytest.mark.parametrize("queue", ["orders", "a.b/c:d@e,f_g-h", "amq.gen-JzTY20BRgKO-HjmUJj0wLg"])
def test_a_plain_name_is_not_changed(queue: str) -> None:
    assert amqp_name(queue) == queue
    assert amqp_name(f"{queue}$dead") == f"{queue}:dead"


@pytest.mark.parametrize(
    "queue", ["größe", "with space", "orders:dead", "tenure:records", "a#b", "a<b>", "x" * 200 + "é", "a-x" + "0" * 20]
)
def test_any_other_name_gets_one_of_its_own(queue: str) -> None:
    found = amqp_name(queue)
    assert found != queue
    assert amqp_name(found) != found  # no two queues share a name
    assert len(amqp_name(f"{queue}$dead")) <= 200


async def test_a_name_like_the_servers_that_it_can_not_have_given_is_refused(backend: tenure.Backend) -> None:
    for queue in (f"amq.{'ü' * 150}", "amq.a b", "amq.a<b"):
        with pytest.raises(ConfigError, match="one that RabbitMQ has given"):
            amqp_name(queue)
    with pytest.raises(ConfigError, match="one that RabbitMQ has given"):
        await backend.queue(f"amq.{'ü' * 150}").send(b"a")


async def test_an_answer_goes_to_a_client_that_waits_without_a_queue(backend: tenure.Backend, name: str) -> None:
    """RabbitMQ returns such an answer although it delivers it, and the place can't be looked for as a queue."""
    answers: asyncio.Queue[Any] = asyncio.Queue()
    async with await aio_pika.connect(url_of(RabbitMQ)) as theirs:
        channel = await theirs.channel()
        replies = await channel.get_queue("amq.rabbitmq.reply-to", ensure=False)
        await replies.consume(answers.put, no_ack=True)
        await backend.queue(name).declare()
        question = aio_pika.Message(b"2+2", reply_to=replies.name)
        await channel.default_exchange.publish(question, routing_key=name)
        [got] = await backend.queue(name).receive(wait=5)
        assert got.reply_to is not None
        assert got.reply_to.endswith("==")
        await got.reply(b"4")
        assert (await answers.get()).body == b"4"
    gone = backend.queue(got.reply_to)
    await gone.send(b"4")  # RabbitMQ drops it
    assert await gone.receive() == []
    assert await gone.stats() == Stats()
    with pytest.raises(ConfigError, match="given by the server"):
        await gone.send(b"4", delay=1.0)


async def test_a_queue_of_any_name_takes_messages(backend: tenure.Backend, name: str) -> None:
    """The driver refuses some letters that AMQP has room for."""
    queue = backend.queue(f"{name} <ä+b>")
    await queue.send(b"a", delay=0.05)
    [got] = await queue.receive(wait=5)
    await got.complete()
    queue = backend.queue(f"{name}<b>")
    await queue.send(b"a")
    [got] = await queue.receive(wait=5)
    await got.complete()


async def test_many_processes_change_the_records_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LOCK_MAX", 2 * ANSWERED_WITHIN)  # nobody dies here with the lock
    url = Url.parse(patient(url_of(RabbitMQ)))
    backends = [rabbitmq.open(url) for _ in range(6)]
    try:
        await asyncio.gather(
            *(
                one.broker.declare(f"{name}-{number}", {"max_deliveries": number + 1})
                for number, one in enumerate(backends)
            )
        )
        names = await backends[0].broker.names()
        assert [one for one in names if one.startswith(name)] == [f"{name}-{number}" for number in range(6)]
        found = [(await backends[0].broker.settings(f"{name}-{number}")).max_deliveries for number in range(6)]
        assert found == [1, 2, 3, 4, 5, 6]
    finally:
        for one in backends:
            await one.close()


async def test_facts_that_are_too_long_are_shortened(name: str) -> None:
    """All properties of a message must fit into a frame: then the history is."""
    backend = rabbitmq.open(Url.parse(patient(url_of(RabbitMQ))))
    broker = backend.broker
    try:
        await broker.declare(name, {"max_deliveries": 60})
        headers = {f"h{number}": "é" * 1_000 for number in range(25)}
        await broker.send(name, [Outgoing(b"a", id="x", headers=headers)])
        failure = tenure.Failure("E", "m" * 4_000, "t" * 16_000)
        for number in range(55):
            [got] = await until_found(lambda: received(broker, name))
            assert got.delivery_count == number + 1
            assert await broker.settle([Settlement(got, Abandon(error=failure))]) == [Settled()]
        [got] = await until_found(lambda: received(broker, name))
        assert dict(got.headers) == headers
        assert await broker.settle([Settlement(got, DeadLetter("why", "d" * 4_000, failure))]) == [Settled()]
        [letter] = await broker.peek_dead(name, EVERYTHING, 1)
        assert (letter.id, letter.reason, letter.delivery_count) == ("x", "why", 56)
        assert letter.description == "d" * 4_000
    finally:
        await backend.close()


# --- steps ---


async def stopped(consuming: asyncio.Task[Any]) -> None:
    """Stop a consumer."""
    consuming.cancel()
    await asyncio.gather(consuming, return_exceptions=True)


def shown(headers: Any) -> dict[str, Any]:
    """Return the headers that the sender has set."""
    return {key: value for key, value in headers.items() if not key.startswith(("x-tenure-", "x-delivery-count"))}


async def is_empty(queue: tenure.Queue) -> bool:
    return await queue.stats() == Stats()


async def test_options_of_other_clients_are_set_aside_and_named_by_doctor() -> None:
    query = (
        "auth_mechanism=plain&blocked_connection_timeout=300&channel_max=100&connection_attempts=3"
        "&connection_timeout=10000&frame_max=131072&locale=en_US&name=orders&retry_delay=5&server_name_indication=h"
        "&socket_timeout=10&stack_timeout=15&verify=verify_peer"
    )
    written = f"amqp://guest:guest@127.0.0.1:{shared(RabbitMQ).port}//?{query}"  # the virtual host as Celery writes it
    async with tenure.connect(patient(written)) as backend:
        facts = facts_by_name((await backend.diagnose(write=False)).facts)
    assert facts["virtual host"].value == "/"
    for option in query.split("&"):
        fact = facts[f"option {option.partition('=')[0]}"]
        assert (fact.value.startswith("set aside: "), fact.advice) == (True, "")
