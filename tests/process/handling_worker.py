"""A consumer as a process of its own, to be killed while it handles messages, and what it notes of them.

``run(URL, QUEUE, MODE, FILE, WORK)`` runs it; a message takes WORK seconds. What becomes of each message goes to FILE,
a line each: ``got`` when it is handed out, ``completing`` when its work is done, ``completed`` once ``complete()`` has
returned, ``failed`` if it raises or the lock is lost before. A line is written by one system call, so a kill leaves it
whole or undone.

- ``pump``: handlers of ``consume()``, which complete their messages themselves;
- ``batches``: ``receive()`` of many messages, which are completed at once.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from typing import Literal

import tenure
import tenure._backend  # imported on first use otherwise; here before the fork
import tenure._backends.rabbitmq.receiving
import tenure._queue.consumer
import tenure._queue.queue

Mode = Literal["pump", "batches"]

BATCH = 10


class Notebook:
    """Where a consumer notes what becomes of its messages."""

    def __init__(self, file: str) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, what: str, *messages: tenure.Message) -> None:
        at = time.monotonic()
        os.write(self._file, "".join(f"{at:.6f} {what} {one.id}\n" for one in messages).encode())


async def handle(message: tenure.Message, notes: Notebook, work: float) -> None:
    try:
        await asyncio.sleep(work)
        notes.write("completing", message)
        await message.complete()
    except BaseException as error:
        notes.write("failed", message)
        if not isinstance(error, tenure.TenureError):  # it is cancelled: the lock is lost
            raise
    else:
        notes.write("completed", message)


async def consume(queue: tenure.Queue, notes: Notebook, work: float) -> None:
    async def begin(message: tenure.Message) -> None:
        notes.write("got", message)
        await handle(message, notes, work)

    await queue.consume(begin)


async def receive_batches(queue: tenure.Queue, notes: Notebook, work: float) -> None:
    while True:
        try:
            messages = await queue.receive(max=BATCH, wait=5.0)
        except tenure.Unavailable:
            await asyncio.sleep(work)
            continue
        notes.write("got", *messages)
        await asyncio.gather(*(handle(one, notes, work) for one in messages))


def keep_what_waits() -> None:
    """Give back nothing while somebody listens: a starved process would, and a kill just then doubles that."""
    tenure._backends.rabbitmq.receiving.KEPT = math.inf


async def main(url: str, queue: str, mode: Mode, file: str, work: float) -> None:
    notes = Notebook(file)
    async with tenure.connect(url) as backend:
        await (consume if mode == "pump" else receive_batches)(backend.queue(queue), notes, work)


def run(url: str, queue: str, mode: Mode, file: str, work: float) -> None:
    if mode == "pump":
        keep_what_waits()
    asyncio.run(main(url, queue, mode, file, work))
