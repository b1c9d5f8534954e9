"""The suites for queues, on an SQLite file."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import ClassVar

from tenure._backends import sqlite
from tenure._queue.broker import Broker
from tenure._url import Url
from tenure.testing import ManualClock
from tenure.testing.conformance import (
    BrokerFaultSuite,
    BrokerSuite,
    ConsumerSuite,
    FaultyBroker,
    GiveUp,
    LiveMessagesSuite,
    LockExpirySuite,
    QueueHarness,
)
from tenure.testing.faultproxy import Begin, Direction
from tests.stores.sqlite.test_lease_suites import moved_away


class SqliteQueueHarness(QueueHarness):
    traits = sqlite.QUEUE_TRAITS
    is_exact = True
    counts_bytes = True
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


class TestSqliteQueues(BrokerSuite):
    harness = SqliteQueueHarness


class TestSqliteLiveMessages(LiveMessagesSuite):
    harness = SqliteQueueHarness


class TestSqliteLocks(LockExpirySuite):
    harness = SqliteQueueHarness


class TestSqliteConsumers(ConsumerSuite):
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
