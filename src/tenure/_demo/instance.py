"""One instance: a process that stands for election, and competes for the work, whoever leads.

Its first line of standard input is a ``Station``. It reports on standard output, and ends when the second line comes,
or when the pipe breaks.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tenure
from tenure._demo import parent_watch
from tenure._demo.leader import Leader
from tenure._demo.ledger import Ledger
from tenure._demo.messages import Channels
from tenure._demo.report import Report, report
from tenure._demo.worker import Worker


@dataclass(frozen=True, slots=True)
class Station:
    """What an instance is told when it is started."""

    number: int
    url: str = field(repr=False)
    election: str
    ttl: float
    ledger: str
    channels: Channels

    def of(self, number: int) -> Station:
        """Return the same for another instance."""
        return replace(self, number=number)

    def orders(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def read(cls, line: bytes) -> Station:
        """Read what :meth:`orders` returned, written as JSON."""
        told = json.loads(line)
        return cls(**told | {"channels": Channels(**told["channels"])})


def main() -> int:
    """Take part until told to stop; return the exit code."""
    try:
        asyncio.run(take_part(Station.read(parent_watch.orders())))
    except* tenure.TenureError as errors:
        report(Report("failed", why="; ".join(map(str, errors.exceptions))))
        code = 1
    else:
        code = 0
    return code


async def take_part(station: Station) -> None:
    """Stand for election, again and again, and count what comes, until told to stop."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    parent_watch.wear(lambda: loop.call_soon_threadsafe(stop.set))
    ledger = Ledger(Path(station.ledger))
    channels = station.channels
    async with tenure.connect(station.url) as backend:
        who = {"instance": str(station.number), "pid": str(os.getpid())}
        election = backend.election(station.election, ttl=station.ttl, metadata=who)
        work, results = channels.work_of(backend), channels.results_of(backend)
        leader = Leader(station.number, ledger, work, results, named=channels.named, stop=stop)
        report(Report("standing"))
        async with asyncio.TaskGroup() as group:
            group.create_task(election.run(leader.lead, stop=stop, sigterm=False))
            group.create_task(Worker(station.number, channels.results).work(work, stop))


if __name__ == "__main__":
    sys.exit(main())
