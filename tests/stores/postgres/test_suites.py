"""Leases and queues in PostgreSQL, under the suites: on a real server, with a moved clock, and with faults."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import ClassVar

import asyncpg

from tenure._backends import postgres
from tenure._backends.postgres.client import Client
from tenure._election.store import LeaseStore
from tenure._lease import Granted
from tenure._queue.broker import Broker
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.message import SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Abandon, Settlement
from tenure._url import Url
from tenure.testing import until
from tenure.testing._conformance.queues.steps import place
from tenure.testing.conformance import (
    BrokerFaultSuite,
    BrokerSuite,
    ConsumerSuite,
    Fault,
    GiveUp,
    LeaseFaultSuite,
    LeaseHarness,
    LeaseStoreSuite,
    LiveMessagesSuite,
    LockExpirySuite,
    QueueHarness,
    ShortUseSuite,
    StoredAgainSuite,
)
from tenure.testing.faultproxy import Begin, Direction, FaultProxy, Kill, hold, kill, late
from tests.servers import Postgres, shared
from tests.stores.postgres.migrated import migrated


class PostgresSetup:
    """The backends of one test, each with its own proxy if it needs faults."""

    def __init__(self, *, behind_proxy: bool, turnable: bool = True) -> None:
        self._behind_proxy = behind_proxy
        self._turnable = turnable
        self.stack = AsyncExitStack()
        self._proxies: dict[int, FaultProxy] = {}
        self._clients: dict[int, Client] = {}

    async def start(self) -> None:
        self.server = await migrated(shared(Postgres, turnable=True) if self._turnable else shared(Postgres))

    async def open(self, options: str = "") -> postgres.PostgresBackend:
        if not self._behind_proxy:
            return self.kept(self.server.url + options)
        proxy = await self.stack.enter_async_context(FaultProxy("127.0.0.1", self.server.port))
        # One connection, so that the lost answer is that of the request, and not of a login.
        url = self.server.url.replace(f":{self.server.port}/", f":{proxy.port}/")
        backend = self.kept(f"{url}?pool=1&timeout=8")
        self._proxies[id(backend.leases)] = self._proxies[id(backend.broker)] = proxy
        return backend

    def kept(self, url: str) -> postgres.PostgresBackend:
        backend = postgres.open(Url.parse(url))
        self.stack.push_async_callback(backend.close)
        self._clients[id(backend.leases)] = self._clients[id(backend.broker)] = backend._client
        return backend

    async def close(self) -> None:
        await self.stack.aclose()

    async def restart(self) -> None:
        await self.close()
        self.server.kill()
        self.server.start()

    def kill(self, port: object, after: int) -> Kill:
        return kill(self._proxies[id(port)], after=after)

    @asynccontextmanager
    async def lose_answer(self, port: object) -> AsyncIterator[None]:
        proxy = self._proxies[id(port)]
        await until(_is_idle)  # otherwise the lost answer could be that of a background task
        proxy.lose_answers()
        try:
            yield
        finally:
            proxy.heal()

    @asynccontextmanager
    async def late(self, port: object) -> AsyncIterator[GiveUp]:
        await until(_is_idle)  # otherwise a background task could be delayed instead
        async with late(self._proxies[id(port)]) as give_up:
            yield give_up

    @asynccontextmanager
    async def hold(self, port: object, direction: Direction) -> AsyncIterator[Begin]:
        await until(_is_idle)  # otherwise a background task could be delayed instead
        async with hold(self._proxies[id(port)], direction=direction) as begin:
            yield begin

    @asynccontextmanager
    async def sever(self, port: object) -> AsyncIterator[None]:
        """Reset the connections, and refuse new ones."""
        proxy = self._proxies[id(port)]
        proxy.refuse()
        proxy.reset()
        try:
            yield
        finally:
            proxy.heal()

    @asynccontextmanager
    async def black_hole(self, port: object) -> AsyncIterator[None]:
        """Keep connections, and pass nothing on; inside the block, clients have a short timeout."""
        proxy = self._proxies[id(port)]
        with self.impatient(port, timeout=0.5):
            proxy.stall()
            try:
                yield
            finally:
                proxy.reset()  # delayed data must not arrive
                proxy.heal()

    @contextmanager
    def impatient(self, port: object, *, timeout: float) -> Iterator[None]:
        """Set this client's timeout to *timeout* seconds."""
        client = self._clients[id(port)]
        patient, client.options = client.options, replace(client.options, timeout=timeout)
        try:
            yield
        finally:
            client.options = patient

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        async with connected_to(self.server.url) as user:
            await user.execute("ALTER SCHEMA tenure RENAME TO tenure_away")
            try:
                yield
            finally:
                await user.execute("ALTER SCHEMA tenure_away RENAME TO tenure")


@asynccontextmanager
async def connected_to(url: str) -> AsyncIterator[asyncpg.Connection]:
    user = await asyncpg.connect(url)
    try:
        yield user
    finally:
        await user.close()


