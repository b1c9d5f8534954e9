"""Leaders and consumers as real processes on SQLite files, killed in rounds at random times from a seed."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tenure
from tenure.testing import until
from tests.process.candidate_setup import CandidateSetup
from tests.process.consumer_setup import ConsumerSetup, check, send
from tests.process.queue_worker import LOCK
from tests.proof.state import Part

PER_ROUND = 5
MESSAGES = 400
PATIENCE = 120.0


def kill(part: Part, enough: int, folder: Path) -> Iterator[None]:
    """Run rounds from ``part.next_seed`` on until *enough* processes were killed."""
    while part.done < enough:
        seed = part.next_seed
        for part_of_round in (leaders, consumers):
            found = tried(part_of_round, seed, folder)
            if found:
                part.failed(f"round {seed}, {part_of_round.__name__}: {found}", f"make proof ARGS='--round {seed}'")
            part.done += PER_ROUND
        part.next_seed += 1
        yield


def tried(part_of_round: Callable[[random.Random, Path], None], seed: int, folder: Path) -> str:
    """Run one part of a round; return its failure. The folder of a failed one is kept."""
    place = folder / f"round-{seed}-{part_of_round.__name__}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        part_of_round(random.Random(seed), place)
    except AssertionError as error:
        return f"{str(error) or repr(error)} (see {place})"
    shutil.rmtree(place, ignore_errors=True)
    return ""


def leaders(rng: random.Random, folder: Path) -> None:
    """Kill the leader of three candidates repeatedly: the next one has a newer token, and the old one does not act."""
    setup = CandidateSetup(folder)
    try:
        for _ in range(3):
            setup.start()
        setup.wait_for_newer(0)
        for _ in range(PER_ROUND):
            time.sleep(rng.uniform(0.0, 1.0))
            token = setup.newest()
            leader = next(pid for what, of, pid in setup.lines() if what == "act" and of == token)
            process = next(process for process in setup.processes if process.pid == leader)
            process.kill()
            process.wait()
            setup.start()
            setup.wait_for_newer(token)
        setup.check_order()
    finally:
        setup.close()


def consumers(rng: random.Random, folder: Path) -> None:
    """Kill one of four consumers repeatedly: no message is lost, and no effect doubled."""
    setup = ConsumerSetup(folder)
    try:
        asyncio.run(_consumed(setup, rng))
        counted = setup.query("SELECT count(*), count(DISTINCT id) FROM effect")
        total = (PER_ROUND + 1) * MESSAGES
        assert counted == [(total, total)], f"{total} messages, effects and different ones: {counted}"
        check(setup)
    finally:
        setup.close()


async def _consumed(setup: ConsumerSetup, rng: random.Random) -> None:
    async with tenure.connect(setup.url) as backend:
        queue = backend.queue("q", lock=LOCK, max_deliveries=1_000)
        for number in range(PER_ROUND):
            while len(setup.processes) < 4:
                setup.start("holding" if rng.random() < 0.2 and number else "together")
            await send(queue, range(number * MESSAGES, (number + 1) * MESSAGES))
            await until(lambda: any(receiver.poll() for receiver in setup.processes.values()), within=PATIENCE)
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            at_work = [process for process, receiver in setup.processes.items() if receiver.poll()]
            setup.kill(rng.choice(at_work))
        for process in list(setup.processes):  # those that hold messages never settle them
            setup.kill(process)
        setup.start("together")
        await send(queue, range(PER_ROUND * MESSAGES, (PER_ROUND + 1) * MESSAGES))

        async def is_empty() -> bool:
            return await queue.stats() == tenure.Stats()

        await until(is_empty, within=PATIENCE)
