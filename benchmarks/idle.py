"""What rest costs: processor time, and requests to the store, of processes that have nothing to do.

``python -m benchmarks idle [--store redis] [--only candidates] [--rest 40]`` starts a server, then the processes:

- ``candidates``: ten, one of which leads; beside a loop written by hand, and on ZooKeeper beside kazoo's election;
- ``leases``: one that holds 1,000 leases;
- ``queues``: one that consumes 1,000 queues, each with a consumer of its own, and all of them empty.

Their start is not counted. Prints figures only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import tenure
from benchmarks.partitions import served
from tests.servers import ZooKeeper, private

Asked = Callable[[], int] | None
"""Counts the requests that a store has got so far; None if it has no server."""


# --- the processes ---


async def candidate(url: str, count: int, ttl: float) -> None:
    """Be a candidate of one election, for ever."""
    async with tenure.connect(url) as backend:
        print("ready", flush=True)
        await backend.election("idle", ttl=ttl).run(_wait)


async def leases(url: str, count: int, ttl: float) -> None:
    """Hold as many leases."""
    begun, all_begun = 0, asyncio.Event()

    async def lead(term: tenure.Term) -> None:
        nonlocal begun
        begun += 1
        if begun == count:
            all_begun.set()
        await _wait(term)

    async with tenure.connect(url) as backend, asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(backend.election(f"idle-{number}", ttl=ttl).run(lead))
            if number % 50 == 49:  # a store does not get them all at once
                await asyncio.sleep(0.05)
        await all_begun.wait()
        print("ready", flush=True)


async def queues(url: str, count: int, ttl: float) -> None:
    """Consume as many queues."""
    async with tenure.connect(url) as backend, asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(backend.queue(f"idle-{number}").consume(_wait, sigterm=False))
            if number % 50 == 49:
                await asyncio.sleep(0.05)
        print("ready", flush=True)


async def by_hand(url: str, count: int, ttl: float) -> None:
    """Be a candidate that asks a Redis or a PostgreSQL every two fifteenths of the lease, and renews by thirds."""
    me = f"{os.getpid()}"
    ask = await (_ask_redis if url.startswith("redis") else _ask_postgres)(url, me, ttl)
    print("ready", flush=True)
    while True:
        await asyncio.sleep(ttl / 3 if await ask() else ttl * 2 / 15)


async def _ask_redis(url: str, me: str, ttl: float) -> Callable[[], asyncio.Future[bool]]:
    from redis import asyncio as aioredis

    client = aioredis.Redis.from_url(url, decode_responses=True)
    renew = client.register_script(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end"
    )

    async def ask() -> bool:
        lasts = int(ttl * 1_000)
        return bool(await renew(["by-hand"], [me, lasts]) or await client.set("by-hand", me, px=lasts, nx=True))

    return lambda: asyncio.ensure_future(ask())


async def _ask_postgres(url: str, me: str, ttl: float) -> Callable[[], asyncio.Future[bool]]:
    import asyncpg

    connection = await asyncpg.connect(url)
    await connection.execute(
        "CREATE TABLE IF NOT EXISTS by_hand (name text PRIMARY KEY, holder text, ends timestamptz)"
    )
    statement = """
        INSERT INTO by_hand VALUES ('idle', $1, now() + $2 * interval '1 s')
        ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, ends = excluded.ends
        WHERE by_hand.holder = excluded.holder OR by_hand.ends < now()
        RETURNING holder
    """

    async def ask() -> bool:
        return bool(await connection.fetch(statement, me, ttl))

    return lambda: asyncio.ensure_future(ask())


async def kazoo(url: str, count: int, ttl: float) -> None:
    """Be a candidate of kazoo's election."""
    from kazoo.client import KazooClient

    client = KazooClient(urlsplit(url).netloc, timeout=ttl)
    client.start()
    print("ready", flush=True)
    await asyncio.to_thread(client.Election("/kazoo", "idle").run, time.sleep, 1e6)


async def _wait(_: object) -> None:
    await asyncio.Event().wait()


KINDS = {kind.__name__: kind for kind in (candidate, leases, queues, by_hand, kazoo)}


# --- the figures ---


def seconds(pid: int) -> float:
    """Return the processor seconds of the threads of a process so far. (/proc/PID/stat has hundredths only.)"""
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def measure(kind: str, url: str, asked: Asked, processes: int, count: int, chosen: argparse.Namespace) -> None:
    """Print what so many *processes* of one *kind* cost."""
    line = [sys.executable, "-m", "benchmarks.idle", "process", kind, url, str(count), str(chosen.ttl)]
    running = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    try:
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(chosen.settle)
        spent, questions, began = [seconds(one.pid) for one in running], asked() if asked else 0, time.monotonic()
        time.sleep(chosen.rest)
        lasted, more = time.monotonic() - began, asked() - questions if asked else 0
        cost = sum(seconds(one.pid) - before for one, before in zip(running, spent, strict=True)) / lasted
        what = f"{processes} processes" if processes > 1 else f"{count:,} in one process"
        requests = f", {more / lasted:.2f} requests /s" if asked else ""
        print(f"    {kind}, {what}: {cost * 60:.2f} CPU s a minute ({cost:.2%} of a core){requests}", flush=True)
    finally:
        for process in running:
            process.kill()
            process.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks idle", description=__doc__.partition("\n")[0])
    parser.add_argument("--store", choices=("redis", "postgres", "sqlite", "zookeeper"), action="append")
    parser.add_argument("--only", choices=("candidates", "leases", "queues"), action="append")
    parser.add_argument("--processes", type=int, default=10, help="candidates (default: 10)")
    parser.add_argument("--count", type=int, default=1_000, help="leases or queues of one process (default: 1000)")
    parser.add_argument("--ttl", type=float, default=15.0, help="seconds (default: 15)")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds after the start (default: 20)")
    parser.add_argument("--rest", type=float, default=40.0, help="seconds at rest that are measured (default: 40)")
    chosen = parser.parse_args(arguments)
    only = chosen.only or ("candidates", "leases", "queues")
    for store in chosen.store or ("redis", "postgres", "sqlite", "zookeeper"):
        print(f"{store}, ttl {chosen.ttl:g} s", flush=True)
        if store == "zookeeper":
            if "candidates" in only:
                with private(ZooKeeper, tick=2.0, session_max=60.0) as server:
                    measure("candidate", server.url, None, chosen.processes, 1, chosen)
                    measure("kazoo", server.url, None, chosen.processes, 1, chosen)
            continue
        with served(store) as (url, asked):
            if "candidates" in only:
                measure("candidate", url, asked, chosen.processes, 1, chosen)
                if store != "sqlite":
                    measure("by_hand", url, asked, chosen.processes, 1, chosen)
            for kind in ("leases", "queues"):
                if kind in only:
                    measure(kind, url, asked, 1, chosen.count, chosen)


if __name__ == "__main__":
    if sys.argv[1:2] == ["process"]:
        asyncio.run(KINDS[sys.argv[2]](sys.argv[3], int(sys.argv[4]), float(sys.argv[5])))
    else:
        main()
