"""A service beside ``consume`` called by hand, in one run: the cost of typed handlers for each message.

Run by hand: ``python -m benchmarks service [--messages 30000] [--rounds 3] [--on sqlite:///bench.db]``. Each contender
drains a queue of so many messages with a handler that does nothing, in one process, ten at once; the contenders take
turns. Prints figures only, and the ratio to ``consume`` with the same decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import tenure

CONCURRENCY = 10
BATCH = 1_000


@dataclass
class Order:
    item: str
    count: int = 1


async def fill(queue: tenure.Queue, count: int) -> None:
    for first in range(0, count, BATCH):
        numbers = range(first, min(first + BATCH, count))
        await queue.send_batch([tenure.Outgoing.json(Order("tea", number)) for number in numbers])


async def consume(backend: tenure.Backend, count: int) -> float:
    async def handle(message: tenure.Message) -> None: ...

    return await drained(backend, count, handle)


async def consume_and_decode(backend: tenure.Backend, count: int) -> float:
    async def handle(message: tenure.Message) -> None:
        message.decode(Order)

    return await drained(backend, count, handle)


async def drained(backend: tenure.Backend, count: int, handle: tenure.Handler) -> float:
    queue = backend.queue("bench")
    await fill(queue, count)
    begun = time.perf_counter()
    await queue.consume(handle, concurrency=CONCURRENCY, until_empty=True)
    return count / (time.perf_counter() - begun)


async def service(backend: tenure.Backend, count: int) -> float:
    served = tenure.Service(backend)
    orders = served.queue("bench", Order)

    @served.handler(orders, concurrency=CONCURRENCY)
    async def handle(order: Order) -> None: ...

    await fill(backend.queue("bench"), count)
    begun = time.perf_counter()
    await served.serve(until_empty=True)
    return count / (time.perf_counter() - begun)


CONTENDERS: dict[str, Callable[[tenure.Backend, int], Awaitable[float]]] = {
    "consume": consume,
    "consume, decode by hand": consume_and_decode,
    "service": service,
}


async def measured(url: str, contender: str, count: int) -> float:
    async with tenure.connect(url) as backend:
        return await CONTENDERS[contender](backend, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--on", default="memory:", metavar="URL")
    options = parser.parse_args()
    figures: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(options.rounds):
        for name in CONTENDERS:
            figures[name].append(asyncio.run(measured(options.on, name, options.messages)))
    beside = statistics.median(figures["consume, decode by hand"])
    for name, each in figures.items():
        median = statistics.median(each)
        print(f"{name:<25} {median:>9,.0f} /s  ({min(each):,.0f} to {max(each):,.0f})  {median / beside:.2f}")


if __name__ == "__main__":
    main()
