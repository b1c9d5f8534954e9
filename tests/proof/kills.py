"""Leaders and consumers as real processes on SQLite files, killed in rounds at moments that a seed draws."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tenure
from tenure.testing import until
from tests.process.queue_worker import LOCK
from tests.process.stage import Stage
from tests.process.yard import Yard, check, send
from tests.proof.state import Part

PER_ROUND = 5
MESSAGES = 400
PATIENCE = 120.0


def kill(part: Part, enough: int, folder: Path) -> Iterator[None]:
    """Go through rounds from ``part.next_seed`` on until *enough* processes were killed."""
    while part.done < enough:
        seed = part.next_seed
        for course in (leaders, consumers):
            found = tried(course, seed, folder)
            if found:
                part.failed(f"round {seed}, {course.__name__}: {found}", f"make proof ARGS='--round {seed}'")
            part.done += PER_ROUND
        part.next_seed += 1
        yield


def tried(course: Callable[[random.Random, Path], None], seed: int, folder: Path) -> str:
    """Go through one course of a round; return what was found. The folder of one that failed is left."""
    place = folder / f"round-{seed}-{course.__name__}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        course(random.Random(seed), place)
    except AssertionError as error:
        return f"{str(error) or repr(error)} (see {place})"
    shutil.rmtree(place, ignore_errors=True)
    return ""


def leaders(rng: random.Random, folder: Path) -> None:
    """Kill the leader of three candidates, each time anew: the next one has a newer token, the old one acts no more."""
    stage = Stage(folder)
    try:
        for _ in range(3):
            stage.start()
        stage.wait_for_newer(0)
        for _ in range(PER_ROUND):
            time.sleep(rng.uniform(0.0, 1.0))
            token = stage.newest()
            leader = next(pid for what, of, pid in stage.lines() if what == "act" and of == token)
            process = next(process for process in stage.processes if process.pid == leader)
            process.kill()
            process.wait()
            stage.start()
            stage.wait_for_newer(token)
        stage.judge()
    finally:
        stage.close()


def consumers(rng: random.Random, folder: Path) -> None:
    """Kill one of four consumers, each time anew: nothing is lost, no effect stands twice."""
    yard = Yard(folder)
    try:
        asyncio.run(_consumed(yard, rng))
        counted = yard.ask("SELECT count(*), count(DISTINCT id) FROM effect")
        total = (PER_ROUND + 1) * MESSAGES
        assert counted == [(total, total)], f"{total} messages, effects and different ones: {counted}"
        check(yard)
    finally:
        yard.close()


async def _consumed(yard: Yard, rng: random.Random) -> None:
    async with tenure.connect(yard.url) as backend:
        queue = backend.queue("q", lock=LOCK, max_deliveries=1_000)
        for number in range(PER_ROUND):
            while len(yard.processes) < 4:
                yard.start("holding" if rng.random() < 0.2 and number else "together")
            await send(queue, range(number * MESSAGES, (number + 1) * MESSAGES))
            await until(lambda: any(hears.poll() for hears in yard.processes.values()), within=PATIENCE)
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            at_work = [process for process, hears in yard.processes.items() if hears.poll()]
            yard.kill(rng.choice(at_work))
        for process in list(yard.processes):  # those that hold would hold for ever
            yard.kill(process)
        yard.start("together")
        await send(queue, range(PER_ROUND * MESSAGES, (PER_ROUND + 1) * MESSAGES))

        async def is_empty() -> bool:
            return await queue.stats() == tenure.Stats()

        await until(is_empty, within=PATIENCE)
