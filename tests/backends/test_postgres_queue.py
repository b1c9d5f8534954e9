"""The queues of PostgreSQL: what a question costs, whatever else is in the tables."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from tenure.backends import postgres
from tenure.queue.message import Outgoing
from tenure.url import Url
from tests.servers import Postgres, private

TTL = 60.0  # nothing here waits for its end, and no test takes as long


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """Give a server of this file's own, which tells what each statement has visited."""
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
    await postgres.migrate(server.url)
    return server.url


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}-{time.time_ns()}"


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[postgres.PostgresBackend]:
    backend = postgres.open(Url.parse(url))
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def native(url: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


# --- what a question visits --------------------------------------------------------------------------------------


def visited(plan: dict[str, Any]) -> float:
    """Count the rows that the nodes of *plan* took up: those they passed on, and those they left out."""
    left_out = sum(count for what, count in plan.items() if what.startswith("Rows Removed by"))
    mine = (plan["Actual Rows"] + left_out) * plan["Actual Loops"]
    return float(mine) + sum(visited(part) for part in plan.get("Plans", ()))


def pages(plan: dict[str, Any]) -> int:
    """Count the pages that *plan* looked at, each as often as it did."""
    return sum(int(plan[f"Shared {how} Blocks"]) for how in ("Hit", "Read"))


async def cost(connection: asyncpg.Connection[asyncpg.Record], statement: str, *values: object) -> int:
    """Return how many rows and pages *statement* visits, with all that the functions in it ask."""
    told: list[str] = []

    def hear(_: object, message: Any) -> None:
        told.append(message.message)

    connection.add_log_listener(hear)
    await connection.execute("SET client_min_messages = log; SET auto_explain.log_min_duration = 0")
    await connection.fetch(statement, *values)
    await connection.execute("SET auto_explain.log_min_duration = -1; SET client_min_messages = notice")
    connection.remove_log_listener(hear)
    plans = [json.loads(one.partition("plan:\n")[2])["Plan"] for one in told if "plan:\n" in one]
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
