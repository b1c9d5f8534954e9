"""The contenders: tenure, a loop written by hand on sqlite3, and three packages that keep a queue in SQLite.

Each has a file of its own, with ``synchronous=FULL``: an acknowledged change survives a loss of power. Differences
are in ``remark``: most locks don't expire, so a crash loses the message, or leaves it locked.

A contender's methods run in a process of their own, where its package is imported.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import sqlite3
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BODY = 200
"""Bytes in a body; the first eight have the time when it was sent."""

Latencies = list[float]


def stamped() -> bytes:
    """Return a body with the present time, by the clock that all processes share."""
    return struct.pack("<d", time.monotonic()) + bytes(BODY - 8)


def age(body: bytes) -> float:
    """Return the seconds since *body* was made."""
    return time.monotonic() - float(struct.unpack_from("<d", body)[0])


class Contender:
    """A library, or code written by hand, that keeps a queue in a file."""

    name = ""
    remark = ""
    processes_max = 4
    sends_batches = True
    waiting = 100_000
    """Messages in the queue when draining begins; fewer if sending more, or finding the first, would take minutes."""

    def send_singly(self, path: Path, give_up: float, count: int) -> int:
        """Send one message at a time until *give_up*, at most *count*; return how many."""
        raise NotImplementedError

    def send_batches(self, path: Path, give_up: float, count: int, size: int) -> int:
        """Send *size* messages at a time until *give_up*, at most *count*; return how many."""
        raise NotImplementedError

    def fill(self, path: Path, count: int) -> None:
        """Send *count* messages in the fastest way."""
        self.send_batches(path, time.monotonic() + 3_600, count, 1_000)

    def drain(self, path: Path, go: Callable[[], None], seconds: float) -> tuple[int, float, float]:
        """Receive and settle until the queue is empty or *seconds* are over; return count, begin and end."""
        raise NotImplementedError

    def listen(self, path: Path, ready: Callable[[], None], count: int) -> Latencies:
        """Wait for *count* messages, in the contender's fastest way; return how old each was when it was handled."""
        raise NotImplementedError

    def send_paced(self, path: Path, count: int, every: float) -> None:
        """Send *count* messages, one every *every* seconds."""
        raise NotImplementedError


def until(give_up: float, count: int, size: int, send: Callable[[int], Any]) -> int:
    """Call *send* for *size* messages until *give_up* or *count*; return how many were sent."""
    sent = 0
    while sent < count and time.monotonic() < give_up:
        send(size)
        sent += size
    return sent


def paced(count: int, every: float, send: Callable[[], Any]) -> None:
    """Call *send* at regular intervals."""
    begin = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, begin + number * every - time.monotonic()))
        send()


# --- tenure ------------------------------------------------------------------------------------------------------


