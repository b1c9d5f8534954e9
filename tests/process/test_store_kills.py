"""Consumers killed with kill -9, on each kind of server, and the server with them: nothing is lost or settled twice.

``TENURE_LONG=1`` makes it long: 20,000 messages, 40 consumers killed, and the server 5 times. Azurite itself is not
killed: what it keeps is saved every few seconds only. RabbitMQ is killed in ``test_rabbitmq.py``.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tenure import _registry as registry
from tenure._queue.broker import Broker
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure._url import Url
from tenure.errors import Unavailable
from tests.durations import until
from tests.long import LONG
from tests.servers import Azurite, Nats, Postgres, RabbitMQ, Redis, ServiceBus, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Load:
    """The load and the kills for a kind of server. Times in seconds."""

    driver: str
    server: type[Azurite] | type[Nats] | type[Postgres] | type[RabbitMQ] | type[Redis] | type[ServiceBus]
    messages: int = 20_000 if LONG else 2_000
    kills: int = 40 if LONG else 6
    server_kills: int = 5 if LONG else 1
    consumers: int = 4
    lock: float = 1.0
    batch: int = 20
    pause: float = 0.02  # after each send, and after an empty claim
    patience: float = 120.0  # until the queue is empty


LOADS = [
    Load("asyncpg", Postgres),
    Load("redis", Redis),
    Load("nats", Nats),
    Load("proton", ServiceBus, lock=5.0),  # the shortest
    # A send without an answer can't be repeated: RabbitMQ keeps it twice. The server is killed in test_rabbitmq.py.
    Load("aiormq", RabbitMQ, server_kills=0),
    Load(
        "azure.storage.queue",
        Azurite,
        messages=20_000 if LONG else 600,
        server_kills=0,
        consumers=3,
        lock=3.0,
        batch=16,
        pause=0.2,
        patience=300.0,
    ),
]

CONSUMER = """
import asyncio, os, sys
from tenure import _registry as registry
from tenure.errors import Unavailable
from tenure._queue.verdicts import COMPLETE, Settled, Settlement
from tenure._url import Url

async def main(url, log, lock, batch, pause):
    broker = registry.load(url).open(url).broker
    def note(what, names):  # one write each: a kill leaves it whole or undone
        os.write(log, "".join(f"{what} {name}\\n" for name in names).encode())
    while True:
        try:
            claim = await broker.receive("work", batch, lock)
            if not claim.deliveries:
                await asyncio.sleep(pause)
                continue
            note("got", [one.id for one in claim.deliveries])
            await asyncio.sleep(0.03)  # the work; most kills come here
            answers = await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
            done = [one.id for one, answer in zip(claim.deliveries, answers) if isinstance(answer, Settled)]
            note("settled", done)
        except Unavailable:
            await asyncio.sleep(pause)

log = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
asyncio.run(main(Url.parse(sys.argv[1]), log, float(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])))
"""


class Consumers:
    """Consumers, which are killed one at a time, and replaced."""

    def __init__(self, load: Load, url: str, folder: Path) -> None:
        self._load = load
        self._url = url
        self._folder = folder
        self.started = 0
        self.running = [self._start() for _ in range(load.consumers)]

    def _start(self) -> tuple[subprocess.Popen[bytes], Path]:
        self.started += 1
        log = self._folder / f"{self.started}.log"
        load = self._load
        numbers = [str(number) for number in (load.lock, load.batch, load.pause)]
        return subprocess.Popen([sys.executable, "-c", CONSUMER, self._url, str(log), *numbers]), log

    async def kill_one(self, rng: random.Random) -> None:
        """Kill one that has begun."""
        place = rng.randrange(len(self.running))
        one, log = self.running[place]
        await until(lambda: log.exists() and log.stat().st_size)
        one.kill()
        one.wait()
        self.running[place] = self._start()

    def close(self) -> None:
        for one, _ in self.running:
            one.kill()
            one.wait()

    def logged(self, what: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for log in self._folder.glob("*.log"):
            for line in log.read_text().splitlines():
                verb, _, name = line.partition(" ")
                if verb == what:
                    found[name] += 1
        return found


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.server.__name__)
async def test_nothing_is_lost_and_nothing_settled_twice(load: Load, tmp_path: Path) -> None:
    pytest.importorskip(load.driver)
    rng = random.Random(17)
    with private(load.server) as server:
        # A killed server closes its connections; one that doesn't answer for less than this is only busy.
        url = Url.parse(f"{server.url}{'&' if '?' in server.url else '?'}timeout=20")
        module = registry.load(url)
        if load.server is Postgres:
            await module.migrate(url.written.reveal())
        backend = module.open(url)
        await backend.broker.declare("work", {"lock": load.lock, "max_deliveries": 1_000})
        consumers = Consumers(load, url.written.reveal(), tmp_path)
        try:
            enough = asyncio.Event()
            sending = asyncio.create_task(send(load, backend.broker, enough))
            await inject_faults(load, server, consumers, rng)
            enough.set()
            sent = await sending
            await empty(load, backend.broker, consumers, sent)
        finally:
            consumers.close()
            await backend.close()
    got, settled = consumers.logged("got"), consumers.logged("settled")
    doubled = sum(got.values()) - len(got)
    print(f"{len(got)} messages, {doubled} delivered again, {len(sent - set(settled))} settled without an answer")
    assert set(got) == sent
    assert [name for name, times in settled.items() if times > 1] == []
    assert len(sent - set(settled)) <= (load.kills + load.consumers * (load.server_kills + 1)) * load.batch


async def send(load: Load, broker: Broker, enough: asyncio.Event) -> set[str]:
    """Send until *enough*, repeating each batch until it is acknowledged; return all ids."""
    sent: set[str] = set()
    while not enough.is_set() or len(sent) < load.messages:
        ids = [f"m{number}" for number in range(len(sent), len(sent) + 50)]
        try:
            await broker.send("work", [Outgoing(b"body", id=name) for name in ids])
            sent.update(ids)
        except Unavailable:  # it may have been kept: with the ids, it is kept once
            assert load.server_kills
        await asyncio.sleep(load.pause)
    return sent


async def inject_faults(load: Load, server: Any, consumers: Consumers, rng: random.Random) -> None:
    for number in range(load.kills):
        await asyncio.sleep(rng.uniform(0.05, 0.25))
        await consumers.kill_one(rng)
        if load.server_kills:
            every = load.kills // load.server_kills
            if number % every == every // 2:
                server.kill()
                server.start()


async def empty(load: Load, broker: Broker, consumers: Consumers, sent: set[str]) -> None:
    """Wait until nothing is left, and nothing on its way: not every broker counts what other processes hold."""
    give_up = time.monotonic() + load.patience
    missing: set[str] = set()
    while await broker.stats("work") != Stats() or (missing := sent - set(consumers.logged("got"))):
        assert time.monotonic() < give_up, (await broker.stats("work"), missing)
        await asyncio.sleep(0.05)