def _is_idle() -> bool:
    background = {"tenure-postgres-notify", "tenure-postgres-tidy"}
    return not any(task.get_name() in background for task in asyncio.all_tasks())


LONG = 200.0  # seconds of the server's clock, which also runs by itself; much longer than a test


LEASE_EDITS = {
    "metadata that is no JSON": "metadata = '{'",
    "metadata of other types": """metadata = '{"x": [1], "y": "\\ud800"}'""",
    "deep metadata": "metadata = repeat('[', 100000)",
    "the last token": "token = 9223372036854775807",
    "an endless time": "expires_at = 'infinity'",
    "a time that is no number": "expires_at = 'NaN'",
    "a time long ago": "expires_at = -1e300",
}
"""What an administrator may set in the row of a lease, by what that is."""

MESSAGE_EDITS = {
    "headers that are no JSON": "headers = '{'",
    "headers that are no object": "headers = '[1]'",
    "headers of other types": """headers = '{"x": [1], "y": null, "z": 1e999, "\\ud800": "\\ud800", "n": 9e99}'""",
    "deep headers": "headers = repeat('[', 100000)",
    "a history that is no list": "history = '7'",
    "a history of another form": """history = '[[1,0,"x",null],7,{"number":-1},[2,1e400,"expired",null]]'""",
    "a count below zero": "deliveries = -5",
    "a count at its end": "deliveries = 2147483647",
    "an endless time": "enqueued_at = 'infinity'",
    "a time that is no number": "enqueued_at = 'NaN'",
    "long texts": "id = repeat('x', 10000), reply_to = repeat('x', 10000), correlation_id = E'\\n'",
}
"""What an administrator may set in the row of a message, by what that is."""

REMOVALS = {
    "delete": [
        "DELETE FROM tenure.declared WHERE queue = (SELECT id FROM tenure.queue WHERE name = $1)",
        "DELETE FROM tenure.queue WHERE name = $1",
    ],
    "forget": [
        "DELETE FROM tenure.declared WHERE queue = (SELECT id FROM tenure.queue WHERE name = $1)",
        "UPDATE tenure.queue SET lock = 30, max_deliveries = 10 WHERE name = $1",
    ],
}
"""What an administrator may remove of the queue $1."""


class PostgresHarness(LeaseHarness):
    traits = postgres.TRAITS
    foreign = tuple(LEASE_EDITS)
    ttl = LONG
    behind_proxy: ClassVar[bool] = False

    async def start(self) -> None:
        self._setup = PostgresSetup(behind_proxy=self.behind_proxy)
        await self._setup.start()

    async def open(self) -> LeaseStore:
        store = (await self._setup.open()).leases
        if self.behind_proxy:  # prepares every statement, so that a lost answer is that of the statement itself
            warm = await store.acquire("warm", "harness", 1.0)
            if isinstance(warm, Granted):
                await store.renew([warm.grant], 1.0)
                await store.release(warm.grant)
            await store.inspect("warm")
        return store

    async def close(self) -> None:
        await self._setup.close()

    async def pass_time(self, seconds: float) -> None:
        self._setup.server.turn(seconds)

    async def write_foreign(self, name: str, how: str) -> None:
        async with connected_to(self._setup.server.url) as user:
            await user.execute(f"UPDATE tenure.lease SET {LEASE_EDITS[how]} WHERE name = $1", name)


