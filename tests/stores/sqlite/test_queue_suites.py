"""The suites for queues, on an SQLite file."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import ClassVar

from tenure._backends import sqlite
from tenure._queue.broker import Broker
from tenure._url import Url
from tenure.testing import ManualClock
from tenure.testing._conformance.queues.steps import place
from tenure.testing.conformance import (
    BrokerFaultSuite,
    BrokerSuite,
    ConsumerSuite,
    FaultyBroker,
    GiveUp,
    LiveMessagesSuite,
    LockExpirySuite,
    QueueHarness,
    ShortUseSuite,
    StoredAgainSuite,
)
from tenure.testing.faultproxy import Begin, Direction
from tests.stores.sqlite.test_lease_suites import moved_away

EDITS = {
    "headers that are no JSON": "headers = '{'",
    "headers that are no object": "headers = '[1]'",
    "headers of other types": """headers = '{"x": [1], "y": null, "z": 1e999, "\\ud800": "\\ud800", "n": 9e99}'""",
    "deep headers": "headers = printf('%.*c', 100000, '[')",
    "headers as bytes": "headers = x'ff'",
    "history that is no JSON": "history = '{'",
    "history of another form": """history = '[[1e999,0,"x",null],7,{"number":-1}]'""",
    "deep history": "history = printf('%.*c', 100000, '[')",
    "counts as text": "deliveries = 'many', priority = 'high'",
    "huge counts": "deliveries = 9e18, priority = 9e18",
    "a negative count": "deliveries = -5",
    "an endless time": "enqueued_at = 1e300",
    "a time as text": "enqueued_at = 'now'",
    "texts as bytes": "id = x'ff', reply_to = x'ff', correlation_id = x'ff'",
    "texts as numbers": "id = 7, reply_to = 7.5, correlation_id = 1e300",
    "a body as text": "body = CAST(body AS TEXT)",
}
"""What an administrator may set in the row of a message, by what that is."""

REMOVALS = {
    "delete": [
        "DELETE FROM tenure_declared WHERE queue IN (SELECT queue FROM tenure_queue WHERE name = ?)",
        "DELETE FROM tenure_queue WHERE replace(name, '$dead', '') = ?",
    ],
    "forget": [
        "DELETE FROM tenure_declared WHERE queue IN (SELECT queue FROM tenure_queue WHERE name = ?)",
    ],
}
"""What an administrator may remove of a queue, whose name stands for each question mark."""


class SqliteQueueHarness(QueueHarness):
    traits = sqlite.QUEUE_TRAITS
    foreign = tuple(EDITS)
    edits = tuple(REMOVALS)
    is_exact = True
    counts_bytes = True
    uses = 200
    busy: ClassVar[float] = 10.0  # many calls come at once, and this process may be slow while one of them writes

    async def start(self) -> None:
        self._clock = ManualClock()
        self._folder = tempfile.TemporaryDirectory(prefix="tenure-")
        self._file = Path(self._folder.name, "here", "queues.db")
        self._file.parent.mkdir()
        self._opened: list[sqlite.SqliteBackend] = []

    async def open(self) -> Broker:
        backend = sqlite.open(
            Url.parse(f"sqlite:///{self._file}?busy={self.busy:g}&synchronous=normal"), clock=self._clock
        )
        self._opened.append(backend)
        return FaultyBroker.around(backend.broker)

    async def restart(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    async def close(self) -> None:
        await self.restart()
        self._folder.cleanup()

    async def pass_time(self, seconds: float) -> None:
        self._clock.advance(seconds)

    async def left_behind(self) -> dict[str, int]:
        with closing(sqlite3.connect(self._file)) as file:
            tables = [name for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            rows = {f"rows of {one}": file.execute(f"SELECT count(*) FROM {one}").fetchone()[0] for one in tables}
        return {"files": len(list(self._file.parent.iterdir())), **rows}

    async def write_foreign(self, queue: str, how: str) -> None:
        body = f"foreign: {how}".encode()
        await place(self._opened[0].broker, self, queue, body)
        with closing(sqlite3.connect(self._file, isolation_level=None)) as file:
            file.execute(f"UPDATE tenure_message SET {EDITS[how]} WHERE body = ?", [body])

    async def edit(self, queue: str, how: str) -> None:
        with closing(sqlite3.connect(self._file, isolation_level=None)) as file:
            for statement in REMOVALS[how]:
                file.execute(statement, [queue])


class TestSqliteQueues(BrokerSuite):
    harness = SqliteQueueHarness


class TestSqliteLiveMessages(LiveMessagesSuite):
    harness = SqliteQueueHarness


class TestSqliteLocks(LockExpirySuite):
    harness = SqliteQueueHarness


class TestSqliteConsumers(ConsumerSuite):
    harness = SqliteQueueHarness


class TestSqliteShortUse(ShortUseSuite):
    harness = SqliteQueueHarness


class TestSqliteStoredAgain(StoredAgainSuite):
    harness = SqliteQueueHarness


class FaultySqliteQueueHarness(SqliteQueueHarness):
    faults = frozenset({"lose_answer", "cut", "late", "hold", "away", "restart"})
    busy = 0.5  # a cut is a lock of another connection

    def lose_answer(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        assert isinstance(broker, FaultyBroker)
        return broker.lose_answer()

    def late(self, broker: Broker) -> AbstractAsyncContextManager[GiveUp]:
        assert isinstance(broker, FaultyBroker)
        return broker.late()

    def hold(self, broker: Broker, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        assert isinstance(broker, FaultyBroker)
        return broker.hold(direction)

    def away(self) -> AbstractAsyncContextManager[None]:
        return moved_away(self._file.parent)

    @asynccontextmanager
    async def cut(self, broker: Broker) -> AsyncIterator[None]:
        other = sqlite3.connect(self._file, isolation_level=None)
        try:
            other.execute("BEGIN EXCLUSIVE")
            yield
        finally:
            other.close()


class TestSqliteQueueFaults(BrokerFaultSuite):
    harness = FaultySqliteQueueHarness
