"""Short receives beside a loop written by hand: how long a message takes that comes now and then.

``python -m benchmarks short_use [--store rabbitmq] [--count 60] [--rounds 3]`` starts a server, and for each contender
in turns a process that sends a message every 0.1 to 0.3 s. The receiver is this process, with nothing else to do:

- tenure calls ``receive(1, wait=5)`` and ``complete()``, again and again;
- by hand, it is the shortest loop with the same driver that also waits for one message at a time, handles it, and only
  then acknowledges it: a consumer with a prefetch of 1 on RabbitMQ, ``fetch(1)`` on NATS, ``XREADGROUP`` on Redis,
  ``LISTEN`` and ``SKIP LOCKED`` on PostgreSQL, a look each millisecond at SQLite.

A message has the time from before its send, and counts as there when it is handed out, before it is acknowledged.
Prints the median and the 90th percentile in milliseconds, how many came out of order, and the ratio of the medians.
Prints figures only.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from itertools import pairwise
from typing import Any

import tenure
from benchmarks.waiting import job_table, postgres_notifying, prepare, sqlite_sending, stream_sending, table_by_hand
from tests.servers import Nats, Postgres, RabbitMQ, Redis, private

WAIT = 5.0
PACES = (0.1, 0.3)
"""Seconds between two messages, at least and at most."""
WARM = 5
"""Messages before those that count."""

Send = Callable[[bytes], Awaitable[object]]
Came = tuple[bytes, float] | None
"""The body of a message, and when it came; None if none came."""
Receive = Callable[[], Awaitable[Came]]
"""Waits for a message at most ``WAIT`` seconds, and acknowledges it."""
Open = Callable[[str], AbstractAsyncContextManager[Any]]


# --- tenure ---


@asynccontextmanager
async def tenure_sending(url: str) -> AsyncIterator[Send]:
    async with tenure.connect(url) as backend:
        yield backend.queue("short").send


@asynccontextmanager
async def tenure_receiving(url: str) -> AsyncIterator[Receive]:
    async with tenure.connect(url) as backend:
        queue = backend.queue("short")

        async def receive() -> Came:
            for message in await queue.receive(1, wait=WAIT):
                came_at = time.monotonic()
                await message.complete()
                return message.body, came_at
            return None

        yield receive


# --- by hand ---


@asynccontextmanager
async def amqp_channel(url: str) -> AsyncIterator[tuple[Any, Any]]:
    import aio_pika

    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel(publisher_confirms=True)
        yield channel, await channel.declare_queue("by-hand", durable=True, arguments={"x-queue-type": "quorum"})


@asynccontextmanager
async def rabbit_sending(url: str) -> AsyncIterator[Send]:
    import aio_pika

    async with amqp_channel(url) as (channel, queue):

        async def send(body: bytes) -> None:
            message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, queue.name)

        yield send


@asynccontextmanager
async def rabbit_receiving(url: str) -> AsyncIterator[Receive]:
    async with amqp_channel(url) as (channel, queue):
        await channel.set_qos(prefetch_count=1)
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        await queue.consume(arrived.put)

        async def receive() -> Came:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT):
                    message = await arrived.get()
                    came_at = time.monotonic()
                    await message.ack()
                    return bytes(message.body), came_at
            return None

        yield receive


@asynccontextmanager
async def jetstream(url: str) -> AsyncIterator[Any]:
    import nats
    from nats.js.api import RetentionPolicy, StreamConfig

    client = await nats.connect(url)
    stream = client.jetstream()
    with suppress(nats.js.errors.Error):  # there is one
        await stream.add_stream(
            StreamConfig(name="by-hand", subjects=["by-hand"], retention=RetentionPolicy.WORK_QUEUE)
        )
    try:
        yield stream
    finally:
        await client.close()


@asynccontextmanager
async def nats_sending(url: str) -> AsyncIterator[Send]:
    async with jetstream(url) as stream:
        yield lambda body: stream.publish("by-hand", body)


@asynccontextmanager
async def nats_receiving(url: str) -> AsyncIterator[Receive]:
    async with jetstream(url) as stream:
        pulled = await stream.pull_subscribe("by-hand", durable="by-hand")

        async def receive() -> Came:
            with suppress(TimeoutError):
                [message] = await pulled.fetch(1, timeout=WAIT)
                came_at = time.monotonic()
                await message.ack_sync()
                return bytes(message.data), came_at
            return None

        yield receive


@asynccontextmanager
async def redis_receiving(url: str) -> AsyncIterator[Receive]:
    from redis import asyncio as aioredis
    from redis.exceptions import ResponseError

    async with aioredis.Redis.from_url(url, socket_timeout=2 * WAIT) as client:
        with suppress(ResponseError):  # there is one
            await client.xgroup_create("by-hand", "group", id="0", mkstream=True)

        async def receive() -> Came:
            found: Any = await client.xreadgroup("group", "me", {"by-hand": ">"}, count=1, block=int(WAIT * 1_000))
            came_at = time.monotonic()
            for entries in found.values() if isinstance(found, dict) else (part[1] for part in found):
                for one, fields in entries[0] if isinstance(found, dict) else entries:
                    async with client.pipeline(transaction=True) as pipeline:
                        pipeline.xack("by-hand", "group", one)
                        pipeline.xdel("by-hand", one)
                        await pipeline.execute()
                    return bytes(fields[b"body"]), came_at
            return None

        yield receive


@asynccontextmanager
async def postgres_receiving(url: str) -> AsyncIterator[Receive]:
    import asyncpg

    connection, listening = await job_table(url), await asyncpg.connect(url)
    woken = asyncio.Event()
    await listening.add_listener("job", lambda *_: woken.set())
    claim = (
        "UPDATE job SET taken_at = clock_timestamp() WHERE id = (SELECT id FROM job WHERE taken_at IS NULL "
        "ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING id, body"
    )

    async def receive() -> Came:
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT):
                while True:
                    woken.clear()
                    if row := await connection.fetchrow(claim):
                        came_at = time.monotonic()
                        await connection.execute("DELETE FROM job WHERE id = $1", row["id"])
                        return bytes(row["body"]), came_at
                    await woken.wait()
        return None

    yield receive
    await listening.close()
    await connection.close()


@asynccontextmanager
async def sqlite_receiving(url: str) -> AsyncIterator[Receive]:
    connection = table_by_hand(url)
    claim = (
        "UPDATE message SET token = ?, locked_until = ? WHERE seq = (SELECT seq FROM message INDEXED BY free "
        "WHERE token IS NULL ORDER BY seq LIMIT 1) RETURNING seq, body"
    )

    async def receive() -> Came:
        give_up = time.monotonic() + WAIT
        while time.monotonic() < give_up:
            if connection.execute("SELECT 1 FROM message WHERE token IS NULL LIMIT 1").fetchone() is not None:
                for seq, body in connection.execute(claim, (1, time.time() + 30)).fetchall():
                    came_at = time.monotonic()
                    connection.execute("DELETE FROM message WHERE seq = ?", (seq,))
                    return bytes(body), came_at
            await asyncio.sleep(0.001)
        return None

    yield receive


STORES: dict[str, dict[str, tuple[Open, Open]]] = {
    "sqlite": {"by hand": (sqlite_sending, sqlite_receiving)},
    "postgres": {"by hand": (postgres_notifying, postgres_receiving)},
    "redis": {"by hand": (stream_sending, redis_receiving)},
    "nats": {"by hand": (nats_sending, nats_receiving)},
    "rabbitmq": {"by hand": (rabbit_sending, rabbit_receiving)},
}
for _contenders in STORES.values():
    _contenders["tenure"] = tenure_sending, tenure_receiving
SERVERS = {"postgres": Postgres, "redis": Redis, "nats": Nats, "rabbitmq": RabbitMQ}


@contextmanager
def served(store: str) -> Iterator[str]:
    """Yield the URL of a fresh store."""
    if store == "sqlite":
        with tempfile.TemporaryDirectory(prefix="tenure-bench-") as folder:
            yield f"sqlite:///{folder}/bench.db"
    else:
        kind: Any = SERVERS[store]
        with private(kind) as server:
            yield server.url


# --- measuring ---


async def send(store: str, contender: str, url: str, count: int, seed: int) -> None:
    """Send numbered messages with the time, one every now and then."""
    sending, _ = STORES[store][contender]
    rng = random.Random(seed)
    async with sending(url) as send_one:
        for number in range(count):
            await asyncio.sleep(rng.uniform(*PACES))
            await send_one(struct.pack("<dq", time.monotonic(), number))


async def receive(store: str, contender: str, url: str, count: int, seed: int) -> tuple[list[float], int]:
    """Receive them; return the age of each, and how many came before one with a lower number."""
    _, receiving = STORES[store][contender]
    ages: list[float] = []
    numbers: list[int] = []
    line = [sys.executable, "-m", "benchmarks.short_use", "--sends", store, contender, url, str(count), str(seed)]
    async with receiving(url) as receive_one:
        sender = subprocess.Popen(line)
        try:
            while len(ages) < count:
                came = await receive_one()
                if came is None and sender.poll() is not None:
                    raise SystemExit(f"{contender} on {store} has got {len(ages)} of {count} messages")
                if came is not None:
                    sent_at, number = struct.unpack("<dq", came[0])
                    ages.append(came[1] - sent_at)
                    numbers.append(number)
        finally:
            sender.kill()
            sender.wait()
    return ages[WARM:], sum(one > other for one, other in pairwise(numbers))


def measure(store: str, count: int, rounds: int) -> None:
    """Measure the contenders of a store in turns, and print what was found."""
    found: dict[str, list[float]] = {contender: [] for contender in STORES[store]}
    odd = dict.fromkeys(found, 0)
    with served(store) as url:
        if store == "postgres":
            asyncio.run(prepare("PostgreSQL", url))
        for seed in range(rounds):
            for contender, ages in found.items():
                more, out_of_order = asyncio.run(receive(store, contender, url, count + WARM, seed))
                ages += more
                odd[contender] += out_of_order
    medians = {}
    for contender, ages in found.items():
        cuts = statistics.quantiles(ages, n=100)
        medians[contender] = cuts[49]
        ratio = f"{medians[contender] / medians['by hand']:.2f} ×" if contender != "by hand" else ""
        print(
            f"{store:9} {contender:8} p50 {cuts[49] * 1e3:7.2f} ms  p90 {cuts[89] * 1e3:7.2f} ms  "
            f"out of order {odd[contender]:2} of {len(ages)}  {ratio}",
            flush=True,
        )


def at_least_one(text: str) -> int:
    """Return the number in *text*, which must be 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} must be 1 or more")
    return number


def at_least_two(text: str) -> int:
    """Return the number in *text*, which must be 2 or more: a single message has no percentiles."""
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{number} must be 2 or more")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--store", choices=STORES, action="append", help="only this one; may be repeated")
    parser.add_argument("--count", type=at_least_two, default=60, help="messages in a round of each contender (60)")
    parser.add_argument("--rounds", type=at_least_one, default=3, help="rounds (3)")
    parser.add_argument("--sends", nargs=5, metavar="…", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sends:
        store, contender, url, count, seed = given.sends
        asyncio.run(send(store, contender, url, int(count), int(seed)))
        return
    for store in given.store or STORES:
        measure(store, given.count, given.rounds)


if __name__ == "__main__":
    main()
