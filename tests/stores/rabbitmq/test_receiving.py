"""RabbitMQ: consumers that end while messages come, and short receives."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

import pytest

import tenure
from tests.durations import until
from tests.servers import RabbitMQ, patient, url_of


@pytest.fixture
def name() -> str:
    return f"rabbit-{secrets.token_hex(6)}"


async def test_the_stop_of_an_idle_consumer_counts_nothing(name: str) -> None:
    """Bursts come just when it is stopped: one that was counted would be dead."""
    url, rounds, burst, had = patient(url_of(RabbitMQ)), 8, 20, 0

    async def note(message: tenure.Message) -> None:
        nonlocal had
        assert message.delivery_count == 1
        had += 1

    async with tenure.connect(url) as sender, tenure.connect(url) as receiver:
        theirs, queue = sender.queue(name), receiver.queue(name, max_deliveries=1)
        for number in range(rounds):
            consuming, before = asyncio.create_task(queue.consume(note, concurrency=10)), had
            await theirs.send(b"x")
            await until(lambda before=before: had > before)  # type: ignore[misc]
            sending = asyncio.create_task(theirs.send_batch([tenure.Outgoing(b"x")] * burst))
            for _ in range(number):
                await asyncio.sleep(0)
            consuming.cancel()
            with suppress(asyncio.CancelledError):
                await consuming
            await sending
        await queue.consume(note, until_empty=True)
        await until(lambda: had >= rounds * (1 + burst))
        assert had == rounds * (1 + burst)
        assert not await queue.dead_letters.peek()


async def test_short_receives_come_in_order_and_leave_nothing_behind(name: str) -> None:
    url, bodies = patient(url_of(RabbitMQ)), [b"%d" % number for number in range(20)]
    async with tenure.connect(url) as sender, tenure.connect(url) as receiver:
        theirs, queue = sender.queue(name), receiver.queue(name)
        await theirs.send(b"declares the queue")
        [first] = await queue.receive(1, wait=5)
        await first.complete()
        got: list[bytes] = []
        for body in bodies:
            receiving = asyncio.create_task(queue.receive(1, wait=5))
            await theirs.send(body)
            for message in await receiving:
                got.append(message.body)
                await theirs.send(b"-" + body)  # while nobody receives
                await message.complete()
            for message in await queue.receive(1, wait=5):
                got.append(message.body)
                await message.complete()
        assert got == [each for body in bodies for each in (body, b"-" + body)]
        assert (await queue.stats()).ready == 0


async def listen_for_a_while(queue: tenure.Queue) -> None:
    """Consume a message, and stop, so that a free consumer is left."""
    handled = asyncio.Event()

    async def note(message: tenure.Message) -> None:
        handled.set()

    await queue.send(b"first")
    consuming = asyncio.create_task(queue.consume(note, concurrency=5))
    await handled.wait()
    consuming.cancel()
    with suppress(asyncio.CancelledError):
        await consuming


async def test_a_queue_is_in_use_until_who_has_listened_closes(name: str) -> None:
    """A client sees only how many consumers there are, and one that nobody listens to stays free."""
    url = patient(url_of(RabbitMQ))
    async with tenure.connect(url) as other:
        async with tenure.connect(url) as listener:
            await listen_for_a_while(listener.queue(name))
            with pytest.raises(tenure.QueueNotEmpty):
                await other.queue(name).delete()
        await other.queue(name).delete()


async def test_what_comes_to_a_consumer_of_nobody_goes_to_another_uncounted(name: str) -> None:
    url = patient(url_of(RabbitMQ))
    async with tenure.connect(url) as one, tenure.connect(url) as other:
        await listen_for_a_while(one.queue(name, max_deliveries=1))
        await other.queue(name).send(b"a")
        [message] = await other.queue(name).receive(1, wait=30)
        assert (message.body, message.delivery_count) == (b"a", 1)
        await message.complete()