class Tenure(Contender):
    """The message pump, with an async handler that does nothing."""

    name = "tenure"
    remark = "lock with token, renewal, dead letters; 100 tasks send, the pump drains"

    def send_singly(self, path: Path, give_up: float, count: int) -> int:
        """Send from a hundred tasks, each one after the other."""
        return asyncio.run(self._send_singly(path, give_up, count))

    async def _send_singly(self, path: Path, give_up: float, count: int) -> int:
        import tenure

        sent = 0
        async with tenure.connect(f"sqlite:///{path}") as backend:
            queue = backend.queue("bench")

            async def one() -> None:
                nonlocal sent
                while sent < count and time.monotonic() < give_up:
                    sent += 1
                    await queue.send(stamped())

            await asyncio.gather(*(one() for _ in range(100)))
        return sent

    def send_batches(self, path: Path, give_up: float, count: int, size: int) -> int:
        """Send with ``send_batch``."""
        return asyncio.run(self._send_batches(path, give_up, count, size))

    async def _send_batches(self, path: Path, give_up: float, count: int, size: int) -> int:
        import tenure

        sent = 0
        async with tenure.connect(f"sqlite:///{path}") as backend:
            queue = backend.queue("bench")
            while sent < count and time.monotonic() < give_up:
                await queue.send_batch([tenure.Outgoing(stamped()) for _ in range(size)])
                sent += size
        return sent

    def drain(self, path: Path, go: Callable[[], None], seconds: float) -> tuple[int, float, float]:
        """Consume with the pump."""
        return asyncio.run(self._drain(path, go, seconds))

    async def _drain(self, path: Path, go: Callable[[], None], seconds: float) -> tuple[int, float, float]:
        import tenure

        count, last = 0, 0.0

        async def handler(message: Any) -> None:
            nonlocal count, last
            count += 1
            last = time.monotonic()

        async with tenure.connect(f"sqlite:///{path}") as backend:
            queue = backend.queue("bench")
            await queue.stats()
            await asyncio.to_thread(go)
            begin = time.monotonic()
            stop = asyncio.Event()
            asyncio.get_running_loop().call_later(seconds, stop.set)
            await queue.consume(handler, stop=stop, until_empty=True)
        return count, begin, last

    def listen(self, path: Path, ready: Callable[[], None], count: int) -> Latencies:
        """Consume with the pump."""
        return asyncio.run(self._listen(path, ready, count))

    async def _listen(self, path: Path, ready: Callable[[], None], count: int) -> Latencies:
        import tenure

        ages: Latencies = []
        stop = asyncio.Event()

        async def handler(message: Any) -> None:
            ages.append(age(message.body))
            if len(ages) >= count:
                stop.set()

        async with tenure.connect(f"sqlite:///{path}") as backend:
            queue = backend.queue("bench")
            consuming = asyncio.create_task(queue.consume(handler, stop=stop))
            await asyncio.sleep(0.3)
            ready()
            await consuming
        return ages

    def send_paced(self, path: Path, count: int, every: float) -> None:
        """Send from one task."""
        asyncio.run(self._send_paced(path, count, every))

    async def _send_paced(self, path: Path, count: int, every: float) -> None:
        import tenure

        async with tenure.connect(f"sqlite:///{path}") as backend:
            queue = backend.queue("bench")
            await queue.stats()
            begin = time.monotonic()
            for number in range(count):
                await asyncio.sleep(max(0.0, begin + number * every - time.monotonic()))
                await queue.send(stamped())


# --- by hand -----------------------------------------------------------------------------------------------------


