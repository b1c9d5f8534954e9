"""What ``benchmarks.instructions`` counts: a program that calls a function of the C library between its parts.

It imports nothing of this repository but tenure, of the tree that PYTHONPATH names, which may be another one.
"""

from __future__ import annotations

import asyncio
import os
import sys

import tenure

BODY = b"x" * 200
BATCH = 100


def end_part() -> None:
    """Call what nothing else calls, so that valgrind writes what it has counted."""
    os.getsid(0)


def require(holds: bool, otherwise: str) -> None:
    """Count nothing that was not done."""
    if not holds:
        raise SystemExit(f"no figures: {otherwise}")


async def count_queue(backend: tenure.Backend, messages: int) -> None:
    queue = backend.queue("bench")

    async def consume(count: int) -> None:
        handled = 0

        async def handle(message: tenure.Message) -> None:
            nonlocal handled
            handled += 1

        await queue.consume(handle, until_empty=True)
        require(handled == count, f"{handled} of {count} messages were handled")

    async def send_batches(count: int) -> None:
        for sent in range(0, count, BATCH):
            await queue.send_batch([tenure.Outgoing(BODY) for _ in range(min(BATCH, count - sent))])

    async def send_singly(count: int) -> None:
        for _ in range(count):
            await queue.send(BODY)

    async def receive_batches(count: int) -> None:
        while count > 0:
            got = await queue.receive(BATCH, wait=5)
            require(len(got) > 0, f"{count} messages did not come")
            await asyncio.gather(*(message.complete() for message in got))
            count -= len(got)

    async def receive_singly(count: int) -> None:
        for _ in range(count):
            await queue.send(BODY)
            got = await queue.receive(wait=5)
            require(len(got) == 1, "a message that was sent did not come")
            await got[0].complete()

    for _ in range(2):  # to warm up
        await send_batches(BATCH)
        await receive_batches(BATCH)
        await send_singly(20)
        await consume(20)
        await receive_singly(5)
    end_part()
    await send_batches(messages)
    end_part()
    await consume(messages)
    end_part()
    await send_singly(messages)
    end_part()
    await receive_batches(messages)
    end_part()
    await receive_singly(messages)
    end_part()


async def count_election(backend: tenure.Backend, terms: int) -> None:
    election = backend.election("bench", ttl=30)

    async def lead(count: int) -> None:
        for _ in range(count):
            async with election.campaign():
                pass

    await lead(10)  # to warm up
    end_part()
    await lead(terms)
    end_part()


async def main(url: str, what: str, times: int) -> None:
    async with tenure.connect(url) as backend:
        await {"queue": count_queue, "election": count_election}[what](backend, times)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
