"""RabbitMQ: looks at dead letters keep them, in their order, whatever ends the look, and cost little memory."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aio_pika
import pytest

import tenure
from tenure._backends.rabbitmq.receiving import AT_ONCE
from tests.durations import PATIENCE, until
from tests.servers import RabbitMQ, patient, private, url_of

LETTERS, SIZE = 600, 400_000
MEMORY_MAX = 48e6
"""Bytes: a dozen pages. All bodies are 240 MB."""


@pytest.fixture
def name() -> str:
    return f"dead-{secrets.token_hex(6)}"


@pytest.fixture(scope="module")
def own() -> Iterator[RabbitMQ]:
    """A server whose policies a test may change, and where much may lie."""
    with private(RabbitMQ, options=[("vm_memory_high_watermark.absolute", "2GB")]) as server:
        yield server


@asynccontextmanager
async def channel_of(url: str) -> AsyncIterator[Any]:
    connection = await aio_pika.connect(url)
    try:
        yield await connection.channel()
    finally:
        await connection.close()


async def bury(url: str, name: str, count: int, *, begin: int = 0, size: int = 0) -> None:
    """Send dead letters as another program does, in an order that is not that of their sequences."""
    async with channel_of(url) as channel:
        filling = b"x" * size
        for first in range(begin, count, 20):
            numbers = range(first, min(first + 20, count))
            letters = [
                aio_pika.Message(b"%d %b" % (one, filling), message_id=str(one), delivery_mode=2) for one in numbers
            ]
            await asyncio.gather(*(channel.default_exchange.publish(one, f"{name}:dead") for one in letters))


async def taken(url: str, queue: str) -> list[int]:
    """Take all messages out of a queue, in its order; return their numbers."""
    async with channel_of(url) as channel:
        theirs = await channel.declare_queue(queue, passive=True)
        found: list[int] = []
        while (one := await theirs.get(fail=False)) is not None:
            await one.ack()
            found.append(int(one.body.split()[0]))
        return found


async def ready(url: str, queue: str) -> int:
    async with channel_of(url) as channel:
        return int((await channel.declare_queue(queue, passive=True)).declaration_result.message_count)


async def look_at_all(letters: tenure.DeadLetters) -> None:
    assert await letters.peek(where=lambda _: False) == []


async def look_at_some(letters: tenure.DeadLetters) -> None:
    assert len(await letters.peek(3)) == 3


async def look_for_a_reason(letters: tenure.DeadLetters) -> None:
    assert await letters.purge(reason="nothing") == 0


async def count_some(letters: tenure.DeadLetters) -> None:
    assert await letters.redrive(where=lambda one: one.body.startswith(b"7"), dry_run=True) > 0


LOOKS = [look_at_all, look_at_some, look_for_a_reason, count_some]


async def test_looks_at_all_dead_letters_keep_their_order(name: str) -> None:
    url, count = url_of(RabbitMQ), 60
    async with tenure.connect(patient(url)) as backend:
        queue = backend.queue(name)
        await queue.declare()
        await bury(url, name, count)
        for _ in range(3):
            for look in LOOKS:
                await look(queue.dead_letters)
    assert await taken(url, f"{name}:dead") == list(range(count))


async def test_letters_that_come_between_two_looks_stay_behind_the_others(name: str) -> None:
    url = url_of(RabbitMQ)
    async with tenure.connect(patient(url)) as backend:
        queue = backend.queue(name)
        await queue.declare()
        for begin in range(0, 50, 10):
            await bury(url, name, begin + 10, begin=begin)
            await look_at_all(queue.dead_letters)
    assert await taken(url, f"{name}:dead") == list(range(50))


async def test_a_look_that_is_left_gives_all_back(name: str) -> None:
    url = url_of(RabbitMQ)

    def fail(letter: tenure.DeadMessage) -> bool:
        if letter.body.startswith(b"30"):
            raise ZeroDivisionError
        return False

    async with tenure.connect(patient(url)) as backend:
        queue = backend.queue(name)
        await queue.declare()
        await bury(url, name, 60)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await queue.dead_letters.redrive(where=fail)
            assert await ready(url, f"{name}:dead") == 60
    assert sorted(await taken(url, f"{name}:dead")) == list(range(60))


@pytest.mark.parametrize("limit", [2, 3])
async def test_a_limit_of_deliveries_loses_none_by_looks(own: RabbitMQ, name: str, limit: int) -> None:
    own.set_policy("limit", f"^{name}", f'{{"delivery-limit": {limit}}}')
    count = 30
    async with tenure.connect(patient(own.url)) as backend:
        queue = backend.queue(name)
        await queue.declare()
        await bury(own.url, name, count)
        for _ in range(2 * limit + 1):
            await look_at_all(queue.dead_letters)
    assert await taken(own.url, f"{name}:dead") == list(range(count))


# --- a process that dies ---

KILLED = """
import asyncio, sys
import tenure
from tenure._backends.rabbitmq import live

