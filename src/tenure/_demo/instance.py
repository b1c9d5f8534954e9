"""One instance: a process that campaigns, and competes for the messages, also while another one leads.

The first line of its standard input is an ``InstanceConfig``. It reports on standard output, and ends when the second
line comes, or when the pipe breaks.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tenure
from tenure._demo import parent_watch
from tenure._demo.leader import Leader
from tenure._demo.ledger import Ledger
from tenure._demo.messages import Queues
from tenure._demo.report import Report, report
from tenure._demo.worker import Worker


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """The settings of an instance, which it gets when it is started."""

    number: int
    url: str = field(repr=False)
    queue_url: str = field(repr=False)  # another one, if the store of the leases has no queues
    election: str
    ttl: float
    ledger: str
    queues: Queues

    def of(self, number: int) -> InstanceConfig:
        """Return the same for another instance."""
        return replace(self, number=number)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def read(cls, line: bytes) -> InstanceConfig:
        """Read what :meth:`as_dict` returned, written as JSON."""
        parsed = json.loads(line)
        return cls(**parsed | {"queues": Queues(**parsed["queues"])})


def main() -> int:
    """Run the instance until it is stopped; return the exit code."""
    try:
        asyncio.run(run_instance(InstanceConfig.read(parent_watch.read_first_line())))
    except* tenure.TenureError as errors:
        report(Report("failed", why="; ".join(map(str, errors.exceptions))))
        code = 1
    else:
        code = 0
    return code


async def run_instance(config: InstanceConfig) -> None:
    """Campaign, again and again, and count chunks, until the instance is stopped."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    parent_watch.watch_parent(lambda: loop.call_soon_threadsafe(stop.set))
    ledger = Ledger(Path(config.ledger))
    queues = config.queues
    async with tenure.connect(config.url) as backend, queue_backend(backend, config) as store:
        metadata = {"instance": str(config.number), "pid": str(os.getpid())}
        election = backend.election(config.election, ttl=config.ttl, metadata=metadata)
        work, results = queues.work_of(store), queues.results_of(store)
        leader = Leader(config.number, ledger, work, results, named=queues.named, stop=stop)
        report(Report("standing by"))
        async with asyncio.TaskGroup() as group:
            group.create_task(election.run(leader.lead, stop=stop, sigterm=False))
            group.create_task(Worker(config.number, queues.results).work(work, stop))


@asynccontextmanager
async def queue_backend(backend: tenure.Backend, config: InstanceConfig) -> AsyncIterator[tenure.Backend]:
    """Provide the store of the queues: *backend*, or another one."""
    if config.queue_url == config.url:
        yield backend
    else:
        async with tenure.connect(config.queue_url) as other:
            yield other


if __name__ == "__main__":
    sys.exit(main())
