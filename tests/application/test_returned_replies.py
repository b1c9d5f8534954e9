"""Replies that handlers return: sent and completed in one step, wherever the handler runs."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

import tenure
from tenure import Reply, Stats
from tenure._queue.received import Received
from tenure.testing import until
from tests.application.queue_setup import QueueSetup, in_virtual_time


def squared(message: Received) -> Reply:
    return Reply(b"%d" % int(message.body) ** 2, headers={"of": message.id})


async def squared_on_loop(message: Received) -> Reply:
    return squared(message)


async def is_empty(queue: tenure.Queue) -> bool:
    return await queue.stats() == Stats()


@pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])
@pytest.mark.parametrize(
    ("handler", "run_in"),
    [
        (squared_on_loop, "auto"),
        (squared, "thread"),
        pytest.param(squared, "process", marks=pytest.mark.process),
    ],
)
def test_a_handler_returns_the_reply(handler: Any, run_in: Any, sessions: bool) -> None:
    async def main() -> None:
        async with tenure.connect("memory:") as backend:
            queue = backend.queue("orders")
            consuming = asyncio.create_task(queue.consume(handler, run_in=run_in, sessions=sessions, concurrency=2))
            session = "s" if sessions else None
            answer = await queue.request(b"7", id="seven", session=session, timeout=60)
            assert (answer.body, answer.headers) == (b"49", {"of": "seven"})
            await queue.send(b"8", session=session)  # no answer is expected
            await until(lambda: is_empty(queue))
            await queue.drain()
            await consuming

    asyncio.run(main())


@in_virtual_time
async def test_the_message_of_a_returned_reply_is_remembered_in_the_inbox(setup: QueueSetup) -> None:
    queue = setup.queue()
    async with setup.consuming(queue, squared_on_loop, inbox_window=1_000.0):
        await queue.request(b"7", id="seven", timeout=60)
        await queue.send(b"8", id="eight")
        await asyncio.sleep(1.0)
    assert await queue.handled("seven", "eight") == [True, True]


@in_virtual_time
async def test_a_returned_reply_settles_without_auto_complete(setup: QueueSetup) -> None:
    queue = setup.queue()
    async with setup.consuming(queue, squared_on_loop, auto_complete=False):
        assert (await queue.request(b"7", timeout=60)).body == b"49"
        assert (await queue.stats()).locked == 0
        await queue.send(b"8")  # no answer is expected, so the handler is to settle it
        await asyncio.sleep(1.0)
        assert (await queue.stats()).locked == 1


@in_virtual_time
async def test_the_first_of_two_replies_is_sent(setup: QueueSetup) -> None:
    queue = setup.queue()

    async def twice(message: tenure.Message) -> Reply:
        await message.reply(b"first")
        return Reply(b"second")

    async with setup.consuming(queue, twice):
        assert (await queue.request(b"?", timeout=60)).body == b"first"
    assert await queue.stats() == Stats()


@in_virtual_time
async def test_a_reply_that_is_too_large_is_a_failure_of_the_handler(setup: QueueSetup) -> None:
    queue = setup.queue(body_max=100)
    seen: list[BaseException] = []

    async def large(message: tenure.Message) -> Reply:
        return Reply(bytes(101))

    consuming = setup.consuming(
        queue,
        large,
        retry=tenure.RetryPolicy(never=(tenure.ConfigError,)),
        on_error=lambda _, error: seen.append(error),
    )
    async with consuming:
        with pytest.raises(tenure.TimedOut):
            await queue.request(b"?", timeout=10)
    assert [type(one) for one in seen] == [tenure.MessageRefused]
    (letter,) = await queue.dead_letters.peek()
    assert (letter.reason, letter.delivery_count) == ("tenure.errors.MessageRefused", 1)
    assert "body (101 bytes)" in str(letter.description)


def test_a_reply_is_json_or_a_body_and_not_both() -> None:
    assert Reply(json=[1]).outgoing.body == b"[1]"
    assert repr(Reply(b"abc")) == "<Reply, 3 bytes>"
    with pytest.raises(tenure.ConfigError, match="body and json can't both be given"):
        Reply(b"x", json=1)
    assert pickle.loads(pickle.dumps(Reply(b"x", headers={"a": 1}))).outgoing == Reply(b"x", headers={"a": 1}).outgoing


def test_a_body_is_read_as_text() -> None:
    async def main() -> None:
        async with tenure.connect("memory:") as backend:
            queue = backend.queue("orders")
            await queue.send_batch([tenure.Outgoing("té".encode()), tenure.Outgoing(b"\xff")])
            first, second = await queue.receive(2)
            assert first.text() == "té"
            with pytest.raises(tenure.DecodeError, match="the body is no text in UTF-8") as caught:
                second.text()
            assert (caught.value.queue, caught.value.sequence) == ("orders", second.sequence)

    asyncio.run(main())
