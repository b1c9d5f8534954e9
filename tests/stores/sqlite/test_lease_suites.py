"""The suites for leases, on an SQLite file."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import ClassVar

from tenure._backends import sqlite
from tenure._election.store import LeaseStore
from tenure._url import Url
from tenure.testing import ManualClock
from tenure.testing.conformance import FaultyLeaseStore, GiveUp, LeaseFaultSuite, LeaseHarness, LeaseStoreSuite
from tenure.testing.faultproxy import Begin, Direction

EDITS = {
    "metadata that is no JSON": "metadata = '{'",
    "metadata of other types": """metadata = '{"x": [1], "\\ud800": "y"}'""",
    "deep metadata": "metadata = printf('%.*c', 100000, '[')",
    "metadata as bytes": "metadata = x'ff'",
    "the last token": "token = 9223372036854775807",
    "a token as text": "token = 'new'",
    "a token with a fraction": "token = 1e300",
    "a holder as bytes": "holder = x'ff'",
    "a holder as a number": "holder = 7",
    "an endless time": "expires_at = 9e999",
    "a time as text": "expires_at = 'never'",
    "a ttl as text": "ttl = 'long'",
    "a negative ttl": "ttl = -1e300",
    "a resignation as text": "resign_asked = 'yes'",
    "renewals as text": "renewals = 'many'",
}
"""What an administrator may set in the row of a lease, by what that is."""


class SqliteHarness(LeaseHarness):
    traits = sqlite.TRAITS
    foreign = tuple(EDITS)
    is_exact = True
    busy: ClassVar[float] = 10.0  # many calls come at once, and this process may be slow while one of them writes

    async def start(self) -> None:
        self._clock = ManualClock()
        self._folder = tempfile.TemporaryDirectory(prefix="tenure-")
        self._file = Path(self._folder.name, "here", "leases.db")
        self._file.parent.mkdir()
        self._opened: list[sqlite.SqliteBackend] = []

    async def open(self) -> FaultyLeaseStore:
        backend = sqlite.open(
            Url.parse(f"sqlite:///{self._file}?busy={self.busy:g}&synchronous=normal"), clock=self._clock
        )
        self._opened.append(backend)
        return FaultyLeaseStore(backend.leases)

    async def restart(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    async def close(self) -> None:
        await self.restart()
        self._folder.cleanup()

    async def pass_time(self, seconds: float) -> None:
        self._clock.advance(seconds)

    async def write_foreign(self, name: str, how: str) -> None:
        with closing(sqlite3.connect(self._file, isolation_level=None)) as file:
            file.execute(f"UPDATE tenure_lease SET {EDITS[how]} WHERE name = ?", [name])


class TestSqliteLeases(LeaseStoreSuite):
    harness = SqliteHarness


@asynccontextmanager
async def moved_away(folder: Path) -> AsyncIterator[None]:
    """Rename *folder*, which has the database."""
    there = folder.with_name("there")
    folder.rename(there)
    try:
        yield
    finally:
        there.rename(folder)


class FaultySqliteHarness(SqliteHarness):
    faults = frozenset({"lose_answer", "cut", "late", "hold", "away", "restart"})
    busy = 0.5  # a cut is a lock of another connection

    def lose_answer(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        assert isinstance(store, FaultyLeaseStore)
        return store.lose_answer()

    def late(self, store: LeaseStore) -> AbstractAsyncContextManager[GiveUp]:
        assert isinstance(store, FaultyLeaseStore)
        return store.late()

    def hold(self, store: LeaseStore, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        assert isinstance(store, FaultyLeaseStore)
        return store.hold(direction)

    def away(self) -> AbstractAsyncContextManager[None]:
        return moved_away(self._file.parent)

    @asynccontextmanager
    async def cut(self, store: LeaseStore) -> AsyncIterator[None]:
        other = sqlite3.connect(self._file, isolation_level=None)
        try:
            other.execute("BEGIN EXCLUSIVE")
            yield
        finally:
            other.close()


class TestSqliteLeaseFaults(LeaseFaultSuite):
    harness = FaultySqliteHarness
