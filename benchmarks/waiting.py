"""The contenders of ``python -m benchmarks performance``: tenure, other libraries, and loops written by hand.

``python -m benchmarks.waiting STORE NAME URL send|listen`` is one process of a contender. It prints ``ready``, then
follows the lines on its input until that ends:

- A sender: ``for SECONDS`` sends one message after another, and prints how many, and how long they took. ``paced COUNT
  SECONDS`` sends so many, one in each interval, and prints ``sent``. ``fill COUNT`` sends as fast as it can.
- A listener prints the age of each message, from before its send to its handler, and the time, by the clock that all
  processes share.

A contender is used in its own fastest way that keeps an acknowledged message. All have the same server, at the same
settings, and their own tables, keys or file.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

BODY = 200
"""Bytes in a body; the first eight have the time when it was sent."""
AT_ONCE = 100
"""Sends at a time while a queue is filled, where a contender has no batches."""

Send = Callable[[bytes], Awaitable[object]]
Handle = Callable[[bytes], None]


def stamped() -> bytes:
    """Return a body with the present time."""
    return struct.pack("<d", time.monotonic()) + bytes(BODY - 8)


@dataclass(frozen=True)
class Contender:
    """A library, or code written by hand, on one store."""

    name: str
    package: str
    """It is left out where this is not installed."""
    sending: Callable[[str], AbstractAsyncContextManager[Send]]
    """Connects to the URL, and yields the function that sends one message."""
    listen: Callable[[str, Handle, Callable[[], None]], Awaitable[None]]
    """Handles messages from the URL until it is cancelled; calls its last argument when it waits for the first one."""
    waiting: int = 20_000
    """The messages that wait when draining is measured."""
    at_once: int = AT_ONCE
    on_uvloop: bool = False


async def prepare(store: str, url: str) -> None:
    """Create the tables of the contenders that don't do it by themselves."""
    if store != "PostgreSQL":
        return
    from tenure._backends import postgres

    await postgres.migrate(url)
    if find_spec("pgqueuer") is not None:
        import asyncpg
        from pgqueuer import AsyncpgDriver, Queries

        connection = await asyncpg.connect(url)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()
    if find_spec("procrastinate") is not None:
        app, _ = procrastinate_of(url, lambda body: None)
        async with app.open_async():
            await app.schema_manager.apply_schema_async()


# --- tenure ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def tenure_sending(url: str) -> AsyncIterator[Send]:
    import tenure

    async with tenure.connect(url) as backend:
        yield backend.queue("bench").send


async def tenure_listen(url: str, handle: Handle, ready: Callable[[], None]) -> None:
    import tenure

    async def handler(message: tenure.Message) -> None:
        handle(message.body)

    async with tenure.connect(url) as backend:
        queue = backend.queue("bench")
        await queue.stats()
        ready()
        await queue.consume(handler)


# --- SQLite ------------------------------------------------------------------------------------------------------


def file_of(url: str) -> str:
    return url.removeprefix("sqlite:///")


def table_by_hand(url: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{file_of(url)}.by-hand", timeout=60, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS message (seq INTEGER PRIMARY KEY, token INTEGER, locked_until REAL, body BLOB)"
    )
    connection.execute("CREATE INDEX IF NOT EXISTS free ON message (seq) WHERE token IS NULL")
    return connection


@asynccontextmanager
async def sqlite_sending(url: str) -> AsyncIterator[Send]:
    connection = table_by_hand(url)

    async def send(body: bytes) -> None:  # the event loop waits for the disk meanwhile
        connection.execute("INSERT INTO message (body) VALUES (?)", (body,))

    yield send


async def sqlite_listen(url: str, handle: Handle, ready: Callable[[], None]) -> None:
    """Poll each millisecond."""
    connection = table_by_hand(url)
    claim = (
        "UPDATE message SET token = ?, locked_until = ? WHERE seq IN (SELECT seq FROM message INDEXED BY free "
        "WHERE token IS NULL ORDER BY seq LIMIT 500) RETURNING seq, body"
    )
    ready()
    while True:
        if connection.execute("SELECT 1 FROM message WHERE token IS NULL LIMIT 1").fetchone() is None:
            await asyncio.sleep(0.001)
            continue
        token = secrets.randbits(62)
        rows = connection.execute(claim, (token, time.time() + 30)).fetchall()
        for _, body in rows:
            handle(body)
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("DELETE FROM message WHERE seq = ? AND token = ?", [(seq, token) for seq, _ in rows])
        connection.execute("COMMIT")


