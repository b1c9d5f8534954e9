"""What a consumer costs: processor time per message, plain and in sessions, in memory and in SQLite.

Run by hand: ``python -m benchmarks consuming [--only sessions] [--messages 10000] [--rounds 5] [--folder /var/tmp]``.
Each round sends the messages, and drains them with a handler that does nothing; only the draining is measured. It
prints the best round and the median, and judges nothing. To compare two versions, run them in turns, several times: the
best rounds differ least. ``PYTHONPATH=path/to/src`` chooses another version.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tenure

BATCH = 1_000
"""Messages sent in one step."""

SESSIONS = 100
"""How many sessions the messages belong to."""


@dataclass(frozen=True, slots=True)
class Course:
    """One thing to measure."""

    name: str
    in_sqlite: bool
    in_sessions: bool

    def messages(self, count: int) -> list[tenure.Outgoing]:
        """Make as many messages as are sent in one round."""
        return [
            tenure.Outgoing(b"x" * 200, session=f"session-{number % SESSIONS}" if self.in_sessions else None)
            for number in range(count)
        ]


COURSES = (
    Course("messages-memory", in_sqlite=False, in_sessions=False),
    Course("messages-sqlite", in_sqlite=True, in_sessions=False),
    Course("sessions-memory", in_sqlite=False, in_sessions=True),
    Course("sessions-sqlite", in_sqlite=True, in_sessions=True),
)


async def measure(course: Course, count: int, rounds: int, folder: Path) -> list[float]:
    """Return the microseconds of processor time that each message took, for each round; the first is left out."""
    found: list[float] = []
    url = f"sqlite:///{folder / course.name}.db" if course.in_sqlite else "memory://"
    async with tenure.connect(url) as backend:
        queue = backend.queue("bench")
        for _ in range(rounds + 1):
            messages = course.messages(count)
            for begin in range(0, count, BATCH):
                await queue.send_batch(messages[begin : begin + BATCH])
            gc.collect()
            spent = time.process_time()
            await queue.consume(_do_nothing, sessions=course.in_sessions, until_empty=True, sigterm=False)
            found.append((time.process_time() - spent) / count * 1e6)
    return found[1:]


async def _do_nothing(message: tenure.Message) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks consuming", description=__doc__)
    parser.add_argument("--only", default="", help="what to measure: a name below, or part of it")
    parser.add_argument("--messages", type=int, default=10_000, help="in each round (default: 10000)")
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up (default: 5)")
    parser.add_argument("--folder", type=Path, default=None, help="where to keep the files (default: as tempfile does)")
    options = parser.parse_args(arguments)
    print(f"Python {sys.version.split()[0]}, {options.rounds} rounds of {options.messages:,} messages")
    with tempfile.TemporaryDirectory(prefix="tenure-bench-", dir=options.folder) as folder:
        for course in COURSES:
            if options.only in course.name:
                found = asyncio.run(measure(course, options.messages, options.rounds, Path(folder)))
                print(
                    f"{course.name:<16} {min(found):6.2f} µs best  {statistics.median(found):6.2f} µs median",
                    flush=True,
                )


if __name__ == "__main__":
    main()
