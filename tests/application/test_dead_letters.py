"""Dead letters: a queue of their own, kept for their time."""

from __future__ import annotations

import asyncio

import pytest

from tenure._queue import context
from tenure._queue.broker import Selection
from tenure._queue.outgoing import Outgoing
from tenure._queue.received import Message
from tenure._queue.retry import Reject
from tenure.errors import ConfigError
from tests.application.queue_setup import AT_ONCE, QueueSetup, fill, in_virtual_time


@in_virtual_time
async def test_dead_letters_are_redriven_to_another_queue(setup: QueueSetup) -> None:
    queue, there = setup.queue(), setup.queue("there")
    await queue.send_batch([Outgoing(b"%d" % number) for number in range(3)])
    for message in await queue.receive(3):
        await message.dead_letter("bad")
    assert await queue.dead_letters.redrive(where=lambda letter: letter.body != b"1", to="there") == 2
    assert await queue.dead_letters.redrive(to="orders") == 1  # its own
    assert [message.body for message in await there.receive(9)] == [b"0", b"2"]
    assert [(message.body, message.sequence) for message in await queue.receive(9)] == [(b"1", 2)]
    with pytest.raises(ConfigError, match="to \\('a b '\\) must be printable, with no space around it"):
        await queue.dead_letters.redrive(to="a b ")


@in_virtual_time
async def test_dead_letters_are_a_queue_of_their_own(setup: QueueSetup) -> None:
    queue = setup.queue()
    await fill(queue, 250)
    for number, message in enumerate(await queue.receive(250)):
        await message.dead_letter("odd" if number % 2 else "even", str(number), error=ValueError(str(number)))
    dead = queue.dead_letters
    assert dead.name == "orders$dead"
    assert len(await dead.peek()) == 100
    assert len(await dead.peek(1_000, reason="odd")) == 125
    assert [one.description for one in await dead.peek(2, where=lambda one: int(one.description) > 200)] == [
        "201",
        "202",
    ]
    [letter] = await dead.receive()
    assert (letter.reason, letter.description, letter.error and letter.error.type) == ("even", "0", "ValueError")
    assert [one.outcome for one in letter.history] == ["rejected"]
    await letter.complete()
    assert await dead.redrive(where=lambda one: one.body.endswith(b"7"), dry_run=True) == 25
    assert await dead.redrive(where=lambda one: one.body.endswith(b"7"), limit=10) == 10
    assert await dead.redrive(reason="odd", limit=5, dry_run=True) == 5
    [one] = await dead.peek(1)
    assert await dead.redrive(ids=[one.id]) == 1
    assert await dead.purge(reason="odd") == 114
    stats = await queue.stats()
    assert (stats.ready, stats.dead) == (11, 124)
    assert await dead.purge() == 124
    with pytest.raises(ConfigError, match="ids must be a collection"):
        await dead.purge(ids="abc")
    with pytest.raises(ConfigError, match="limit must be"):
        await dead.redrive(limit=0)


def test_how_long_letters_have_been_dead_is_counted_back_from_now() -> None:
    assert Selection(dead_for=60.0).at(100.0) == Selection(dead_before=40.0)


@in_virtual_time
async def test_dead_letters_are_kept_as_long_as_another_process_has_declared_since(setup: QueueSetup) -> None:
    mine, theirs = setup.queue(dead_retention=60.0), setup.queue()
    await mine.send(b"a")
    [message] = await mine.receive()
    await message.dead_letter("no use")
    await theirs.declare(dead_retention=10_000.0)
    await theirs.send(b"b")
    await asyncio.sleep(100.0)
    assert (await mine.receive())[0].body == b"b"
    await asyncio.sleep(1.0)
    assert (await mine.stats()).dead == 1
    await asyncio.sleep(10_000.0)
    await mine.receive()
    await asyncio.sleep(1.0)
    assert (await mine.stats()).dead == 0


@in_virtual_time
async def test_dead_letters_go_in_their_time_also_beside_an_idle_consumer(setup: QueueSetup) -> None:
    async def reject(message: Message) -> None:
        raise Reject("odd")

    for sessions in (False, True):
        queue = setup.queue(f"orders-{sessions}", dead_retention=60.0)
        async with setup.consuming(queue, reject, sessions=sessions, concurrency=1):
            await asyncio.sleep(600.0)
            for _ in range(2):
                await queue.send(b"no session's", expires_in=1.0)
                await asyncio.sleep(30.0)
                assert (await queue.stats()).dead == 1
                await asyncio.sleep(60.0)
                assert (await queue.stats()).dead == 0


def test_dead_letters_go_however_many_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "PURGE_MAX", 10)

    @in_virtual_time
    async def test(setup: QueueSetup) -> None:
        queue = setup.queue(dead_retention=60.0)
        await queue.send_batch([Outgoing(b"late", expires_in=1.0)] * 25)
        await asyncio.sleep(2.0)
        assert (await queue.stats()).dead == 25
        await asyncio.sleep(100.0)
        await queue.receive()
        await asyncio.sleep(1.0)
        assert (await queue.stats()).dead == 0

    test()


@in_virtual_time
async def test_the_history_of_a_message_that_failed_often_stays_small(setup: QueueSetup) -> None:
    queue = setup.queue(max_deliveries=50)
    await fill(queue, 1)

    async def handler(message: Message) -> None:
        raise ValueError("x" * 100_000)

    await queue.consume(handler, until_empty=True, retry=AT_ONCE)
    [dead] = await queue.dead_letters.peek()
    sizes = [len(attempt.error.traceback) for attempt in dead.history if attempt.error is not None]
    assert len(sizes) == 50
    assert min(sizes[0], sizes[-1]) > 16_000
    assert sum(sizes) < 100_000
