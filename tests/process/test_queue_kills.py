"""Real consumers on one SQLite file, killed and stopped: nothing is lost, settled twice, or done twice needlessly."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

import tenure
from tenure.testing import until
from tests.process.looking import states_of
from tests.process.queue_worker import LOCK, run

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.name != "posix", reason="needs signals")]

EVERY = 0.25  # seconds from kill to kill, at least
BETWEEN = 50  # messages settled from kill to kill, at least: or a machine that is slow enough would never be done
PORTIONS = 5
PATIENCE = 100.0

# New consumers come from a process that has imported everything: so they work at once, and not only when they die.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["__main__", "tests.process.queue_worker"])


class Yard:
    """A file, the processes that consume from it, and what they did."""

    def __init__(self, folder: Path) -> None:
        self.file = str(folder / "work.db")
        self.url = f"sqlite:///{self.file}?synchronous=normal&busy=30"
        self.processes: dict[ForkServerProcess, Connection] = {}
        with closing(sqlite3.connect(self.file)) as connection:
            connection.execute("CREATE TABLE effect (id TEXT, delivery INTEGER, pid INTEGER)")

    def start(self, mode: str) -> tuple[ForkServerProcess, Connection]:
        hears, tells = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=run, args=(self.file, mode, tells))
        process.start()
        tells.close()
        self.processes[process] = hears
        return process, hears

    def kill(self, process: ForkServerProcess) -> None:
        process.kill()
        process.join()
        process.close()
        self.processes.pop(process).close()

    def close(self) -> None:
        for process in list(self.processes):
            self.kill(process)

    def ask(self, question: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self.file, timeout=30)) as connection:
            return connection.execute(question).fetchall()


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path)
    yield yard
    yard.close()


async def work_off(yard: Yard, queue: tenure.Queue, mode: str, total: int) -> None:
    """Send *total* messages, and let four consumers work until nothing is left, one of them killed every now and then.

    The messages come in portions, each but the first after a kill: or a quick machine would be done before.
    """
    portions = [range(start, start + total // PORTIONS) for start in range(0, total, total // PORTIONS)]
    left_at_kill = math.inf
    give_up = time.monotonic() + PATIENCE
    await send(queue, portions.pop(0))
    while len(yard.processes) < 4:
        yard.start(mode)
    while True:
        stats = await queue.stats()
        if stats == tenure.Stats() and not portions:
            return
        assert time.monotonic() < give_up, f"{stats}, {len(portions)} portions to come"
        await until(_Later(EVERY), within=EVERY * 20)
        at_work = [process for process, hears in yard.processes.items() if hears.poll()]
        left = stats.ready + stats.locked
        if at_work and (portions or left + BETWEEN <= left_at_kill):
            yard.kill(at_work[0])
            left_at_kill = left
            yard.start(mode)
            if portions:
                await send(queue, portions.pop(0))
                left_at_kill = math.inf


async def send(queue: tenure.Queue, numbers: range) -> None:
    for start in numbers[::1_000]:
        await queue.send_batch([tenure.Outgoing(b"x", id=f"m{n}") for n in numbers if start <= n < start + 1_000])


class _Later:
    """A condition that holds after so many seconds: what paces the kills, and decides nothing."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def __call__(self) -> bool:
        return time.monotonic() >= self._at


def check(yard: Yard) -> None:
    """See that the books are in order after all the deaths."""
    assert yard.ask("PRAGMA integrity_check") == [("ok",)]
    for table in ("message", "ready", "delayed", "expiry", "deferred", "hold", "death"):
        assert yard.ask(f"SELECT count(*) FROM tenure_{table}") == [(0,)], table


@pytest.mark.timeout(150)
async def test_twenty_thousand_messages_and_their_effects_survive_a_kill_every_quarter_second(yard: Yard) -> None:
    total = 20_000
    async with tenure.connect(yard.url) as backend:
        queue = backend.queue("q", lock=LOCK, max_deliveries=1_000)
        yard.start("holding")  # the first to be killed
        await work_off(yard, queue, "together", total)
    assert yard.ask("SELECT count(*), count(DISTINCT id) FROM effect") == [(total, total)], "lost, or done twice"
    assert yard.ask("SELECT count(*) > 0 FROM effect WHERE delivery > 1") == [(1,)], "what was in hand is not back"
    check(yard)


@pytest.mark.timeout(150)
async def test_a_pump_that_is_killed_loses_nothing(yard: Yard) -> None:
    total = 5_000
    async with tenure.connect(yard.url) as backend:
        queue = backend.queue("q", lock=LOCK, max_deliveries=1_000)
        await work_off(yard, queue, "apart", total)
    done = yard.ask("SELECT count(DISTINCT id) FROM effect")
    assert done == [(total,)]
    # Done twice is what at least once means; but each delivery is one, and only those in hand at a kill came again.
    assert yard.ask("SELECT id FROM effect GROUP BY id, delivery HAVING count(*) > 1") == []
    check(yard)


async def test_a_consumer_that_was_stopped_past_its_lock_can_settle_nothing(yard: Yard) -> None:
    async with tenure.connect(yard.url) as backend:
        queue = backend.queue("q", lock=LOCK)
        await queue.send(b"x", id="m")
        stopped, hears = yard.start("stopped")
        pid = stopped.pid
        assert pid is not None
        await until(hears.poll, within=PATIENCE, what="the consumer to receive")
        assert hears.recv() == "received"
        await until(lambda: states_of(pid) <= {"T"}, within=PATIENCE, what="the consumer to be stopped")
        ours = backend.queue("q", lock=2 * PATIENCE)
        [message] = await ours.receive(wait=PATIENCE)  # its lock has ended, and ours has begun
        assert message.delivery_count == 2
        os.kill(pid, signal.SIGCONT)
        for _ in ("transact", "complete", "abandon", "renew"):
            await until(hears.poll, within=PATIENCE, what="the consumer to be told")
            assert hears.recv() == "LockLost"
        await message.complete()
    assert yard.ask("SELECT count(*) FROM effect") == [(0,)]
    check(yard)
