"""Queues in PostgreSQL: sending and draining, beside a loop by hand on asyncpg, and beside pgqueuer and procrastinate.

Run by hand: ``python -m benchmarks.postgres_queue [NAME …] [--messages 20000] [--batch 100] [--fsync]``. Each contender
has a fresh server of its own, one process, and an async handler that does nothing. Libraries that are not installed are
left out. Processor time is printed besides wall time: on a busy machine only that can be compared. Prints figures
only. ``snapshot --seconds 600`` measures how a transaction that stays open, such as a backup's, slows down a queue.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Unpack

import asyncpg

import tenure
from benchmarks import standing
from tenure._backends import postgres
from tenure._queue.broker import QueueOptions
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Settlement
from tenure._url import Url
from tests.servers import Postgres, private
from tests.servers.process import _family

BODY = b"x" * 200
TICK = os.sysconf("SC_CLK_TCK")


class Watch:
    """Time, and the processor time of this process and of the server with all its children."""

    def __init__(self, server: Postgres) -> None:
        self._server = server
        self._begun = self._now()

    def _now(self) -> tuple[float, float, float]:
        theirs = 0
        for pid in _family(self._server.pid):
            try:
                with open(f"/proc/{pid}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            theirs += sum(int(field) for field in fields[11 : 15 if pid == self._server.pid else 13])
        return time.perf_counter(), time.process_time(), theirs / TICK

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


async def pump(server: Postgres, count: int, batch: int, **limits: Unpack[QueueOptions]) -> None:
    """Tenure as programs use it: send_batch, and the message pump."""
    await postgres.migrate(server.url)
    async with tenure.connect(server.url) as backend:
        queue, watch = backend.queue("bench", **limits), Watch(server)
        for _ in range(0, count, batch):
            await queue.send_batch([Outgoing(BODY) for _ in range(batch)])
        watch.lap("send", count)

        async def handle(message: tenure.Message) -> None:
            pass

        await queue.consume(handler=handle, until_empty=True)
        watch.lap("drain", count)


async def broker(server: Postgres, count: int, batch: int, **limits: Unpack[QueueOptions]) -> None:
    """The broker itself: the next claim is under way while the last one is settled."""
    await postgres.migrate(server.url)
    backend = postgres.open(Url.parse(server.url))
    await backend.broker.declare("bench", limits)
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


async def by_hand(server: Postgres, count: int, batch: int) -> None:
    """A loop by hand on SKIP LOCKED: no token, no renewal, no retries, no dead letters, no counts."""
    connection, watch = await asyncpg.connect(server.url), Watch(server)
    await connection.execute(
        "CREATE TABLE job (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, taken_at timestamptz, body bytea)"
    )
    await connection.execute("CREATE INDEX ON job (id) WHERE taken_at IS NULL")
    for _ in range(0, count, batch):
        await connection.execute("INSERT INTO job (body) SELECT unnest($1::bytea[])", [BODY] * batch)
    watch.lap("send", count)
    claim = (
        "UPDATE job SET taken_at = clock_timestamp() WHERE id IN (SELECT id FROM job WHERE taken_at IS NULL "
        "ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED) RETURNING id, body"
    )
    while rows := await connection.fetch(claim, batch):
        await connection.execute("DELETE FROM job WHERE id = ANY ($1)", [row["id"] for row in rows])
    watch.lap("drain", count)
    await connection.close()


async def pgqueuer(server: Postgres, count: int, batch: int) -> None:
    from pgqueuer import AsyncpgDriver, PgQueuer, Queries
    from pgqueuer.types import QueueExecutionMode

    connection = await asyncpg.connect(server.url)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    watch = Watch(server)
    for _ in range(0, count, batch):
        await queries.enqueue(["handle"] * batch, [BODY] * batch, [0] * batch)
    watch.lap("send", count)
    worker = PgQueuer(AsyncpgDriver(connection))

    @worker.entrypoint("handle")
    async def handle(job: object) -> None:
        pass

    await worker.qm.run(
        batch_size=batch,
        mode=QueueExecutionMode.drain,
        dequeue_timeout=timedelta(seconds=1),
        max_concurrent_tasks=10**6,
    )
    watch.lap("drain", count)
    await connection.close()


async def procrastinate(server: Postgres, count: int, batch: int) -> None:
    from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=server.url))
    async with app.open_async():
        await app.schema_manager.apply_schema_async()

        @app.task(name="handle")
        async def handle(body: str) -> None:
            pass

        watch = Watch(server)
        for _ in range(0, count, batch):
            await handle.batch_defer_async(*({"body": "x" * 200} for _ in range(batch)))
        watch.lap("send", count)
        await app.run_worker_async(concurrency=batch, wait=False, install_signal_handlers=False)
        watch.lap("drain", count)


async def wakes(server: Postgres, count: int, batch: int) -> None:
    """Measure the time from the send to the delivery to a consumer in another backend that waits for a hint."""
    await postgres.migrate(server.url)
    sender, receiver = (postgres.open(Url.parse(server.url)) for _ in range(2))
    hints, took = receiver.broker.hints("bench"), []
    await anext(hints)
    await receiver.broker.receive("bench", 1, 30.0)
    for _ in range(min(count, 500)):
        waiting = asyncio.ensure_future(anext(hints))
        await asyncio.sleep(0.02)  # the sender's pause between two notifications is over, as in an idle queue
        begun = time.perf_counter()
        await sender.broker.send("bench", [Outgoing(BODY)])
        await waiting
        claim = await receiver.broker.receive("bench", 1, 30.0)
        took.append(time.perf_counter() - begun)
        await receiver.broker.settle([Settlement(claim.deliveries[0], COMPLETE)])
    standing.print_times(took)
    await sender.close()
    await receiver.close()


async def snapshot(server: Postgres, count: int, batch: int, *, seconds: float) -> None:
    """Rounds of sending and draining, in turn on a server where a snapshot is held open and on one without."""
    with private(Postgres) as free:
        holder = await asyncpg.connect(server.url)
        servers = {"held": server, "free": free}
        for each in servers.values():
            await postgres.migrate(each.url)
        await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await holder.execute("SELECT FROM pg_class")  # from here on the snapshot is held
        begun = printed = time.perf_counter()
        took, rounds = dict.fromkeys(servers, 0.0), 0
        async with tenure.connect(server.url) as first, tenure.connect(free.url) as second:
            queues = {"held": first.queue("bench"), "free": second.queue("bench")}
            while (now := time.perf_counter()) < begun + seconds:
                for name, queue in queues.items():
                    took[name] += await _drained(queue, count, batch)
                rounds += 1
                if now > printed + min(60.0, seconds / 5):
                    rates = {name: rounds * count / spent for name, spent in took.items()}
                    print(
                        f"    after {now - begun:>4.0f} s: drained {rates['held']:>7,.0f} /s beside a snapshot, "
                        f"{rates['free']:>7,.0f} /s without: {rates['held'] / rates['free']:.2f}",
                        flush=True,
                    )
                    took, rounds, printed = dict.fromkeys(servers, 0.0), 0, now
        await holder.close()


async def _drained(queue: tenure.Queue, count: int, batch: int) -> float:
    """Send *count* messages; return how long it took to drain them."""
    for _ in range(0, count, batch):
        await queue.send_batch([Outgoing(BODY) for _ in range(batch)])

    async def handle(message: tenure.Message) -> None:
        pass

    begun = time.perf_counter()
    await queue.consume(handler=handle, until_empty=True)
    return time.perf_counter() - begun


async def hand_overs(server: Postgres, count: int, batch: int) -> None:
    """Measure the time from resigning to the next leader's start; and the requests of a candidate that stands by."""
    await postgres.migrate(server.url)
    await standing.hand_overs(server.url, min(count, 100))
    connection = await asyncpg.connect(server.url)
    own = 0

    async def asked() -> int:
        nonlocal own
        await connection.execute("SELECT pg_stat_clear_snapshot()")
        own += 2  # these two
        return -own + int(
            await connection.fetchval("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
        )

    await standing.idle(server.url, asked)
    await connection.close()


Contender = Callable[[Postgres, int, int], Awaitable[None]]

CONTENDERS: dict[str, tuple[Contender, str, int]] = {
    # name: (what runs, the package it needs, the divisor of the number of messages, for slow ones)
    "pump": (pump, "tenure", 1),
    "broker": (broker, "tenure", 1),
    "limited-pump": (partial(pump, max_locked=1_000), "tenure", 1),
    "limited-broker": (partial(broker, max_locked=1_000), "tenure", 1),
    "by-hand": (by_hand, "asyncpg", 1),
    "pgqueuer": (pgqueuer, "pgqueuer", 2),
    "procrastinate": (procrastinate, "procrastinate", 20),
    "wakes": (wakes, "tenure", 1),
    "hand-overs": (hand_overs, "tenure", 1),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "names", nargs="*", metavar="NAME", default=list(CONTENDERS), help=", ".join([*CONTENDERS, "snapshot"])
    )
    arguments.add_argument("--messages", type=int, default=20_000)
    arguments.add_argument("--batch", type=int, default=100)
    arguments.add_argument("--fsync", action="store_true", help="let every commit wait for the disk")
    arguments.add_argument("--seconds", type=float, default=60.0, help="how long the snapshot is held (60)")
    given = arguments.parse_args()
    contenders = CONTENDERS | {"snapshot": (partial(snapshot, seconds=given.seconds), "tenure", 4)}
    for name in given.names:
        if name not in contenders:
            arguments.error(f"there is no {name!r}; there are {', '.join(contenders)}")
    print(f"fsync {given.fsync}, batch {given.batch}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    for name in given.names:
        run, package, fewer = contenders[name]
        if find_spec(package) is None:
            print(f"{name}: not installed")
            continue
        print(f"{name}:", flush=True)
        with private(Postgres, durable=given.fsync) as server:
            asyncio.run(run(server, given.messages // fewer, given.batch))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