class ByHand(Contender):
    """A simple loop on sqlite3: a claim with token and time, a commit per step."""

    name = "by hand"
    remark = "sqlite3 alone: claim with token and lock time, delete; a commit each; polls every 1 ms"

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.name = f"by hand, {batch} at a time"

    def _open(self, path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None, timeout=0)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS message (seq INTEGER PRIMARY KEY, body BLOB, token INTEGER, locked_until REAL)"
        )
        connection.execute("CREATE INDEX IF NOT EXISTS free ON message (seq) WHERE token IS NULL")
        return connection

    def _write(self, connection: sqlite3.Connection, work: Callable[[], Any]) -> Any:
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                break
            except sqlite3.OperationalError:
                time.sleep(random.uniform(0.0001, 0.001))
        answer = work()
        connection.execute("COMMIT")
        return answer

    def _send(self, connection: sqlite3.Connection, size: int) -> None:
        rows = [(stamped(),) for _ in range(size)]
        self._write(connection, lambda: connection.executemany("INSERT INTO message (body) VALUES (?)", rows))

    def send_singly(self, path: Path, give_up: float, count: int) -> int:
        """Send one in each commit."""
        connection = self._open(path)
        return until(give_up, count, 1, lambda size: self._send(connection, size))

    def send_batches(self, path: Path, give_up: float, count: int, size: int) -> int:
        """Send *size* in each commit."""
        connection = self._open(path)
        return until(give_up, count, size, lambda size: self._send(connection, size))

    def _take(self, connection: sqlite3.Connection, handle: Callable[[bytes], None]) -> int:
        token, until = secrets.randbits(62), time.time() + 30
        claim = (
            "UPDATE message SET token = ?, locked_until = ? WHERE seq IN (SELECT seq FROM message INDEXED BY free "
            "WHERE token IS NULL ORDER BY seq LIMIT ?) RETURNING seq, body"
        )
        rows = self._write(connection, lambda: connection.execute(claim, (token, until, self.batch)).fetchall())
        for _, body in rows:
            handle(body)
        if rows:
            done = [(seq, token) for seq, _ in rows]
            self._write(
                connection,
                lambda: connection.executemany("DELETE FROM message WHERE seq = ? AND token = ?", done),
            )
        return len(rows)

    def drain(self, path: Path, go: Callable[[], None], seconds: float) -> tuple[int, float, float]:
        """Take a batch, handle it, delete it."""
        connection = self._open(path)
        go()
        begin = last = time.monotonic()
        count = 0
        while last - begin < seconds and (taken := self._take(connection, lambda body: None)):
            count += taken
            last = time.monotonic()
        return count, begin, last

    def listen(self, path: Path, ready: Callable[[], None], count: int) -> Latencies:
        """Poll each millisecond."""
        connection = self._open(path)
        ages: Latencies = []
        ready()
        while len(ages) < count:
            if connection.execute("SELECT 1 FROM message WHERE token IS NULL LIMIT 1").fetchone() is None:
                time.sleep(0.001)
            else:
                self._take(connection, lambda body: ages.append(age(body)))
        return ages

    def send_paced(self, path: Path, count: int, every: float) -> None:
        """Send one in each commit."""
        connection = self._open(path)
        paced(count, every, lambda: self._send(connection, 1))


# --- packages ----------------------------------------------------------------------------------------------------


class Huey(Contender):
    """SqliteHuey with fsync on."""

    name = "huey"
    remark = "a task is removed before it runs: a crash loses it; no batches"
    sends_batches = False
    waiting = 10_000

    def _open(self, path: Path, *, fsync: bool = True) -> tuple[Any, Any]:
        from huey import SqliteHuey

        huey = SqliteHuey("bench", filename=str(path), fsync=fsync)
        ages: Latencies = []

        @huey.task()  # type: ignore[untyped-decorator]
        def work(body: bytes) -> None:
            ages.append(age(body))

        huey.ages = ages
        return huey, work

    def send_singly(self, path: Path, give_up: float, count: int) -> int:
        """Call the task."""
        _, work = self._open(path)
        return until(give_up, count, 1, lambda _: work(stamped()))

    def fill(self, path: Path, count: int) -> None:
        """Call the task, without fsync."""
        huey, work = self._open(path, fsync=False)
        until(time.monotonic() + 3_600, count, 1, lambda _: work(stamped()))
        huey.storage.close()

    def drain(self, path: Path, go: Callable[[], None], seconds: float) -> tuple[int, float, float]:
        """Dequeue and execute, as its worker does."""
        huey, _ = self._open(path)
        go()
        begin = last = time.monotonic()
        count = 0
        while last - begin < seconds and (task := huey.dequeue()) is not None:
            huey.execute(task)
            count += 1
            last = time.monotonic()
        return count, begin, last

    def listen(self, path: Path, ready: Callable[[], None], count: int) -> Latencies:
        """Run its consumer with one worker and its default settings."""
        huey, _ = self._open(path)
        consumer = huey.create_consumer(workers=1, periodic=False)
        consumer.start()
        ready()
        while len(huey.ages) < count:
            time.sleep(0.05)
        consumer.stop()
        return list(huey.ages)

    def send_paced(self, path: Path, count: int, every: float) -> None:
        """Call the task."""
        _, work = self._open(path)
        paced(count, every, lambda: work(stamped()))


