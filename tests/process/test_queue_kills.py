"""Real consumers on one SQLite file, killed and stopped: nothing is lost, settled twice or handled twice in vain."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenure
from tests.durations import PATIENCE, until
from tests.process.consumer_setup import ConsumerSetup, check, send
from tests.process.queue_worker import LOCK
from tests.process_states import states_of

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.name != "posix", reason="needs signals")]

EVERY = 0.25  # seconds from kill to kill, at least
BETWEEN = 50  # messages settled from kill to kill, at least, so that a slow machine makes progress
PORTIONS = 5


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[ConsumerSetup]:
    setup = ConsumerSetup(tmp_path)
    yield setup
    setup.close()


async def work_off(setup: ConsumerSetup, queue: tenure.Queue, mode: str, total: int) -> None:
    """Send *total* messages, and let four consumers work until nothing is left, killing one of them repeatedly.

    The messages come in portions, each but the first after a kill, so that a fast machine isn't done before.
    """
    portions = [range(start, start + total // PORTIONS) for start in range(0, total, total // PORTIONS)]
    left_at_kill = math.inf
    give_up = time.monotonic() + PATIENCE
    await send(queue, portions.pop(0))
    while len(setup.processes) < 4:
        setup.start(mode)
    while True:
        stats = await queue.stats()
        if stats == tenure.Stats() and not portions:
            return
        assert time.monotonic() < give_up, f"{stats}, {len(portions)} portions to come"
        await until(_Later(EVERY))
        at_work = [process for process, receiver in setup.processes.items() if receiver.poll()]
        left = stats.ready + stats.locked
        if at_work and (portions or left + BETWEEN <= left_at_kill):
            setup.kill(at_work[0])
            left_at_kill = left
            setup.start(mode)
            if portions:
                await send(queue, portions.pop(0))
                left_at_kill = math.inf


class _Later:
    """A condition that holds after so many seconds; it only paces the kills."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def __call__(self) -> bool:
        return time.monotonic() >= self._at


@pytest.mark.timeout(150)
async def test_twenty_thousand_messages_and_their_effects_survive_a_kill_every_quarter_second(
    setup: ConsumerSetup,
) -> None:
    total = 20_000
    async with tenure.connect(setup.url) as backend:
        queue = backend.queue("q", lock=LOCK, max_deliveries=1_000)
        setup.start("holding")  # the first to be killed
        await work_off(setup, queue, "together", total)
    assert setup.query("SELECT count(*), count(DISTINCT id) FROM effect") == [(total, total)], "lost, or handled twice"
    assert setup.query("SELECT count(*) > 0 FROM effect WHERE delivery > 1") == [(1,)], (
        "no held message was delivered again"
    )
    check(setup)


@pytest.mark.timeout(150)
async def test_a_pump_that_is_killed_loses_nothing(setup: ConsumerSetup) -> None:
    total = 5_000
    async with tenure.connect(setup.url) as backend:
        queue = backend.queue("q", lock=LOCK, max_deliveries=1_000)
        await work_off(setup, queue, "apart", total)
    done = setup.query("SELECT count(DISTINCT id) FROM effect")
    assert done == [(total,)]
    # At-least-once delivery allows two deliveries of a message, but each delivery has one effect.
    assert setup.query("SELECT id FROM effect GROUP BY id, delivery HAVING count(*) > 1") == []
    check(setup)


async def test_a_consumer_that_was_stopped_past_its_lock_can_settle_nothing(setup: ConsumerSetup) -> None:
    async with tenure.connect(setup.url) as backend:
        queue = backend.queue("q", lock=LOCK)
        await queue.send(b"x", id="m")
        stopped, receiver = setup.start("stopped")
        pid = stopped.pid
        assert pid is not None
        await until(receiver.poll, what="the consumer to receive")
        assert receiver.recv() == "received"
        await until(lambda: states_of(pid) <= {"T"}, what="the consumer to be stopped")
        other = backend.queue("q")
        await other.declare(lock=2 * PATIENCE)
        [message] = await other.receive(wait=PATIENCE)  # the first lock has ended, and this one has begun
        assert message.delivery_count == 2
        os.kill(pid, signal.SIGCONT)
        for _ in ("transact", "complete", "abandon", "renew"):
            await until(receiver.poll, what="the consumer to report")
            assert receiver.recv() == "LockLost"
        await message.complete()
    assert setup.query("SELECT count(*) FROM effect") == [(0,)]
    check(setup)
