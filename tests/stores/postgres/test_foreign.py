"""Rows in PostgreSQL that another program has changed. Edits of one message or lease: see the suites."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tenure._backends.postgres.functions import Deaths
from tenure._backends.postgres.leases import _seen
from tenure._backends.postgres.queue import PostgresBroker, _settings_of
from tenure._backends.postgres.rows import death_of, delivery_of, live_message
from tenure._backends.postgres.wake import Wake
from tenure._checks import LONGEST
from tenure._lease import Granted, HeldBy, Vacant
from tenure._queue.broker import EVERYTHING, QueueSettings
from tenure._queue.checks import COUNT_MAX
from tenure._queue.message import HISTORY_MAX, Delivery, Died
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Abandon, DeadLetter, Settled, Settlement, Verdict
from tenure._runtime.notifier import Notifier
from tenure.errors import ConfigError
from tests.servers import Postgres, shared
from tests.stores.postgres.migrated import Native, migrated, native, opened

LOCK = 3_600.0  # nothing here waits for its end, and no test takes as long

COLUMNS: dict[str, Any] = {
    "number": 5,
    "id": None,
    "body": b"x",
    "headers": None,
    "deliveries": 1,
    "enqueued_at": 1.5,
    "until": 2.5,
    "session": None,
    "priority": 0,
    "reply_to": None,
    "correlation_id": None,
}


class Server:
    """A queue and leases on a server, and the hand of another program."""

    def __init__(self, broker: PostgresBroker, leases: Any, connection: Native, name: str) -> None:
        self.broker = broker
        self.leases = leases
        self.connection = connection
        self.queue = name

    async def send(self, *bodies: bytes) -> None:
        await self.broker.send(self.queue, [Outgoing(body) for body in bodies])

    async def receive(self) -> list[Delivery]:
        return list((await self.broker.receive(self.queue, 10, LOCK)).deliveries)

    async def edit(self, change: str, body: bytes, table: str = "message") -> None:
        await self.connection.execute(
            f"UPDATE tenure.{table} SET {change} "
            "WHERE body = $1 AND queue = (SELECT id FROM tenure.queue WHERE name = $2)",
            body,
            self.queue,
        )

    async def settle(self, verdict: Verdict, *deliveries: Delivery) -> None:
        answers = await self.broker.settle([Settlement(one, verdict) for one in deliveries])
        assert all(isinstance(answer, Settled) for answer in answers)


@pytest.fixture
async def server(name: str) -> AsyncIterator[Server]:
    postgres = await migrated(shared(Postgres))
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(opened(postgres.url))
        connection = await stack.enter_async_context(native(postgres.url))
        yield Server(backend.broker, backend.leases, connection, name)


def bodies(deliveries: list[Delivery]) -> list[bytes]:
    return [one.body for one in deliveries]


# --- rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value", "field", "expected"),
    [
        ("headers", "{", "headers", {}),
        ("headers", "[" * 100_000, "headers", {}),
        ("headers", "[1]", "headers", {}),
        ("headers", '{"a": "b", "c": [1], "x-tenure-y": 1}', "headers", {"a": "b", "x-tenure-y": 1}),
        ("deliveries", -5, "delivery_count", 0),
        ("enqueued_at", math.nan, "enqueued_at", 0.0),
        ("enqueued_at", math.inf, "enqueued_at", LONGEST),
        ("enqueued_at", -math.inf, "enqueued_at", 0.0),
        ("until", math.inf, "locked_until", LONGEST),
        ("priority", 77, "priority", 9),
        ("priority", -1, "priority", 0),
        ("session", "", "session", None),
    ],
)
def test_what_can_be_read_of_a_row_is_handed_out(column: str, value: object, field: str, expected: object) -> None:
    row = tuple((COLUMNS | {column: value}).values())
    delivery = delivery_of("q", 7, row)
    assert getattr(delivery, field) == expected
    assert (delivery.body, delivery.token) == (b"x", 7)
    shown = live_message("q", (*row, 2, math.nan, None, None))
    assert shown.due_at is None


def test_headers_of_any_size_that_may_be_sent_are_read() -> None:
    headers = {"\x01" * 200: "\x01" * 65_000}
    row = tuple((COLUMNS | {"headers": json.dumps(headers)}).values())
    assert delivery_of("q", 7, row).headers == headers


@pytest.mark.parametrize("history", [None, "null", "{}", "7", '"x"', '[[1,"x"],7,null]', "[" * 100_000])
def test_a_death_is_shown_whatever_its_history_is(history: str | None) -> None:
    death = death_of(("because", "", math.nan, history))
    assert (death.reason, death.at, death.error, death.history) == ("because", 0.0, None, ())


def test_deaths_that_are_unreadable_are_left_out() -> None:
    deaths = Deaths()
    deaths.note("q", '[[1, null, 2, "expired"], 7, ["x"], [2, 5, 1, "x"], [3, "id", -1, "max_deliveries", "more"]]')
    deaths.note("q", '[[4, "id", 999999999999999, "x"], [5, "id", 1e15, "x"]]')
    deaths.note("q", "[" * 100_000)
    deaths.note("q", "{}")
    one, three, four = Died(1, "q--1", 2, "expired"), Died(3, "id", 0, "max_deliveries"), Died(4, "id", COUNT_MAX, "x")
    assert deaths.take("q") == (one, three, four)


def test_settings_that_can_not_be_are_left_out() -> None:
    row = (math.nan, 0, -1.0, 10, -math.inf, -1, 0, 1.0, 5, math.inf, True)
    assert _settings_of(row) == QueueSettings(body_max=10, paused=True)


@pytest.mark.parametrize(
    ("token", "holder", "remaining", "expected"),
    [
        (-5, "ann", 1.0, HeldBy("a", "ann", 0, 1.0)),
        (5, "ann", math.inf, HeldBy("a", "ann", 5, LONGEST)),
        (5, "ann", math.nan, HeldBy("a", "ann", 5, None)),
        (5, None, 1.0, Vacant("a", 5)),
        (5, "ann", -math.inf, Vacant("a", 5)),
    ],
)
@pytest.mark.parametrize("metadata", ["", "[", "7", '{"x": 1}', "[" * 100_000])
def test_a_lease_is_shown_whatever_its_row_holds(
    token: int, holder: str | None, remaining: float, expected: object, metadata: str
) -> None:
    assert _seen("a", token, holder, remaining, metadata, False) == expected


@pytest.mark.parametrize("payload", ["", ":", "x", ":queue:unknown", "x" * 7_999, "\x01:\ufffd", None])
def test_a_notification_of_another_program_wakes_or_does_nothing(payload: object) -> None:
    waking = Wake.__new__(Wake)
    waking._nonce, waking._notifier = "nonce", Notifier()
    waking._on_notification(None, 1, "tenure.hints", payload)


# --- statements --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", ["null", "{}", "7", '"x"', '[7, null, {"x": [1]}]'])
async def test_a_history_of_another_form_keeps_back_no_message(server: Server, history: str) -> None:
    await server.send(b"a", b"b")
    await server.edit(f"history = '{history}'", b"a")
    await server.receive()
    await server.edit("due_at = 1", b"a")
    await server.edit("due_at = 1", b"b")
    received = await server.receive()
    assert bodies(received) == [b"a", b"b"], "their locks have ended"
    await server.settle(Abandon(), *received)
    await server.settle(DeadLetter("because"), *await server.receive())
    shown = await server.broker.peek_dead(server.queue, EVERYTHING, 10)
    assert [[one.outcome for one in letter.history] for letter in shown] == [["expired", "abandoned", "rejected"]] * 2


async def test_a_history_that_is_long_is_cut_by_the_next_attempt(server: Server) -> None:
    await server.send(b"a")
    [held] = await server.receive()
    await server.edit("history = (SELECT jsonb_agg(jsonb_build_array(n)) FROM generate_series(1, 5000) AS n)", b"a")
    await server.settle(Abandon(), held)
    length = await server.connection.fetchval(
        "SELECT jsonb_array_length(history) FROM tenure.message WHERE seq = $1", held.sequence
    )
    assert length == HISTORY_MAX


async def test_a_count_that_can_not_rise_keeps_back_no_message(server: Server) -> None:
    await server.send(b"a", b"b")
    await server.edit(f"deliveries = {COUNT_MAX}", b"a")
    received = await server.receive()
    assert [(one.body, one.delivery_count) for one in received] == [(b"a", COUNT_MAX), (b"b", 1)]


async def test_a_time_that_is_endless_is_waited_for_in_no_loop(server: Server) -> None:
    await server.broker.send(server.queue, [Outgoing(b"a", delay=5.0)])
    for due_at in ("'Infinity'", "'NaN'", "1e300"):
        await server.edit(f"due_at = {due_at}", b"a")
        due_in = (await server.broker.receive(server.queue, 10, LOCK)).due_in
        assert due_in is None or 0.0 < due_in <= LONGEST


async def test_counts_of_deliveries_that_are_huge_end_no_claim(server: Server) -> None:
    await server.broker.declare(server.queue, {"rate": (1, 60.0)})
    await server.send(b"a", b"b")
    await server.broker.receive(server.queue, 1, LOCK)
    for number in ("9223372036854775807", "-9223372036854775808"):
        await server.connection.execute(
            f"INSERT INTO tenure.delivered SELECT began, at, {number}, queue, scope FROM tenure.delivered "
            "WHERE queue = (SELECT id FROM tenure.queue WHERE name = $1)",
            server.queue,
        )
        await server.broker.receive(server.queue, 1, LOCK)


# --- leases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["9223372036854775807", "-5"])
async def test_a_token_that_can_not_rise_names_the_lease(server: Server, token: str) -> None:
    held = await server.leases.acquire(server.queue, "ann#1", LOCK)
    assert isinstance(held, Granted)
    await server.leases.release(held.grant)
    await server.connection.execute(f"UPDATE tenure.lease SET token = {token} WHERE name = $1", server.queue)
    with pytest.raises(ConfigError, match="token of the lease"):
        await server.leases.acquire(server.queue, "bob#1", LOCK)
    assert isinstance(await server.leases.inspect(server.queue), Vacant)
