"""Sending, receiving, and the verbs of a received message."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure.errors import ConfigError, LockLost, Unavailable
from tests.application.queue_setup import LOCK, QueueSetup, fill, in_virtual_time


@in_virtual_time
async def test_a_message_is_received_with_all_its_fields(setup: QueueSetup) -> None:
    queue = setup.queue()
    sent = await queue.send(
        b"body", id="a", headers={"k": 1}, priority=3, reply_to="answers", correlation_id="c", expires_in=60.0
    )
    assert sent == "a"
    [message] = await queue.receive()
    assert (message.id, message.body, dict(message.headers), message.delivery_count) == ("a", b"body", {"k": 1}, 1)
    assert (message.priority, message.reply_to, message.correlation_id, message.session) == (3, "answers", "c", None)
    assert message.queue == "orders"
    assert message.locked_until - message.enqueued_at == pytest.approx(LOCK)
    assert (message.reason, message.description, message.error, message.history) == (None, None, None, ())
    assert message.sequence == 1
    await message.complete()
    assert await queue.stats() == Stats()


@dataclass
class Line:
    article: str
    count: int = 1


@dataclass
class Order:
    number: int
    lines: list[Line]
    wanted: datetime | None = None
    rebate: float = 0.0


@in_virtual_time
async def test_json_and_dataclasses(setup: QueueSetup) -> None:
    queue = setup.queue()
    order = Order(7, [Line("Öl", 2), Line("x")], datetime(2026, 1, 1, tzinfo=UTC), 1)
    await queue.send(json=order)
    await queue.send(json={"a": [1, None]}, headers={"content-type": "application/vnd.mine+json"})
    first, second = await queue.receive(10)
    assert first.headers["content-type"] == "application/json"
    assert first.decode(Order) == order
    assert first.json()["lines"][0] == {"article": "Öl", "count": 2}
    assert (second.json(), second.headers["content-type"]) == ({"a": [1, None]}, "application/vnd.mine+json")
    with pytest.raises(ValueError, match="no 'number', 'lines', which Order must have"):
        second.decode(Order)
    with pytest.raises(ConfigError, match="can't be written as JSON"):
        await queue.send(json=object())
    with pytest.raises(ConfigError, match="can't both be given"):
        await queue.send(b"x", json=1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"body": "text"}, "body must be bytes, not str; encode it"),
        ({"body": 17}, "body must be bytes, not int"),
        ({"body": b"x" * 101}, r"body \(101 bytes\) must not be larger than body_max \(100 bytes\)"),
        ({"headers": {1: "x"}}, "header's name must be text"),
        ({"headers": {"x": b"bytes"}}, "header 'x' must be text, a whole number"),
        ({"headers": {"x": None}}, "header 'x' must be text"),
        ({"headers": {"x": math.nan}}, "header 'x' must be a finite number"),
        ({"headers": {"x": 2**63}}, "64 bits"),
        ({"headers": ["x"]}, "headers must be a mapping"),
        ({"delay": -1}, "delay must be at least 0"),
        ({"delay": "1"}, "delay must be a finite number"),
        ({"delay": 1, "at": 17.0}, "delay .* and at .* can't both"),
        ({"at": datetime(2026, 1, 1)}, "must have a time zone"),
        ({"at": math.inf}, "at must be a datetime or finite Unix seconds"),
        ({"expires_in": 0}, "expires_in must be more than 0"),
        ({"headers": {"a": "x" * 65_536}}, "headers \\(65,537 bytes\\) must not be larger than 65,536 bytes"),
        ({"priority": 10}, "priority must be a whole number from 0 to 9"),
        ({"priority": 1.0}, "priority must be a whole number"),
        ({"priority": True}, "priority must be a whole number"),
        ({"id": ""}, "id must not be empty"),
        ({"id": "x" * 256}, r"id \(256 characters\) must not be longer than 255"),
        ({"id": 5}, "id must be text"),
        ({"session": "a\0b"}, "NUL"),
        ({"correlation_id": "\ud800"}, "UTF-8"),
        ({"reply_to": "a$b"}, r"reply_to .* must not contain '\$'"),
    ],
)
def test_bad_messages_are_refused_before_anything_is_written(options: dict[str, Any], complaint: str) -> None:
    @in_virtual_time
    async def test(setup: QueueSetup) -> None:
        queue = setup.queue(body_max=100)
        with pytest.raises(ConfigError, match=complaint):
            await queue.send(**options)
        batch = [Outgoing(b"good"), Outgoing(**{"body": b"", **options}), Outgoing(b"good")]
        with pytest.raises(ConfigError, match=f"message 1 of 3: .*{complaint}.*none of them was sent"):
            await queue.send_batch(batch)
        assert await queue.stats() == Stats()

    test()


@in_virtual_time
async def test_a_batch_may_be_empty_and_its_bodies_any_bytes(setup: QueueSetup) -> None:
    queue = setup.queue()
    assert await queue.send_batch([]) == []
    bodies: list[Any] = [bytearray(b"a"), memoryview(b"b")]
    await queue.send_batch(Outgoing(body) for body in bodies)
    assert [type(one.body) for one in await queue.receive(5)] == [bytes, bytes]
    with pytest.raises(ConfigError, match="must be an Outgoing"):
        await queue.send_batch([b"raw"])  # type: ignore[list-item]


@in_virtual_time
async def test_delayed_at_a_datetime(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send(b"probe")
    [probe] = await queue.receive()
    await probe.complete()
    await queue.send(b"later", at=datetime.fromtimestamp(probe.enqueued_at + 60, UTC))
    assert await queue.receive() == []
    [later] = await queue.receive(wait=100)
    assert later.body == b"later"
    assert 59 < setup.clock.now() < 62


@in_virtual_time
async def test_receive_waits_for_a_message_and_no_longer(setup: QueueSetup) -> None:
    queue = setup.queue()
    assert await queue.receive(wait=3.0) == []
    assert setup.clock.now() == pytest.approx(3.0)
    waiting = asyncio.ensure_future(queue.receive(10, wait=60.0))
    await asyncio.sleep(1.0)
    await queue.send(b"now")
    assert [one.body for one in await waiting] == [b"now"]
    assert setup.clock.now() == pytest.approx(4.0)


@in_virtual_time
async def test_a_receive_that_is_given_up_gives_back(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send(b"a")
    setup.broker.delay = 1.0
    receiving = asyncio.ensure_future(queue.receive())
    await asyncio.sleep(0.5)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    await asyncio.sleep(3.0)
    [message] = await queue.receive()
    assert message.delivery_count == 1


@in_virtual_time
async def test_verbs_return_what_the_store_did(setup: QueueSetup) -> None:
    queue = setup.queue()
    await fill(queue, 6)
    done, failed, deferred, bad, back, slow = await queue.receive(10)
    await done.complete()
    await failed.abandon(delay=5.0, error=ValueError("x"))
    await deferred.defer()
    await bad.dead_letter("bad", "very")
    await back.give_back()
    for message in (done, failed, deferred, bad, back):
        for verb in (message.complete, message.abandon, message.defer, message.renew, message.give_back):
            with pytest.raises(LockLost, match="discard the work done"):
                await verb()
        with pytest.raises(LockLost):
            await message.dead_letter("x")
    stats = await queue.stats()
    assert (stats.ready, stats.locked, stats.delayed, stats.deferred, stats.dead) == (1, 1, 1, 1, 1)
    await asyncio.sleep(20.0)
    before = slow.locked_until
    assert await slow.renew() == slow.locked_until > before
    await asyncio.sleep(29.0)
    await slow.complete()
    [again] = await queue.receive_deferred(deferred.sequence, 999)
    assert (again.body, again.delivery_count) == (b"2", 2)
    await again.defer()
    assert [one.sequence for one in await queue.peek_deferred()] == [deferred.sequence]
    with pytest.raises(ConfigError, match="reason must not be empty"):
        await again.dead_letter("")


@in_virtual_time
async def test_no_answer_is_unavailable(setup: QueueSetup) -> None:
    queue = setup.queue()
    await fill(queue, 1)
    [message] = await queue.receive()
    setup.broker.cut = True
    with pytest.raises(Unavailable):
        await message.complete()
    setup.broker.cut = False
    await message.complete()
