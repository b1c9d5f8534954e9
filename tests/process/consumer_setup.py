"""Consumers as real processes on one SQLite file, to be killed, and their effects."""

from __future__ import annotations

import multiprocessing
import sqlite3
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import tenure
from tests.process.queue_worker import run

# Forked from a process that has imported everything, so that they start to work before they are killed.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["__main__", "tests.process.queue_worker"])


class ConsumerSetup:
    """A file, the processes that consume from it, and their effects."""

    def __init__(self, folder: Path) -> None:
        self.file = str(folder / "work.db")
        self.url = f"sqlite:///{self.file}?synchronous=normal&busy=30"
        self.processes: dict[ForkServerProcess, Connection] = {}
        with closing(sqlite3.connect(self.file)) as connection:
            connection.execute("CREATE TABLE effect (id TEXT, delivery INTEGER, pid INTEGER)")

    def start(self, mode: str) -> tuple[ForkServerProcess, Connection]:
        receiver, sender = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=run, args=(self.file, mode, sender))
        process.start()
        sender.close()
        self.processes[process] = receiver
        return process, receiver

    def kill(self, process: ForkServerProcess) -> None:
        process.kill()
        process.join()
        process.close()
        self.processes.pop(process).close()

    def close(self) -> None:
        for process in list(self.processes):
            self.kill(process)

    def query(self, question: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.file, timeout=30)) as connection:
            return connection.execute(question).fetchall()

    def execute(self, change: str) -> None:
        with closing(sqlite3.connect(self.file, timeout=30)) as connection, connection:
            connection.execute(change)


async def send(queue: tenure.Queue, numbers: range) -> None:
    for start in numbers[::1_000]:
        await queue.send_batch([tenure.Outgoing(b"x", id=f"m{n}") for n in numbers if start <= n < start + 1_000])


def check(setup: ConsumerSetup) -> None:
    """Check that the file is intact, and the queue empty."""
    assert setup.query("PRAGMA integrity_check") == [("ok",)]
    for table in ("message", "ready", "delayed", "expiry", "deferred", "hold", "death"):
        assert setup.query(f"SELECT count(*) FROM tenure_{table}") == [(0,)], table
