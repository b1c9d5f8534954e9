"""Queues in NATS: sending, draining and waking, beside loops of nats-py written by hand and beside FastStream.

Run by hand: ``python -m benchmarks.nats_queue [NAME …] [--messages 20000] [--batch 100] [--wakes 300]``. Each contender
has a fresh server of its own, one process, and a handler that does nothing. A loop by hand has no renewal, no retries,
no dead letters and no fence. It acknowledges as its name says: each message by a request of its own, which NATS calls
a double acknowledgement; or without an answer; or as tenure does, of which only the last of a batch has one. Prints
figures only.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import nats
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StreamConfig

import tenure
from tenure._backends import nats as backends_nats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Settlement
from tenure._url import Url
from tests.servers import Nats, private

BODY = b"x" * 200
STREAM = StreamConfig(name="bench", subjects=["bench"], retention=RetentionPolicy.WORK_QUEUE)
PAUSE = 0.01  # seconds between two messages that wake an idle consumer


class Figures:
    """The figures of one contender."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def lap(self, what: str, count: int) -> None:
        ended = time.perf_counter()
        print(f"    {what:<6} {count / (ended - self._begun):>9,.0f} /s", flush=True)
        self._begun = time.perf_counter()


def show_wakes(waits: list[float]) -> None:
    waits = sorted(waits)
    print(
        f"    wake   {statistics.median(waits) * 1e3:9.2f} ms p50, {waits[int(len(waits) * 0.99)] * 1e3:.2f} ms p99",
        flush=True,
    )


# --- contenders --------------------------------------------------------------------------------------------------


async def tenure_broker(server: Nats, count: int, batch: int, wakes: int) -> None:
    """The broker itself: the next claim is under way while the last one is settled."""
    backend = backends_nats.open(Url.parse(server.url))
    broker, figures = backend.broker, Figures()
    for _ in range(0, count, batch):
        await broker.send("bench", [Outgoing(BODY) for _ in range(batch)])
    figures.lap("send", count)
    claiming = asyncio.ensure_future(broker.receive("bench", batch, 30.0))
    while (claim := await claiming).deliveries:
        claiming = asyncio.ensure_future(broker.receive("bench", batch, 30.0))
        await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
    figures.lap("drain", count)
    await backend.close()


async def tenure_pump(server: Nats, count: int, batch: int, wakes: int) -> None:
    """The message pump with an async handler that does nothing: locks renewed, failures counted, verdicts batched."""
    async with tenure.connect(server.url) as backend:
        queue, figures = backend.queue("bench"), Figures()
        for _ in range(0, count, batch):
            await queue.send_batch([Outgoing(BODY) for _ in range(batch)])
        figures.lap("send", count)

        async def handle(message: tenure.Message) -> None:
            pass

        await queue.consume(handle, until_empty=True)
        figures.lap("drain", count)
        waits: list[float] = []
        stop = asyncio.Event()

        async def measure(message: tenure.Message) -> None:
            waits.append(time.perf_counter() - float(message.body))

        consuming = asyncio.create_task(queue.consume(measure, stop=stop))
        await asyncio.sleep(0.5)  # idle
        for _ in range(wakes):
            await queue.send(repr(time.perf_counter()).encode())
            await asyncio.sleep(PAUSE)
        stop.set()
        await consuming
        show_wakes(waits)


async def loop(server: Nats, count: int, batch: int, wakes: int, *, acknowledge: str) -> None:
    """A loop by hand on a pull consumer."""
    client = await nats.connect(server.url)
    context, figures = client.jetstream(), Figures()
    await context.add_stream(STREAM)
    for _ in range(0, count, batch):
        await asyncio.gather(*(context.publish("bench", BODY) for _ in range(batch)))
    figures.lap("send", count)
    config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=30.0, max_ack_pending=-1)
    subscription = await context.pull_subscribe("bench", durable="bench", config=config)

    async def settle(messages: list[Any]) -> None:
        if acknowledge == "each":
            await asyncio.gather(*(message.ack_sync(timeout=5.0) for message in messages))
            return
        for message in messages[: -1 if acknowledge == "last" else None]:
            await message.ack()
        if acknowledge == "last":
            await messages[-1].ack_sync(timeout=5.0)

    left = count
    while left:
        messages = await subscription.fetch(batch, timeout=5.0)
        left -= len(messages)
        await settle(messages)
    await client.flush()
    figures.lap("drain", count)
    waits: list[float] = []

    async def consume() -> None:
        while len(waits) < wakes:
            [message] = await subscription.fetch(1, timeout=30.0)
            waits.append(time.perf_counter() - float(message.data))
            await settle([message])

    consuming = asyncio.create_task(consume())
    await asyncio.sleep(0.5)
    for _ in range(wakes):
        await context.publish("bench", repr(time.perf_counter()).encode())
        await asyncio.sleep(PAUSE)
    await consuming
    show_wakes(waits)
    await client.close()


async def faststream(server: Nats, count: int, batch: int, wakes: int) -> None:
    """FastStream on a pull consumer, which acknowledges without an answer."""
    from faststream.nats import JStream, NatsBroker, PullSub

    broker = NatsBroker(server.url, logger=None)
    stream = JStream(name="bench", declare=False)
    left = count
    done = asyncio.Event()
    waits: list[float] = []

    @broker.subscriber("bench", stream=stream, durable="bench", pull_sub=PullSub(batch_size=batch))
    async def handle(body: bytes) -> None:
        nonlocal left
        if left <= 0:
            waits.append(time.perf_counter() - float(body))
        left -= 1
        if left == 0:
            done.set()

    client = await nats.connect(server.url)
    context, figures = client.jetstream(), Figures()
    await context.add_stream(STREAM)
    for _ in range(0, count, batch):
        await asyncio.gather(*(context.publish("bench", BODY) for _ in range(batch)))
    figures.lap("send", count)
    await broker.start()
    await done.wait()
    figures.lap("drain", count)
    for _ in range(wakes):
        await context.publish("bench", repr(time.perf_counter()).encode())
        await asyncio.sleep(PAUSE)
    for _ in range(wakes):
        if len(waits) < wakes:
            await asyncio.sleep(PAUSE)
    if waits:
        show_wakes(waits)
    await broker.stop()
    await client.close()


Contender = Callable[[Nats, int, int, int], Awaitable[None]]

CONTENDERS: dict[str, Contender] = {
    "tenure": tenure_pump,
    "tenure_broker": tenure_broker,
    "loop_each_answered": partial(loop, acknowledge="each"),
    "loop_last_answered": partial(loop, acknowledge="last"),
    "loop_unanswered": partial(loop, acknowledge="none"),
    "faststream": faststream,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(CONTENDERS)}")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--wakes", type=int, default=300)
    options = parser.parse_args()
    unknown = set(options.names) - set(CONTENDERS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(CONTENDERS)}")
    for name in options.names or CONTENDERS:
        if name == "faststream" and find_spec("faststream") is None:
            print(f"{name}: not installed")
            continue
        print(name, flush=True)
        with private(Nats) as server:
            asyncio.run(CONTENDERS[name](server, options.messages, options.batch, options.wakes))


if __name__ == "__main__":
    main()
