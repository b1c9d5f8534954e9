"""Queues on a broker whose only hints are those of its own process, which come at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tenure._backends.memory.queue import MemoryBroker
from tenure._queue.broker import QueueSettings, QueueTraits
from tenure._queue.context import QueueContext
from tenure._queue.queue import Queue
from tenure._queue.received import Message
from tenure._runtime.renewal_thread import RenewalThread
from tenure.testing.loop import VirtualLoop, run


class Quiet(MemoryBroker):
    """Like Azure's queues: there are no hints from other processes."""

    @property
    def traits(self) -> QueueTraits:
        return replace(super().traits, hints=False)


def orders(loop: asyncio.AbstractEventLoop) -> Queue:
    assert isinstance(loop, VirtualLoop)
    clock = loop.clock()
    settings = QueueSettings()
    return Queue(QueueContext("orders", Quiet(clock), RenewalThread.here(), clock, settings, "me", lambda _: None, {}))


def test_an_idle_consumer_is_woken_by_what_its_own_process_sends() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        queue, came = orders(loop), list[float]()

        async def handle(message: Message) -> None:
            came.append(loop.time())

        consuming = asyncio.ensure_future(queue.consume(handle, poll_every=60.0))
        await asyncio.sleep(600)  # by now, it polls every minute
        sent = loop.time()
        await queue.send(b"a")
        await asyncio.sleep(120)
        await queue.drain()
        await consuming
        assert came == [pytest.approx(sent, abs=0.01)]

    run(main(), seed=1, limit=100_000)


def test_a_receiver_is_woken_by_what_its_own_process_sends() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        queue = orders(loop)
        receiving = asyncio.ensure_future(queue.receive(1, wait=600))
        await asyncio.sleep(300.1)
        sent = loop.time()
        await queue.send(b"a")
        [message] = await receiving
        assert loop.time() == pytest.approx(sent, abs=0.01)
        await message.complete()

    run(main(), seed=1, limit=100_000)
