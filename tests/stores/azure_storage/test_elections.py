"""Fifty elections at once on a fast Azurite: leaders are disconnected, cut off, killed, and paused past their lease."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("azure.storage.blob")

from tenure.testing.faultproxy import FaultProxy
from tests.durations import PATIENCE, stretched, wait_until
from tests.servers import Azurite, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
SPEED, SPEED_LEAST = 10.0, 2.5  # on an idle machine, a lease of 60 s ends after 6
NAMES = [f"chair-{number}" for number in range(50)]
Line = tuple[str, str, int, int]  # what, name, token, process


class Way:
    """A proxy on a loop of its own, controlled by this test from another thread."""

    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.proxy = FaultProxy("127.0.0.1", port)
        asyncio.run_coroutine_threadsafe(self.proxy.__aenter__(), self._loop).result(60)

    def call(self, act: Callable[[], object]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(act)
        self._loop.call_soon_threadsafe(done.set)
        assert done.wait(60)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.proxy.__aexit__(None, None, None), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


class Stage:
    """The folder in which all candidates write their logs, and their processes."""

    def __init__(self, folder: Path, server: Azurite) -> None:
        self.folder = folder
        self.server = server
        self.way = Way(server.blob.port)
        self.processes: list[subprocess.Popen[bytes]] = []
        with closing(sqlite3.connect(folder / "resource.db", isolation_level=None)) as connection:
            # Here, as SQLite refuses all but one of those that change the mode at once.
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(
                "CREATE TABLE deed (seq INTEGER PRIMARY KEY, name TEXT NOT NULL, token INTEGER NOT NULL)"
            )

    def start(self, port: int) -> subprocess.Popen[bytes]:
        url = f"azurite://127.0.0.1:{port}?timeout=40"
        with (self.folder / f"stderr-{len(self.processes)}").open("wb") as errors:
            argv = [
                sys.executable,
                str(HERE / "candidate.py"),
                url,
                str(self.folder),
                ",".join(NAMES),
                f"{self.server.speed:g}",
            ]
            process = subprocess.Popen(argv, stderr=errors)
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        self.way.close()

    def lines(self) -> list[Line]:
        path = self.folder / "acts"
        text = path.read_text() if path.exists() else ""
        rows = (
            line.split() for line in text[: text.rfind("\n") + 1].splitlines()
        )  # without a line that is still being written
        return [(what, name, int(token), int(pid)) for what, name, token, pid in rows]

    def leaders(self) -> dict[str, tuple[int, int]]:
        """Return for each name the newest token that has acted, and its process."""
        return {name: max(rows) for name, rows in self._acts().items()}

    def _acts(self) -> dict[str, list[tuple[int, int]]]:
        acts = defaultdict(list)
        for what, name, token, pid in self.lines():
            if what == "act":
                acts[name].append((token, pid))
        return acts

    def until(self, condition: Callable[[], bool]) -> None:
        slower = SPEED / self.server.speed
        wait_until(condition, lambda: f"it did not happen: {self.leaders()} {self.errors()}", PATIENCE * slower)

    def go_on(self, count: int) -> None:
        """Wait until so many more acts were done."""
        seen = len(self.lines())
        self.until(lambda: len(self.lines()) > seen + count)

    def deposed(self, pid: int) -> None:
        """Wait until other processes have acted for every name that *pid* leads."""
        led = {name: token for name, (token, by) in self.leaders().items() if by == pid}
        assert led
        self.until(lambda: all(self.leaders()[name][0] > token for name, token in led.items()))

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """Pause a process while it has no lock: in the middle of a write to the resource, it would block all others."""
        while True:
            process.send_signal(signal.SIGSTOP)
            with closing(sqlite3.connect(self.folder / "resource.db", isolation_level=None, timeout=2)) as connection:
                try:
                    connection.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError:
                    process.send_signal(signal.SIGCONT)
                    time.sleep(0.05)
                else:
                    connection.execute("ROLLBACK")
                    return

    def errors(self) -> str:
        return "".join(path.read_text()[-2_000:] for path in sorted(self.folder.glob("stderr-*")))

    def busiest(self, *among: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        pids = [pid for _, pid in self.leaders().values()]
        return max(among, key=lambda process: pids.count(process.pid))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with private(Azurite, speed=max(SPEED / stretched(1.0), SPEED_LEAST)) as server:
        stage = Stage(tmp_path, server)
        try:
            yield stage
        finally:
            stage.close()


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_fifty_elections_through_resets_cuts_kills_and_stops(stage: Stage) -> None:
    cut_off = stage.start(stage.way.proxy.port)
    stage.until(lambda: len(stage.leaders()) == len(NAMES))
    second, third = stage.start(stage.server.blob.port), stage.start(stage.server.blob.port)

    for _ in range(5):  # running requests fail, and are repeated
        stage.way.call(stage.way.proxy.reset)
        stage.go_on(len(NAMES))
    stage.way.call(stage.way.proxy.stall)  # a black hole: no answer, and no error either
    stage.deposed(cut_off.pid)
    stage.way.call(stage.way.proxy.heal)

    killed = stage.busiest(second, third)
    left = third if killed is second else second
    killed.kill()
    killed.wait()
    stage.deposed(killed.pid)
    stage.start(stage.server.blob.port)

    stopped = stage.busiest(left, cut_off)
    stage.stop(stopped)
    stage.deposed(stopped.pid)
    stopped.send_signal(signal.SIGCONT)
    stage.go_on(2 * len(NAMES))

    judge(stage, stopped.pid)


def judge(stage: Stage, stopped: int) -> None:
    """The fence accepts no write of an old term; without it there is none either, unless a process was paused."""
    lines = stage.lines()
    paused = {line[1:] for line in lines if line[0] == "paused"}
    newest: dict[str, int] = {}
    late = []
    for what, name, token, pid in lines:
        if what == "act":
            if token < newest.get(name, 0):
                late.append((name, token, pid))
            newest[name] = max(newest.get(name, 0), token)
    assert [one for one in late if one[2] != stopped and one not in paused] == []
    with closing(sqlite3.connect(stage.folder / "resource.db")) as connection:
        deeds = connection.execute("SELECT name, token FROM deed ORDER BY seq").fetchall()
    accepted: dict[str, int] = {}
    for name, token in deeds:
        assert token >= accepted.get(name, 0), f"the fence accepted an old term of {name}"
        accepted[name] = token
    holders = {(name, token, pid) for what, name, token, pid in lines if what == "act"}
    assert len(holders) == len({(name, token) for name, token, _ in holders}), "one token, two holders"
    assert "Traceback" not in stage.errors()
    terms = len({(name, token) for name, token, _ in holders})
    assert terms >= 2 * len(NAMES)
    print(f"{terms} terms, {len(deeds)} writes under the fence, {len(late)} unfenced acts of a paused leader")
