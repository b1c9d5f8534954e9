"""Services as real processes: stopped by signals, killed, and a fleet that loses nothing when instances die."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

import tenure.sync
from tenure.sync import Queue
from tests.durations import PATIENCE, wait_until

pytestmark = pytest.mark.process

SERVICE = """
import asyncio, os, sqlite3, sys, time
import tenure, tenure.sync

service = tenure.Service("sqlite:///work.db")
orders = service.queue("orders", int, lock=float(os.environ["LOCK"]))
done = sqlite3.connect("done.db", timeout=60, isolation_level=None)
done.execute("create table if not exists done (number integer primary key, times integer not null)")

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one step: handlers and leaders run in threads

@service.on_startup
def start():
    say("starts")

@service.handler(orders, concurrency=4, grace=50)
async def serve(number: int) -> None:
    if number < 0:
        say("begins")
        try:
            await asyncio.sleep(-number)
        except asyncio.CancelledError:
            say("cancelled")
            raise
        say("done")
    done.execute("insert into done values (?, 1) on conflict do update set times = times + 1", [number])

@service.leader("chair", ttl=float(os.environ["LOCK"]))
async def lead(term: tenure.Term) -> None:
    say("leads", term.token)
    await asyncio.sleep(3600)

@service.leader("clerk", ttl=float(os.environ["LOCK"]))
def clerk(term: tenure.sync.Term) -> None:
    say("clerk leads")
    term.lost.wait()
    say("clerk ends")

@service.on_shutdown
def stop():
    say("stops")

if __name__ == "__main__":
    service.run(until_empty="--until-empty" in sys.argv)
    say("over")
"""


class Instance:
    """One process of the service."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.output = folder / f"out-{time.monotonic_ns()}"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(folder / "worker.py"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                process_group=0,
            )

    def lines(self) -> list[str]:
        return self.output.read_text().splitlines()

    def wait_for(self, line: str, times: int = 1) -> None:
        wait_until(lambda: self.lines().count(line) >= times, lambda: f"no {line!r} in {self.lines()}")

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)


@pytest.fixture
def start(tmp_path: Path, lock: float) -> Iterator[Callable[..., Instance]]:
    (tmp_path / "worker.py").write_text(SERVICE)
    started: list[Instance] = []

    def start(*arguments: str) -> Instance:
        started.append(Instance(tmp_path, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture
def orders(tmp_path: Path, lock: float) -> Iterator[Queue]:
    with tenure.sync.connect(f"sqlite:///{tmp_path}/work.db") as backend:
        yield backend.queue("orders", lock=lock)


def test_a_signal_lets_handlers_finish_and_releases_the_leases(start: Callable[..., Instance], orders: Queue) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        one = start()
        orders.send(json=-1)
        one.wait_for("begins")
        one.wait_for("clerk leads")
        one.send_signal(number)
        assert one.ended() == 0
        interrupted = ["interrupted: handlers may finish; interrupt again to stop without waiting"]
        said = one.lines()
        assert said[0] == "starts"
        assert {"done", "clerk ends"} <= set(said)
        assert said[-2:] == ["stops", "over"]
        assert [line for line in said if line.startswith("interr")] == (interrupted if number == signal.SIGINT else [])
    assert orders.stats() == tenure.Stats()


def test_a_second_interrupt_cancels_the_handlers(start: Callable[..., Instance], orders: Queue) -> None:
    one = start()
    orders.send(json=-40)
    one.wait_for("begins")
    one.send_signal(signal.SIGINT)
    one.wait_for("interrupted: handlers may finish; interrupt again to stop without waiting")
    one.send_signal(signal.SIGINT)
    one.wait_for("cancelled")
    one.ended()
    assert "stops" in one.lines()
    (again,) = orders.receive(wait=PATIENCE)
    assert again.delivery_count == 1  # it was given back uncounted


def test_a_second_sigterm_ends_the_process_and_the_message_comes_back(
    start: Callable[..., Instance], orders: Queue
) -> None:
    one = start()
    orders.send(json=-40)
    one.wait_for("begins")
    one.wait_for("clerk leads")
    one.send_signal(signal.SIGTERM)
    one.wait_for("clerk ends")
    one.send_signal(signal.SIGTERM)
    assert one.ended() == -signal.SIGTERM
    (again,) = orders.receive(wait=PATIENCE)
    assert again.delivery_count == 2


def test_a_fleet_loses_nothing_when_instances_are_killed(
    start: Callable[..., Instance], orders: Queue, tmp_path: Path
) -> None:
    count = 2_000
    orders.send_batch([tenure.Outgoing.json(number) for number in range(count)])
    fleet = [start() for _ in range(3)]
    for _ in range(4):
        victim = fleet.pop(0)
        victim.wait_for("starts")
        before = orders.stats().ready
        wait_until(lambda before=before: orders.stats().ready < max(before, 1), lambda: f"{orders.stats()}")  # type: ignore[misc]
        victim.kill()
        fleet.append(start())
    last = start("--until-empty")
    wait_until(lambda: orders.stats() == tenure.Stats(), lambda: f"{orders.stats()}")
    for one in fleet:
        one.send_signal(signal.SIGTERM)
        assert one.ended() == 0
    assert last.ended() == 0
    with closing(sqlite3.connect(tmp_path / "done.db")) as database:
        numbers = [number for (number,) in database.execute("select number from done order by number")]
    assert numbers == list(range(count))
