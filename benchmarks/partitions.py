"""Processes that share partitions: time to balance, partitions that move, and what rest costs.

``python -m benchmarks partitions --store redis`` starts a server, then the members, all at once; waits at rest; lets
one join, one leave in order, and kills one. Prints figures only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory

import tenure
from tests.servers import Postgres, Redis, private

TICKS = os.sysconf("SC_CLK_TCK")


async def member(url: str, partitions: int, ttl: float) -> None:
    """Take part until SIGTERM; print each change with its time, by the clock that all processes share."""

    async def work(term: tenure.PartitionTerm) -> None:
        print("+", term.partition, time.monotonic(), flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("-", term.partition, time.monotonic(), flush=True)

    async with tenure.connect(url) as backend:
        await backend.partitions("bench", partitions, ttl=ttl).run(work)


class Members:
    """The processes, and what each owns."""

    def __init__(self, url: str, partitions: int, ttl: float) -> None:
        self._line = [sys.executable, "-m", "benchmarks.partitions", "member", url, str(partitions), str(ttl)]
        self.partitions = partitions
        self.owned: dict[subprocess.Popen[str], set[str]] = {}
        self.moves = 0
        self._guard = threading.Lock()

    def start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self._line, stdout=subprocess.PIPE, text=True)
        self.owned[process] = set()
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            sign, partition, _ = line.split()
            with self._guard:
                owned = self.owned.get(process, set())
                (owned.add if sign == "+" else owned.discard)(partition)
                self.moves += sign == "+"

    @property
    def is_balanced(self) -> bool:
        with self._guard:
            counts = [len(owned) for owned in self.owned.values()]
        return sum(counts) == self.partitions and max(counts) - min(counts) <= 1

    def until_balanced(self, what: str, act: Callable[[], object]) -> None:
        """Let *act* happen; print how long it takes until all is in balance again, and how many partitions moved."""
        self.moves, began = 0, time.monotonic()
        act()
        while not self.is_balanced:
            time.sleep(0.005)
        took = time.monotonic() - began
        time.sleep(1.0)
        print(f"    {what}: {took:.2f} s until balance, {self.moves} partitions moved", flush=True)

    def remove(self, process: subprocess.Popen[str]) -> None:
        with self._guard:
            del self.owned[process]

    def seconds(self) -> dict[int, float]:
        """Return the processor seconds of each process so far."""
        found = {}
        for process in self.owned:
            with open(f"/proc/{process.pid}/stat", encoding="ascii") as stat:
                fields = stat.read().rpartition(")")[2].split()
            found[process.pid] = (int(fields[11]) + int(fields[12])) / TICKS
        return found

    def end(self) -> None:
        for process in list(self.owned):
            process.terminate()
        for process in list(self.owned):
            process.wait(60)


def measure(members: Members, count: int, rest: float, asked: Callable[[], int] | None) -> None:
    """Print the figures of *count* members."""

    def begin() -> None:
        for _ in range(count):
            members.start()

    members.until_balanced(f"{count} start together", begin)
    time.sleep(15.0)
    before, questions, began = members.seconds(), asked() if asked else 0, time.monotonic()
    time.sleep(rest)
    lasted = time.monotonic() - began
    shares = sorted((after - before[pid]) / lasted for pid, after in members.seconds().items())
    print(f"    at rest: {shares[len(shares) // 2]:.1%} of a core each (at most {shares[-1]:.1%})", flush=True)
    if asked:
        print(f"    at rest: {(asked() - questions) / lasted / count:.2f} requests /s each", flush=True)
    members.until_balanced("one joins", members.start)
    first, second, *_ = members.owned

    def leave() -> None:
        first.terminate()
        members.remove(first)

    def kill() -> None:
        second.kill()
        members.remove(second)

    members.until_balanced("one leaves", leave)
    members.until_balanced("one is killed", kill)


@contextmanager
def served(store: str) -> Iterator[tuple[str, Callable[[], int] | None]]:
    """Start a store; yield its URL, and what counts its statements."""
    with ExitStack() as stack:
        if store == "sqlite":
            folder = stack.enter_context(TemporaryDirectory())
            yield f"sqlite:///{folder}/leases.db", None
        elif store == "redis":
            server = stack.enter_context(private(Redis))
            yield server.url, lambda: _reads(server)
        else:
            from tenure._backends import postgres

            database = stack.enter_context(private(Postgres))
            asyncio.run(postgres.migrate(database.url))
            asyncio.run(_log_statements(database.url))
            log = database.folder / "server.log"
            yield database.url, lambda: log.read_text(errors="replace").count("LOG:  execute ")


def _reads(server: Redis) -> int:
    """Return how often the server has read from its clients: scripts that are sent together are one request."""
    import redis

    with redis.Redis.from_url(server.url) as client:
        return int(client.info("stats")["total_reads_processed"])


async def _log_statements(url: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        await connection.execute("ALTER SYSTEM SET log_statement = 'all'")
        await connection.execute("SELECT pg_reload_conf()")
    finally:
        await connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks partitions", description=__doc__)
    parser.add_argument("--store", choices=("redis", "postgres", "sqlite"), action="append")
    parser.add_argument("--partitions", type=int, default=1_000)
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--ttl", type=float, default=15.0, help="seconds (default: 15)")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds at rest that are measured (default: 60)")
    chosen = parser.parse_args()
    for store in chosen.store or ("redis", "postgres", "sqlite"):
        print(f"{store}, {chosen.partitions} partitions, ttl {chosen.ttl:g} s", flush=True)
        with served(store) as (url, asked):
            members = Members(url, chosen.partitions, chosen.ttl)
            try:
                measure(members, chosen.members, chosen.rest, asked)
            finally:
                members.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["member"]:
        asyncio.run(member(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
    else:
        main()