what, at = sys.argv[3], int(sys.argv[4])

def is_meant(letter):
    return int(letter.body.split()[0]) % 3 == 0

async def main(url, name):
    async with tenure.connect(url) as backend:
        letters = backend.queue(name).dead_letters
        if what == "look":
            seen = 0
            def stop(letter):
                nonlocal seen
                seen += 1
                if seen == at:
                    print("there", flush=True)
                    sys.stdin.readline()
            await letters.peek(where=stop)
        else:
            ids = [one.id for one in await letters.peek(1_000, where=is_meant)]
            removed = 0
            remove = live.Pages.remove
            async def stop_at(self, one):
                nonlocal removed
                removed += 1
                if removed == at:
                    print("there", flush=True)
                if removed >= at:
                    await asyncio.Event().wait()
                await remove(self, one)
            live.Pages.remove = stop_at
            await getattr(letters, what)(ids=ids)

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


async def killed_at(url: str, name: str, what: str, at: int) -> None:
    """Kill a process while it does *what*, at the letter *at*; return when the server has given back what it had."""
    argv = [sys.executable, "-c", KILLED, patient(url), name, what, str(at)]
    process = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert await asyncio.wait_for(process.stdout.readline(), PATIENCE) == b"there\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    async with channel_of(url) as channel:

        async def is_alone() -> bool:
            found = await channel.declare_queue(f"{name}:dead", passive=True)
            return bool(found.declaration_result.consumer_count == 0)

        await until(is_alone)


@pytest.mark.process
@pytest.mark.parametrize("looks", [0, 1], ids=["first", "second"])
async def test_a_process_that_dies_while_it_looks_loses_and_doubles_none(name: str, looks: int) -> None:
    url, count = url_of(RabbitMQ), 60
    async with tenure.connect(patient(url)) as backend:
        queue = backend.queue(name)
        await queue.declare()
        await bury(url, name, count)
        for _ in range(looks):
            await look_at_all(queue.dead_letters)
        await killed_at(url, name, "look", 35)
        await look_at_all(queue.dead_letters)
        assert await ready(url, f"{name}:dead") == count
    assert sorted(await taken(url, f"{name}:dead")) == list(range(count))


@pytest.mark.process
@pytest.mark.parametrize("what", ["purge", "redrive"])
async def test_a_process_that_dies_in_a_selective_removal_loses_none(name: str, what: str) -> None:
    url, count, at = url_of(RabbitMQ), 150, 20
    async with tenure.connect(patient(url)) as backend:
        await backend.queue(name).declare()
        await bury(url, name, count)
        await killed_at(url, name, what, at)
        left = Counter(await taken(url, f"{name}:dead"))
        back = Counter(await taken(url, name))
    meant, others = set(range(0, count, 3)), set(range(count)) - set(range(0, count, 3))
    assert {one: left[one] for one in others} == dict.fromkeys(others, 1)
    assert not others & back.keys()
    if what == "purge":
        assert not back
        assert set(left.values()) == {1}
        return
    assert meant == (left.keys() | back.keys()) & meant
    assert set(left.values()) | set(back.values()) == {1}
    twice = left.keys() & back.keys()
    assert 1 <= len(twice) <= AT_ONCE


# --- memory ---


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX
    finally:
        tracemalloc.stop()


@pytest.mark.timeout(300)
async def test_many_large_dead_letters_are_never_in_memory_at_once(own: RabbitMQ, name: str) -> None:
    url = own.url
    async with tenure.connect(patient(url)) as backend:
        queue = backend.queue(name)
        await queue.declare()
        await bury(url, name, LETTERS, size=SIZE)
        letters = queue.dead_letters
        with bounded():
            assert await letters.redrive(where=lambda one: one.body.startswith(b"77 ")) == 1
        with bounded():
            assert await letters.purge(reason="nothing") == 0
        with bounded():
            assert len(await letters.peek(2)) == 2
        with bounded():
            assert await letters.purge(where=lambda one: int(one.body.split()[0]) % 2 == 0) == LETTERS / 2
        with bounded():
            assert await letters.redrive() == LETTERS / 2 - 1
        with bounded():
            assert len(await queue.peek(2)) == 2
        with bounded():
            assert await queue.purge(ids=["77"]) == 1
        assert (await queue.stats()).ready == LETTERS / 2 - 1
        await queue.delete(force=True)
