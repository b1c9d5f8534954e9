"""RabbitMQ: quorum queues on three nodes that lose their majority, and find it again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

pytest.importorskip("aiormq")

import tenure
from tenure.errors import Unavailable
from tests.durations import until
from tests.servers import RabbitMQ, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[RabbitMQ]]:
    with private(RabbitMQ) as first, private(RabbitMQ, first=first) as second, private(RabbitMQ, first=first) as third:
        assert first.evaluate("length(rabbit_nodes:all_running())") == "3"
        yield [first, second, third]


async def test_what_was_acknowledged_outlives_a_lost_majority(nodes: list[RabbitMQ]) -> None:
    first, *others = nodes
    kept: set[bytes] = set()
    handled: set[bytes] = set()
    said: set[str] = set()

    async def handle(message: tenure.Message) -> None:
        handled.add(message.body)

    async with tenure.connect(f"{first.url}?timeout=3") as backend, tenure.connect(f"{first.url}?timeout=3") as other:
        queue = backend.queue("work", lock=30, max_deliveries=1_000)
        await queue.declare()
        assert "3" in first.evaluate("length(maps:get(nodes, amqqueue:get_type_state(hd(rabbit_amqqueue:list()))))")
        consuming = asyncio.create_task(other.queue("work").consume(handle))

        async def send(body: bytes) -> bool:
            try:
                await queue.send(body)
            except Unavailable as error:
                said.add(str(error))
                return False
            kept.add(body)
            return True

        for number in range(20):
            assert await send(b"before %d" % number)
        await until(lambda: kept <= handled)
        for node in others:
            os.kill(node.clock_pid, signal.SIGSTOP)
        try:
            refused = [not await send(b"without %d" % number) for number in range(3)]
            assert all(refused), "nobody can have kept it"
            assert not consuming.done()
        finally:
            for node in others:
                os.kill(node.clock_pid, signal.SIGCONT)
        assert all("gave no answer within 3 s" in one or "was not confirmed" in one for one in said), said

        async def is_sent() -> bool:
            return await send(b"after")

        await until(is_sent)
        for number in range(20):
            await send(b"after %d" % number)
        await until(lambda: kept <= handled)
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
