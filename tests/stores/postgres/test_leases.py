"""Leases in PostgreSQL while another transaction has their rows: every interleaving here is forced."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg
import pytest

from tenure._backends import postgres
from tenure._backends.postgres.statements import statements
from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer, Vacant
from tenure.errors import ConfigError, Unavailable
from tenure.testing import until
from tests.servers import Postgres, shared
from tests.stores.postgres.migrated import Native, migrated, native, opened

TTL = 200.0  # by a clock that is put forward: the test's own duration must not count
SQL = statements("leases.sql", "tenure")


@pytest.fixture
async def server() -> Postgres:
    return await migrated(shared(Postgres, turnable=True))


@pytest.fixture
async def steady(scene: Scene) -> Scene:
    """Yield a scene on a server with a real clock: on one that was put forward, time-outs don't fire."""
    scene.server = await migrated(shared(Postgres))
    return scene


class Scene:
    """A server with candidates, with another transaction that can lock rows, and a view of requests that wait."""

    def __init__(self, server: Postgres) -> None:
        self.server = server
        self._stack = AsyncExitStack()

    async def backend(self, options: str = "") -> postgres.PostgresBackend:
        return await self._stack.enter_async_context(opened(self.server.url + options))

    async def native(self) -> Native:
        return await self._stack.enter_async_context(native(self.server.url))

    @asynccontextmanager
    async def stranger(self, *names: str) -> AsyncIterator[Native]:
        """Lock the rows of *names* in a transaction that is committed at the end."""
        connection = await self.native()
        async with connection.transaction():
            await connection.execute("SELECT FROM tenure.lease WHERE name = ANY ($1) FOR UPDATE", names)
            yield connection

    async def waiting(self, count: int, mark: str = "tenure.lease") -> None:
        """Wait until exactly *count* requests wait for rows."""
        watch = await self.native()
        statement = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND strpos(query, $1) > 0 "
            "AND pid <> pg_backend_pid()"
        )

        async def they_wait() -> bool:
            return bool(await watch.fetchval(statement, mark) == count)

        await until(they_wait)

    async def ends_at(self, name: str) -> float:
        end: float = await (await self.native()).fetchval("SELECT expires_at FROM tenure.lease WHERE name = $1", name)
        return end

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def scene(server: Postgres) -> AsyncIterator[Scene]:
    scene = Scene(server)
    yield scene
    await scene.close()


async def won(store: postgres.PostgresLeases, name: str, holder: str = "ann#1", ttl: float = TTL) -> Grant:
    answer = await store.acquire(name, holder, ttl)
    assert isinstance(answer, Granted), answer
    return answer.grant


def patiently(connection: Native, statement: str, *values: Any) -> asyncio.Future[list[asyncpg.Record]]:
    """Send a request like the store, but without a time limit for locks: its client has given it up."""
    return asyncio.ensure_future(connection.fetch(SQL[statement], *values, "0"))


def renewal(*grants: Grant, ttl: float = TTL) -> tuple[Any, ...]:
    return [one.name for one in grants], [one.holder for one in grants], [one.token for one in grants], ttl


# --- late requests -----------------------------------------------------------------------------------------------


async def test_a_late_renewal_does_not_shorten_a_newer_extension(scene: Scene, name: str) -> None:
    first, second = sorted((f"{name}-1", f"{name}-2"), key=lambda one: hashlib.sha256(one.encode()).digest())
    store = (await scene.backend()).leases
    grants = [await won(store, first), await won(store, second)]
    async with scene.stranger(first):
        late = patiently(await scene.native(), "renew", *renewal(*grants))  # rows are locked in the order of their keys
        await scene.waiting(1)
        assert await store.renew(grants[1:], TTL * 10) == [Granted(grants[1])]
        end = await scene.ends_at(second)
    assert len(await late) == 2
    assert await scene.ends_at(second) == end


