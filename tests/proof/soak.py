"""Hours under load: consumers on one SQLite file, watched for lost messages, and for memory and files that grow."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import tenure
from tenure.testing import until
from tests.process.queue_worker import LOCK
from tests.process.yard import Yard
from tests.proof.state import Part

STAGE = 20
"""Seconds from one look to the next."""
WARM = 3
"""Looks after which nothing should grow any more."""
GROWTH_MAX = 1.3
AGAIN = f"make proof ARGS='--soak {WARM * STAGE * 2} --state build/again'"
EVERY, AT_ONCE = 0.1, 20


def soak(part: Part, enough: int, folder: Path) -> Iterator[None]:
    """Send and consume for *enough* seconds, in stages; yield after each. One that is interrupted is not counted."""
    folder.mkdir(parents=True, exist_ok=True)
    if part.done >= enough:
        return
    for old in folder.glob("work.db*"):  # of an earlier run: its consumers are gone
        old.unlink()
    part.notes["looks"] = 0
    yard = Yard(folder)
    try:
        for _ in range(3):
            yard.start("apart")
        with asyncio.Runner() as runner:
            while part.done < enough:
                begun = time.monotonic()
                found = runner.run(_one_stage(yard, part.next_seed, min(STAGE, enough - part.done)))
                part.done += round(time.monotonic() - begun)
                part.next_seed += 1
                found += _grown(yard, part)
                for what in found:
                    part.failed(
                        f"stage {part.next_seed - 1}: {what}", "make proof ARGS='--soak SECONDS' with a new --state"
                    )
                yield
    finally:
        yard.close()


async def _one_stage(yard: Yard, stage: int, seconds: float) -> list[str]:
    """Send for so many seconds, and see that all of it was consumed."""
    sent = 0
    end = time.monotonic() + seconds
    async with tenure.connect(yard.url) as backend:
        queue = backend.queue("q", lock=LOCK, max_deliveries=1_000)
        while time.monotonic() < end:
            names = [f"{stage}-{number}" for number in range(sent, sent + AT_ONCE)]
            await queue.send_batch([tenure.Outgoing(b"x" * 100, id=name) for name in names])
            sent += AT_ONCE
            await asyncio.sleep(EVERY)

        async def is_empty() -> bool:
            return await queue.stats() == tenure.Stats()

        await until(is_empty, within=120)
    [(deliveries, different)] = yard.ask("SELECT count(DISTINCT id || delivery), count(DISTINCT id) FROM effect")
    [(effects,)] = yard.ask("SELECT count(*) FROM effect")
    yard.tell("DELETE FROM effect")
    # A consumer that was late may have lost its lock, and the message came again; each delivery has one effect.
    found = f"{sent} sent, {different} consumed, in {deliveries} deliveries with {effects} effects"
    return [] if different == sent and effects == deliveries else [found]


def _grown(yard: Yard, part: Part) -> list[str]:
    """Note how much memory and how many files the consumers have; return what has grown since they were warm."""
    notes = part.notes
    notes["looks"] += 1
    pids = [process.pid for process in yard.processes if process.pid]
    if not Path("/proc/self/statm").exists():
        return []
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    notes["MiB"] = pages * os.sysconf("SC_PAGE_SIZE") // 2**20
    notes["files"] = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    found = []
    for what in ("MiB", "files"):
        if notes["looks"] == WARM:
            notes[f"{what}, warm"] = notes[what]
        elif notes["looks"] > WARM and notes[what] > GROWTH_MAX * notes[f"{what}, warm"]:
            found.append(f"{what} of the consumers: {notes[f'{what}, warm']}, now {notes[what]}")
    return found
