"""Consumers of an Azure queue killed with kill -9: nothing is lost, nothing is settled twice.

Azurite itself is not killed: what it keeps is saved every few seconds only. ``TENURE_FULL=1`` makes it long: 20,000
messages, 40 consumers killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("azure.storage.queue")

from tenure.backends import azure_storage
from tenure.queue.broker import QueueSettings
from tenure.queue.message import Outgoing, Stats
from tenure.testing import until
from tenure.url import Url
from tests.servers import Azurite, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

FULL = os.environ.get("TENURE_FULL", "") not in ("", "0")
MESSAGES, KILLS = (20_000, 40) if FULL else (600, 6)
CONSUMERS = 3
LOCK = 3.0
BATCH = 16

CONSUMER = """
import asyncio, os, sys
from tenure.backends import azure_storage
from tenure.errors import Unavailable
from tenure.queue.message import COMPLETE, Settled, Settlement
from tenure.url import Url

async def main(url, log, lock, batch):
    broker = azure_storage.open(Url.parse(url)).broker
    def note(what, names):  # one write each: what a kill cuts off was not said
        os.write(log, "".join(f"{what} {name}\\n" for name in names).encode())
    while True:
        try:
            claim = await broker.receive("work", batch, lock)
            if not claim.deliveries:
                await asyncio.sleep(0.05)
                continue
            note("got", [one.id for one in claim.deliveries])
            await asyncio.sleep(0.05)  # the work, in which most of the killed die
            answers = await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
            done = [one.id for one, answer in zip(claim.deliveries, answers) if isinstance(answer, Settled)]
            note("settled", done)
        except Unavailable:
            await asyncio.sleep(0.05)

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
        argv = [sys.executable, "-c", CONSUMER, self._url, str(log), str(LOCK), str(BATCH)]
        return subprocess.Popen(argv), log

    async def kill_one(self, dice: random.Random) -> None:
        """Kill one that has begun to work."""
        place = dice.randrange(len(self.running))
        one, log = self.running[place]
        await until(lambda: log.exists() and log.stat().st_size, within=120)
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
    with private(Azurite) as server:
        backend = azure_storage.open(Url.parse(server.url))
        await backend.broker.declare("work", QueueSettings(lock=LOCK, max_deliveries=1_000))
        staff = Staff(server.url, tmp_path)
        try:
            enough = asyncio.Event()
            sending = asyncio.create_task(send(backend, enough))
            for _ in range(KILLS):
                await asyncio.sleep(dice.uniform(0.1, 0.5))
                await staff.kill_one(dice)
            enough.set()
            sent = await sending
            await until(lambda: set(staff.said("got")) == sent, within=300)
            async with asyncio.timeout(300):
                while await backend.broker.stats("work") != Stats():
                    await asyncio.sleep(0.1)
        finally:
            staff.dismiss()
            await backend.close()
    got, settled = staff.said("got"), staff.said("settled")
    doubled = sum(got.values()) - len(got)
    print(f"{len(got)} messages, {doubled} delivered again, {len(sent - set(settled))} settled with nobody to hear it")
    assert set(got) == sent
    assert [name for name, times in settled.items() if times > 1] == []
    assert len(sent - set(settled)) <= (KILLS + CONSUMERS) * BATCH


async def send(backend: azure_storage.AzureBackend, enough: asyncio.Event) -> set[str]:
    """Send until it is enough, so that those who are to be killed have work; return all ids."""
    sent: set[str] = set()
    while not enough.is_set() or len(sent) < MESSAGES:
        ids = [f"m{number}" for number in range(len(sent), len(sent) + 50)]
        assert list(await backend.broker.send("work", [Outgoing(b"body", id=name) for name in ids])) == ids
        sent.update(ids)
        await asyncio.sleep(0.25)
    return sent