async def test_a_late_repeated_acquisition_does_not_shorten_a_lease(scene: Scene, name: str) -> None:
    store = (await scene.backend()).leases
    grant = await won(store, name)
    async with scene.stranger(name) as newer:
        late = patiently(await scene.native(), "acquire", name, "ann#1", TTL, "{}", "none", "")
        await scene.waiting(1)
        await newer.fetch(SQL["renew"], *renewal(grant, ttl=TTL * 10), "0")
        end = await newer.fetchval("SELECT expires_at FROM tenure.lease WHERE name = $1", name)
    assert [row["token"] for row in await late] == [grant.token]
    assert await scene.ends_at(name) == end


@pytest.mark.parametrize("statement", ["release", "renew"])
async def test_a_late_request_of_an_old_grant_changes_no_newer_one(scene: Scene, name: str, statement: str) -> None:
    store = (await scene.backend()).leases
    old = await won(store, name)
    async with scene.stranger(name) as stranger:
        values: tuple[Any, ...] = (name, old.holder, old.token, "none", "") if statement == "release" else renewal(old)
        late = patiently(await scene.native(), statement, *values)
        await scene.waiting(1)
        await stranger.fetch(SQL["release"], name, old.holder, old.token, "none", "", "0")
        assert await stranger.fetch(SQL["acquire"], name, "bob#1", TTL, "{}", "none", "", "0")
    assert [tuple(row) for row in await late] in ([], [(None,)])
    found = await store.inspect(name)
    assert isinstance(found, HeldBy)
    assert (found.holder, found.token) == ("bob#1", old.token + 1)


async def test_a_claim_that_would_have_ended_already_is_refused(scene: Scene, name: str) -> None:
    store = (await scene.backend()).leases
    await store.release(await won(store, name))
    async with scene.stranger(name):
        late = patiently(await scene.native(), "acquire", name, "bob#1", TTL, "{}", "none", "")
        await scene.waiting(1)
        scene.server.turn(TTL * 1.5)
    assert await late == []
    assert await store.inspect(name) == Vacant(name, 1)


# --- two candidates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["unborn", "released", "expired"])
async def test_of_two_that_claim_an_unlocked_row_one_wins(scene: Scene, name: str, before: str) -> None:
    stores = [(await scene.backend()).leases for _ in range(2)]
    if before != "unborn":
        grant = await won(stores[0], name, "old#1")
        await stores[0].release(grant) if before == "released" else scene.server.turn(TTL * 1.5)
    stranger = await scene.native()
    transaction = stranger.transaction()
    await transaction.start()
    if before == "unborn":  # a claim that is rolled back
        await stranger.fetch(SQL["acquire"], name, "stranger#1", TTL, "{}", "none", "", "0")
    else:
        await stranger.execute("SELECT FROM tenure.lease WHERE name = $1 FOR UPDATE", name)
    claims = [
        asyncio.ensure_future(store.acquire(name, holder, TTL))
        for store, holder in zip(stores, ("ann#1", "bob#1"), strict=True)
    ]
    await scene.waiting(2)
    await transaction.rollback()
    answers = await asyncio.gather(*claims)
    [granted] = [answer for answer in answers if isinstance(answer, Granted)]
    [held] = [answer for answer in answers if isinstance(answer, HeldBy)]
    assert granted.grant.token == held.token == (1 if before == "unborn" else 2)
    assert held.holder == granted.grant.holder


# --- rows that another has locked --------------------------------------------------------------------------------


async def test_a_locked_row_delays_no_other_lease(steady: Scene, name: str) -> None:
    scene = steady
    store = (await scene.backend()).leases
    grants = [await won(store, f"{name}-{number}") for number in range(4)]
    await store.release(grants[3])
    ends = [await scene.ends_at(grant.name) for grant in grants[:3]]
    async with scene.stranger(grants[1].name):
        first, locked, third, lost = await store.renew(grants, TTL * 2)
        assert (first, third, lost) == (Granted(grants[0]), Granted(grants[2]), Lost(grants[3]))
        assert isinstance(locked, NoAnswer)
        assert "another transaction has locked the row" in locked.why
        with pytest.raises(Unavailable, match="another transaction has locked the row"):
            await store.renew(grants[1:2], TTL * 2)
        later = [await scene.ends_at(grant.name) for grant in grants[:3]]
    assert [now > then for now, then in zip(later, ends, strict=True)] == [True, False, True]
    assert await store.renew(grants[1:2], TTL) == [Granted(grants[1])]


