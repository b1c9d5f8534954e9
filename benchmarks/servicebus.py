"""Queues on Service Bus, on the look-alike: tenure beside the client library by hand, with the same acknowledgement.

Run by hand: ``python -m benchmarks servicebus [--messages 5000] [--batch 100] [--wakes 200]``. Both await every
settlement. It prints figures only, and they say nothing of the service: the look-alike is one process of Python.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable

from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient

import tenure
from tests.servers import ServiceBus, private

BODY = b"x" * 200
QUEUE = "bench"


async def fill(server: ServiceBus, count: int) -> None:
    async with tenure.connect(server.url) as backend:
        queue = backend.queue(QUEUE, lock=60)
        for begin in range(0, count, 500):
            await queue.send_batch([tenure.Outgoing(BODY) for _ in range(min(500, count - begin))])


async def pump(server: ServiceBus, count: int, batch: int) -> float:
    """Tenure's message pump."""

    async def handle(message: tenure.Message) -> None:
        pass

    async with tenure.connect(server.url) as backend:
        begun = time.perf_counter()
        await backend.queue(QUEUE).consume(handle, concurrency=batch, until_empty=True, sigterm=False)
        return time.perf_counter() - begun


async def one_by_one(server: ServiceBus, count: int, batch: int) -> float:
    """The library's own way: a batch is received, and each message is completed."""
    async with (
        ServiceBusClient.from_connection_string(server.connection_string) as client,
        client.get_queue_receiver(QUEUE) as receiver,
    ):
        begun, left = time.perf_counter(), count
        while left:
            for message in await receiver.receive_messages(batch, max_wait_time=5):
                await receiver.complete_message(message)
                left -= 1
        return time.perf_counter() - begun


async def prefetched(server: ServiceBus, count: int, batch: int) -> float:
    """The same with a prefetch buffer."""
    async with (
        ServiceBusClient.from_connection_string(server.connection_string) as client,
        client.get_queue_receiver(QUEUE, prefetch_count=batch) as receiver,
    ):
        begun, left = time.perf_counter(), count
        while left:
            for message in await receiver.receive_messages(batch, max_wait_time=5):
                await receiver.complete_message(message)
                left -= 1
        return time.perf_counter() - begun


async def at_once(server: ServiceBus, count: int, batch: int) -> float:
    """The same, with the messages of a batch completed concurrently."""
    async with (
        ServiceBusClient.from_connection_string(server.connection_string) as client,
        client.get_queue_receiver(QUEUE) as receiver,
    ):
        begun, left = time.perf_counter(), count
        while left:
            messages = await receiver.receive_messages(batch, max_wait_time=5)
            await asyncio.gather(*map(receiver.complete_message, messages))
            left -= len(messages)
        return time.perf_counter() - begun


DRAINS: dict[str, Callable[[ServiceBus, int, int], Awaitable[float]]] = {
    "tenure": pump,
    "by hand": one_by_one,
    "by hand, prefetch": prefetched,
    "by hand, gathered": at_once,
}


async def wakes_of_tenure(server: ServiceBus, count: int) -> list[float]:
    """From before the send by the library, to the handler."""
    took: list[float] = []
    sent_at = 0.0
    handled = asyncio.Event()

    async def handle(message: tenure.Message) -> None:
        took.append(time.perf_counter() - sent_at)
        handled.set()

    other = ServiceBusClient.from_connection_string(server.connection_string)
    async with tenure.connect(server.url) as receiver, other:
        await receiver.queue("wake").receive()  # creates it
        sender = other.get_queue_sender("wake")
        consuming = asyncio.create_task(receiver.queue("wake").consume(handle, sigterm=False))
        await asyncio.sleep(1)
        for _ in range(count + 5):
            handled.clear()
            await asyncio.sleep(0.02)
            sent_at = time.perf_counter()
            await sender.send_messages(ServiceBusMessage(BODY))
            await handled.wait()
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
    return took[5:]


async def wakes_by_hand(server: ServiceBus, count: int) -> list[float]:
    """From before the send to the message in the loop of the library's iterator, on another client."""
    took: list[float] = []
    sent_at = 0.0
    handled = asyncio.Event()
    client = ServiceBusClient.from_connection_string(server.connection_string)
    other = ServiceBusClient.from_connection_string(server.connection_string)

    async def consume() -> None:
        async with client.get_queue_receiver("wake") as receiver:
            async for message in receiver:
                took.append(time.perf_counter() - sent_at)
                await receiver.complete_message(message)
                handled.set()

    async with client, other, other.get_queue_sender("wake") as sender:
        consuming = asyncio.create_task(consume())
        await asyncio.sleep(1)
        for _ in range(count + 5):
            handled.clear()
            await asyncio.sleep(0.02)
            sent_at = time.perf_counter()
            await sender.send_messages(ServiceBusMessage(BODY))
            await handled.wait()
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
    return took[5:]


async def run(options: argparse.Namespace) -> None:
    with private(ServiceBus) as server:
        base = 0.0
        print(f"drained, {options.messages:,} messages of {len(BODY)} bytes, at most {options.batch} at a time")
        for _ in range(options.rounds):
            for name, drain in DRAINS.items():
                await fill(server, options.messages)
                spent = time.process_time()
                seconds = await drain(server, options.messages, options.batch)
                rate = options.messages / seconds
                base = rate if name == "tenure" else base
                cpu = (time.process_time() - spent) / options.messages * 1e6
                print(
                    f"    {name:<20}{rate:>8,.0f} /s {rate / base:6.2f} × tenure {cpu:7.0f} us of processor time each"
                )
        print("from the send to the handler, in another client, milliseconds")
        for name, wakes in (("tenure", wakes_of_tenure), ("by hand", wakes_by_hand)) * options.rounds:
            took = sorted(await wakes(server, options.wakes))
            p50, p99 = statistics.median(took) * 1e3, took[int(len(took) * 0.99)] * 1e3
            print(f"    {name:<20}p50 {p50:6.2f}   p99 {p99:6.2f}")


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks servicebus", description=__doc__)
    parser.add_argument("--messages", type=int, default=5_000, help="to be drained in each round (default: 5000)")
    parser.add_argument("--batch", type=int, default=100, help="received at once, or handled at once (default: 100)")
    parser.add_argument("--wakes", type=int, default=200, help="messages to an idle consumer (default: 200)")
    parser.add_argument("--rounds", type=int, default=2, help="of everything (default: 2)")
    print(f"load {os.getloadavg()[0]:.1f}, on {os.cpu_count()} cores")
    asyncio.run(run(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
