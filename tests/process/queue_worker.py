"""A consumer as a process of its own, to be killed at any moment, or to stop itself.

``run(FILE, MODE)`` is its life. Its effects stand in FILE too, in the table ``effect``:

- ``together``: receives some, writes their effects and completes them in one transaction of its own;
- ``holding``: receives some, tells the pipe, and does nothing about them: who kills it hits messages in hand for sure;
- ``apart``: a handler writes its effect, and the pump completes the message when it returns; both tell the pipe when
  they have begun;
- ``stopped``: receives one message, stops itself, and settles it when it is let go on; tells the pipe what it was told.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from functools import cache
from multiprocessing.connection import Connection

import tenure
import tenure._backend  # tenure loads it when it is first needed; it is to be there before the fork
import tenure._queue.queue
from tenure._backends.sqlite import transact

LOCK = 1.5
EFFECT = "INSERT INTO effect VALUES (?, ?, ?)"


def connect(file: str) -> sqlite3.Connection:
    connection = sqlite3.connect(file, isolation_level=None, timeout=30)
    connection.execute("PRAGMA synchronous = NORMAL")  # what is killed here is the process, not the power
    return connection


@cache
def tell_once(told: Connection) -> None:
    told.send("up")


async def receive_on_and_on(queue: tenure.Queue, connection: sqlite3.Connection, told: Connection) -> None:
    while True:
        messages = await queue.receive(max=20, wait=1.0)
        if not messages:
            continue
        with transact(connection, busy=30.0) as queues:
            connection.executemany(EFFECT, [(one.id, one.delivery_count, os.getpid()) for one in messages])
            queues.complete(*messages)
        tell_once(told)


async def hold(queue: tenure.Queue, told: Connection) -> None:
    while not await queue.receive(max=20, wait=1.0):
        pass
    tell_once(told)
    await asyncio.Event().wait()


async def consume(queue: tenure.Queue, connection: sqlite3.Connection, told: Connection) -> None:
    async def handler(message: tenure.Message) -> None:
        connection.execute(EFFECT, (message.id, message.delivery_count, os.getpid()))
        tell_once(told)

    await queue.consume(handler, prefetch=50)


async def stop_and_go_on(queue: tenure.Queue, connection: sqlite3.Connection, told: Connection) -> None:
    # It must not be stopped while one of its threads writes, for then nobody else could write: so no wait, no hints.
    while not (messages := await queue.receive()):
        await asyncio.sleep(0.01)
    [message] = messages
    told.send("received")
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        with transact(connection) as queues:
            connection.execute(EFFECT, (message.id, message.delivery_count, os.getpid()))
            queues.complete(message)
    except tenure.LockLost:
        told.send("LockLost")
    for verb in (message.complete, message.abandon, message.renew):
        try:
            await verb()
        except tenure.LockLost:
            told.send("LockLost")


async def main(file: str, mode: str, told: Connection) -> None:
    connection = connect(file)
    async with tenure.connect(f"sqlite:///{file}?synchronous=normal&busy=30") as backend:
        queue = backend.queue("q", lock=LOCK, max_deliveries=1_000)
        if mode == "stopped":
            await stop_and_go_on(queue, connection, told)
        elif mode == "together":
            await receive_on_and_on(queue, connection, told)
        elif mode == "holding":
            await hold(queue, told)
        else:
            await consume(queue, connection, told)


def run(file: str, mode: str, told: Connection) -> None:
    asyncio.run(main(file, mode, told))
