"""Consumers of RabbitMQ killed while they handle messages, and the server with them: what was completed stays so.

Each consumer notes when it gets a message, and when ``complete()`` has returned; ``handled.py`` judges.
``TENURE_LONG=1`` makes it long: ten runs, and loops of ``receive()`` with as many messages.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

pytest.importorskip("aiormq")

import tenure
from tenure._backends.rabbitmq.receiving import AT_ONCE
from tests.durations import ANSWERED_WITHIN, until
from tests.long import LONG
from tests.process.consumer_setup import FORKS
from tests.process.handled import Judgement, Noted, Notes, Outage, judge
from tests.process.handling_worker import Mode, run
from tests.servers import RabbitMQ, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

RUNS = 10 if LONG else 3
CONSUMERS = 3
BATCH = 10
"""Messages that are sent at once."""


@dataclass(frozen=True)
class Load:
    """What is sent, and what is killed."""

    mode: Mode
    messages: int = 5_000
    kills: int = 60
    outages: int = 2

    def due(self, kills: int) -> float:
        """Return how many messages belong before so many kills, so that they are spread over all of them."""
        return self.messages * kills / self.kills


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitMQ]:
    with private(RabbitMQ) as server:
        yield server


@dataclass
class Consumers:
    """Processes that consume a queue; each that is killed is replaced."""

    url: str
    queue: str
    mode: Mode
    folder: Path
    started: int = 0
    running: dict[ForkServerProcess, Notes] = field(default_factory=dict)
    killed: list[Notes] = field(default_factory=list)

    def start(self) -> None:
        self.started += 1
        file = self.folder / f"{self.started}.log"
        file.touch()
        process = FORKS.Process(target=run, args=(self.url, self.queue, self.mode, str(file), 0.03))
        process.start()
        self.running[process] = Notes(file)

    def kill(self, process: ForkServerProcess) -> bool:
        """Kill a consumer; return whether it was handling a message."""
        process.kill()
        process.join()
        process.close()
        self.killed.append(notes := self.running.pop(process))
        return bool(notes.in_hand())

    def handling(self) -> list[ForkServerProcess]:
        return [process for process, notes in self.running.items() if notes.in_hand()]

    def noted(self) -> list[Noted]:
        return sorted(line for notes in (*self.killed, *self.running.values()) for line in notes.lines())

    @property
    def handled(self) -> int:
        """How many messages were worked on, also of those whose completion an outage has left open."""
        return len(set().union(*(notes.handled() for notes in (*self.killed, *self.running.values()))))

    def close(self) -> None:
        for process in list(self.running):
            self.kill(process)


@pytest.mark.parametrize("seed", range(RUNS))
async def test_no_message_is_handled_again_once_its_completion_was_answered(
    seed: int, server: RabbitMQ, tmp_path: Path
) -> None:
    found = await judged(Load("pump"), seed, server, tmp_path)
    assert found == Judgement(undone=found.undone, redelivered=found.redelivered)


async def test_a_loop_of_receives_leaves_no_more_copies_than_it_gives_back_at_once(
    server: RabbitMQ, tmp_path: Path
) -> None:
    load = Load("batches") if LONG else Load("batches", messages=1_000, kills=12, outages=1)
    found = await judged(load, 0, server, tmp_path)
    assert found.lost == []
    assert len({*found.again, *found.twice}) <= AT_ONCE * load.kills, found


async def judged(load: Load, seed: int, server: RabbitMQ, folder: Path) -> Judgement:
    """Send messages to consumers that are killed; when nothing is left, judge what they have noted."""
    began = time.monotonic()
    rng = random.Random(seed)
    sent: set[str] = set()
    async with tenure.connect(f"{server.url}?timeout={ANSWERED_WITHIN:g}") as backend:
        queue = backend.queue(f"work-{load.mode}-{seed}")
        await queue.declare()
        consumers = Consumers(server.url, queue.name, load.mode, folder)
        for _ in range(CONSUMERS):
            consumers.start()
        sending = asyncio.create_task(send(queue, sent, load, consumers, rng))
        try:
            outages = await kill(server, load, consumers, rng)
            await sending
            found = await judged_at_last(queue, sent, consumers, outages)
        finally:
            sending.cancel()
            consumers.close()
        assert await queue.stats() == tenure.Stats()  # no dead letter
    print(
        f"{len(sent)} messages, {load.kills} kills, {len(outages)} restarts in {time.monotonic() - began:.0f} s: "
        f"{found.redelivered} delivered again, {len(found.again)} of them after an answer, "
        f"{len(found.twice)} completed twice, {len(found.lost)} lost; {found.undone} undone by a restart"
    )
    return found


async def send(queue: tenure.Queue, sent: set[str], load: Load, consumers: Consumers, rng: random.Random) -> None:
    """Send all messages, some before each kill; what has no answer is not sent again, as it may be kept."""
    number = 0
    while len(sent) < load.messages:
        ids = [f"m{number + place}" for place in range(BATCH)]
        number += BATCH
        try:
            await queue.send_batch([tenure.Outgoing(b"body", id=name) for name in ids])
            sent.update(ids)
        except tenure.Unavailable:
            await asyncio.sleep(rng.uniform(0.0, 0.2))
            continue
        await until(lambda: len(sent) <= load.due(len(consumers.killed) + 2), what="another kill")


async def kill(server: RabbitMQ, load: Load, consumers: Consumers, rng: random.Random) -> list[Outage]:
    """Kill consumers that are handling messages, and the server in between."""
    outages: list[Outage] = []
    kills, every = 0, load.kills // max(1, load.outages)
    while kills < load.kills:
        due = load.due(kills) - BATCH * CONSUMERS
        await until(lambda due=due: consumers.handled >= due, what="work on most messages")  # type: ignore[misc]
        await asyncio.sleep(rng.uniform(0.0, 0.1))
        await until(consumers.handling, what="a consumer that handles a message")
        if not consumers.kill(rng.choice(consumers.handling() or list(consumers.running))):
            consumers.start()
            continue
        consumers.start()
        kills += 1
        if load.outages and kills % every == every // 2:
            begun = time.monotonic()
            await asyncio.to_thread(server.kill)
            outages.append(Outage(begun, time.monotonic()))
            await asyncio.to_thread(server.start)
    return outages


async def judged_at_last(queue: tenure.Queue, sent: set[str], consumers: Consumers, outages: list[Outage]) -> Judgement:
    """Wait until the queue is empty and nobody handles or notes anything; return the judgement on what was noted."""
    killed = {notes.consumer for notes in consumers.killed}

    async def is_over() -> bool:
        before = consumers.noted()
        is_empty = await queue.stats() == tenure.Stats()
        if not is_empty or consumers.handling() or len(consumers.noted()) > len(before):
            return False
        return not judge(sent, before, killed, outages).lost  # else one may be on its way, which isn't counted

    with suppress(AssertionError):  # the judgement says what is missing
        await until(is_over)
    return judge(sent, consumers.noted(), killed, outages)