async def test_beside_a_locked_row_a_renewal_extends_its_own_grants_only(steady: Scene, name: str) -> None:
    """It doesn't shorten one either. The statement that waits for no row makes the same comparisons."""
    scene = steady
    store = (await scene.backend()).leases
    locked, long = [await won(store, f"{name}-{which}", ttl=TTL * 10) for which in ("locked", "long")]
    old = await won(store, name)
    await store.release(old)
    new = await won(store, name)
    strange = Grant(name, "bob#1", new.token)
    forged = Grant(locked.name, locked.holder, locked.token + 1)
    ends = [await scene.ends_at(one) for one in (name, long.name)]
    async with scene.stranger(locked.name):
        no_answer, *answers = await store.renew([locked, long, old, strange, forged], TTL * 2)
        assert isinstance(no_answer, NoAnswer)
        assert answers == [Granted(long), Lost(old), Lost(strange), Lost(forged)]
        assert [await scene.ends_at(one) for one in (name, long.name)] == ends
    assert await store.renew([new], TTL) == [Granted(new)]


# --- many leases -------------------------------------------------------------------------------------------------


async def test_many_are_inspected_by_one_statement(scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = await scene.backend()
    names = [f"{name}-{number}" for number in range(200)]
    grant = await won(backend.leases, names[-1])
    fetch, sent = backend.leases._client.fetch, 0

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal sent
        sent += 1
        return await fetch(*arguments, **options)

    monkeypatch.setattr(backend.leases._client, "fetch", counted)
    assert [one.token for one in await backend.leases.inspect_many(names)] == [0] * 199 + [grant.token]
    assert sent == 1
    assert await backend.leases.inspect_many([]) == []
    assert sent == 1


# --- a missing schema --------------------------------------------------------------------------------------------


async def test_a_schema_that_disappears_after_it_has_worked_is_unavailable(scene: Scene) -> None:
    schema = f"away_{time.time_ns()}"
    await postgres.migrate(f"{scene.server.url}?schema={schema}")
    backend, native = await scene.backend(f"?schema={schema}"), await scene.native()
    grant = await won(backend.leases, "name")
    await backend.leases.renew([grant], TTL)
    await backend.broker.stats("queue")
    await native.execute(f"ALTER SCHEMA {schema} RENAME TO {schema}_not")
    for request in (
        backend.leases.acquire("name", "bob#1", TTL),
        backend.leases.renew([grant], TTL),
        backend.broker.stats("queue"),
    ):
        with pytest.raises(Unavailable, match="it worked before"):
            await request
    fresh = await scene.backend(f"?schema={schema}")
    with pytest.raises(ConfigError, match="run: tenure migrate"):
        await fresh.leases.inspect("name")
    await native.execute(f"ALTER SCHEMA {schema}_not RENAME TO {schema}")
    assert await backend.leases.renew([grant], TTL) == [Granted(grant)]
    assert (await fresh.leases.inspect("name")).token == grant.token


async def test_a_function_that_disappears_after_it_has_worked_is_unavailable(scene: Scene) -> None:
    schema = f"partly_{time.time_ns()}"
    await postgres.migrate(f"{scene.server.url}?schema={schema}")
    backend, native = await scene.backend(f"?schema={schema}"), await scene.native()
    await backend.broker.stats("queue")
    await native.execute(f"ALTER FUNCTION {schema}.counts(text) RENAME TO counts_not")
    with pytest.raises(Unavailable, match="it worked before"):
        await backend.broker.stats("queue")
    await native.execute(f"ALTER FUNCTION {schema}.counts_not(text) RENAME TO counts")
    await backend.broker.stats("queue")


async def test_a_schema_that_was_never_complete_is_a_config_error(scene: Scene) -> None:
    schema = f"gap_{time.time_ns()}"
    await postgres.migrate(f"{scene.server.url}?schema={schema}")
    await (await scene.native()).execute(f"ALTER TABLE {schema}.lease RENAME TO elsewhere")
    backend = await scene.backend(f"?schema={schema}")
    for _ in range(2):
        with pytest.raises(ConfigError, match="not complete"):
            await backend.leases.inspect("name")
