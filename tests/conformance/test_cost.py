"""The cost of a request on each store: no more than for what it returns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import ClassVar, TypeVar

from redis import asyncio as aioredis

from tenure._backends import postgres
from tenure.testing.conformance import BrokerCostSuite, LeaseCostSuite, Scale
from tests.conformance.counting import VmSteps, commands_called, lines_run, methods_sent, requests_sent, rows_visited
from tests.servers import Postgres, shared
from tests.stores.azure_storage.test_suites import AzureHarness, AzureQueueHarness
from tests.stores.memory.test_suites import MemoryHarness, MemoryQueueHarness
from tests.stores.postgres.migrated import migrated
from tests.stores.postgres.test_suites import PostgresHarness, PostgresQueueHarness, PostgresSetup
from tests.stores.rabbitmq.test_suites import RabbitQueueHarness
from tests.stores.redis.test_suites import RedisHarness, RedisQueueHarness, RedisSetup
from tests.stores.sqlite.test_lease_suites import SqliteHarness
from tests.stores.sqlite.test_queue_suites import SqliteQueueHarness

T = TypeVar("T")
Ask = Callable[[], Awaitable[T]]


# --- memory ---


class Lines:
    """Counts for a harness that runs the store in this process."""

    scale: ClassVar[Scale | None] = Scale("lines", noise=60, times=3)

    async def work_of(self, ask: Ask[T]) -> tuple[T, int]:
        return await lines_run(ask)


class CountedMemory(Lines, MemoryHarness):
    pass


class CountedMemoryQueues(Lines, MemoryQueueHarness):
    pass


class TestMemoryLeaseCost(LeaseCostSuite):
    harness = CountedMemory


class TestMemoryQueueCost(BrokerCostSuite):
    harness = CountedMemoryQueues


# --- SQLite ---


class Steps:
    """Counts for its harness, while that is open."""

    async def start(self) -> None:
        await super().start()  # type: ignore[misc]
        self._steps = VmSteps()
        self._steps.start()

    async def close(self) -> None:
        self._steps.stop()
        await super().close()  # type: ignore[misc]

    async def work_of(self, ask: Ask[T]) -> tuple[T, int]:
        return await self._steps.of(ask)


class CountedSqlite(Steps, SqliteHarness):
    scale = Scale("steps", noise=400)


class CountedSqliteQueues(Steps, SqliteQueueHarness):
    scale = Scale("steps", noise=400, step=150_000)  # of a thousand messages


class TestSqliteLeaseCost(LeaseCostSuite):
    harness = CountedSqlite


class TestSqliteQueueCost(BrokerCostSuite):
    harness = CountedSqliteQueues


# --- PostgreSQL ---


class OneConnection(PostgresSetup):
    """Every request of a kind goes through one connection, so that its figures are complete.

    Background work is off: autovacuum holds snapshots, under which more rows are visited.
    """

    async def start(self) -> None:
        self.server = await migrated(shared(Postgres, turnable=True, options=(("autovacuum", "off"),)))

    async def open(self, options: str = "") -> postgres.PostgresBackend:
        self.backend = await super().open("?pool=1&listen=false")
        return self.backend


class Rows:
    """Counts on the one connection."""

    _setup: PostgresSetup

    async def start(self) -> None:
        self._setup = self._counted = OneConnection(behind_proxy=False)
        await self._setup.start()

    async def work_of(self, ask: Ask[T]) -> tuple[T, int]:
        return await rows_visited(self._counted.backend._client, ask)


class CountedPostgres(Rows, PostgresHarness):
    scale = Scale("rows visited", noise=60, times=3)


class CountedPostgresQueues(Rows, PostgresQueueHarness):
    scale = Scale("rows visited", noise=60, times=3, flood=15_000, step=110_000)  # of ten thousand messages


class TestPostgresLeaseCost(LeaseCostSuite):
    harness = CountedPostgres


class TestPostgresQueueCost(BrokerCostSuite):
    harness = CountedPostgresQueues


# --- Redis ---


class Counter(RedisSetup):
    async def start(self) -> None:
        await super().start()
        self._looking = aioredis.Redis.from_url(self._server.url)

    async def close(self) -> None:
        await super().close()
        await self._looking.aclose()

    async def work_of(self, ask: Ask[T]) -> tuple[T, int]:
        return await commands_called(self._looking, ask)


class CountedRedis(Counter, RedisHarness):
    scale = Scale("commands", noise=20)


class CountedRedisQueues(Counter, RedisQueueHarness):
    scale = Scale("commands", noise=20, step=10_000)


class TestRedisLeaseCost(LeaseCostSuite):
    harness = CountedRedis


class TestRedisQueueCost(BrokerCostSuite):
    harness = CountedRedisQueues
    # A request continues with further scripts, each bounded; see tests/stores/redis/test_bounds.py.
    test_everything_has_expired = None  # type: ignore[assignment]


# --- Azure Storage ---

FEW = Scale("requests", shallow=4, deep=24, few=3, several=16, flood=120, noise=6, step=300)
ROUND = 410  # requests: two hundred letters are received and put back


class Requests:
    """Counts the requests of this process."""

    async def work_of(self, ask: Ask[T]) -> tuple[T, int]:
        return await requests_sent(ask)


class CountedAzure(Requests, AzureHarness):
    scale = FEW


class CountedAzureQueues(Requests, AzureQueueHarness):
    scale = replace(FEW, rounds={"redrive one": ROUND, "purge one": ROUND})


class TestAzureLeaseCost(LeaseCostSuite):
    harness = CountedAzure


class TestAzureQueueCost(BrokerCostSuite):
    harness = CountedAzureQueues


# --- RabbitMQ ---


A_PAGE = 620  # methods: two hundred dead letters are received and put back, each proven alone at worst


class CountedRabbitQueues(RabbitQueueHarness):
    rounds: ClassVar[dict[str, int]] = dict.fromkeys(["peek at a dead letter", "redrive one", "purge one"], A_PAGE)
    # More than two rounds: a request that goes through all of them is seen.
    scale = Scale("methods", shallow=50, deep=500, few=3, several=16, flood=300, noise=30, rounds=rounds)

    async def work_of(self, ask: Ask[T]) -> tuple[T, int]:
        return await methods_sent(ask)


class TestRabbitQueueCost(BrokerCostSuite):
    harness = CountedRabbitQueues