class LiteQueue(Contender):
    """litequeue with ``synchronous`` set to FULL."""

    name = "litequeue"
    remark = "lock without end or token: after a crash it stays locked; text only; polls every 1 ms"
    waiting = 10_000

    def _open(self, path: Path) -> Any:
        from litequeue import LiteQueue as Package

        queue = Package(str(path), timeout=60)
        queue.conn.execute("PRAGMA synchronous = FULL")
        return queue

    def _send(self, queue: Any, size: int) -> None:
        if size == 1:
            queue.put(stamped().hex())
        else:
            with queue.transaction():
                for _ in range(size):
                    queue.put(stamped().hex())

    def send_singly(self, path: Path, give_up: float, count: int) -> int:
        """Put one."""
        queue = self._open(path)
        return until(give_up, count, 1, lambda size: self._send(queue, size))

    def send_batches(self, path: Path, give_up: float, count: int, size: int) -> int:
        """Put many in a transaction."""
        queue = self._open(path)
        return until(give_up, count, size, lambda size: self._send(queue, size))

    def drain(self, path: Path, go: Callable[[], None], seconds: float) -> tuple[int, float, float]:
        """Pop, done."""
        queue = self._open(path)
        go()
        begin = last = time.monotonic()
        count = 0
        while last - begin < seconds and (message := queue.pop()) is not None:
            queue.done(message.message_id)
            count += 1
            last = time.monotonic()
        return count, begin, last

    def listen(self, path: Path, ready: Callable[[], None], count: int) -> Latencies:
        """Poll each millisecond."""
        queue = self._open(path)
        ages: Latencies = []
        ready()
        while len(ages) < count:
            message = queue.pop()
            if message is None:
                time.sleep(0.001)
            else:
                ages.append(age(bytes.fromhex(message.data)))
                queue.done(message.message_id)
        return ages

    def send_paced(self, path: Path, count: int, every: float) -> None:
        """Put one."""
        queue = self._open(path)
        paced(count, every, lambda: self._send(queue, 1))


class PersistQueue(Contender):
    """persist-queue's SQLiteAckQueue, which is durable by SQLite's own default."""

    name = "persist-queue"
    remark = "one process only; a restart delivers again what was not acknowledged; no batches"
    processes_max = 1
    sends_batches = False
    waiting = 10_000

    def _open(self, path: Path) -> Any:
        from persistqueue import SQLiteAckQueue

        return SQLiteAckQueue(str(path), multithreading=True, timeout=60)

    def send_singly(self, path: Path, give_up: float, count: int) -> int:
        """Put one."""
        queue = self._open(path)
        return until(give_up, count, 1, lambda _: queue.put(stamped()))

    def fill(self, path: Path, count: int) -> None:
        """Put one at a time, without fsync."""
        queue = self._open(path)
        for connection in (queue._getter, queue._putter):
            connection.execute("PRAGMA synchronous = OFF")
        until(time.monotonic() + 3_600, count, 1, lambda _: queue.put(stamped()))

    def drain(self, path: Path, go: Callable[[], None], seconds: float) -> tuple[int, float, float]:
        """Get, acknowledge."""
        from persistqueue.exceptions import Empty

        queue = self._open(path)
        go()
        begin = last = time.monotonic()
        count = 0
        while last - begin < seconds:
            try:
                item = queue.get(block=False)
            except Empty:
                break
            queue.ack(item)
            count += 1
            last = time.monotonic()
        return count, begin, last


def contenders() -> Sequence[Contender]:
    """Return all contenders, tenure first."""
    return [Tenure(), ByHand(10), ByHand(500), Huey(), LiteQueue(), PersistQueue()]


def size_of(path: Path) -> int:
    """Return the bytes of a queue's file, or folder, with its log."""
    if path.is_dir():
        return sum(one.stat().st_size for one in path.iterdir())
    return sum(os.path.getsize(one) for one in path.parent.glob(f"{path.name}*") if one.is_file())
