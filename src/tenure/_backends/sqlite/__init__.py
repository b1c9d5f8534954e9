"""Leases and queues in an SQLite file, for the processes of one machine.

``sqlite:///relative.db``, ``sqlite:////absolute/path.db``
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tenure._backends.sqlite.address import Options, path_of
from tenure._backends.sqlite.client import Database
from tenure._backends.sqlite.file_clock import FileClock
from tenure._backends.sqlite.leases import LEASES, TRAITS, SqliteLeases
from tenure._backends.sqlite.operations import TABLES
from tenure._backends.sqlite.queue import QUEUE_TRAITS, SqliteBroker, topic_of
from tenure._backends.sqlite.wake import Wake
from tenure._backends.sqlite.worker import Worker
from tenure._backends.sqlite.writer import Writer
from tenure._opened import Fact
from tenure._runtime.clock import Clock, SystemClock
from tenure._url import Url

__all__ = [
    "QUEUE_TRAITS",
    "TRAITS",
    "Options",
    "SqliteBackend",
    "SqliteBroker",
    "SqliteLeases",
    "open",
]


def open(url: Url, *, clock: Clock | None = None) -> SqliteBackend:
    """Open the file that *url* names; its first use creates it.

    Raises:
        ConfigError: The URL names no file, or an option is unknown or doesn't fit.
    """
    return SqliteBackend(path_of(url), url.options(Options), clock or SystemClock())


class SqliteBackend:
    """An SQLite file in use: a thread with a connection for leases, one to write and one to read queues, and a socket.

    A thread starts when it is first needed: for elections only, there is one.
    """

    def __init__(self, path: str, options: Options, clock: Clock) -> None:
        used = threading.Event()
        self._worker = Worker(lambda: Database(path, options, [LEASES], used=used))
        self._wake = Wake(path, self._worker)
        self.leases = SqliteLeases(self._worker, self._wake, clock)
        self._path = path
        self._times = times = FileClock(clock)
        self._writer = Writer(
            lambda: Database(path, options, TABLES, syncs_apart=True, used=used),
            times,
            lambda queue: self._wake.notify(topic_of(queue)),
        )
        self._reader = Worker(lambda: Database(path, options, TABLES, reads_only=True, used=used))
        self.broker = SqliteBroker(self._writer, self._reader, self._wake, times)

    async def describe(self) -> Sequence[Fact]:
        """Return facts about the file and the library."""
        from tenure._backends.sqlite.diagnosis import diagnose  # most programs are never examined

        facts = await self._worker.run(lambda database: diagnose(database, self._times))
        return [*facts, self._wake.fact()]

    async def set_clock(self, *, dry_run: bool) -> str:
        """Set the clock of the queues back to this machine's; return what was done."""
        from tenure._backends.sqlite.clock_setting import set_clock_back  # few ever need them
        from tenure._backends.sqlite.diagnosis import file_clock_state, spoken_state

        if dry_run:
            state = await self._worker.run(lambda database: file_clock_state(database, self._times))
        else:
            state = await self._writer.submit(
                lambda operations: operations.by_clock(set_clock_back, self._times.wall())
            )
        if not state.ahead:
            return f"the clock of {self._path} is not ahead of this machine's; there is nothing to do"
        done = "would be set back" if dry_run else "is set back"
        return f"the clock of {self._path} {done} to this machine's: it was {spoken_state(state)}"

    async def close(self) -> None:
        """Close the connections, end their threads, and stop listening."""
        await self._wake.close()
        await self._writer.close()
        await self._reader.close()
        await self._worker.close()