def huey_of(url: str, handle: Handle) -> tuple[Any, Any]:
    from huey import SqliteHuey

    huey = SqliteHuey("bench", filename=f"{file_of(url)}.huey", fsync=True)

    @huey.task()  # type: ignore[untyped-decorator]
    def work(body: bytes) -> None:
        handle(body)

    return huey, work


@asynccontextmanager
async def huey_sending(url: str) -> AsyncIterator[Send]:
    _, work = huey_of(url, lambda body: None)

    async def send(body: bytes) -> None:
        work(body)

    yield send


async def huey_listen(url: str, handle: Handle, ready: Callable[[], None]) -> None:
    """Its consumer with one worker and its default settings: it polls each 0.1 s at first, then more rarely."""
    huey, _ = huey_of(url, handle)
    consumer = huey.create_consumer(workers=1, periodic=False)
    consumer.start()
    ready()
    try:
        await asyncio.Event().wait()
    finally:
        consumer.stop()


@asynccontextmanager
async def litequeue_sending(url: str) -> AsyncIterator[Send]:
    queue = litequeue_of(url)

    async def send(body: bytes) -> None:
        queue.put(body.hex())

    yield send


def litequeue_of(url: str) -> Any:
    from litequeue import LiteQueue

    queue = LiteQueue(f"{file_of(url)}.litequeue", timeout=60)
    queue.conn.execute("PRAGMA synchronous = FULL")
    return queue


async def litequeue_listen(url: str, handle: Handle, ready: Callable[[], None]) -> None:
    """Poll each millisecond."""
    queue = litequeue_of(url)
    ready()
    while True:
        message = queue.pop()
        if message is None:
            await asyncio.sleep(0.001)
        else:
            handle(bytes.fromhex(message.data))
            queue.done(message.message_id)


# --- PostgreSQL --------------------------------------------------------------------------------------------------


async def job_table(url: str) -> Any:
    import asyncpg

    connection = await asyncpg.connect(url)
    await connection.execute(
        "CREATE TABLE IF NOT EXISTS job "
        "(id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, taken_at timestamptz, body bytea)"
    )
    await connection.execute("CREATE INDEX IF NOT EXISTS job_free ON job (id) WHERE taken_at IS NULL")
    return connection


@asynccontextmanager
async def postgres_sending(url: str) -> AsyncIterator[Send]:
    connection = await job_table(url)

    async def send(body: bytes) -> None:
        await connection.execute("INSERT INTO job (body) VALUES ($1)", body)

    yield send
    await connection.close()


@asynccontextmanager
async def postgres_notifying(url: str) -> AsyncIterator[Send]:
    connection = await job_table(url)

    async def send(body: bytes) -> None:
        await connection.execute(
            "WITH sent AS (INSERT INTO job (body) VALUES ($1) RETURNING id) SELECT pg_notify('job', '') FROM sent", body
        )

    yield send
    await connection.close()


async def take_jobs(connection: Any, handle: Handle) -> None:
    """Handle all jobs that wait."""
    claim = (
        "UPDATE job SET taken_at = clock_timestamp() WHERE id IN (SELECT id FROM job WHERE taken_at IS NULL "
        "ORDER BY id LIMIT 500 FOR UPDATE SKIP LOCKED) RETURNING id, body"
    )
    while rows := await connection.fetch(claim):
        for row in rows:
            handle(row["body"])
        await connection.execute("DELETE FROM job WHERE id = ANY ($1)", [row["id"] for row in rows])


async def postgres_polling(url: str, handle: Handle, ready: Callable[[], None]) -> None:
    """Look every 5 ms."""
    connection = await job_table(url)
    ready()
    while True:
        await take_jobs(connection, handle)
        await asyncio.sleep(0.005)


async def postgres_listen(url: str, handle: Handle, ready: Callable[[], None]) -> None:
    """LISTEN, and look after each notification."""
    import asyncpg

    connection, listening = await job_table(url), await asyncpg.connect(url)
    woken = asyncio.Event()
    await listening.add_listener("job", lambda *_: woken.set())
    ready()
    while True:
        woken.clear()
        await take_jobs(connection, handle)
        await woken.wait()


