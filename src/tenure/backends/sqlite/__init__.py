"""Leases in an SQLite file, for processes of one machine: ``sqlite:///relative.db``, ``sqlite:////absolute/path.db``."""

from __future__ import annotations

from collections.abc import Sequence

from tenure.backends import Fact
from tenure.backends.sqlite.client import Database, Options, Worker, path_of
from tenure.backends.sqlite.fence import Fence
from tenure.backends.sqlite.leases import LEASES, TRAITS, SqliteLeases
from tenure.backends.sqlite.wake import Wake
from tenure.clock import Clock, SystemClock
from tenure.url import Url

__all__ = ["TRAITS", "Fence", "Options", "SqliteBackend", "SqliteLeases", "open"]


def open(url: Url, *, clock: Clock | None = None) -> SqliteBackend:
    """Open the file that *url* names; it is created when first used.

    Raises:
        ConfigError: The URL names no file, or an option is unknown or doesn't fit.
    """
    return SqliteBackend(path_of(url), url.options(Options), clock or SystemClock())


class SqliteBackend:
    """An SQLite file in use: one thread with one connection, and one socket to be woken by."""

    def __init__(self, path: str, options: Options, clock: Clock) -> None:
        self._worker = Worker(lambda: Database(path, options, [LEASES]))
        self._wake = Wake(path, self._worker)
        self.leases: SqliteLeases = SqliteLeases(self._worker, self._wake, clock)

    async def describe(self) -> Sequence[Fact]:
        """Ask the file and the library about themselves."""
        return [*await self._worker.run(Database.facts), self._wake.fact()]

    async def close(self) -> None:
        """Close the connection, end its thread, and stop listening."""
        await self._wake.close()
        await self._worker.close()
