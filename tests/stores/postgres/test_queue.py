"""The queues of PostgreSQL: the cost of a request, whatever else is in the tables; marks, lost claims, upgrades."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

import tenure
from tenure._backends import postgres
from tenure._backends.postgres import claims, housekeeping
from tenure._backends.postgres.client import Client
from tenure._backends.postgres.connections import Connection
from tenure._backends.postgres.migrate import RAISE_BEHIND, functions
from tenure._backends.postgres.sessions import HeldSessions
from tenure._backends.postgres.statements import VERSION
from tenure._queue.broker import EVERY_LIVE, EVERYTHING, Broker, Claim, LiveSelection, NoSession, QueueOptions
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.identity import ID_MARK
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    COMPLETE,
    GIVE_BACK,
    LAPSED,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Deleted,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure.errors import ConfigError, Unavailable
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tests.servers import Postgres, private
from tests.stores.postgres.migrated import migrated, native, opened

TTL = 60.0  # nothing here waits for its end, and no test takes as long
LOCK = 200.0  # by a clock that is put forward: the test's own duration must not count


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """Return a server of this file's own, which reports the rows that each statement has read."""
    settings = [
        ("session_preload_libraries", "auto_explain"),
        ("auto_explain.log_nested_statements", "on"),
        ("auto_explain.log_analyze", "on"),
        ("auto_explain.log_timing", "off"),
        ("auto_explain.log_buffers", "on"),
        ("auto_explain.log_format", "json"),
        ("autovacuum", "off"),
    ]
    with private(Postgres, options=settings) as server:
        yield server


@pytest.fixture
async def url(server: Postgres) -> str:
    return (await migrated(server)).url


# --- the rows that a request reads -------------------------------------------------------------------------------


def visited(plan: dict[str, Any]) -> float:
    """Count the rows that the nodes of *plan* have read, including those that they filtered out."""
    left_out = sum(count for what, count in plan.items() if what.startswith("Rows Removed by"))
    mine = (plan["Actual Rows"] + left_out) * plan["Actual Loops"]
    return float(mine) + sum(visited(part) for part in plan.get("Plans", ()))


def pages(plan: dict[str, Any]) -> int:
    """Count the pages that *plan* has read, repeated reads included."""
    return sum(int(plan[f"Shared {how} Blocks"]) for how in ("Hit", "Read"))


async def cost(connection: asyncpg.Connection[asyncpg.Record], statement: str, *values: object) -> int:
    """Return how many rows and pages *statement* reads, including the statements of its functions."""
    messages: list[str] = []

    def on_log(_: object, message: Any) -> None:
        messages.append(message.message)

    connection.add_log_listener(on_log)
    await connection.execute("SET client_min_messages = log; SET auto_explain.log_min_duration = 0")
    await connection.fetch(statement, *values)
    await connection.execute("SET auto_explain.log_min_duration = -1; SET client_min_messages = notice")
    connection.remove_log_listener(on_log)
    plans = [json.loads(one.partition("plan:\n")[2])["Plan"] for one in messages if "plan:\n" in one]
    assert plans
    return int(sum(visited(plan) + pages(plan) for plan in plans))


# --- sending -----------------------------------------------------------------------------------------------------


async def test_a_batch_with_ids_costs_as_much_for_each_message_however_many_they_are(url: str, name: str) -> None:
    async with native(url) as connection:
        few, many = [
            await cost(
                connection,
                "SELECT tenure.send_many($1, $2, $3)",
                name,
                [b"x"] * count,
                [f"{count}-{i}" for i in range(count)],
            )
            for count in (200, 1600)
        ]
    assert many < 10 * few


async def test_of_ids_in_one_batch_the_first_is_kept_and_those_remembered_are_not(url: str, name: str) -> None:
    async with opened(url) as backend:
        await backend.broker.send(name, [Outgoing(b"0", id="known")])
        batch = [("1", "a"), ("2", None), ("3", "known"), ("4", "a"), ("5", None), ("6", "b")]
        ids = await backend.broker.send(name, [Outgoing(body.encode(), id=one) for body, one in batch])
        assert [one if one in ("a", "b", "known") else None for one in ids] == [one for _, one in batch]
        got = (await backend.broker.receive(name, 10, TTL)).deliveries
        assert [(one.body, one.id) for one in got] == [
            (b"0", "known"), (b"1", "a"), (b"2", ids[1]), (b"5", ids[4]), (b"6", "b")
        ]  # fmt: skip


async def test_a_message_sent_alone_is_kept_as_in_a_batch(url: str, name: str) -> None:
    def message() -> Outgoing:
        return Outgoing(b"x", headers={"a": 1, "b": "é"}, reply_to="answers", correlation_id="c")

    columns = "state, due_at, expires_at, queue, deliveries, priority, is_deferred, id, session, reply_to, "
    columns += "correlation_id, headers, history, body, enqueued_at > 0 AS has_time"
    async with opened(url) as backend, native(url) as connection:
        for _ in range(2):  # the first one creates the queue
            await backend.broker.send(name, [message()])
        await backend.broker.send(name, [message(), message()])
        rows = await connection.fetch(
            f"SELECT {columns} FROM tenure.message WHERE queue = (SELECT id FROM tenure.queue WHERE name = $1)", name
        )
        assert len(rows) == 4
        assert len({tuple(row) for row in rows}) == 1
        assert (await backend.broker.stats(name)).ready == 4