@asynccontextmanager
async def pgqueuer_sending(url: str) -> AsyncIterator[Send]:
    import asyncpg
    from pgqueuer import AsyncpgDriver, Queries

    connection = await asyncpg.connect(url)
    queries = Queries(AsyncpgDriver(connection))
    yield lambda body: queries.enqueue(["handle"], [body], [0])
    await connection.close()


async def pgqueuer_listen(url: str, handle: Handle, ready: Callable[[], None]) -> None:
    import asyncpg
    from pgqueuer import AsyncpgDriver, PgQueuer

    worker = PgQueuer(AsyncpgDriver(await asyncpg.connect(url)))

    @worker.entrypoint("handle")
    async def work(job: Any) -> None:
        handle(job.payload)

    ready()
    await worker.run(batch_size=100)


def procrastinate_of(url: str, handle: Handle) -> tuple[Any, Any]:
    from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=url))

    @app.task(name="handle")
    async def work(body: str) -> None:
        handle(bytes.fromhex(body))

    return app, work


@asynccontextmanager
async def procrastinate_sending(url: str) -> AsyncIterator[Send]:
    app, work = procrastinate_of(url, lambda body: None)
    async with app.open_async():
        yield lambda body: work.defer_async(body=body.hex())


async def procrastinate_listen(url: str, handle: Handle, ready: Callable[[], None]) -> None:
    app, _ = procrastinate_of(url, handle)
    async with app.open_async():
        ready()
        await app.run_worker_async(concurrency=100, install_signal_handlers=False)


# --- Redis -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stream_sending(url: str) -> AsyncIterator[Send]:
    from redis import asyncio as aioredis

    async with aioredis.Redis.from_url(url) as client:
        yield lambda body: client.xadd("by-hand", {"body": body})


async def stream_listen(url: str, handle: Handle, ready: Callable[[], None]) -> None:
    """A blocking read of a consumer group."""
    from redis import asyncio as aioredis
    from redis.exceptions import ResponseError

    async with aioredis.Redis.from_url(url) as client:
        with suppress(ResponseError):  # there is one
            await client.xgroup_create("by-hand", "group", id="0", mkstream=True)
        ready()
        while True:
            found = await client.xreadgroup("group", "me", {"by-hand": ">"}, count=500, block=1_000)
            for entries in found.values() if isinstance(found, dict) else (part[1] for part in found):
                some = entries[0] if isinstance(found, dict) else entries
                for _, fields in some:
                    handle(fields[b"body"])
                async with client.pipeline(transaction=True) as pipeline:
                    pipeline.xack("by-hand", "group", *(one for one, _ in some))
                    pipeline.xdel("by-hand", *(one for one, _ in some))
                    await pipeline.execute()


@asynccontextmanager
async def saq_sending(url: str) -> AsyncIterator[Send]:
    from saq import Queue

    queue = Queue.from_url(url)
    await queue.connect()
    yield lambda body: queue.enqueue("handle", body=body.hex(), ttl=-1)
    await queue.disconnect()


async def saq_listen(url: str, handle: Handle, ready: Callable[[], None]) -> None:
    from saq import Queue, Worker

    async def work(context: object, *, body: str) -> None:
        handle(bytes.fromhex(body))

    queue = Queue.from_url(url)
    await queue.connect()
    ready()
    await Worker(queue, functions=[("handle", work)], concurrency=100).start()


def taskiq_of(url: str, handle: Handle) -> tuple[Any, Any]:
    from taskiq_redis import RedisStreamBroker

    broker = RedisStreamBroker(url, xread_count=100)

    @broker.task(task_name="handle")
    async def work(body: str) -> None:
        handle(bytes.fromhex(body))

    return broker, work


@asynccontextmanager
async def taskiq_sending(url: str) -> AsyncIterator[Send]:
    broker, work = taskiq_of(url, lambda body: None)
    await broker.startup()
    yield lambda body: work.kiq(body.hex())
    await broker.shutdown()


async def taskiq_listen(url: str, handle: Handle, ready: Callable[[], None]) -> None:
    from taskiq.api import run_receiver_task

    broker, _ = taskiq_of(url, handle)
    broker.is_worker_process = True
    await broker.startup()
    ready()
    await run_receiver_task(broker, max_async_tasks=100)


def streaq_of(url: str, handle: Handle) -> tuple[Any, Any]:
    from streaq import Worker

    worker = Worker(url, concurrency=100, handle_signals=False)

    @worker.task(name="handle", ttl=0)
    async def work(body: str) -> None:
        handle(bytes.fromhex(body))

    return worker, work


