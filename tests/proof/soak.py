"""Hours under load: consumers on one SQLite file, watched for lost messages, and for memory and files that grow."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import tenure
from tenure.testing import until
from tests.process.consumer_setup import ConsumerSetup
from tests.process.queue_worker import LOCK
from tests.proof.state import Part

STAGE = 20
"""Seconds of a stage; memory and files are measured after each."""
WARM = 3
"""Stages after which memory and files should not grow any more."""
GROWTH_MAX = 1.3
AGAIN = f"make proof ARGS='--soak {WARM * STAGE * 2} --state build/again'"
EVERY, AT_ONCE = 0.1, 20


def soak(part: Part, enough: int, folder: Path) -> Iterator[None]:
    """Send and consume for *enough* seconds, in stages; yield after each. One that is interrupted is not counted."""
    folder.mkdir(parents=True, exist_ok=True)
    if part.done >= enough:
        return
    for old in folder.glob("work.db*"):  # of an earlier run, whose consumers have ended
        old.unlink()
    part.notes["stages"] = 0
    setup = ConsumerSetup(folder)
    try:
        for _ in range(3):
            setup.start("apart")
        with asyncio.Runner() as runner:
            while part.done < enough:
                begun = time.monotonic()
                found = runner.run(_one_stage(setup, part.next_seed, min(STAGE, enough - part.done)))
                part.done += round(time.monotonic() - begun)
                part.next_seed += 1
                found += _grown(setup, part)
                for what in found:
                    part.failed(
                        f"stage {part.next_seed - 1}: {what}", "make proof ARGS='--soak SECONDS' with a new --state"
                    )
                yield
    finally:
        setup.close()


async def _one_stage(setup: ConsumerSetup, stage: int, seconds: float) -> list[str]:
    """Send for so many seconds, and check that everything was consumed."""
    sent = 0
    end = time.monotonic() + seconds
    async with tenure.connect(setup.url) as backend:
        queue = backend.queue("q", lock=LOCK, max_deliveries=1_000)
        while time.monotonic() < end:
            names = [f"{stage}-{number}" for number in range(sent, sent + AT_ONCE)]
            await queue.send_batch([tenure.Outgoing(b"x" * 100, id=name) for name in names])
            sent += AT_ONCE
            await asyncio.sleep(EVERY)

        async def is_empty() -> bool:
            return await queue.stats() == tenure.Stats()

        await until(is_empty, within=120)
    [(deliveries, different)] = setup.query("SELECT count(DISTINCT id || delivery), count(DISTINCT id) FROM effect")
    [(effects,)] = setup.query("SELECT count(*) FROM effect")
    setup.execute("DELETE FROM effect")
    # A consumer that was late may have lost its lock, and the message came again; each delivery has one effect.
    found = f"{sent} sent, {different} consumed, in {deliveries} deliveries with {effects} effects"
    return [] if different == sent and effects == deliveries else [found]


def _grown(setup: ConsumerSetup, part: Part) -> list[str]:
    """Measure the memory and open files of the consumers; return what has grown since stage WARM."""
    notes = part.notes
    notes["stages"] += 1
    pids = [process.pid for process in setup.processes if process.pid]
    if not Path("/proc/self/statm").exists():
        return []
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    notes["MiB"] = pages * os.sysconf("SC_PAGE_SIZE") // 2**20
    notes["files"] = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    found = []
    for what in ("MiB", "files"):
        if notes["stages"] == WARM:
            notes[f"{what}, warm"] = notes[what]
        elif notes["stages"] > WARM and notes[what] > GROWTH_MAX * notes[f"{what}, warm"]:
            found.append(f"{what} of the consumers: {notes[f'{what}, warm']}, now {notes[what]}")
    return found