async def test_only_a_message_that_is_ready_at_once_is_sent_by_the_short_statement(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    fetch = Client.fetch

    async def note(self: Client, statement: str, *values: object, **options: Any) -> list[asyncpg.Record]:
        asked.extend(re.findall("send_many|kept AS", statement))
        return await fetch(self, statement, *values, **options)

    monkeypatch.setattr(Client, "fetch", note)
    others = [
        Outgoing(id="1"), Outgoing(session="s"), Outgoing(at=1.0), Outgoing(expires_in=9.0), Outgoing(delay=1.0),
        Outgoing(priority=1),
    ]  # fmt: skip
    async with opened(url) as backend, opened(url + "?prepared=false") as without:
        await backend.broker.send(name, [Outgoing()])
        asked.clear()
        await backend.broker.send(name, [Outgoing()])
        assert asked == ["kept AS"]
        asked.clear()
        for one in others:
            await backend.broker.send(name, [one])
        await backend.broker.send(name, [Outgoing(), Outgoing()])
        await without.broker.send(name, [Outgoing()])
        assert asked == ["send_many"] * 8


async def test_a_message_sent_alone_brings_a_deleted_queue_back(url: str, name: str) -> None:
    async with opened(url) as backend:
        await backend.broker.send(name, [Outgoing(b"x")])
        [got] = (await backend.broker.receive(name, 1, TTL)).deliveries
        await backend.broker.settle([Settlement(got, COMPLETE)])
        assert isinstance(await backend.broker.delete(name), Deleted)
        await backend.broker.send(name, [Outgoing(b"y")])
        assert name in await backend.broker.names()
        assert [one.body for one in (await backend.broker.receive(name, 1, TTL)).deliveries] == [b"y"]


# --- sessions ----------------------------------------------------------------------------------------------------


async def claimed(broker: Broker, name: str, session: str | None = None, limit: int = 1) -> tuple[SessionLock, Claim]:
    """Accept a session, which must be free, and claim its next messages."""
    held = await broker.accept(name, session, LOCK)
    assert isinstance(held, SessionLock)
    claim = await broker.receive_session(held, limit)
    assert isinstance(claim, Claim)
    return held, claim


async def test_a_deep_session_costs_no_more_than_a_shallow_one(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection:
        costs: dict[str, list[int]] = {}
        for depth in (100, 1000):
            queue = f"{name}-{depth}"
            await backend.broker.send(queue, [Outgoing(b"x", session="deep")] * depth)
            await connection.execute("ANALYZE")
            await connection.execute("DISCARD PLANS")
            for what, statement in {
                "accept": "SELECT FROM tenure.accept($1, NULL, 60, 7)",
                "receive": "SELECT FROM tenure.receive_session($1, 'deep', 7, 5)",
                "renew": "SELECT FROM tenure.renew_sessions($1, '{deep}', '{7}', 60)",
                "other": "SELECT FROM tenure.accept($1, NULL, 60, 8)",
                "empty": "SELECT FROM tenure.receive($1, 5, 60, 9)",
                "release": "SELECT tenure.release_session($1, 'deep', 7)",
                "stats": "SELECT FROM tenure.stats($1)",
            }.items():
                costs.setdefault(what, []).append(await cost(connection, statement, queue))
    for what, (few, many) in costs.items():
        assert many < 1.5 * few + 20, (what, few, many)


async def test_idle_sessions_cost_nothing(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection:
        costs: dict[str, list[int]] = {}
        for count in (100, 1000):
            queue = f"{name}-{count}"
            await backend.broker.send(queue, [Outgoing(b"x", session="one")])
            await connection.execute(
                "INSERT INTO tenure.session (queue, name, until, state) SELECT id, 'idle ' || n, 0, 'x' "
                "FROM tenure.queue, generate_series(1, $2) AS n WHERE name = $1",
                queue,
                count,
            )
            for what, statement in {
                "empty": "SELECT FROM tenure.receive($1, 5, 60, 9)",
                "accept": "SELECT FROM tenure.accept($1, NULL, 60, 7)",
                "none": "SELECT FROM tenure.accept($1, NULL, 60, 8)",
            }.items():
                costs.setdefault(what, []).append(await cost(connection, statement, queue))
    for what, (few, many) in costs.items():
        assert many < 1.5 * few + 20, (what, few, many)


async def test_sessions_behind_a_waiting_message_delay_no_other_session(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection:
        costs: list[int] = []
        for depth in (100, 1000):
            queue = f"{name}-{depth}"
            await backend.broker.send(queue, [Outgoing(b"x", session="held up")] * depth)
            held, claim = await claimed(backend.broker, queue)
            await backend.broker.settle([Settlement(claim.deliveries[0], Abandon(delay=LOCK))])
            await backend.broker.release(held)
            await backend.broker.send(queue, [Outgoing(b"x", session="other")])
            costs.append(await cost(connection, "SELECT FROM tenure.accept($1, NULL, 60, 7)", queue))
            accepted = "SELECT s.name FROM tenure.session AS s JOIN tenure.queue AS q ON id = queue WHERE q.name = $1"
            assert await connection.fetchval(f"{accepted} AND token = 7", queue) == "other"
    assert costs[1] < 1.5 * costs[0] + 20, costs


async def test_a_session_is_offered_whatever_transaction_ends_late(turnable: Postgres, name: str) -> None:
    """A concurrent accept removes no row that the late transaction needs."""
    async with opened(turnable.url) as backend, native(turnable.url) as connection:
        broker = backend.broker
        await broker.send(name, [Outgoing(b"1", session="s"), Outgoing(b"2", session="s")])
        # Sent while the session is locked, which is released before the sender has committed.
        held, claim = await claimed(broker, name, limit=10)
        async with connection.transaction():
            await connection.execute("SELECT tenure.send($1, '3', session => 's')", name)
            await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
            await broker.release(held)
            assert isinstance(await broker.accept(name, None, LOCK), NoSession)
        held, claim = await claimed(broker, name)
        assert [one.body for one in claim.deliveries] == [b"3"]
        # Completed in time, committed after the session was found to be held up.
        await broker.send(name, [Outgoing(b"4", session="s")])
        async with connection.transaction():
            [one] = claim.deliveries
            await connection.execute("SELECT tenure.complete($1, $2)", name, f"{one.token}.{one.sequence}")
            turnable.turn(LOCK * 1.05)
            for _ in range(2):
                assert isinstance(await broker.accept(name, None, LOCK), NoSession)
        held, claim = await claimed(broker, name)
        assert [one.body for one in claim.deliveries] == [b"4"]


async def test_a_late_renewal_does_not_shorten_the_lock_of_another_session(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as stranger, native(url) as late:
        broker = backend.broker
        await broker.send(name, [Outgoing(session="a"), Outgoing(session="b")])
        held = [await broker.accept(name, session, TTL) for session in ("a", "b")]
        first, second = [one for one in held if isinstance(one, SessionLock)]
        await broker.receive_session(second, 1)
        statement = "SELECT tenure.renew_sessions($1, $2, $3, $4)"
        tokens = [int(one.token) for one in (first, second)]

        async def waits() -> bool:
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND pid = $1"
            return bool(await stranger.fetchval(waiting, late.get_server_pid()) == 1)

        async with stranger.transaction():
            await stranger.execute("SELECT FROM tenure.session WHERE name = 'a' AND token = $1 FOR UPDATE", tokens[0])
            pending = asyncio.ensure_future(late.fetch(statement, name, ["a", "b"], tokens, TTL))
            await until(waits)
            [newer] = await broker.renew([second], TTL * 10)
        answers = [row[0] for row in await pending]
        ends = "SELECT until FROM tenure.session WHERE token = $1 UNION ALL SELECT due_at FROM tenure.message "
        until_then = [row[0] for row in await late.fetch(f"{ends} WHERE token = $1", tokens[1])]
        assert isinstance(newer, Renewed)
        assert until_then == [answers[1]] * 2
        assert answers[1] > answers[0] + TTL


async def test_a_session_that_is_being_released_is_skipped(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection:
        broker = backend.broker
        await broker.send(name, [Outgoing(b"1", session="s")])
        held, _ = await claimed(broker, name)
        await broker.send(name, [Outgoing(b"2", session="s")])
        async with connection.transaction():
            assert await connection.fetchval("SELECT tenure.release_session($1, 's', $2)", name, held.token)
            found = await broker.accept(name, None, LOCK)  # without waiting
            assert isinstance(found, NoSession)
            assert found.due_in is not None  # a rollback is not notified
            assert found.due_in < 1.0
        _, claim = await claimed(broker, name, limit=10)
        assert [one.body for one in claim.deliveries] == [b"1", b"2"]


async def test_nothing_is_claimed_under_a_session_that_is_released_meanwhile(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection, native(url) as watch:
        broker = backend.broker
        await broker.send(name, [Outgoing(b"1", session="s")])
        held = await broker.accept(name, "s", LOCK)
        assert isinstance(held, SessionLock)
        async with connection.transaction():
            assert await connection.fetchval("SELECT tenure.release_session($1, 's', $2)", name, held.token)
            pending = asyncio.ensure_future(broker.receive_session(held, 1))
            await until(lambda: is_waiting(watch))
        assert await pending == LAPSED
        # In the other order, the release finds the claimed message.
        held = await broker.accept(name, "s", LOCK)
        assert isinstance(held, SessionLock)
        async with connection.transaction():
            await connection.fetch("SELECT FROM tenure.receive_session($1, 's', $2, 1)", name, held.token)
            releasing = asyncio.ensure_future(broker.release(held))
            await until(lambda: is_waiting(watch))
        assert await releasing == Settled()
        assert (await broker.stats(name)).locked == 0


async def is_waiting(connection: asyncpg.Connection[asyncpg.Record]) -> bool:
    return bool(await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))


@pytest.mark.parametrize("way", ["one", "many", "by priority", "deferred", "dead"])
async def test_rows_that_another_transaction_has_locked_are_skipped(url: str, name: str, way: str) -> None:
    async with opened(f"{url}?timeout=5") as backend, native(url) as connection:
        broker, table = backend.broker, "dead" if way == "dead" else "message"
        sent = [Outgoing(b"1", priority=1 if way == "by priority" else 0), Outgoing(b"2")]
        await broker.send(name, sent)
        numbers: list[int] = []
        if way in ("deferred", "dead"):
            first = (await broker.receive(name, 10, LOCK)).deliveries
            numbers = [one.sequence for one in first]
            verdict = Defer() if way == "deferred" else DeadLetter("because")
            assert await broker.settle([Settlement(one, verdict) for one in first]) == [Settled()] * 2

        async def claim() -> list[bytes]:
            if way == "deferred":
                found = await broker.receive_deferred(name, numbers, LOCK)
            else:
                found = await broker.receive(name + DEAD_SUFFIX * (way == "dead"), 1 if way == "one" else 10, LOCK)
            return [one.body for one in found.deliveries]

        async with connection.transaction():
            held = f"SELECT FROM tenure.{table} AS m JOIN tenure.queue AS q ON q.id = m.queue WHERE q.name = $1"
            assert await connection.fetch(f"{held} AND body = '1' FOR UPDATE OF m", name)
            assert await claim() == [b"2"]
        assert await claim() == [b"1"]


@pytest.mark.parametrize("way", ["one", "many", "by priority", "deferred", "dead"])
async def test_two_concurrent_claims_get_different_messages(url: str, name: str, way: str) -> None:
    """The first has not committed its claim yet: the second neither waits for it nor claims the same message."""
    statement = {"deferred": "receive_deferred", "dead": "receive_dead"}.get(way, "receive")
    async with opened(f"{url}?timeout=5") as backend, native(url) as connection:
        broker = backend.broker
        await broker.send(name, [Outgoing(b"%d" % one, priority=one * (way == "by priority")) for one in range(4)])
        numbers: list[int] = []
        if way in ("deferred", "dead"):
            first = (await broker.receive(name, 10, LOCK)).deliveries
            numbers = [one.sequence for one in first]
            verdict = Defer() if way == "deferred" else DeadLetter("because")
            assert await broker.settle([Settlement(one, verdict) for one in first]) == [Settled()] * 4
        most = 1 if way == "one" else 2
        async with connection.transaction():
            what = numbers[:2] if way == "deferred" else most
            rows = await connection.fetch(f"SELECT * FROM tenure.{statement}($1, $2, $3, $4)", name, what, LOCK, 7)
            mine = [row["body"] for row in rows if row["seq"] is not None]
            if way == "deferred":
                claim = await broker.receive_deferred(name, numbers, LOCK)
            else:
                claim = await broker.receive(name + DEAD_SUFFIX * (way == "dead"), most, LOCK)
            theirs = [one.body for one in claim.deliveries]
        assert len(mine) == len(theirs) == most
        assert not {*mine} & {*theirs}


@pytest.mark.parametrize("limits", [{}, {"max_locked": 3}, {"max_locked": 3, "session_rate": (2, 0.05)}], ids=repr)
async def test_every_session_is_served_with_many_at_work(url: str, name: str, limits: QueueOptions) -> None:
    async with opened(url) as backend, opened(url) as other:
        handled: list[bytes] = []
        await backend.broker.declare(name, limits)

        async def send(broker: Broker, first: int) -> None:
            for number in range(first, first + 40):
                await broker.send(name, [Outgoing(b"%d" % number, session=f"s{number % 7}")])

        async def work(broker: Broker) -> None:
            while len(handled) < 80:
                held = await broker.accept(name, None, LOCK)
                if isinstance(held, NoSession):
                    await asyncio.sleep(0)
                    continue
                claim = await broker.receive_session(held, 2)
                assert isinstance(claim, Claim)
                handled.extend(one.body for one in claim.deliveries)
                await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
                await broker.release(held)

        async with asyncio.timeout(TTL):
            await asyncio.gather(
                *(send(backend.broker, first) for first in (0, 40)),
                *(work(one.broker) for one in (backend, other) for _ in range(3)),
            )
        assert sorted(handled) == sorted(b"%d" % number for number in range(80))
        for first in (0, 40):  # of one sender, in order
            for session in range(7):
                numbers = [number for number in map(int, handled) if number - first in range(40)]
                found = [number for number in numbers if number % 7 == session]
                assert found == sorted(found)
        async with native(url) as connection:  # no rows are left
            await backend.broker.accept(name, None, LOCK)
            assert (
                await connection.fetchval(
                    "SELECT count(*) FROM tenure.waiting JOIN tenure.queue ON id = queue AND name = $1", name
                )
                == 0
            )


# --- marks -------------------------------------------------------------------------------------------------------


class Raising:
    """Raises the marks of a queue step by step."""

    def __init__(self, connection: Connection, name: str, schema: str = "tenure") -> None:
        self._connection = connection
        self._name = name
        self._schema = schema

    async def propose(self, number: int, looks_ahead: bool = True) -> None:
        statement = f"SELECT {self._schema}.propose($1, $2, $3)"
        self.proposal = await self._connection.fetchval(statement, self._name, number, looks_ahead)
        self._writers = await self._connection.fetchval(f"SELECT {self._schema}.writers()")

    async def complete(self) -> bool | None:
        statement = f"SELECT {self._schema}.raise_marks($1, $2, $3)"
        raised: bool | None = await self._connection.fetchval(statement, self._name, self.proposal, self._writers)
        return raised

    async def marks(self) -> list[float]:
        statement = f"SELECT {self._schema}._marks(id) FROM {self._schema}.queue WHERE name = $1"
        found: list[float] = await self._connection.fetchval(statement, self._name)
        return found


async def consumed(broker: Broker, name: str, limit: int = 100) -> list[bytes]:
    claim = await broker.receive(name, limit, LOCK)
    await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
    return [one.body for one in claim.deliveries]


async def test_consumed_messages_are_not_read_again_beside_a_snapshot(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "RAISE_AFTER", 300)
    async with opened(url) as backend, native(url) as reader, native(url) as connection:
        broker = backend.broker
        async with reader.transaction(isolation="repeatable_read"):
            await reader.execute("SELECT FROM tenure.queue")
            costs: dict[str, list[int]] = {}
            for count in (600, 3000):
                for _ in range(0, count, 100):
                    await broker.send(name, [Outgoing(b"x", expires_in=3600)] * 50 + [Outgoing(b"x", priority=4)] * 50)
                    while await consumed(broker, name):
                        await backend.broker._housekeeping.finish()
                await broker.stats(name)  # which makes one row of the tally
                for what, statement in {
                    "receive": "SELECT FROM tenure.receive($1, 10, 60, 7)",
                    "stats": "SELECT FROM tenure.stats($1)",
                }.items():
                    costs.setdefault(what, []).append(await cost(connection, statement, name))
    for what, (few, many) in costs.items():
        assert many < 1.5 * few + 300, (what, few, many)


async def test_settled_locks_are_read_only_where_claims_need_the_next_due_time(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "RAISE_AFTER", 300)
    async with opened(url) as backend, native(url) as connection:
        broker, raising = backend.broker, Raising(connection, name)
        await broker.declare(name, {"lock": LOCK})
        await broker.send(name, [Outgoing(b"x" * 1500)] * 700)
        begun = time.time()

        async def walked(looks_ahead: bool) -> int:
            await raising.propose(1, looks_ahead)
            return await cost(connection, f"SELECT FROM tenure.raise_marks($1, {raising.proposal}, '{{}}')", name)

        for _ in range(2):  # with enough messages
            assert len(await consumed(broker, name, 300)) == 300
            await broker._housekeeping.finish()
        assert begun + LOCK - RAISE_BEHIND <= (await raising.marks())[11] < begun + LOCK
        _, few = [await walked(looks_ahead=False) for _ in range(2)]  # the first time, it is planned, too
        assert await walked(looks_ahead=True) > few + 100
        assert (await raising.marks())[11] >= begun + LOCK
        assert await walked(looks_ahead=True) < few + 50
        assert await walked(looks_ahead=False) < few + 50
        marks = await raising.marks()
        assert marks[11] >= begun + LOCK

        assert len(await consumed(broker, name, 300)) == 100  # the last claim has looked for the next due time
        await broker._housekeeping.finish()
        again = await raising.marks()
        assert again[11] > marks[11]
    async with opened(url) as backend:  # it doesn't know how far the others have raised them
        await backend.broker.receive(name, 1, LOCK)
        await backend.broker._housekeeping.finish()
        async with native(url) as connection:
            assert (await Raising(connection, name).marks())[11] > again[11]


async def test_a_replaced_proposal_is_distinguished_from_a_raised_one(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection:
        await backend.broker.send(name, [Outgoing(b"x")])
        one, two = Raising(connection, name), Raising(connection, name)
        await one.propose(1)
        await two.propose(1)
        assert await two.complete() is True
        assert await one.complete() is None


async def used_up(broker: Broker, name: str, count: int) -> None:
    """Send *count* messages that take many pages, and consume them."""
    assert isinstance(broker, postgres.PostgresBroker)
    await broker.send(name, [Outgoing(b"x" * 1500)] * count)
    while await consumed(broker, name, 500):
        await broker._housekeeping.finish()
    await broker.stats(name)  # which makes one row of the tally


@pytest.mark.parametrize(("known", "is_limited"), [(0, False), (1, False), (5, False), (1, True)])
async def test_no_verb_reads_consumed_messages_if_the_planner_expects_few(
    url: str, name: str, known: int, is_limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics of a time when the queue was drained make a scan of all of it look cheap, beside a snapshot."""
    monkeypatch.setattr(housekeeping, "RAISE_AFTER", 300)
    costs: dict[str, list[int]] = {}
    async with opened(url) as backend, native(url) as reader, native(url) as other, native(url) as connection:
        broker = backend.broker

        async def count(what: str, statement: str, *values: object) -> None:
            given = (name, *values) if "$1" in statement else ()
            costs.setdefault(what, []).append(await cost(connection, f"SELECT FROM tenure.{statement}", *given))

        if is_limited:
            await broker.declare(name, {"max_locked": 5_000, "rate": (9_000, 3600.0), "session_rate": (2, 3600.0)})
        async with reader.transaction(isolation="repeatable_read"):
            await reader.execute("SELECT FROM tenure.queue")
            for depth in (100, 400, 3000):
                await used_up(broker, name, depth)
                await broker.send(name, [Outgoing(b"x")] * known)
                await connection.execute("VACUUM ANALYZE")
                await broker.send(name, [Outgoing(b"x")] * 10 + [Outgoing(b"x", session=f"{depth}")] * 4)
                await count("receive", "receive($1, 2, 0.001, 7)")
                await connection.execute("SELECT pg_sleep(0.01)")
                await count("time", "stats($1)")
                got = (await broker.receive(name, 8, LOCK)).deliveries
                numbers, tokens = [one.sequence for one in got], [one.token for one in got]
                await count("renew", "renew_many($1, $2, $3, 300)", numbers, tokens)
                async with other.transaction():
                    await other.execute("SELECT FROM tenure.message WHERE seq = $1 FOR UPDATE", numbers[0])
                    await count("renew beside", "renew_many($1, $2, $3, 300)", numbers, tokens)
                await count("complete", "complete_many($1, $2, $3)", numbers[:4], tokens[:4])
                settle = "settle_many($1, $2, $3, $4, $5, $6, $7, $8, $9)"
                rest: list[list[object]] = [[0.0] * 3, ["test"] * 3, [""] * 3, [None] * 3, [0.0] * 3]
                verdicts = ["defer", "dead", "abandon"]
                await count("settle", settle, numbers[4:7], tokens[4:7], verdicts, *rest)
                await count("deferred", "receive_deferred($1, $2, 300, 8)", numbers[4:5])
                held, _ = await claimed(broker, name, f"{depth}", 2)
                session = ([held.session], [held.token])
                await count("renew session", "renew_sessions($1, $2, $3, 300)", *session)
                async with other.transaction():
                    await other.execute("SELECT FROM tenure.message WHERE session = $1 FOR UPDATE", held.session)
                    await count("renew session beside", "renew_sessions($1, $2, $3, 600)", *session)
                await count("state", "write_state($1, $2, $3, NULL)", held.session, held.token)
                await count("release", "release_session($1, $2, $3)", held.session, held.token)
                await count("complete one", "complete($1, $2)", f"{tokens[7]}.{numbers[7]}")
                await count("names", "names()")
                await count("peek", "peek_dead($1, NULL, NULL, NULL, NULL, 0, 10)")
                await count("redrive", "revive($1, NULL, NULL, NULL, NULL, 0, 10, false, false)")
    for what, (_, few, many) in costs.items():  # at first, they are planned, too
        assert many < 1.5 * few + 200, (what, few, many)


async def test_listing_skips_a_deleted_queue_at_constant_cost(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as reader, native(url) as connection:
        broker, costs = backend.broker, []
        async with reader.transaction(isolation="repeatable_read"):
            await reader.execute("SELECT FROM tenure.queue")  # so that nothing of what follows is cleared away
            for count in (100, 20_000):
                await broker.send(name, [Outgoing(b"x")])
                await consumed(broker, name)
                await connection.execute(
                    "INSERT INTO tenure.tally (queue) "
                    "SELECT id FROM tenure.queue, generate_series(1, $1) WHERE name = $2",
                    count,
                    name,
                )
                await broker.stats(name)  # which makes one row of them
                raising = Raising(connection, name)
                await raising.propose(1)
                assert await raising.complete()
                assert isinstance(await broker.delete(name), Deleted)
                assert name not in await broker.names()
                costs.append(await cost(connection, "SELECT FROM tenure.names()"))
        assert costs[1] < costs[0] + 50, costs


async def test_marks_skip_nothing_that_is_committed_later(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as late, native(url) as connection:
        broker, raising = backend.broker, Raising(connection, name)
        await broker.send(name, [Outgoing(b"0")])
        async with late.transaction():
            await late.execute("SELECT tenure.send($1, 'late')", name)
            await late.execute("SELECT tenure.send($1, 'soon', delay => 5)", name)
            await broker.send(name, [Outgoing(b"1")])
            claim = await broker.receive(name, 10, LOCK)
            await broker.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
            await raising.propose(claim.deliveries[-1].sequence)
            assert not await raising.complete()
            assert await consumed(broker, name) == []
        assert await raising.complete()
        assert (await raising.marks())[0] == claim.deliveries[0].sequence + 1
        assert await consumed(broker, name) == [b"late"]
        due_in = (await broker.receive(name, 10, LOCK)).due_in
        assert due_in is not None
        assert due_in < 5.0


STOPPED = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted"


@asynccontextmanager
async def reading_slowly(server: Postgres) -> AsyncIterator[tuple[str, Connection, Connection]]:
    """Yield a schema, a connection that stops at each raised mark, and one that continues it by unlocking 7."""
    schema = f"slow_{time.time_ns()}"
    await postgres.migrate(f"{server.url}?schema={schema}")
    async with native(server.url) as reader, native(server.url) as holder:
        await holder.execute(f"""
            CREATE ROLE {schema};
            GRANT USAGE ON SCHEMA {schema} TO {schema};
            GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {schema};
            CREATE FUNCTION {schema}.stop(kind smallint) RETURNS boolean LANGUAGE plpgsql AS $$
            BEGIN
                PERFORM pg_advisory_xact_lock_shared(7) WHERE kind = 2;
                RETURN true;
            END $$;
            ALTER TABLE {schema}.mark ENABLE ROW LEVEL SECURITY;
            CREATE POLICY slow ON {schema}.mark USING ({schema}.stop(kind));
            SELECT pg_advisory_lock(7);
        """)
        await reader.execute(f"SET ROLE {schema}")
        yield schema, reader, holder


@pytest.mark.parametrize("what", ["a claim", "another that raises"])
async def test_marks_that_are_raised_while_they_are_read_hide_nothing(server: Postgres, name: str, what: str) -> None:
    async with reading_slowly(server) as (schema, reader, holder), opened(f"{server.url}?schema={schema}") as backend:
        broker, raising, late = backend.broker, Raising(holder, name, schema), Raising(reader, name, schema)
        await broker.send(name, [Outgoing(b"low"), Outgoing(b"high")])
        low, high = (await broker.receive(name, 2, LOCK)).deliveries
        await broker.settle([Settlement(high, COMPLETE)])
        await raising.propose(high.sequence)
        assert await raising.complete()
        await broker.settle([Settlement(low, Abandon())])  # adds a row that lowers the marks, which are above it
        await late.propose(high.sequence)
        await raising.propose(high.sequence)
        statement = f"SELECT seq FROM {schema}.receive($1, 1, 60, 7)"
        reading = asyncio.ensure_future(late.complete() if what != "a claim" else reader.fetchval(statement, name))
        await until(lambda: holder.fetchval(STOPPED))
        # It may write, as it sees the message; but it waits for another transaction that raises marks.
        assert await raising.complete() == (what == "a claim")
        await holder.execute("SELECT pg_advisory_unlock(7)")
        assert await reading == (low.sequence if what == "a claim" else True)
        if what != "a claim":
            assert await consumed(broker, name) == [b"low"]


async def test_marks_are_not_raised_beside_a_claim_that_has_read_them(server: Postgres, name: str) -> None:
    """Otherwise they may be above the end of the lock that the claim is about to write."""
    async with reading_slowly(server) as (schema, reader, holder), opened(f"{server.url}?schema={schema}") as backend:
        broker, raising = backend.broker, Raising(holder, name, schema)
        await broker.send(name, [Outgoing(b"x")])
        await raising.propose(1)
        assert await raising.complete()
        claiming = asyncio.ensure_future(reader.fetchval(f"SELECT seq FROM {schema}.receive($1, 1, 60, 7)", name))
        await until(lambda: holder.fetchval(STOPPED))
        await raising.propose(1)
        assert not await raising.complete()
        await holder.execute("SELECT pg_advisory_unlock(7)")
        assert await claiming
        assert await raising.complete()


@pytest.mark.parametrize("looks_ahead", [True, False])
@pytest.mark.parametrize("at", ["before", "proposed", "raised"])
async def test_marks_skip_nothing_that_is_put_back(turnable: Postgres, name: str, at: str, looks_ahead: bool) -> None:
    """A message that becomes claimable below a proposed or raised mark is found, whatever the cause and the time."""
    async with opened(turnable.url) as backend, native(turnable.url) as connection, native(turnable.url) as other:
        broker, raising = backend.broker, Raising(connection, name)
        batch = [Outgoing(b"%d" % number, expires_in=LOCK * 99) for number in range(9)]
        await broker.send(name, [*batch, Outgoing(b"urgent", priority=9), Outgoing(b"a"), Outgoing(b"z")])
        claim = await broker.receive(name, 100, LOCK)
        urgent, *some = claim.deliveries
        one, two, three, dead, *orphans = some[:9]
        await broker.settle([Settlement(gone, COMPLETE) for gone in (*some[9:], *orphans[:-1])])
        await broker.settle([Settlement(dead, DeadLetter("because"))])
        if at == "proposed":
            await raising.propose(some[-1].sequence, looks_ahead)
        elif at == "raised":
            await raising.propose(some[-1].sequence, looks_ahead)
            assert await raising.complete()
        async with other.transaction():  # begins before, and ends after
            await other.fetch(
                "SELECT tenure.settle_many($1, $2, $3, '{abandon}', '{0}', '{NULL}', '{NULL}', '{NULL}', '{0}')",
                name,
                [one.sequence],
                [one.token],
            )
            if at == "before":
                await raising.propose(some[-1].sequence, looks_ahead)
                assert not await raising.complete()
        await broker.settle(
            [Settlement(two, GIVE_BACK), Settlement(urgent, Abandon()), Settlement(three, Abandon(delay=5))]
        )
        await broker.redrive(name, EVERYTHING, None)
        assert await raising.complete() is not False
        waiting = await broker.receive(name, 100, 1.0)  # a lock shorter than all others
        assert [each.body for each in waiting.deliveries] == [b"urgent", b"0", b"1", b"3"]
        assert waiting.due_in is not None
        assert waiting.due_in <= 1.0
        turnable.turn(6)
        again = await broker.receive(name, 100, LOCK)
        assert [each.body for each in again.deliveries] == [b"urgent", b"0", b"1", b"2", b"3"]
        turnable.turn(LOCK * 1.05)
        assert len((await broker.receive(name, 100, LOCK)).deliveries) == 6  # the orphan, too
        turnable.turn(LOCK * 99)
        stats = await broker.stats(name)
        assert (stats.ready, stats.dead) == (2, 4)  # two without ttl, and the expired ones


@pytest.mark.parametrize(
    "cause",
    ["given back", "abandoned", "delayed", "redriven", "orphan", "urgent", "later", "expiring", "deferred"],
)
async def test_each_thing_below_a_mark_is_found_by_itself(turnable: Postgres, name: str, cause: str) -> None:
    async with opened(turnable.url) as backend, native(turnable.url) as connection:
        broker, raising = backend.broker, Raising(connection, name)
        await broker.send(name, [Outgoing(b"low")])
        [low] = (await broker.receive(name, 1, LOCK)).deliveries
        if cause == "redriven":
            await broker.settle([Settlement(low, DeadLetter("because"))])
        elif cause == "deferred":
            await broker.settle([Settlement(low, Defer())])
        await broker.send(
            name, [Outgoing(b"x"), Outgoing(b"later", delay=LOCK * 9), Outgoing(b"y", expires_in=LOCK * 9)]
        )
        claim = await broker.receive(name, 10, LOCK * 9)
        if cause not in ("given back", "abandoned", "delayed", "orphan", "redriven", "deferred"):
            await broker.settle([Settlement(low, COMPLETE)])
        await broker.settle([Settlement(claim.deliveries[0], COMPLETE)])
        await raising.propose(claim.deliveries[-1].sequence)
        assert await raising.complete()
        match cause:
            case "given back":
                await broker.settle([Settlement(low, GIVE_BACK)])
            case "abandoned":
                await broker.settle([Settlement(low, Abandon())])
            case "delayed":
                await broker.settle([Settlement(low, Abandon(delay=LOCK / 2))])
            case "redriven":
                await broker.redrive(name, EVERYTHING, None)
            case "urgent":
                await broker.send(name, [Outgoing(b"low", priority=3)])
            case "later":
                await broker.send(name, [Outgoing(b"low", delay=LOCK / 2)])
            case "expiring":
                await broker.send(name, [Outgoing(b"low", expires_in=LOCK / 2)])
            case "deferred":
                [low] = (await broker.receive_deferred(name, [low.sequence], LOCK / 2)).deliveries
        due_in = (await broker.receive(name, 1, LOCK)).due_in if cause in ("delayed", "later", "deferred") else None
        if due_in is not None:
            assert due_in <= LOCK / 2
            turnable.turn(LOCK * 0.6)
        elif cause == "orphan":
            turnable.turn(LOCK * 1.05)
        if cause == "expiring":
            turnable.turn(LOCK * 0.6)
            assert (await broker.stats(name)).dead == 1
        elif cause == "deferred":
            assert (await broker.stats(name)).deferred == 1
        else:
            assert [one.body for one in (await broker.receive(name, 1, LOCK)).deliveries] == [b"low"]


@pytest.mark.parametrize("most", [None, 5])
async def test_nothing_is_lost_with_marks_that_are_raised_all_the_time(
    url: str, name: str, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "RAISE_AFTER", 1)
    rng = random.Random(7)
    sent = 0
    handled: list[bytes] = []
    async with opened(f"{url}?pool=8") as backend, opened(url) as other:
        await backend.broker.declare(name, {"max_deliveries": 1000, "max_locked": most or math.inf})
        locked: list[int] = []

        async def watch(connection: Connection) -> None:
            held = "SELECT count(*) FROM tenure.message JOIN tenure.queue AS q ON q.id = queue "
            held += "WHERE name = $1 AND state = 1"
            while True:
                locked.append(await connection.fetchval(held, name))
                await asyncio.sleep(0.002)

        async def send(connection: Connection, broker: Broker) -> None:
            nonlocal sent
            for _ in range(25):
                async with connection.transaction():  # numbers are assigned in another order than they are committed
                    for _ in range(rng.randrange(1, 4)):
                        body, sent = b"%d" % sent, sent + 1
                        await connection.execute(
                            "SELECT tenure.send($1, $2, delay => $3, priority => $4)",
                            name,
                            body,
                            rng.choice([0.0, 0.0, 0.01, 0.05]),
                            rng.choice([0, 0, 0, 5]),
                        )
                    await asyncio.sleep(rng.random() * 0.02)

        async def work(broker: Broker) -> None:
            while len(handled) < sent or not done:
                is_left = rng.random() < 0.2  # to the end of its locks
                claim = await broker.receive(name, rng.randrange(1, 8), 0.1 if is_left else LOCK)
                kinds: list[Verdict] = [COMPLETE, Abandon(), Abandon(delay=0.02), GIVE_BACK]
                verdicts = rng.choices(kinds, [6, 1, 1, 1], k=8)
                passed = [] if is_left else [Settlement(*one) for one in zip(claim.deliveries, verdicts, strict=False)]
                for one, answer in zip(passed, await broker.settle(passed), strict=True):
                    assert answer == Settled()
                    if one.verdict is COMPLETE:
                        handled.append(one.delivery.body)
                await asyncio.sleep(0)

        done = False
        async with native(url) as first, native(url) as second, native(url) as third, asyncio.timeout(TTL):
            watching = asyncio.ensure_future(watch(third))
            working = [asyncio.ensure_future(work(one.broker)) for one in (backend, other) for _ in range(2)]
            await asyncio.gather(*(send(connection, backend.broker) for connection in (first, second)))
            done = True
            await asyncio.gather(*working)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        assert sorted(handled) == sorted(b"%d" % number for number in range(sent))
        assert most is None or max(locked) == most


# --- claims whose answer was lost --------------------------------------------------------------------------------


@asynccontextmanager
async def behind_a_proxy(server: Postgres) -> AsyncIterator[tuple[Broker, FaultProxy]]:
    """Yield a broker whose answers can be lost."""
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        through = (await migrated(server)).url.replace(f":{server.port}/", f":{proxy.port}/")
        async with opened(f"{through}?pool=1&timeout=5&listen=false") as backend:
            yield backend.broker, proxy


def is_quiet() -> bool:
    return not any(
        task.get_name() in ("tenure-postgres-notify", "tenure-postgres-tidy") for task in asyncio.all_tasks()
    )


async def test_a_claim_whose_answer_was_lost_is_given_back_uncounted(server: Postgres, url: str, name: str) -> None:
    async with behind_a_proxy(server) as (broker, proxy), native(url) as connection:
        await broker.send(name, [Outgoing(b"1"), Outgoing(b"2")])
        first = (await broker.receive(name, 1, LOCK)).deliveries
        await until(is_quiet)
        for _ in range(3):
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                await broker.receive(name, 10, LOCK)
            proxy.heal()
        await until(lambda: responds(broker, name))
        claim = await broker.receive(name, 10, LOCK)
        assert [(one.body, one.delivery_count) for one in claim.deliveries] == [(b"2", 1)]
        assert (
            await broker.settle([Settlement(one, COMPLETE) for one in (*first, *claim.deliveries)]) == [Settled()] * 2
        )
        # One that was not found: it is executed later.
        assert isinstance(broker, postgres.PostgresBroker)
        with pytest.raises(Unavailable), broker._claims.noting(name, 77, 60.0):
            raise Unavailable("as if the request was sent")
        assert (await broker.receive(name, 10, LOCK)).deliveries == ()
        await broker.send(name, [Outgoing(b"3")])
        assert await connection.fetch("SELECT FROM tenure.receive($1, 1, 60, 77)", name)
        claim = await broker.receive(name, 10, LOCK)
        assert [(one.body, one.delivery_count) for one in claim.deliveries] == [(b"3", 1)]
        assert not broker._claims


async def test_a_claim_that_arrives_late_after_a_network_failure_is_given_back(
    server: Postgres, url: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New connections succeed before requests sent on old ones arrive: TCP resends these ever less often."""
    passed = [0.0]
    monkeypatch.setattr(claims, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(passed)))
    async with behind_a_proxy(server) as (broker, proxy), opened(url) as other:
        assert isinstance(broker, postgres.PostgresBroker)
        await broker.send(name, [Outgoing(b"a")])
        assert (await broker.receive(f"{name}-other", 1, LOCK)).deliveries == ()
        await until(is_quiet)
        proxy.holding = asyncio.Event()
        pending = asyncio.ensure_future(broker.receive(name, 1, LOCK))
        await proxy.holding.wait()
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        passed.append(LOCK / 2)  # the network was cut
        assert (await broker.receive(name, 0, LOCK)).deliveries == ()
        await proxy.deliver()
        assert (await other.broker.stats(name)).locked == 1
        claim = await broker.receive(name, 1, LOCK)
        assert [(one.body, one.delivery_count) for one in claim.deliveries] == [(b"a", 1)]
        with pytest.raises(Unavailable), broker._claims.noting(name, 77, LOCK):
            raise Unavailable("it will never arrive")
        for _ in range(2):
            passed.append(LOCK / 2)
            assert broker._claims
            assert (await broker.receive(name, 1, LOCK)).deliveries == ()
        assert not broker._claims


async def test_a_lost_claim_of_deferred_messages_is_given_back_uncounted(server: Postgres, name: str) -> None:
    async with behind_a_proxy(server) as (broker, proxy):
        await broker.send(name, [Outgoing(b"1"), Outgoing(b"2")])
        got = (await broker.receive(name, 2, LOCK)).deliveries
        await broker.settle([Settlement(one, Defer()) for one in got])
        numbers = [one.sequence for one in got]
        [in_hand] = (await broker.receive_deferred(name, numbers[:1], LOCK)).deliveries
        await until(is_quiet)
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            await broker.receive_deferred(name, numbers, LOCK)
        proxy.heal()
        await until(lambda: responds(broker, name))
        found = (await broker.receive_deferred(name, numbers, LOCK)).deliveries
        assert [(one.body, one.delivery_count) for one in found] == [(b"2", 2)]
        assert await broker.settle([Settlement(one, COMPLETE) for one in (in_hand, *found)]) == [Settled()] * 2


async def test_giving_a_claim_back_costs_no_more_beside_many_locked_messages(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection:
        broker, costs = backend.broker, []
        for depth in (100, 3_000):
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"x")] * (depth + 20))
            for lock in (LOCK - 5, LOCK + 5):  # as if they had been claimed 5 s earlier or later
                assert len((await broker.receive(queue, depth // 2, lock)).deliveries) == depth // 2
            await connection.execute("ANALYZE")
            await connection.execute("DISCARD PLANS")
            asked_at = time.monotonic()
            assert len(await connection.fetch("SELECT FROM tenure.receive($1, 10, $2, 7)", queue, LOCK)) == 10
            statement = "SELECT tenure.give_back($1, '{7, 8}', $2, $3)"
            ages = [time.monotonic() - asked_at + 2.0] * 2  # until it is executed, on a busy machine
            costs.append(await cost(connection, statement, queue, ages, [LOCK] * 2))
            assert (await broker.stats(queue)).ready == 20
        assert costs[1] < 1.5 * costs[0] + 50, costs


async def test_a_session_is_in_order_after_a_claim_whose_answer_was_lost(server: Postgres, url: str, name: str) -> None:
    async with behind_a_proxy(server) as (broker, proxy):
        await broker.send(name, [Outgoing(b"%d" % number, session="s") for number in range(4)])
        held, _ = await claimed(broker, name)
        await until(is_quiet)
        proxy.lose_answers()
        with pytest.raises(Unavailable):
            await broker.receive_session(held, 2)
        proxy.heal()
        await until(lambda: responds(broker, name))
        claim = await broker.receive_session(held, 2)
        assert isinstance(claim, Claim)
        assert [(one.body, one.delivery_count) for one in claim.deliveries] == [(b"1", 1), (b"2", 1)]


async def test_sessions_whose_locks_have_ended_are_forgotten(turnable: Postgres, name: str) -> None:
    async with opened(turnable.url) as backend:
        broker = backend.broker
        assert isinstance(broker, postgres.PostgresBroker)
        await broker.send(name, [Outgoing(b"x", session=f"{number}") for number in range(300)])
        held = [(await claimed(broker, name))[0] for _ in range(300)]
        assert len(broker._sessions) == 300
        assert isinstance((await broker.renew(held[:1], LOCK))[0], Renewed)
        turnable.turn(LOCK * 1.05)
        assert await broker.receive_session(held[1], 1) is LAPSED
        assert len(broker._sessions) == 299
        assert set(await broker.renew(held, LOCK)) == {LAPSED}
        assert len(broker._sessions) == 0


async def test_sessions_without_further_requests_are_forgotten_in_time() -> None:
    sessions = HeldSessions()
    for number in range(10_000):  # of which a hundred are held at a time
        sessions.hold(number, ends=number + 100, now=number)
        sessions.received(number, [number])
        sessions.hold(0, ends=number + 100, now=number)  # one is renewed all the time
        assert len(sessions) <= 256
    assert sessions.unsettled(0) == [0]
    assert sessions.unsettled(9_950) == [9_950]
    assert sessions.unsettled(5_000) == []


async def responds(broker: Broker, name: str) -> bool:
    try:
        await broker.settings(name)
    except Unavailable:
        return False
    return True


# --- deaths ------------------------------------------------------------------------------------------------------


async def test_deaths_found_on_one_loop_while_another_reports_them_are_reported_once(url: str, name: str) -> None:
    async with opened(url) as backend:
        broker = backend.broker
        found = json.dumps([[number, None, 1, "expired"] for number in range(2_000)])
        taken: list[int] = []
        is_over = threading.Event()

        def take() -> None:
            while not is_over.is_set():
                taken.extend(one.sequence for one in broker._functions.deaths.take(name))

        taker = threading.Thread(target=take)
        taker.start()
        try:
            for _ in range(30):
                broker._functions.deaths.note(name, found)
                await until(lambda: not broker._functions.deaths._kept.get(name))
        finally:
            is_over.set()
            taker.join()
        assert len(taken) == 30 * 2_000


# --- rights ------------------------------------------------------------------------------------------------------


def no_right_on(table: str) -> str:
    """Return the pattern of one line that names the right and the table."""
    return rf"\A[^\n]*permission denied for table {table}\b[^\n]*GRANT[^\n]*\Z"


async def test_a_role_that_sends_and_one_that_consumes_can_do_no_more(server: Postgres, url: str, name: str) -> None:
    written = (Path(__file__).parents[3] / "docs" / "postgresql.md").read_text()
    [grants] = re.findall(r"^```sql\n-- sends(.*?)^```$", written, re.MULTILINE | re.DOTALL)
    async with native(url) as connection:
        await connection.execute(f"CREATE ROLE producer LOGIN; CREATE ROLE consumer LOGIN; --{grants}")
        await connection.execute("SELECT tenure.declare($1)", name)
    as_producer, as_consumer = (url.replace("postgres@", f"{role}@") for role in ("producer", "consumer"))
    async with opened(as_producer) as sender, opened(as_consumer) as receiver:
        kinds: list[dict[str, Any]] = [
            {}, {"id": "a"}, {"session": "s"}, {"priority": 3}, {"delay": 3600.0}, {"expires_in": 99.0}
        ]  # fmt: skip
        for _ in range(2):
            await sender.broker.send(name, [Outgoing(b"x", **kind) for kind in kinds])
        async with native(as_producer) as connection:
            await connection.execute("SELECT tenure.send($1, 'y', id => 'b')", name)
            for forbidden in ("SELECT body FROM tenure.message", "DELETE FROM tenure.message"):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(forbidden)
        with pytest.raises(Unavailable, match=no_right_on("message")):
            await sender.broker.receive(name, 1, LOCK)

        broker = receiver.broker
        got = (await broker.receive(name, 100, LOCK)).deliveries
        assert len(got) == 8
        verdicts: list[Verdict] = [Complete(remember=9.0), Abandon(), Abandon(delay=9.0), GIVE_BACK, DeadLetter("bad")]
        await broker.renew(got, LOCK)
        await broker.settle(
            [Settlement(*one) for one in zip(got, [*verdicts, Defer(), COMPLETE, COMPLETE], strict=True)]
        )
        [dead] = (await broker.receive(f"{name}{DEAD_SUFFIX}", 9, LOCK)).deliveries
        await broker.settle([Settlement(dead, COMPLETE)])
        held, claim = await claimed(broker, name)
        await broker.renew([held], LOCK)
        await broker.write_state(held, b"state")
        await broker.settle([Settlement(claim.deliveries[0], Abandon())])
        await broker.release(held)
        await broker._functions.call("tidy", name)
        received = housekeeping.Received(highest=got[-1].sequence)
        await broker._housekeeping._raise_marks(name, received, looks_ahead=True)
        async with native(url) as connection:
            raised = "SELECT count(*) FROM tenure.mark JOIN tenure.queue ON id = queue WHERE name = $1 AND kind = 2"
            assert await connection.fetchval(raised, name) == 1
        stats = await broker.stats(name)
        assert (stats.locked, stats.deferred, stats.dead) == (0, 1, 0)
        with pytest.raises(Unavailable, match=no_right_on("message")):
            await broker.send(name, [Outgoing(b"x")])
        with pytest.raises(Unavailable, match=no_right_on("queue")):
            await broker.declare(name, {"lock": 9.0})

        async with opened(url) as owner:
            await owner.broker.send(f"{name}-2", [Outgoing(b"x")])
            claim = await owner.broker.receive(f"{name}-2", 1, LOCK)
            await owner.broker.settle([Settlement(claim.deliveries[0], DeadLetter("bad"))])
        with pytest.raises(Unavailable, match=no_right_on("message")):
            await broker.redrive(f"{name}-2", EVERYTHING, None)

        async with opened(url) as owner:
            await owner.broker.declare(name, {"max_locked": 2, "rate": (9, 99.0), "session_rate": (1, 99.0)})
        await sender.broker.send(name, [Outgoing(b"x"), Outgoing(b"x", session="t"), Outgoing(b"x", session="t")])
        claim = await broker.receive(name, 1, LOCK)
        assert (len(claim.deliveries), claim.is_limited) == (1, True)
        _, claim = await claimed(broker, name, "t", limit=2)
        assert (len(claim.deliveries), claim.is_held_back) == (1, True)
        assert not (await broker.receive_deferred(name, [got[5].sequence], LOCK)).deliveries
        assert isinstance(await broker.accept(name, None, LOCK), NoSession)
        await broker._functions.call("tidy", name)
        async with native(as_consumer) as connection:
            for forbidden in ("UPDATE tenure.queue SET max_locked = NULL", "SELECT FROM tenure.queue FOR UPDATE"):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(forbidden)


# --- a shorter renewal, and a clock that was set back ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["message", "session"])
async def test_a_shorter_renewal_shortens_no_lock_that_was_extended_beside_a_transaction(
    turnable: Postgres, name: str, kind: str
) -> None:
    async with opened(turnable.url) as backend, native(turnable.url) as connection:
        broker, is_session = backend.broker, kind == "session"
        held: SessionLock | Delivery
        await broker.send(name, [Outgoing(b"x", session="s" if is_session else None)])
        if is_session:
            held, claim = await claimed(broker, name)
            [first] = claim.deliveries
        else:
            [first] = [held] = (await broker.receive(name, 1, LOCK)).deliveries
        async with connection.transaction():
            await connection.execute("SELECT FROM tenure.message WHERE seq = $1 FOR UPDATE", first.sequence)
            [longer], [shorter] = await broker.renew([held], LOCK * 2), await broker.renew([held], LOCK * 1.5)
            assert isinstance(longer, Renewed)
            assert shorter == longer
        turnable.turn(LOCK * 1.8)
        [again] = await broker.renew([held], LOCK / 10)
        assert again == longer
        assert (await broker.receive(name, 1, LOCK)).deliveries == ()
        assert await broker.settle([Settlement(first, COMPLETE)]) == [Settled()]


async def test_a_short_lock_with_less_than_a_second_left_is_not_extended_beside_a_transaction(
    url: str, name: str
) -> None:
    """The answer may come after its end: then another process may have found it over."""
    async with opened(url) as backend, native(url) as connection:
        broker = backend.broker
        await broker.send(name, [Outgoing(b"x")])
        [first] = (await broker.receive(name, 1, 0.95)).deliveries
        async with connection.transaction():
            await connection.execute("SELECT FROM tenure.message WHERE seq = $1 FOR UPDATE", first.sequence)
            assert await broker.renew([first], 1.0) == [LAPSED]


async def test_nothing_is_younger_than_now_for_a_clock_that_was_set_back(url: str, name: str) -> None:
    async with opened(url) as backend, native(url) as connection:
        await backend.broker.send(name, [Outgoing(b"x")])
        await connection.execute("UPDATE tenure.message SET enqueued_at = enqueued_at + 1000")
        stats = await backend.broker.stats(name)
        assert (stats.ready, stats.oldest_age) == (1, 0.0)


# --- ids ---------------------------------------------------------------------------------------------------------


async def test_ids_are_the_same_before_and_after_the_functions_are_replaced(server: Postgres) -> None:
    url = f"{server.url}?schema=renamed"
    await postgres.migrate(url)
    async with tenure.connect(url) as backend, native(server.url) as connection:
        orders = backend.queue("orders")
        now = functions("renamed")
        before = now.replace(f"|| '{ID_MARK}' ||", "|| '$' ||")
        assert before != now
        await connection.execute(before)
        noted = await connection.fetchval("SELECT renamed.send('orders', 'a')")
        assert noted == "orders$1"
        [message] = await orders.receive()
        await message.complete(remember=TTL)
        assert message.id == "orders--1"
        assert await orders.handled(message.id, noted, "orders--2") == [True, True, False]
        noted = await connection.fetchval("SELECT renamed.send('orders', 'a')")
        [message] = await orders.receive()
        await message.dead_letter("wrong")
        letters = orders.dead_letters
        assert [one.id for one in await letters.peek(ids=[message.id])] == ["orders--2"]
        assert [one.id for one in await letters.peek(ids=[noted])] == ["orders--2"]
        await connection.execute(now)
        assert [one.id for one in await letters.peek(ids=[noted])] == ["orders--2"]
        by_former = "SELECT seq FROM renamed.peek_dead('orders', NULL, ARRAY[$1], NULL, NULL, 0, 10)"
        assert await connection.fetchval(by_former, noted) == 2  # as a client of an earlier release calls it
        sent_id = await connection.fetchval("SELECT renamed.send('orders', 'b')")
        assert sent_id == "orders--3"


# --- purging beside other transactions ---------------------------------------------------------------------------


@asynccontextmanager
async def purge_held_up(url: str, broker: Broker, name: str, body: bytes, which: LiveSelection) -> AsyncIterator[None]:
    """Let a purge that removes the message with this body run up to its COMMIT, and commit behind the block."""
    stop = f"""
        CREATE OR REPLACE FUNCTION stop_{name.replace("-", "_")}() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_advisory_xact_lock(4711);
            RETURN OLD;
        END $$;
        CREATE CONSTRAINT TRIGGER stop AFTER DELETE ON tenure.message INITIALLY DEFERRED
            FOR EACH ROW WHEN (OLD.body = '\\x{body.hex()}') EXECUTE FUNCTION stop_{name.replace("-", "_")}();
    """
    async with native(url) as connection, native(url) as watch:
        await connection.execute(stop)
        try:
            async with connection.transaction():
                await connection.execute("SELECT pg_advisory_xact_lock(4711)")
                purging = asyncio.ensure_future(broker.purge_live(name, which))
                await until(lambda: is_waiting(watch))
                yield
            await purging
        finally:
            await connection.execute("DROP TRIGGER stop ON tenure.message")


async def held_up_twice(broker: Broker, name: str) -> tuple[SessionLock, Claim]:
    """Lock a session that a delayed message holds up (A) and a locked one (B), with a ready one (C) behind."""
    await broker.send(name, [Outgoing(body, session="s") for body in (b"A", b"B", b"C")])
    held, claim = await claimed(broker, name, limit=2)
    await broker.settle([Settlement(claim.deliveries[0], Abandon(delay=1_000.0))])
    return held, claim


async def test_a_session_goes_on_whose_blockers_end_by_a_purge_and_a_consumer(url: str, name: str) -> None:
    """Neither of the two sees the other's deletion."""
    async with opened(url) as backend:
        broker = backend.broker
        held, claim = await held_up_twice(broker, name)
        async with purge_held_up(url, broker, name, b"A", LiveSelection(states=frozenset(["delayed"]))):
            await broker.settle([Settlement(claim.deliveries[1], COMPLETE)])
            await broker.release(held)
        _, claim = await claimed(broker, name)
        assert [one.body for one in claim.deliveries] == [b"C"]


async def test_a_session_goes_on_whose_blockers_end_by_two_purges(url: str, name: str) -> None:
    async with opened(url) as backend:
        broker = backend.broker
        held, claim = await held_up_twice(broker, name)
        await broker.settle([Settlement(claim.deliveries[1], Abandon(delay=1_000.0))])
        await broker.release(held)
        first, second = (frozenset([one.sequence]) for one in claim.deliveries)
        async with purge_held_up(url, broker, name, b"A", LiveSelection(sequences=first)):
            assert await broker.purge_live(name, LiveSelection(sequences=second)) == 1
            assert isinstance(await broker.accept(name, None, LOCK), NoSession)
        _, claim = await claimed(broker, name)
        assert [one.body for one in claim.deliveries] == [b"C"]


async def test_messages_that_become_due_during_a_purge_are_purged(url: str, name: str) -> None:
    async with opened(url) as backend:
        broker = backend.broker
        await broker.send(name, [Outgoing(b"A"), Outgoing(b"late", delay=0.3)])

        async def is_due_or_gone() -> bool:
            return not await broker.peek(name, LiveSelection(states=frozenset(["delayed"])), 1)

        async with purge_held_up(url, broker, name, b"A", EVERY_LIVE):
            await until(is_due_or_gone)
        assert (await broker.stats(name)).ready == 0


# --- queues that are idle, or deleted ----------------------------------------------------------------------------


async def test_a_hundred_idle_queues_are_listed_and_deletion_leaves_no_rows(
    server: Postgres,
) -> None:
    url, day = f"{server.url}?schema=idling", 86_400.0
    await postgres.migrate(url)
    async with opened(url) as backend, native(server.url) as connection:
        due = [f"due {number}" for number in range(105)]
        deleted = {"gone": day + 60, "held": day + 60, "recent": day - 60}
        for queue in (*due, *deleted, "used", "later"):
            await connection.execute("SELECT idling.declare($1)", queue)
            for table, columns in (("tally", "(queue, ready)"), ("mark", "(queue, kind, keys)")):
                await connection.execute(
                    f"INSERT INTO idling.{table} {columns} SELECT id, n {', array_fill(0, $2)' * (table == 'mark')} "
                    f"FROM idling.queue, generate_series(0, 1) AS n WHERE name = $1",
                    queue,
                    *([[14]] if table == "mark" else []),
                )
        empty = "INSERT INTO idling.tally (queue, ready) SELECT id, -1 FROM idling.queue WHERE name = $1"
        await connection.execute(empty, "gone")
        await connection.execute(empty, "recent")
        since = "UPDATE idling.queue SET {} = idling.clock() - $2::float8 WHERE name = $1"
        await connection.executemany(since.format("deleted_at"), list(deleted.items()))
        waiting = [(queue, 1.0 + place) for place, queue in enumerate(due)]
        random.Random(7).shuffle(waiting)
        await connection.executemany(since.format("idle_at"), [*waiting, ("later", -1000.0)])
        assert await backend.broker.idle() == due[:4:-1]
        await connection.execute("UPDATE idling.queue SET idle_at = NULL WHERE name = ANY ($1)", due[5:])
        assert await backend.broker.idle() == due[4::-1]
        left = "SELECT name, count(DISTINCT t.n), count(DISTINCT m.n) FROM idling.queue "
        left += "LEFT JOIN idling.tally AS t ON t.queue = id LEFT JOIN idling.mark AS m ON m.queue = id GROUP BY name"
        rows = {row[0]: tuple(row[1:]) for row in await connection.fetch(left)}
        assert rows == {**dict.fromkeys((*due, "held", "used", "later"), (2, 2)), "recent": (3, 2)}
        for table in ("tally", "mark"):  # nothing is left behind either
            orphans = f"SELECT count(*) FROM idling.{table} WHERE queue NOT IN (SELECT id FROM idling.queue)"
            assert await connection.fetchval(orphans) == 0


# --- upgrades ----------------------------------------------------------------------------------------------------


async def test_sessions_of_version_3_are_offered_also_if_they_were_sent_meanwhile(server: Postgres, name: str) -> None:
    url = f"{server.url}?schema=third"
    await postgres.migrate(url, to=3)
    row = "INSERT INTO third.message (queue, state, enqueued_at, session, body) VALUES (1, 0, 1, $1, 'x')"
    async with native(server.url) as connection, native(server.url) as late, native(server.url) as watch:
        await connection.execute(
            "INSERT INTO third.queue (name, lock, max_deliveries, dedupe_window, body_max) VALUES ($1, 9, 3, 9, 99)",
            name,
        )
        await connection.execute(row, "before")
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(row, "open")
        migrating = asyncio.ensure_future(postgres.migrate(url))
        await until(lambda: is_waiting(watch))
        # Like a call that had begun: with no function of version 4, and committed only after the migration.
        sending = asyncio.ensure_future(late.execute(row, "late"))
        await until(lambda: are_waiting(watch, 2))
        await transaction.commit()
        assert str(await migrating) == f"upgraded the schema 'third' from version 3 to {VERSION}"
        await sending
    async with opened(url) as backend:
        found = [await backend.broker.accept(name, None, LOCK) for _ in range(4)]
        assert [one.session if isinstance(one, SessionLock) else None for one in found] == [
            "before", "open", "late", None
        ]  # fmt: skip


@pytest.mark.parametrize("held", ["queue", "message", "tally", "session"])
async def test_an_upgrade_and_an_open_transaction_do_not_deadlock(server: Postgres, name: str, held: str) -> None:
    schema = f"loaded_{held}"
    url = f"{server.url}?schema={schema}"
    await postgres.migrate(url, to=3)
    async with native(server.url) as user, native(server.url) as watch:
        await user.execute("SET deadlock_timeout = '10ms'")  # in a deadlock, this transaction is cancelled
        async with user.transaction():
            await user.execute(f"DELETE FROM {schema}.{held}")
            migrating = asyncio.ensure_future(postgres.migrate(url))
            await until(lambda: is_waiting(watch))
            for other in ("queue", "message", "tally", "session"):
                await user.execute(f"DELETE FROM {schema}.{other}")
        assert (await migrating).after == VERSION


async def test_a_cancelled_upgrade_leaves_the_version_and_the_next_one_succeeds(server: Postgres) -> None:
    url = f"{server.url}?schema=interrupted"
    await postgres.migrate(url, to=3)
    async with native(server.url) as user, native(server.url) as watch:
        async with user.transaction():
            await user.execute("DELETE FROM interrupted.message")
            migrating = asyncio.ensure_future(postgres.migrate(url))
            await until(lambda: is_waiting(watch))
            migrating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await migrating
        assert await watch.fetchval("SELECT max(version) FROM interrupted.migration") == 3
    assert str(await postgres.migrate(url)) == f"upgraded the schema 'interrupted' from version 3 to {VERSION}"


async def are_waiting(connection: asyncpg.Connection[asyncpg.Record], count: int) -> bool:
    return bool(await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted") >= count)


async def test_old_code_works_with_a_newer_compatible_schema(server: Postgres, name: str) -> None:
    url = f"{server.url}?schema=rolling"
    await postgres.migrate(url)
    async with native(server.url) as connection:
        # As a later release would leave it.
        newer = "INSERT INTO rolling.migration (version, oldest) VALUES ($1, $2)"
        await connection.execute(newer, VERSION + 1, VERSION)
        async with opened(url) as backend:
            await backend.broker.send(name, [Outgoing(b"x")])
            assert len((await backend.broker.receive(name, 1, LOCK)).deliveries) == 1
        assert "already" in str(await postgres.migrate(url))
        await connection.execute(newer, VERSION + 2, VERSION + 1)
        async with opened(url) as backend:
            with pytest.raises(ConfigError, match="made by a newer tenure"):
                await backend.broker.send(name, [Outgoing(b"x")])
        with pytest.raises(ConfigError, match="made by a newer"):
            await postgres.migrate(url)


async def test_a_migration_leaves_the_indexes_that_the_functions_need(server: Postgres) -> None:
    url, statement = f"{server.url}?schema=indexed", "SELECT indexname FROM pg_indexes WHERE tablename = 'message'"
    await postgres.migrate(url)
    async with native(server.url) as connection:
        wanted = await connection.fetch(f"{statement} AND schemaname = 'indexed' ORDER BY 1")
        assert [name for (name,) in wanted] == ["message_due", "message_order", "message_pkey", "message_turn"]
        # As an earlier state of this version had left it.
        await connection.execute(
            "DROP INDEX indexed.message_order, indexed.message_turn; "
            "CREATE INDEX message_ready ON indexed.message (queue, priority, (seq + 0)) WHERE state = 0; "
            "CREATE INDEX message_deferred ON indexed.message (queue, seq) WHERE state = 3; "
            "UPDATE indexed.migration SET functions = 'others'"
        )
        await postgres.migrate(url)
        assert await connection.fetch(f"{statement} AND schemaname = 'indexed' ORDER BY 1") == wanted
