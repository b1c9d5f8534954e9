"""Queues in Redis: sending and draining, beside a hand-written redis-py loop and beside arq, saq, taskiq and dramatiq.

Run by hand: ``python -m benchmarks.redis_queue [NAME …] [--messages 20000] [--batch 100] [--fsync everysec]``. Each
contender has a fresh server of its own, one process, and a handler that does nothing. Libraries that are not installed
are left out (they need different versions of redis-py, so measuring all takes several environments). Prints figures
only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec

from redis import asyncio as aioredis

import tenure
from benchmarks import standing
from tenure._backends import redis
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Settlement
from tenure._url import Url
from tests.servers import Redis, private

BODY = b"x" * 200

Seconds = tuple[float, float]


class Watch:
    """Time, and the processor time of this process and of the server."""

    def __init__(self, server: Redis) -> None:
        self._server = server
        self._begun = self._now()

    def _now(self) -> tuple[float, float, float]:
        with open(f"/proc/{self._server.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return time.perf_counter(), time.process_time(), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def lap(self, what: str, count: int) -> None:
        ended = self._now()
        wall, ours, theirs = (after - before for after, before in zip(ended, self._begun, strict=True))
        print(
            f"    {what:<6} {count / wall:>9,.0f} /s   of processor time per message: "
            f"{ours / count * 1e6:6.1f} us ours, {theirs / count * 1e6:6.1f} us the server's",
            flush=True,
        )
        self._begun = self._now()


# --- contenders --------------------------------------------------------------------------------------------------


async def tenure_broker(server: Redis, count: int, batch: int) -> None:
    """The broker itself: the next claim is under way while the last one is settled."""
    backend = redis.open(Url.parse(server.url))
    broker, watch = backend.broker, Watch(server)
    for _ in range(0, count, batch):
        await broker.send("bench", [Outgoing(BODY) for _ in range(batch)])
    watch.lap("send", count)
    claiming = asyncio.ensure_future(broker.receive("bench", batch, 30.0))
    while (claim := await claiming).deliveries:
        claiming = asyncio.ensure_future(broker.receive("bench", batch, 30.0))
        await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
    watch.lap("drain", count)
    await backend.close()


async def tenure_pump(server: Redis, count: int, batch: int) -> None:
    """The message pump with an async handler that does nothing: locks renewed, failures counted, verdicts batched."""
    async with tenure.connect(server.url) as backend:
        queue, watch = backend.queue("bench"), Watch(server)
        for _ in range(0, count, batch):
            await queue.send_batch([Outgoing(BODY) for _ in range(batch)])
        watch.lap("send", count)

        async def handle(message: tenure.Message) -> None:
            pass

        await queue.consume(handler=handle, until_empty=True)
        watch.lap("drain", count)


async def stream_loop(server: Redis, count: int, batch: int) -> None:
    """A loop by hand on a stream with a consumer group: no renewal, no retries, no dead letters, no fence."""
    client = aioredis.Redis.from_url(server.url)
    watch = Watch(server)
    await client.xgroup_create("bench", "group", mkstream=True)
    for _ in range(0, count, batch):
        async with client.pipeline(transaction=False) as pipeline:
            for _ in range(batch):
                pipeline.xadd("bench", {"body": BODY})
            await pipeline.execute()
    watch.lap("send", count)
    while found := await client.xreadgroup("group", "me", {"bench": ">"}, count=batch):
        entries = next(iter(found.values()))[0] if isinstance(found, dict) else found[0][1]
        ids = [entry[0] for entry in entries]
        async with client.pipeline(transaction=True) as pipeline:
            pipeline.xack("bench", "group", *ids)
            pipeline.xdel("bench", *ids)
            await pipeline.execute()
    watch.lap("drain", count)
    await client.aclose()


async def arq(server: Redis, count: int, batch: int) -> None:
    from arq import create_pool
    from arq.connections import RedisSettings
    from arq.worker import Worker, func

    async def handle(context: object, body: bytes) -> None:
        pass

    settings = RedisSettings(port=server.port)
    pool, watch = await create_pool(settings), Watch(server)
    for _ in range(0, count, batch):
        await asyncio.gather(*(pool.enqueue_job("handle", BODY) for _ in range(batch)))
    watch.lap("send", count)
    options = {"burst": True, "max_jobs": batch, "poll_delay": 0.01, "handle_signals": False, "keep_result": 0}
    worker = Worker([func(handle, name="handle")], redis_settings=settings, **options)
    await worker.main()
    watch.lap("drain", count)
    await worker.close()
    await pool.aclose()


async def saq(server: Redis, count: int, batch: int) -> None:
    from saq import Queue, Worker

    left = count
    done = asyncio.Event()

    async def handle(context: object, *, body: str) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    queue = Queue.from_url(server.url)
    await queue.connect()
    watch = Watch(server)
    for _ in range(0, count, batch):
        await asyncio.gather(*(queue.enqueue("handle", body="x" * 200, ttl=-1) for _ in range(batch)))
    watch.lap("send", count)
    worker = Worker(queue, functions=[("handle", handle)], concurrency=batch)
    working = asyncio.create_task(worker.start())
    await done.wait()
    watch.lap("drain", count)
    await worker.stop()
    await asyncio.gather(working, return_exceptions=True)
    await queue.disconnect()


async def taskiq(server: Redis, count: int, batch: int) -> None:
    from taskiq.api import run_receiver_task
    from taskiq_redis import RedisStreamBroker

    broker = RedisStreamBroker(server.url, xread_count=batch)
    left, done = count, asyncio.Event()

    @broker.task
    async def handle(body: str) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    await broker.startup()
    watch = Watch(server)
    for _ in range(0, count, batch):
        await asyncio.gather(*(handle.kiq("x" * 200) for _ in range(batch)))
    watch.lap("send", count)
    working = asyncio.create_task(run_receiver_task(broker, max_async_tasks=batch))
    await done.wait()
    watch.lap("drain", count)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await broker.shutdown()


async def dramatiq(server: Redis, count: int, batch: int) -> None:
    import dramatiq as library
    from dramatiq.brokers.redis import RedisBroker

    broker = RedisBroker(url=server.url)
    left, lock, done = count, threading.Lock(), threading.Event()

    def handle(body: str) -> None:
        nonlocal left
        with lock:
            left -= 1
            if not left:
                done.set()

    actor = library.actor(handle, broker=broker, actor_name="handle")
    watch = Watch(server)
    for _ in range(count):
        actor.send("x" * 200)
    watch.lap("send", count)
    worker = library.Worker(broker, worker_threads=8)
    worker.start()
    await asyncio.to_thread(done.wait)
    watch.lap("drain", count)
    worker.stop()


async def wakes(server: Redis, count: int, batch: int) -> None:
    """Measure the time from the send to the delivery to a consumer that waits for a hint."""
    sender, receiver = (redis.open(Url.parse(server.url)) for _ in range(2))
    hints, took = receiver.broker.hints("bench"), []
    await anext(hints)
    await receiver.broker.receive("bench", 1, 30.0)
    for _ in range(min(count, 500)):
        waiting = asyncio.ensure_future(anext(hints))
        await asyncio.sleep(0)
        begun = time.perf_counter()
        await sender.broker.send("bench", [Outgoing(BODY)])
        await waiting
        claim = await receiver.broker.receive("bench", 1, 30.0)
        took.append(time.perf_counter() - begun)
        await receiver.broker.settle([Settlement(claim.deliveries[0], COMPLETE)])
    standing.print_times(took)
    await sender.close()
    await receiver.close()


async def hand_overs(server: Redis, count: int, batch: int) -> None:
    """Measure the time from resigning to the next leader's start; and the requests of a candidate that stands by."""
    await standing.hand_overs(server.url, min(count, 100))
    client = aioredis.Redis.from_url(server.url)
    own = 0

    async def asked() -> int:
        nonlocal own
        own += 1  # this request, which is counted at the next one
        # Commands inside a script are counted separately, and are no requests.
        counted = ("cmdstat_evalsha", "cmdstat_ping", "cmdstat_info")
        calls = await client.info("commandstats")
        return -own + sum(calls[name]["calls"] for name in counted if name in calls)

    await standing.idle(server.url, asked)
    await client.aclose()


