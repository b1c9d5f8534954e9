"""Real consumers on one SQLite file, killed and stopped: nothing is lost, settled twice, or done twice needlessly."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenure
from tenure.testing import until
from tests.process.looking import states_of
from tests.process.queue_worker import LOCK
from tests.process.yard import Yard, check, send

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.name != "posix", reason="needs signals")]

EVERY = 0.25  # seconds from kill to kill, at least
BETWEEN = 50  # messages settled from kill to kill, at least: or a machine that is slow enough would never be done
PORTIONS = 5
PATIENCE = 100.0


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


class _Later:
    """A condition that holds after so many seconds: what paces the kills, and decides nothing."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def __call__(self) -> bool:
        return time.monotonic() >= self._at


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
        ours = backend.queue("q")
        await ours.declare(lock=2 * PATIENCE)
        [message] = await ours.receive(wait=PATIENCE)  # its lock has ended, and ours has begun
        assert message.delivery_count == 2
        os.kill(pid, signal.SIGCONT)
        for _ in ("transact", "complete", "abandon", "renew"):
            await until(hears.poll, within=PATIENCE, what="the consumer to be told")
            assert hears.recv() == "LockLost"
        await message.complete()
    assert yard.ask("SELECT count(*) FROM effect") == [(0,)]
    check(yard)
