"""The work of each kind of store for a request: counted by the store, or by its client."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
from redis import asyncio as aioredis

import tenure._backends.memory
from tenure._backends.postgres.client import Client

T = TypeVar("T")

MEMORY = str(Path(tenure._backends.memory.__file__).parent)


async def lines_run(ask: Callable[[], Awaitable[T]], *files: str) -> tuple[T, int]:
    """Count the lines of the memory store that are run, or of *files*, each iteration of a loop."""
    lines = 0

    def note(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return note

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        return note if frame.f_code.co_filename.startswith((MEMORY, *files)) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        answer = await ask()
    finally:
        sys.settrace(before)
    return answer, lines


class VmSteps:
    """Counts the steps and written bytes of SQLite on every connection that is opened from now on."""

    STEPS = 10  # between two calls of the counter
    WRITTEN = 100  # bytes that count as much as one step: a page counts as 40

    def __init__(self) -> None:
        self._rounds = 0
        self._patch = pytest.MonkeyPatch()

    def start(self) -> None:
        connect = sqlite3.connect

        def counted(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(*arguments, **options)
            connection.set_progress_handler(self._note, self.STEPS)
            return connection

        self._patch.setattr(sqlite3, "connect", counted)

    def stop(self) -> None:
        self._patch.undo()

    def _note(self) -> int:
        self._rounds += 1
        return 0

    async def of(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        rounds, written = self._rounds, _written()
        answer = await ask()
        return answer, (self._rounds - rounds) * self.STEPS + (_written() - written) // self.WRITTEN


def _written() -> int:
    """Return how many bytes this process has written so far; 0 if unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("wchar"))


async def rows_visited(client: Client, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
    """Count the rows and the entries of indexes that PostgreSQL goes through on *client*'s connections."""
    before = await _visited(client)
    answer = await ask()
    return answer, await _visited(client) - before


async def _visited(client: Client) -> int:
    for urgent in (False, True):  # each connection publishes its figures late
        await client.fetch("SELECT pg_stat_force_next_flush()", urgent=urgent)
    schema = client.options.schema
    [[rows]] = await client.fetch(
        "SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE schemaname = $1)"
        " + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE schemaname = $1)",
        schema,
    )
    return int(rows)


async def commands_called(redis: aioredis.Redis, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
    """Count the commands that a Redis carries out, those of scripts among them."""
    before = await _called(redis)
    answer = await ask()
    return answer, await _called(redis) - before - 1  # this request


async def _called(redis: aioredis.Redis) -> int:
    return sum(one["calls"] for one in (await redis.info("commandstats")).values())


async def methods_sent(ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
    """Count the methods that are sent to RabbitMQ: requests, verdicts and messages."""
    from tenure._backends.rabbitmq.connection import AmqpChannel

    sent = 0

    def counted(method: Callable[..., T]) -> Callable[..., T]:
        def call(*arguments: Any, **options: Any) -> T:
            nonlocal sent
            sent += 1
            return method(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("request", "publish", "ack", "reject"):
            patch.setattr(AmqpChannel, name, counted(getattr(AmqpChannel, name)))
        answer = await ask()
    return answer, sent


async def requests_sent(ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
    """Count the requests that are sent to Azure Storage."""
    from azure.core.pipeline.transport import AioHttpTransport

    send, sent = AioHttpTransport.send, 0

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal sent
        sent += 1
        return await send(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AioHttpTransport, "send", counted)
        answer = await ask()
    return answer, sent