Contender = Callable[[Redis, int, int], Awaitable[None]]

CONTENDERS: dict[str, tuple[Contender, str, int]] = {
    # name: (what runs, the package it needs, the divisor of the number of messages, for slow ones)
    "pump": (tenure_pump, "tenure", 1),
    "broker": (tenure_broker, "tenure", 1),
    "streams": (stream_loop, "redis", 1),
    "arq": (arq, "arq", 10),
    "saq": (saq, "saq", 5),
    "taskiq": (taskiq, "taskiq_redis", 5),
    "dramatiq": (dramatiq, "dramatiq", 5),
    "wakes": (wakes, "tenure", 1),
    "hand-overs": (hand_overs, "tenure", 1),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "names", nargs="*", metavar="NAME", default=list(CONTENDERS), help=f"some of {', '.join(CONTENDERS)}"
    )
    arguments.add_argument("--messages", type=int, default=20_000)
    arguments.add_argument("--batch", type=int, default=100)
    arguments.add_argument("--fsync", choices=["always", "everysec", "no"], default="always")
    given = arguments.parse_args()
    for name in given.names:
        if name not in CONTENDERS:
            arguments.error(f"there is no {name!r}; there are {', '.join(CONTENDERS)}")
    print(
        f"appendfsync {given.fsync}, batch {given.batch}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    )
    for name in given.names:
        run, package, fewer = CONTENDERS[name]
        if find_spec(package) is None:
            print(f"{name}: not installed")
            continue
        print(f"{name}:", flush=True)
        with private(Redis, options=[("appendfsync", given.fsync)]) as server:
            asyncio.run(run(server, given.messages // fewer, given.batch))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
