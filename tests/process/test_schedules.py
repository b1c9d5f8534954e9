"""Processes that run a schedule, on each kind of store: each slot is sent once, whoever dies; and pauses end in time.

Always the process that has sent the newest slot is killed, at a random moment until shortly after the next one is due.
``TENURE_LONG=1`` makes it 100 of them, instead of 12.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import tenure.sync
from tenure._schedule.machine import LOOK_EVERY
from tenure._schedule.plan import Plan
from tenure._schedule.slots import id_of, newest, slots_of
from tests.durations import stretched, wait_until
from tests.long import LONG
from tests.process_states import stop
from tests.servers import Nats, Postgres, Redis, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

KILLS = 100 if LONG else 12
PROCESSES = 3
EVERY = 0.4

PROGRAM = """
import asyncio, os, sys
import tenure
from tenure.events import SlotSent

def note(event):
    if isinstance(event, SlotSent):
        os.write(log, f"{event.slot:.3f} {os.getpid()}\\n".encode())  # one write: a kill leaves it whole or undone

async def main():
    async with tenure.connect(sys.argv[1], on_event=note) as backend:
        await backend.schedule("beat", float(sys.argv[3]), queue="beats", missed="all").run()

log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
asyncio.run(main())
"""


class Fleet:
    """Processes that run one schedule, and a log of what each has sent."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._log = folder / "sent"
        self._log.touch()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for _ in range(PROCESSES):
            self.start()

    def start(self) -> None:
        line = [sys.executable, "-c", PROGRAM, self._url, str(self._log), str(EVERY)]
        process = subprocess.Popen(line)
        self._processes[process.pid] = process

    def sent(self) -> list[tuple[float, int]]:
        """Return each slot that was reported, and its process, in order."""
        lines = [line.split() for line in self._log.read_text().splitlines()]
        return [(float(slot), int(pid)) for slot, pid in lines]

    def newest_sender(self) -> int:
        """Wait for a further slot; return the process that has sent it."""
        before = len(self.sent())
        wait_until(lambda: len(self.sent()) > before and self.sent()[-1][1] in self._processes)
        return self.sent()[-1][1]

    def kill(self, pid: int) -> None:
        process = self._processes.pop(pid)
        process.kill()
        process.wait()

    def close(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


@contextmanager
def store(kind: str, folder: Path) -> Iterator[str]:
    with ExitStack() as stack:
        if kind == "sqlite":
            yield f"sqlite:///{folder / 'work.db'}"
        elif kind in ("redis", "nats"):
            yield stack.enter_context(private(Redis if kind == "redis" else Nats)).url
        else:
            url = stack.enter_context(private(Postgres)).url
            with tenure.sync.connect(url) as backend:
                backend.migrate()
            yield url


def after_pause(fleet: Fleet, paused_at: float) -> list[float]:
    """Return the slots that were sent and are later than the pause; a report may be late."""
    return [slot for slot, _ in fleet.sent() if slot > paused_at]


@pytest.mark.parametrize("kind", ["sqlite", "redis", "postgres", "nats"])
def test_the_first_slot_after_a_pause_is_sent_in_time(kind: str, tmp_path: Path) -> None:
    with store(kind, tmp_path) as url, tenure.sync.connect(url) as backend:
        fleet = Fleet(url, tmp_path)
        try:
            fleet.newest_sender()
            schedules = backend.queue("beats").schedules
            schedules.pause("beat")
            paused_at = time.time()
            time.sleep(stretched(5 * EVERY))  # all see that it is paused
            assert not after_pause(fleet, paused_at)
            resumed_at = time.time()
            schedules.resume("beat")
            wait_until(lambda: after_pause(fleet, paused_at), within=LOOK_EVERY / 2)
            assert after_pause(fleet, paused_at)[0] >= resumed_at - EVERY
        finally:
            fleet.close()


@pytest.mark.parametrize("kind", ["sqlite", "redis", "postgres", "nats"])
def test_each_slot_is_sent_once_whoever_dies(kind: str, tmp_path: Path) -> None:
    rng = random.Random(29)
    with store(kind, tmp_path) as url:
        fleet = Fleet(url, tmp_path)
        try:
            fleet.newest_sender()
            for number in range(KILLS):
                pid = fleet.newest_sender()
                time.sleep(rng.uniform(0.0, EVERY * 1.1))
                if number % 4 == 3:  # it hangs instead, and wakes up with what it has seen before
                    stop(pid, tmp_path / "work.db")
                    fleet.newest_sender()
                    os.kill(pid, signal.SIGCONT)
                else:
                    fleet.kill(pid)
                    fleet.start()
            fleet.newest_sender()
        finally:
            fleet.close()
        with tenure.sync.connect(url) as backend:
            [status] = backend.schedules()
            ids = [message.id for message in backend.queue("beats").receive(max=10_000)]
    reported = [slot for slot, _ in fleet.sent()]
    assert status.last is not None
    slots = newest(slots_of(Plan(EVERY)), reported[0] - EVERY / 2, status.last, 10_000)
    expected = [id_of("beat", slot) for slot in slots]
    assert (ids if kind != "nats" else sorted(ids)) == (
        expected if kind != "nats" else sorted(expected)
    )  # in any order
    assert len(reported) == len(set(reported))
    assert {id_of("beat", slot) for slot in reported} <= set(ids)
    print(f"{kind}: {len(ids)} slots, {KILLS} processes killed or stopped, {len(ids) - len(reported)} without report")