class SeveredHarness(PostgresHarness):
    behind_proxy = True
    faults: ClassVar[frozenset[Fault]] = frozenset({"lose_answer", "cut", "late", "hold", "away", "restart"})

    async def restart(self) -> None:
        await self._setup.restart()

    def away(self) -> AbstractAsyncContextManager[None]:
        return self._setup.away()

    def lose_answer(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        return self._setup.lose_answer(store)

    def late(self, store: LeaseStore) -> AbstractAsyncContextManager[GiveUp]:
        return self._setup.late(store)

    def hold(self, store: LeaseStore, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        return self._setup.hold(store, direction)

    def cut(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        return self._setup.sever(store)


class BlackHoledHarness(SeveredHarness):
    faults = frozenset({"cut"})

    def cut(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        return self._setup.black_hole(store)


class LockedRowHarness(PostgresHarness):
    """On a server with its own clock: with a moved clock, time-outs don't fire.

    Time passes by changing the leases' rows, while no transaction has them locked.
    """

    faults = frozenset({"cut_one"})

    async def start(self) -> None:
        self._setup = PostgresSetup(behind_proxy=False, turnable=False)
        await self._setup.start()

    async def pass_time(self, seconds: float) -> None:
        async with connected_to(self._setup.server.url) as user:
            await user.execute("UPDATE tenure.lease SET expires_at = expires_at - $1", seconds)

    @asynccontextmanager
    async def cut_one(self, store: LeaseStore, name: str) -> AsyncIterator[None]:
        """Lock the row, as an open transaction may."""
        async with connected_to(self._setup.server.url) as user, user.transaction():
            await user.execute("SELECT FROM tenure.lease WHERE name = $1 FOR UPDATE", name)
            with self._setup.impatient(store, timeout=1.0):
                yield


class TestPostgresLeases(LeaseStoreSuite):
    harness = PostgresHarness


class TestPostgresLeasesSevered(LeaseFaultSuite):
    harness = SeveredHarness


class TestPostgresLeasesBlackHoled(LeaseFaultSuite):
    harness = BlackHoledHarness


class TestPostgresLeasesWithALockedRow(LeaseFaultSuite):
    harness = LockedRowHarness


CLIENT = "client backend"


class PostgresQueueHarness(QueueHarness):
    traits = postgres.QUEUE_TRAITS
    foreign = tuple(MESSAGE_EDITS)
    edits = tuple(REMOVALS)
    lock = LONG
    counts_bytes = True
    uses = 100
    backlog = 21_000  # it handles ten times a thousand, and a session takes two steps
    behind_proxy: ClassVar[bool] = False

    async def start(self) -> None:
        self._setup = PostgresSetup(behind_proxy=self.behind_proxy)
        await self._setup.start()

    async def open(self) -> Broker:
        broker = (await self._setup.open()).broker
        if self.behind_proxy:  # see above
            queue = f"warm-{secrets.token_hex(6)}"
            for verdict in (COMPLETE, Abandon()):
                await broker.send(queue, [Outgoing(b"", id=repr(verdict))])
                got = (await broker.receive(queue, 1, 1.0)).deliveries
                await broker.renew(got, 1.0)
                await broker.settle([Settlement(one, verdict) for one in got])
            await broker.send(queue, [Outgoing(b"", session="s")])
            session = await broker.accept(queue, None, 1.0)
            if isinstance(session, SessionLock):
                await broker.renew([session], 1.0)
                await broker.release(session)
        return broker

    async def close(self) -> None:
        await self._setup.close()

    async def pass_time(self, seconds: float) -> None:
        self._setup.server.turn(seconds)

    async def left_behind(self) -> dict[str, int]:
        async with connected_to(self._setup.server.url) as user:
            tables = await user.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'tenure'")
            rows = {f"rows of {one}": await user.fetchval(f"SELECT count(*) FROM tenure.{one}") for (one,) in tables}
            connections = await user.fetchval("SELECT count(*) FROM pg_stat_activity WHERE backend_type = $1", CLIENT)
            locks = await user.fetchval("SELECT count(*) FROM pg_locks WHERE pid <> pg_backend_pid()")
        return {"connections": connections, "locks": locks, **rows}

    async def write_foreign(self, queue: str, how: str) -> None:
        body = f"foreign: {how}".encode()
        await place((await self._setup.open()).broker, self, queue, body)
        table = "dead" if queue.endswith(DEAD_SUFFIX) else "message"
        async with connected_to(self._setup.server.url) as user:
            await user.execute(f"UPDATE tenure.{table} SET {MESSAGE_EDITS[how]} WHERE body = $1", body)

    async def edit(self, queue: str, how: str) -> None:
        async with connected_to(self._setup.server.url) as user:
            for statement in REMOVALS[how]:
                await user.execute(statement, queue)


class SeveredQueueHarness(PostgresQueueHarness):
    behind_proxy = True
    faults: ClassVar[frozenset[Fault]] = frozenset({"lose_answer", "cut", "late", "hold", "away", "restart", "kill"})

    async def restart(self) -> None:
        await self._setup.restart()

    def away(self) -> AbstractAsyncContextManager[None]:
        return self._setup.away()

    def kill(self, broker: Broker, after: int) -> Kill:
        return self._setup.kill(broker, after)

    def lose_answer(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        return self._setup.lose_answer(broker)

    def late(self, broker: Broker) -> AbstractAsyncContextManager[GiveUp]:
        return self._setup.late(broker)

    def hold(self, broker: Broker, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        return self._setup.hold(broker, direction)

    def cut(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        return self._setup.sever(broker)


class BlackHoledQueueHarness(SeveredQueueHarness):
    faults = frozenset({"cut"})

    def cut(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        return self._setup.black_hole(broker)


class TestPostgresQueues(BrokerSuite):
    harness = PostgresQueueHarness


class TestPostgresLiveMessages(LiveMessagesSuite):
    harness = PostgresQueueHarness


class TestPostgresLocks(LockExpirySuite):
    harness = PostgresQueueHarness


class TestPostgresConsumers(ConsumerSuite):
    harness = PostgresQueueHarness


class TestPostgresShortUse(ShortUseSuite):
    harness = PostgresQueueHarness


class TestPostgresStoredAgain(StoredAgainSuite):
    harness = PostgresQueueHarness


class TestPostgresQueuesSevered(BrokerFaultSuite):
    harness = SeveredQueueHarness


class TestPostgresQueuesBlackHoled(BrokerFaultSuite):
    harness = BlackHoledQueueHarness
