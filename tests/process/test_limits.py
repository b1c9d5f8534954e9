"""Processes that consume a queue with limits, killed and stopped in the middle: no limit is exceeded, no place is lost.

``TENURE_LONG=1`` makes it 60 kills, instead of 8.
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
from tests.durations import wait_until
from tests.long import LONG
from tests.process_states import stop
from tests.servers import Postgres, Redis, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

KILLS = 60 if LONG else 8
PROCESSES = 3
LOCK = 1.5
MOST = 3
RATE = (40, 2.0)

PROGRAM = """
import asyncio, os, sys, time
import tenure

def note(what, message):  # one write: a kill leaves it whole or undone
    line = f"{time.monotonic():.6f} {os.getpid()} {what} {message.sequence}\\n"
    os.write(log, line.encode())

async def handle(message):
    note("begin", message)
    await asyncio.sleep(0.05)
    note("end", message)

async def main():
    async with tenure.connect(sys.argv[1]) as backend:
        await backend.queue("orders").consume(handle, concurrency=4)

log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
asyncio.run(main())
"""


class Fleet:
    """Processes that consume, a log of their handlers, and of when a process was killed or stopped."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._log = folder / "handled"
        self._log.touch()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.gone: list[tuple[float, int]] = []
        for _ in range(PROCESSES):
            self.start()

    def start(self) -> None:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, self._url, str(self._log)])
        self._processes[process.pid] = process

    def lines(self) -> list[tuple[float, int, str, int]]:
        found = (line.split() for line in self._log.read_text().splitlines())
        return [(float(at), int(pid), what, int(sequence)) for at, pid, what, sequence in found]

    def busy(self) -> int:
        """Wait until a handler has begun anew; return its process."""
        seen = len(self.lines())

        def begun() -> list[int]:
            return [pid for _, pid, what, _ in self.lines()[seen:] if what == "begin" and pid in self._processes]

        wait_until(begun)
        return begun()[-1]

    def kill(self, pid: int) -> None:
        process = self._processes.pop(pid)
        process.kill()
        process.wait()
        self.gone.append((time.monotonic(), pid))

    def close(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()

    def running_at_once(self) -> int:
        """Return the most handlers that ran at once. Those of a process that was killed or stopped ended then."""
        changes: list[tuple[float, int]] = []
        open_: dict[tuple[int, int], float] = {}
        ends = sorted([*self.lines(), *((at, pid, "gone", 0) for at, pid in self.gone)])
        for at, pid, what, sequence in ends:
            if what == "begin":
                open_[pid, sequence] = at
                changes.append((at, 1))
            elif what == "end" and open_.pop((pid, sequence), None) is not None:
                changes.append((at, -1))
            elif what == "gone":
                for key in [key for key in open_ if key[0] == pid]:
                    del open_[key]
                    changes.append((at, -1))
        running = most = 0
        for _, change in sorted(changes):
            running += change
            most = max(most, running)
        return most


@contextmanager
def store(kind: str, folder: Path) -> Iterator[str]:
    with ExitStack() as stack:
        if kind == "sqlite":
            yield f"sqlite:///{folder / 'work.db'}"
        elif kind == "redis":
            yield stack.enter_context(private(Redis)).url
        else:
            url = stack.enter_context(private(Postgres)).url
            with tenure.sync.connect(url) as backend:
                backend.migrate()
            yield url


@pytest.mark.parametrize("kind", ["sqlite", "redis", "postgres"])
def test_no_limit_is_exceeded_and_no_place_is_lost(kind: str, tmp_path: Path) -> None:
    rng = random.Random(8)
    with store(kind, tmp_path) as url, tenure.sync.connect(url) as backend:
        queue = backend.queue("orders", lock=LOCK, max_deliveries=1_000, max_locked=MOST, rate=RATE)
        queue.send_batch([tenure.Outgoing(b"x") for _ in range(KILLS * 40)])
        fleet = Fleet(url, tmp_path)
        try:
            for number in range(KILLS):
                pid = fleet.busy()
                time.sleep(rng.uniform(0.0, 0.06))
                if number % 4 == 3:  # it hangs instead, until others have its places, and wakes up
                    stop(pid, tmp_path / "work.db")
                    fleet.gone.append((time.monotonic(), pid))
                    time.sleep(LOCK * 1.2)
                    fleet.busy()
                    os.kill(pid, signal.SIGCONT)
                else:
                    fleet.kill(pid)
                    fleet.start()
            handled = len(fleet.lines())
            wait_until(lambda: len(fleet.lines()) > handled + 20)  # all places are free again
            queue.declare(paused=True)
            wait_until(lambda: queue.stats().locked == 0)
            handled = len(fleet.lines())
            time.sleep(0.5)
            assert len(fleet.lines()) == handled
            queue.declare(paused=False, rate=(10_000, 1.0))
            wait_until(lambda: queue.stats() == tenure.Stats())
        finally:
            fleet.close()
        lines = fleet.lines()
        assert fleet.running_at_once() <= MOST
        paused = len(lines[:handled])
        began = [at for at, _, what, _ in lines[:paused] if what == "begin"]
        most, seconds = RATE
        # A handler begins soon after its message was received, which is what is counted.
        crowded = [1 for first, last in zip(began, began[most:], strict=False) if last - first < seconds - 0.25]
        assert not crowded
        completed = {sequence for _, _, what, sequence in lines if what == "end"}
        assert len(completed) == KILLS * 40
