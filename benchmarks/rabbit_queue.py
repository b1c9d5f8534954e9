"""Queues in RabbitMQ: sending, draining and waking, beside loops by hand on aio-pika and beside FastStream.

Run by hand: ``python -m benchmarks.rabbit_queue [NAME …] [--messages 20000] [--batch 100] [--wakes 300]``. Each
contender has a fresh server of its own, a quorum queue, confirms, one acknowledgement for each message, and a handler
that does nothing. *drain* empties a full queue; *wake* is the time from the beginning of a send, by another process, to
the handler of an idle consumer. Prints figures only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import Any

import tenure
from tests.servers import RabbitMQ, private

BODY = b"x" * 200
QUEUE = "bench"
ARGUMENTS: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": 2**31 - 1}
PREFETCH = 510
"""As many as the pump holds at most: those that are handled, and those that wait."""

SENDER = """
import asyncio, sys, time
import aio_pika

async def main(url, queue, count):
    connection = await aio_pika.connect(url)
    channel = await connection.channel(publisher_confirms=True)
    print("ready", flush=True)
    for _ in range(count):
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        body = str(time.time_ns()).encode()
        await channel.default_exchange.publish(aio_pika.Message(body, delivery_mode=2), routing_key=queue)
    await connection.close()

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


class Watch:
    """Time, and the processor time of this process."""

    def __init__(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def lap(self, what: str, count: int) -> None:
        ended = time.perf_counter(), time.process_time()
        wall, ours = (after - before for after, before in zip(ended, self._begun, strict=True))
        us = ours / count * 1e6
        print(f"    {what:<6} {count / wall:>9,.0f} /s   {us:6.1f} us of our processor time", flush=True)
        self._begun = time.perf_counter(), time.process_time()


class Wakes:
    """Lets another process send one message after the other, each when the last one was handled."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._count = count
        self._found: list[float] = []
        self._handled = asyncio.Event()

    def handle(self, body: bytes) -> None:
        """Note a message that was handled."""
        if body != BODY:
            self._found.append((time.time_ns() - int(body)) / 1e6)
            self._handled.set()

    async def measure(self) -> None:
        sender = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            SENDER,
            self._url,
            QUEUE,
            str(self._count),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert sender.stdin
        assert sender.stdout
        await sender.stdout.readline()
        for _ in range(self._count):
            self._handled.clear()
            await asyncio.sleep(0.01)  # idle again
            sender.stdin.write(b"\n")
            await self._handled.wait()
        await sender.wait()
        found = sorted(self._found)
        p50, p99 = statistics.median(found), found[int(len(found) * 0.99)]
        print(f"    wake   p50 {p50:6.2f} ms, p99 {p99:6.2f} ms", flush=True)


# --- contenders --------------------------------------------------------------------------------------------------


async def tenure_pump(server: RabbitMQ, count: int, batch: int, wakes: int) -> None:
    """The message pump with an async handler that does nothing: locks renewed, failures counted, verdicts proven."""
    async with tenure.connect(server.url) as backend:
        queue = backend.queue(QUEUE)
        await queue.send(b"x")  # declared
        await queue.consume(handler=_nothing, until_empty=True)
        watch, waking = Watch(), Wakes(server.address, wakes)
        for _ in range(0, count, batch):
            await queue.send_batch([tenure.Outgoing(BODY) for _ in range(batch)])
        watch.lap("send", count)
        left = count
        empty = asyncio.Event()

        async def handle(message: tenure.Message) -> None:
            nonlocal left
            left -= 1
            if not left:
                empty.set()
            waking.handle(message.body)

        consuming = asyncio.create_task(queue.consume(handler=handle))
        await empty.wait()
        watch.lap("drain", count)
        await waking.measure()
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)


async def _nothing(message: tenure.Message) -> None:
    pass


async def aio_pika(server: RabbitMQ, count: int, batch: int, wakes: int) -> None:
    """A loop by hand: a callback that acknowledges; no locks that end, no retries, no dead letters."""
    import aio_pika

    connection = await aio_pika.connect(server.address)
    async with connection:
        channel = await connection.channel(publisher_confirms=True)
        queue = await channel.declare_queue(QUEUE, durable=True, arguments=ARGUMENTS)
        watch, waking = Watch(), Wakes(server.address, wakes)

        async def send() -> None:
            message = aio_pika.Message(BODY, delivery_mode=2)
            await channel.default_exchange.publish(message, routing_key=QUEUE, mandatory=True)

        for _ in range(0, count, batch):
            await asyncio.gather(*(send() for _ in range(batch)))
        watch.lap("send", count)
        left = count
        empty = asyncio.Event()

        async def handle(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            nonlocal left
            waking.handle(message.body)
            await message.ack()
            left -= 1
            if not left:
                empty.set()

        await channel.set_qos(prefetch_count=PREFETCH)
        await queue.consume(handle)
        await empty.wait()
        watch.lap("drain", count)
        await waking.measure()


async def faststream(server: RabbitMQ, count: int, batch: int, wakes: int) -> None:
    """FastStream with a subscriber that does nothing."""
    from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitMessage, RabbitQueue

    broker = RabbitBroker(server.address, default_channel=Channel(prefetch_count=PREFETCH), logger=None)
    queue = RabbitQueue(QUEUE, durable=True, queue_type=QueueType.QUORUM, arguments={"x-delivery-limit": 2**31 - 1})
    await broker.connect()
    await broker.declare_queue(queue)
    watch, waking = Watch(), Wakes(server.address, wakes)
    for _ in range(0, count, batch):
        await asyncio.gather(*(broker.publish(BODY, QUEUE, persist=True) for _ in range(batch)))
    watch.lap("send", count)
    left = count
    empty = asyncio.Event()

    @broker.subscriber(queue)
    async def handle(_: Any, message: RabbitMessage) -> None:
        nonlocal left
        left -= 1
        if not left:
            empty.set()
        waking.handle(message.body)

    await broker.start()
    await empty.wait()
    watch.lap("drain", count)
    await waking.measure()
    await broker.stop()


Contender = Callable[[RabbitMQ, int, int, int], Awaitable[None]]

CONTENDERS: dict[str, tuple[Contender, str]] = {
    "tenure": (tenure_pump, "aiormq"),
    "aio-pika": (aio_pika, "aio_pika"),
    "faststream": (faststream, "faststream"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rabbit_queue", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CONTENDERS)}; without, all")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--wakes", type=int, default=300)
    options = parser.parse_args()
    print(f"batch {options.batch}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    for name in options.names or CONTENDERS:
        contender, package = CONTENDERS[name]
        print(f"  {name}")
        if find_spec(package) is None:
            print("    not installed")
            continue
        with private(RabbitMQ) as server:
            asyncio.run(contender(server, options.messages, options.batch, options.wakes))


if __name__ == "__main__":
    main()
