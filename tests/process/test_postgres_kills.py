"""Consumers killed with kill -9 and the server with them: nothing is lost, nothing is settled twice.

``TENURE_FULL=1`` makes it long: 20,000 messages, 40 consumers killed, 3 servers.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tenure.backends import postgres
from tenure.errors import Unavailable
from tenure.queue.broker import QueueSettings
from tenure.queue.message import Outgoing, Stats
from tenure.testing import until
from tenure.url import Url
from tests.servers import Postgres, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

FULL = os.environ.get("TENURE_FULL", "") not in ("", "0")
MESSAGES, CONSUMER_KILLS, SERVER_KILLS = (20_000, 40, 3) if FULL else (2_000, 6, 1)
CONSUMERS = 4
LOCK = 1.0
BATCH = 20

CONSUMER = """
import asyncio, os, sys
from tenure.backends import postgres
from tenure.errors import Unavailable
from tenure.queue.message import COMPLETE, Settled, Settlement
from tenure.url import Url

async def main(url, log, lock, batch):
    broker = postgres.open(Url.parse(url)).broker
    def note(what, names):  # one write each: what a kill cuts off was not said
        os.write(log, "".join(f"{what} {name}\\n" for name in names).encode())
    while True:
        try:
            claim = await broker.receive("work", batch, lock)
            if not claim.deliveries:
                await asyncio.sleep(0.02)
                continue
            note("got", [one.id for one in claim.deliveries])
            await asyncio.sleep(0.03)  # the work, in which most of the killed die
            answers = await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
            done = [one.id for one, answer in zip(claim.deliveries, answers) if isinstance(answer, Settled)]
            note("settled", done)
        except Unavailable:
            await asyncio.sleep(0.02)

log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
asyncio.run(main(sys.argv[1], log, float(sys.argv[3]), int(sys.argv[4])))
"""


class Staff:
    """Consumers, one of which is killed now and then, and replaced."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self.hired = 0
        self.running = [self._hire() for _ in range(CONSUMERS)]

    def _hire(self) -> tuple[subprocess.Popen[bytes], Path]:
        self.hired += 1
        log = self._folder / f"{self.hired}.log"
        argv = [sys.executable, "-c", CONSUMER, f"{self._url}?timeout=2", str(log), str(LOCK), str(BATCH)]
        return subprocess.Popen(argv), log

    async def kill_one(self, dice: random.Random) -> None:
        """Kill one that has begun to work."""
        place = dice.randrange(len(self.running))
        one, log = self.running[place]
        await until(lambda: log.exists() and log.stat().st_size, within=60)
        one.kill()
        one.wait()
        self.running[place] = self._hire()

    def dismiss(self) -> None:
        for one, _ in self.running:
            one.kill()
            one.wait()

    def said(self, what: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for log in self._folder.glob("*.log"):
            for line in log.read_text().splitlines():
                verb, _, name = line.partition(" ")
                if verb == what:
                    found[name] += 1
        return found


async def test_nothing_is_lost_and_nothing_settled_twice(tmp_path: Path) -> None:
    dice = random.Random(17)
    with private(Postgres) as server:
        await postgres.migrate(server.url)
        backend = postgres.open(Url.parse(f"{server.url}?timeout=2"))
        await backend.broker.declare("work", QueueSettings(lock=LOCK, max_deliveries=1_000))
        staff = Staff(server.url, tmp_path)
        try:
            enough = asyncio.Event()
            sending = asyncio.create_task(send(backend, enough))
            await hurt(server, staff, dice)
            enough.set()
            sent = await sending
            await empty(backend)
        finally:
            staff.dismiss()
            await backend.close()
    got, settled = staff.said("got"), staff.said("settled")
    doubled = sum(got.values()) - len(got)
    print(f"{len(got)} messages, {doubled} delivered again, {len(sent - set(settled))} settled with nobody to hear it")
    assert set(got) == sent
    assert [name for name, times in settled.items() if times > 1] == []
    assert len(sent - set(settled)) <= (CONSUMER_KILLS + CONSUMERS * (SERVER_KILLS + 1)) * BATCH


async def send(backend: postgres.PostgresBackend, enough: asyncio.Event) -> set[str]:
    """Send until it is enough, each batch again until it is acknowledged; return all ids."""
    sent: set[str] = set()
    while not enough.is_set() or len(sent) < MESSAGES:
        ids = [f"m{number}" for number in range(len(sent), len(sent) + 50)]
        try:
            await backend.broker.send("work", [Outgoing(b"body", id=name) for name in ids])
            sent.update(ids)
        except Unavailable:
            pass  # it may be there: the ids see to it that it is kept once
        await asyncio.sleep(0.02)
    return sent


async def hurt(server: Postgres, staff: Staff, dice: random.Random) -> None:
    for number in range(CONSUMER_KILLS):
        await asyncio.sleep(dice.uniform(0.05, 0.25))
        await staff.kill_one(dice)
        if number % (CONSUMER_KILLS // SERVER_KILLS) == CONSUMER_KILLS // SERVER_KILLS // 2:
            server.kill()
            server.start()


async def empty(backend: postgres.PostgresBackend) -> None:
    give_up = time.monotonic() + 120
    while await backend.broker.stats("work") != Stats():
        assert time.monotonic() < give_up, await backend.broker.stats("work")
        await asyncio.sleep(0.05)
