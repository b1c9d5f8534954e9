"""What one process costs its store: connections, requests at rest, requests and bytes of log for each message.

Run by hand: ``python -m benchmarks capacity [postgresql] [redis] [--messages 5000] [--seconds 30]``. Prints figures
only, each as the server counts it: PostgreSQL its transactions and the bytes of its write-ahead log, Redis the scripts
that it was sent, and the bytes of its append-only file.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg
from redis import asyncio as aioredis

import tenure
from tenure._backend import Backend
from tenure._backends import postgres
from tests.servers import Postgres, Redis, private

BODY = b"x" * 200
SETTLED = 6.0
"""Seconds until what happens only once, at the start, is over."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a server has counted so far, without the requests that read it."""

    requests: int
    log: int
    connections: int


class Server:
    """A server with its counters."""

    url: str

    async def counts(self) -> Counts:
        raise NotImplementedError


class PostgresServer(Server):
    def __init__(self, connection: asyncpg.Connection, url: str) -> None:
        self.url = url
        self._connection = connection
        self._own = 0

    async def counts(self) -> Counts:
        fetch = self._connection.fetchval
        await asyncio.sleep(11)  # idle sessions report what they have done within ten seconds
        await fetch("SELECT pg_stat_clear_snapshot()")
        self._own += 4
        return Counts(
            await fetch("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()") - self._own,
            await fetch("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"),
            await fetch("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()") - 1,
        )


class RedisServer(Server):
    def __init__(self, client: aioredis.Redis, url: str) -> None:
        self.url = url
        self._client = client

    async def counts(self) -> Counts:
        commands = await self._client.info("commandstats")
        known = ("evalsha", "eval", "fcall", "ping", "subscribe", "script|load", "hello", "auth")
        sent = sum(commands.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in known)
        stats = await self._client.info("persistence")
        clients = await self._client.info("clients")
        return Counts(sent, int(stats.get("aof_current_size", 0)), clients["connected_clients"] - 1)


@asynccontextmanager
async def postgres_server() -> AsyncIterator[Server]:
    with private(Postgres, durable=True) as server:
        await postgres.migrate(server.url)
        connection = await asyncpg.connect(server.url)
        yield PostgresServer(connection, server.url)
        await connection.close()


@asynccontextmanager
async def redis_server() -> AsyncIterator[Server]:
    with private(Redis) as server:
        client = aioredis.Redis.from_url(server.url)
        await client.config_set("appendonly", "yes")
        yield RedisServer(client, server.url)
        await client.aclose()


Act = Callable[[Backend], Awaitable[object]]


async def at_rest(server: Server, what: str, act: Act, seconds: float) -> None:
    """Print what one backend costs that does nothing but *act*."""
    async with tenure.connect(server.url) as backend:
        task = asyncio.ensure_future(act(backend))
        await asyncio.sleep(SETTLED)
        before, begun = await server.counts(), time.perf_counter()
        await asyncio.sleep(seconds)
        after = await server.counts()
        took = time.perf_counter() - begun
        print(
            f"    {what:<28} {(after.requests - before.requests) / took:6.2f} requests/s, "
            f"{after.connections} connections",
            flush=True,
        )
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def lead(backend: Backend) -> None:
    async def work(term: tenure.Term) -> None:
        await term.lost.wait()

    await backend.election("held").run(work)


async def consume(backend: Backend) -> None:
    async def handle(message: tenure.Message) -> None:
        pass

    await backend.queue("idle").consume(handle)


async def both(backend: Backend) -> None:
    await asyncio.gather(lead(backend), consume(backend))


async def busy(server: Server, count: int, batch: int) -> None:
    """Print what a message costs that is sent, and one that is consumed."""
    async with tenure.connect(server.url) as backend:
        queue = backend.queue(f"busy-{batch}")
        await queue.send(BODY)
        await queue.consume(_ignore, until_empty=True)
        before = await server.counts()
        for _ in range(0, count, batch):
            await queue.send_batch([tenure.Outgoing(BODY) for _ in range(batch)])
        between = await server.counts()
        await queue.consume(_ignore, until_empty=True)
        after = await server.counts()
    for what, begin, end in (("sent", before, between), ("consumed", between, after)):
        print(
            f"    {what}, {batch} at once: {(end.requests - begin.requests) / count:6.3f} requests and "
            f"{(end.log - begin.log) / count:6.0f} bytes of log for each message",
            flush=True,
        )


async def _ignore(message: tenure.Message) -> None:
    pass


SERVERS = {"postgresql": postgres_server, "redis": redis_server}


async def measure(name: str, messages: int, seconds: float) -> None:
    """Print the figures of one store."""
    async with SERVERS[name]() as server:

        async def two_candidates(backend: Backend) -> None:
            async with tenure.connect(server.url) as other:
                await asyncio.gather(lead(other), lead(backend))

        print(f"{name}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors", flush=True)
        await at_rest(server, "one leader", lead, seconds)
        await at_rest(server, "a leader and one standing by", two_candidates, seconds)
        await at_rest(server, "one idle consumer", consume, seconds)
        await at_rest(server, "a leader that also consumes", both, seconds)
        for batch in (1, 100):
            await busy(server, messages // (10 if batch == 1 else 1), batch)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks capacity", description=__doc__)
    parser.add_argument("stores", nargs="*", default=list(SERVERS), metavar="STORE", help=", ".join(SERVERS))
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to count at rest (30)")
    given = parser.parse_args()
    for name in given.stores:
        asyncio.run(measure(name, given.messages, given.seconds))


if __name__ == "__main__":
    main()
