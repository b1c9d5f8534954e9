"""One instance: a process that stands for election, and does the work while it leads.

Its first line of standard input is a ``Station``. It reports on standard output, one JSON line each, and ends when the
second line comes, or when the pipe breaks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tenure
from tenure.demo import leash
from tenure.demo.computation import Count, count_file, merge
from tenure.demo.job import File, Job
from tenure.demo.ledger import Ledger

SLICE = 0.15
"""Seconds of work between two writes to the ledger: so much is done again, at most, when a leader dies."""


@dataclass(frozen=True, slots=True)
class Station:
    """What an instance is told when it is started."""

    number: int
    url: str
    election: str
    ttl: float
    ledger: str


@dataclass(frozen=True, slots=True)
class Report:
    """What an instance tells the director; ``at`` is the machine's monotonic clock, the same in all its processes."""

    what: Literal["standing", "elected", "wrote", "refused", "left", "failed"]
    token: int = 0
    why: str = ""
    at: float = 0.0

    @classmethod
    def read(cls, line: bytes) -> Report:
        """Read what :func:`report` wrote."""
        return cls(**json.loads(line))


def report(what: Report) -> None:
    """Tell the director, now."""
    line = json.dumps(dataclasses.asdict(dataclasses.replace(what, at=time.monotonic())))
    os.write(1, line.encode() + b"\n")  # one write, so that a kill leaves no half a line


def main() -> int:
    """Stand for election until told to stop; return the exit code."""
    try:
        asyncio.run(stand(Station(**json.loads(leash.orders()))))
    except tenure.TenureError as error:
        report(Report("failed", why=str(error)))
        return 1
    return 0


async def stand(station: Station) -> None:
    """Stand for election, again and again, until told to stop."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    leash.wear(lambda: loop.call_soon_threadsafe(stop.set))
    ledger = Ledger(Path(station.ledger))
    async with tenure.connect(station.url) as backend:
        who = {"instance": str(station.number), "pid": str(os.getpid())}
        election = backend.election(station.election, ttl=station.ttl, metadata=who)
        report(Report("standing"))
        await election.run(Leader(station.number, ledger, stop).lead, stop=stop)


class Leader:
    """The work of a term: count what nobody has counted yet, and write it down."""

    def __init__(self, number: int, ledger: Ledger, stop: asyncio.Event) -> None:
        self._number = number
        self._ledger = ledger
        self._stop = stop

    async def lead(self, term: tenure.Term) -> None:
        """Lead for one term: to the end of the work, and then until told to stop."""
        report(Report("elected", term.token))
        try:
            self._ledger.begin_term(term.token, self._number)
            report(Report("wrote", term.token))
            await self._work(term)
            await self._stop.wait()
        except tenure.TermLost as refusal:
            # A newer leader has written already. Ours is over, and the store will tell so in a moment.
            report(Report("refused", term.token, str(refusal)))
            await term.lost.wait()
        finally:
            report(Report("left", term.token))

    async def _work(self, term: tenure.Term) -> None:
        job, left = self._ledger.job(), self._ledger.remaining()
        while left:
            counts = await _count_some(job, left)
            term.check()
            self._ledger.record(term.token, counts)
            left = left[len(counts) :]
        if not self._ledger.progress().finished:
            self._ledger.finish(term.token, merge(self._ledger.counts()))


async def _count_some(job: Job, files: Sequence[File]) -> list[Count]:
    """Count the first of *files*: as many as fit into a slice of time, at least one."""
    until = time.monotonic() + SLICE
    counts: list[Count] = []
    for file in files:
        began = time.monotonic()
        # In a thread: a leader whose loop doesn't answer is taken for stalled, and its lease is not renewed.
        counts.append(await asyncio.to_thread(count_file, job.folder, file.path, parsed=file.parsed))
        await asyncio.sleep(max(0.0, began + job.pace - time.monotonic()))
        if time.monotonic() >= until:
            break
    return counts


if __name__ == "__main__":
    sys.exit(main())
