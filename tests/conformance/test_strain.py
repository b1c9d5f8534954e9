"""Stores that are full, and stores that were cut off on a slow link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import asyncpg
from redis import asyncio as aioredis

from tenure._backends import postgres
from tenure._election.store import LeaseStore
from tenure._queue.broker import Broker
from tenure._url import Url
from tenure.testing.conformance import BrokerCapacitySuite, LeaseCapacitySuite
from tenure.testing.faultproxy import FaultProxy
from tests.disks import fill, small_disk
from tests.servers import Postgres, shared
from tests.stores.azure_storage.test_suites import AzureQueueHarness
from tests.stores.postgres.test_suites import PostgresHarness, PostgresQueueHarness
from tests.stores.rabbitmq.test_suites import RabbitQueueHarness
from tests.stores.redis.test_suites import RedisHarness, RedisQueueHarness, RedisSetup
from tests.stores.sqlite.test_lease_suites import SqliteHarness
from tests.stores.sqlite.test_queue_suites import SqliteQueueHarness


@asynccontextmanager
async def slowed(proxies: list[FaultProxy], round_trip: float) -> AsyncIterator[None]:
    """Delay both ways through *proxies* inside the block."""
    for proxy in proxies:
        proxy.delay(round_trip / 2)
    try:
        yield
    finally:
        for proxy in proxies:
            proxy.heal()


# --- SQLite ---


class OnASmallDisk:
    """A file on a disk of 2 MB, which the test fills."""

    _folder: TemporaryDirectory[str]
    _file: Path

    async def start(self) -> None:
        await super().start()  # type: ignore[misc]  # of the harness that follows
        self._stack = ExitStack()
        try:
            disk = self._stack.enter_context(small_disk(Path(self._folder.name, "disk")))
        except BaseException:
            self._folder.cleanup()
            raise
        self._file = disk / "small.db"

    async def restart(self) -> None:
        await super().restart()  # type: ignore[misc]

    async def close(self) -> None:
        await self.restart()
        self._stack.close()
        self._folder.cleanup()

    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        ballast = fill(self._file.parent)
        try:
            yield
        finally:
            ballast.unlink()


class StrainedSqlite(OnASmallDisk, SqliteHarness):
    faults = frozenset({"full"})


class StrainedSqliteQueues(OnASmallDisk, SqliteQueueHarness):
    faults = frozenset({"full"})
    slack = 300_000  # its reserve is as large as the log, and some more


class TestSqliteLeaseStrain(LeaseCapacitySuite):
    harness = StrainedSqlite


class TestSqliteQueueStrain(BrokerCapacitySuite):
    harness = StrainedSqliteQueues


# --- PostgreSQL ---

MOVE = """
DO $$
DECLARE one record;
BEGIN
    FOR one IN SELECT oid, relkind FROM pg_class WHERE relnamespace = 'strained'::regnamespace AND relkind IN ('r', 'i')
    LOOP
        EXECUTE format('ALTER %s %s SET TABLESPACE small',
            CASE one.relkind WHEN 'r' THEN 'TABLE' ELSE 'INDEX' END, one.oid::regclass);
    END LOOP;
END $$
"""


class InASmallTablespace:
    """A schema whose tables are on a disk of 1 MB, apart from the server's log; the test fills it."""

    async def start(self) -> None:
        self._stack = AsyncExitStack()
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _start(self) -> None:
        self._server = shared(Postgres, turnable=True)
        self._disk = self._stack.enter_context(small_disk(self._server.folder / "small", "1m"))
        self._server.give(self._disk, 0o700)
        user = await asyncpg.connect(self._server.url)
        self._stack.push_async_callback(user.close)
        await user.execute(f"CREATE TABLESPACE small LOCATION '{self._disk}'")
        self._stack.push_async_callback(user.execute, "DROP TABLESPACE small")
        await postgres.migrate(f"{self._server.url}?schema=strained")
        self._stack.push_async_callback(user.execute, "DROP SCHEMA strained CASCADE")
        await user.execute(MOVE)

    async def backend(self) -> postgres.PostgresBackend:
        backend = postgres.open(Url.parse(f"{self._server.url}?schema=strained"))
        self._stack.push_async_callback(backend.close)
        return backend

    async def close(self) -> None:
        await self._stack.aclose()

    async def pass_time(self, seconds: float) -> None:
        self._server.turn(seconds)

    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        ballast = fill(self._disk)
        try:
            yield
        finally:
            ballast.unlink()