@asynccontextmanager
async def streaq_sending(url: str) -> AsyncIterator[Send]:
    worker, work = streaq_of(url, lambda body: None)

    async def send(body: bytes) -> None:
        await work.enqueue(body.hex())

    async with worker:
        yield send


async def streaq_listen(url: str, handle: Handle, ready: Callable[[], None]) -> None:
    worker, _ = streaq_of(url, handle)
    ready()
    await worker.run_async()


# --- all ---------------------------------------------------------------------------------------------------------

TENURE = Contender("tenure", "tenure", tenure_sending, tenure_listen)
TENURE_ON_UVLOOP = Contender("tenure on uvloop", "uvloop", tenure_sending, tenure_listen, on_uvloop=True)

STORES: dict[str, list[Contender]] = {
    "SQLite": [
        TENURE,
        TENURE_ON_UVLOOP,
        Contender("by hand", "sqlite3", sqlite_sending, sqlite_listen, at_once=1),
        Contender("huey", "huey", huey_sending, huey_listen, 2_000, at_once=1),
        Contender("litequeue", "litequeue", litequeue_sending, litequeue_listen, 2_000, at_once=1),
    ],
    "PostgreSQL": [
        TENURE,
        TENURE_ON_UVLOOP,
        Contender("by hand", "asyncpg", postgres_sending, postgres_polling, at_once=1),
        Contender("by hand, NOTIFY", "asyncpg", postgres_notifying, postgres_listen, at_once=1),
        Contender("pgqueuer", "pgqueuer", pgqueuer_sending, pgqueuer_listen, 5_000, at_once=1),
        Contender("procrastinate", "procrastinate", procrastinate_sending, procrastinate_listen, 2_000, at_once=4),
    ],
    "Redis": [
        TENURE,
        TENURE_ON_UVLOOP,
        Contender("by hand", "redis", stream_sending, stream_listen),
        Contender("saq", "saq", saq_sending, saq_listen, 5_000),
        Contender("taskiq", "taskiq_redis", taskiq_sending, taskiq_listen, 5_000),
        Contender("streaQ", "streaq", streaq_sending, streaq_listen, 5_000),
    ],
}
"""By the store, tenure first."""


# --- one process -------------------------------------------------------------------------------------------------


async def input_lines() -> AsyncIterator[list[str]]:
    """Yield the words of each line of the input, read on a thread: the event loop is the contender's."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str]()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    threading.Thread(target=read, daemon=True).start()
    while words := (await lines.get()).split():
        yield words


async def send(contender: Contender, url: str) -> None:
    """Be a sender."""
    async with contender.sending(url) as one:
        print("ready", flush=True)
        async for command, number, *more in input_lines():
            if command == "for":
                count, begun = 0, time.monotonic()
                while (took := time.monotonic() - begun) < float(number):
                    await one(stamped())
                    count += 1
                print(count, took, flush=True)
            elif command == "paced":
                begun = time.monotonic()
                for place in range(int(number)):
                    await asyncio.sleep(max(0.0, begun + place * float(more[0]) - time.monotonic()))
                    await one(stamped())
                print("sent", flush=True)
            else:
                left = int(number)

                async def some() -> None:
                    nonlocal left
                    while left > 0:
                        left -= 1
                        await one(stamped())

                await asyncio.gather(*(some() for _ in range(contender.at_once)))
                print("sent", flush=True)


async def listen(contender: Contender, url: str) -> None:
    """Be a listener. Nothing is printed while messages come: that would take its time."""
    ages: list[tuple[float, float]] = []

    def handle(body: bytes) -> None:
        now = time.monotonic()
        ages.append((now - struct.unpack_from("<d", body)[0], now))

    listening = asyncio.ensure_future(contender.listen(url, handle, lambda: print("ready", flush=True)))
    async for command, *_ in input_lines():
        if command == "count":
            print(len(ages), flush=True)
        else:
            print(*(f"{age:.6f}/{at:.6f}" for age, at in ages), flush=True)
            ages.clear()
    listening.cancel()


if __name__ == "__main__":
    _, store, name, url, role = sys.argv
    [contender] = (one for one in STORES[store] if one.name == name)
    if contender.on_uvloop:
        import uvloop

        run = uvloop.run
    else:
        run = asyncio.run
    run((send if role == "send" else listen)(contender, url))
