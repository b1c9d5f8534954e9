"""A consumer as a process of its own, to be killed at any moment, or to stop itself.

``run(FILE, MODE)`` runs it. Its effects are written to FILE, too, into the table ``effect``:

- ``together``: receives messages, writes their effects and completes them in one transaction;
- ``holding``: receives messages, reports that to the pipe, and keeps them, so that a kill always hits held messages;
- ``apart``: a handler writes its effect, and the pump completes the message when it returns; both report to the
  pipe that they have begun;
- ``stopped``: receives one message, stops itself, and settles it when it is continued; reports each
  LockLost to the pipe.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from functools import cache
from multiprocessing.connection import Connection

import tenure
import tenure._backend  # imported on first use otherwise; here before the fork
import tenure._queue.queue
from tenure.backends.sqlite import transact

LOCK = 1.5
EFFECT = "INSERT INTO effect VALUES (?, ?, ?)"


def connect(file: str) -> sqlite3.Connection:
    connection = sqlite3.connect(file, isolation_level=None, timeout=30)
    connection.execute("PRAGMA synchronous = NORMAL")  # only processes are killed here, not the machine
    return connection


@cache
def report_once(pipe: Connection) -> None:
    pipe.send("up")


async def receive_and_complete(queue: tenure.Queue, connection: sqlite3.Connection, pipe: Connection) -> None:
    while True:
        messages = await queue.receive(max=20, wait=1.0)
        if not messages:
            continue
        with transact(connection, busy=30.0) as queues:
            connection.executemany(EFFECT, [(one.id, one.delivery_count, os.getpid()) for one in messages])
            queues.complete(*messages)
        report_once(pipe)


async def hold(queue: tenure.Queue, pipe: Connection) -> None:
    while not await queue.receive(max=20, wait=1.0):
        pass
    report_once(pipe)
    await asyncio.Event().wait()


async def consume(queue: tenure.Queue, connection: sqlite3.Connection, pipe: Connection) -> None:
    async def handler(message: tenure.Message) -> None:
        connection.execute(EFFECT, (message.id, message.delivery_count, os.getpid()))
        report_once(pipe)

    await queue.consume(handler, prefetch=50)


async def stop_and_go_on(queue: tenure.Queue, connection: sqlite3.Connection, pipe: Connection) -> None:
    # It must not be stopped while a thread of it writes, which would block other writers: so no wait, no hints.
    while not (messages := await queue.receive()):
        await asyncio.sleep(0.01)
    [message] = messages
    pipe.send("received")
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        with transact(connection) as queues:
            connection.execute(EFFECT, (message.id, message.delivery_count, os.getpid()))
            queues.complete(message)
    except tenure.LockLost:
        pipe.send("LockLost")
    for verb in (message.complete, message.abandon, message.renew):
        try:
            await verb()
        except tenure.LockLost:
            pipe.send("LockLost")


async def main(file: str, mode: str, pipe: Connection) -> None:
    connection = connect(file)
    async with tenure.connect(f"sqlite:///{file}?synchronous=normal&busy=30") as backend:
        queue = backend.queue("q", lock=LOCK, max_deliveries=1_000)
        if mode == "stopped":
            await stop_and_go_on(queue, connection, pipe)
        elif mode == "together":
            await receive_and_complete(queue, connection, pipe)
        elif mode == "holding":
            await hold(queue, pipe)
        else:
            await consume(queue, connection, pipe)


def run(file: str, mode: str, pipe: Connection) -> None:
    asyncio.run(main(file, mode, pipe))