class StrainedPostgres(InASmallTablespace, PostgresHarness):
    faults = frozenset({"full"})

    async def open(self) -> LeaseStore:
        return (await self.backend()).leases


class StrainedPostgresQueues(InASmallTablespace, PostgresQueueHarness):
    faults = frozenset({"full"})
    slack = 100_000  # free space in its pages
    drains_when_full = False  # a verdict writes a new row version

    async def open(self) -> Broker:
        return (await self.backend()).broker


class TestPostgresLeaseStrain(LeaseCapacitySuite):
    harness = StrainedPostgres


class TestPostgresQueueStrain(BrokerCapacitySuite):
    harness = StrainedPostgresQueues


class SlowPostgresQueues(PostgresQueueHarness):
    faults = frozenset({"slow"})

    async def open(self) -> Broker:
        server = self._setup.server
        self._way = await self._setup.stack.enter_async_context(FaultProxy("127.0.0.1", server.port))
        url = server.url.replace(f":{server.port}/", f":{self._way.port}/")
        return self._setup.kept(f"{url}?pool=10").broker

    @asynccontextmanager
    async def slow(self, broker: Broker, round_trip: float) -> AsyncIterator[None]:
        async with slowed([self._way], round_trip):
            yield

    async def reset(self, broker: Broker) -> None:
        self._way.reset()


class TestPostgresQueuesOnASlowLink(BrokerCapacitySuite):
    harness = SlowPostgresQueues


# --- Redis ---


class LimitedMemory(RedisSetup):
    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        async with aioredis.Redis.from_url(self._server.url) as client:
            await client.config_set("maxmemory", "1")
            try:
                yield
            finally:
                await client.config_set("maxmemory", "0")

    @asynccontextmanager
    async def slow(self, broker: Broker, round_trip: float) -> AsyncIterator[None]:
        async with slowed([self._proxies[id(broker)]], round_trip):
            yield

    async def reset(self, broker: Broker) -> None:
        self._proxies[id(broker)].reset()


class StrainedRedis(LimitedMemory, RedisHarness):
    faults = frozenset({"full"})


class StrainedRedisQueues(LimitedMemory, RedisQueueHarness):
    faults = frozenset({"full", "slow"})


class TestRedisLeaseStrain(LeaseCapacitySuite):
    harness = StrainedRedis


class TestRedisQueueStrain(BrokerCapacitySuite):
    harness = StrainedRedisQueues


# --- RabbitMQ ---


class StrainedRabbitQueues(RabbitQueueHarness):
    options = (("loopback_users.guest", "false"),)  # no other test uses such a server, as an alarm is for all
    lock = 20.0  # much longer than a test
    faults = frozenset({"full", "slow"})
    drains_when_full = False  # a verdict other than complete puts a copy somewhere

    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        alarm = "{resource_limit, memory, node()}"
        await asyncio.to_thread(self._server.evaluate, f"rabbit_alarm:set_alarm({{{alarm}, []}})")
        try:
            yield
        finally:
            await asyncio.to_thread(self._server.evaluate, f"rabbit_alarm:clear_alarm({alarm})")

    @asynccontextmanager
    async def slow(self, broker: Broker, round_trip: float) -> AsyncIterator[None]:
        async with slowed([self._proxies[id(broker)]], round_trip):
            yield

    async def reset(self, broker: Broker) -> None:
        self._proxies[id(broker)].reset()


class TestRabbitQueueStrain(BrokerCapacitySuite):
    harness = StrainedRabbitQueues


# --- Azure Storage: it can't be filled ---


class StrainedAzureQueues(AzureQueueHarness):
    faults = frozenset({"slow"})

    @asynccontextmanager
    async def slow(self, broker: Broker, round_trip: float) -> AsyncIterator[None]:
        async with slowed([*self._ways[broker].proxies], round_trip):
            yield

    async def reset(self, broker: Broker) -> None:
        for proxy in self._ways[broker].proxies:
            proxy.reset()


class TestAzureQueueStrain(BrokerCapacitySuite):
    harness = StrainedAzureQueues
