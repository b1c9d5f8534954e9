"""Live messages: peeked at, and purged in steps, by the statements of live.sql."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import asyncpg

from tenure._backends.postgres.client import Client
from tenure._backends.postgres.connections import Connection, transaction
from tenure._backends.postgres.functions import QueueFunctions
from tenure._backends.postgres.rows import STATES, delivery_of, live_message
from tenure._backends.postgres.statements import PLANS, SEARCH_PATH, statements
from tenure._backends.postgres.wake import Wake
from tenure._queue.broker import LiveSelection
from tenure._queue.checks import INT_MAX
from tenure._queue.identity import ID_MARK
from tenure._queue.message import Delivery, LiveMessage, State

PURGE_BATCH = 1_000
"""Live messages that are purged in one transaction."""

_LOCKED = 1
_LANES: tuple[tuple[State, int], ...] = (("deferred", 11), *(("ready", lane) for lane in range(11)))
"""The states and lanes in the order of a purge: a delayed or deferred message may move to a later lane meanwhile."""

PLANNED = "; ".join(f"SET LOCAL {setting}" for setting in (*PLANS, SEARCH_PATH))
"""Gives the statements of a transaction the settings of the functions."""


class LiveMessages:
    """The messages of queues, dead letters excepted."""

    def __init__(self, client: Client, functions: QueueFunctions, wake: Wake) -> None:
        self._client = client
        self._functions = functions
        self._wake = wake
        self._schema = client.options.schema

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages."""
        await self._functions.apply_due(queue)
        rows = await self._planned("peek", queue, *_conditions(which), limit, _states(which))
        return [live_message(queue, row) for row in rows]

    async def purge(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove live messages for good, some of one priority or state in each step."""
        await self._functions.apply_due(queue)
        [[now]] = await self._client.fetch(f"SELECT {self._schema}.clock()")
        which = replace(which, sent_before=now if which.sent_before is None else min(now, which.sent_before))
        if dry_run:
            states = [state for state in _states(which) if state != _LOCKED]
            [[counted]] = await self._planned("count", queue, *_conditions(which), None, states)
            return int(counted)
        total = await self._purge_delayed(queue, which) if which.wants("delayed") else 0
        for state, lane in _LANES:
            if which.wants(state):
                total += await self._purge_lane(queue, which, lane)
        return total

    async def _purge_lane(self, queue: str, which: LiveSelection, lane: int) -> int:
        total = 0
        while True:
            count, last = await self._purge("purge_lane", queue, which, lane)
            total += count
            if last is None:
                return total
            which = replace(which, after=int(last))

    async def _purge_delayed(self, queue: str, which: LiveSelection) -> int:
        total, due_at = 0, 0.0
        while True:
            count, last = await self._purge("purge_delayed", queue, which, due_at)
            total += count
            if last is None:
                return total
            due_at = last

    async def _purge(self, statement: str, queue: str, which: LiveSelection, behind: float) -> tuple[int, float | None]:
        """Run one step; return how many it removed, and the last of them, or None if no more are left."""
        known = live_statements(self._schema)

        async def purge(connection: Connection) -> tuple[int, float | None, bool]:
            async with transaction(connection, self._client.bound()):
                await connection.execute(PLANNED)
                row = await connection.fetchrow(known[statement], queue, *_conditions(which), PURGE_BATCH, behind)
                assert row is not None
                count, last, has_freed = row
            return count, last if count == PURGE_BATCH else None, has_freed

        count, last, has_freed = await self._client.run(purge)
        if has_freed:  # a removed message held up others of its session
            self._wake.notify(f"queue:{queue}")
        return count, last

    async def holding(self, queues: Sequence[str]) -> Sequence[bool]:
        """Tell which of *queues* hold messages."""

        async def look(connection: Connection) -> list[bool]:
            rows = await connection.fetch(live_statements(self._schema)["holding"], list(queues))
            if any(is_read_only for _, is_read_only in rows):  # a claim would show it: another server is the primary
                raise asyncpg.ReadOnlySQLTransactionError("it can only be read")
            return [holds for holds, _ in rows]

        return await self._client.run(look)

    async def _planned(self, statement: str, *values: object) -> list[Any]:
        """Return the rows of one of the statements about live messages."""

        async def fetch(connection: Connection) -> list[Any]:
            async with transaction(connection, self._client.bound()):
                await connection.execute(PLANNED)
                return await connection.fetch(live_statements(self._schema)[statement], *values)

        return await self._client.run(fetch)

    async def peek_deferred(self, queue: str, limit: int, after: int = 0) -> Sequence[Delivery]:
        """Show deferred messages."""
        await self._functions.apply_due(queue)
        return [delivery_of(queue, "", row) for row in await self._functions.rows("peek_deferred", queue, limit, after)]


def _states(which: LiveSelection) -> list[int]:
    return [number for number, state in enumerate(STATES) if which.wants(state)]


def _conditions(which: LiveSelection) -> tuple[Any, ...]:
    return (
        which.after,
        None if which.sequences is None else sorted(which.sequences),
        None if which.ids is None else sorted(which.ids),
        which.session,
        which.sent_before,
    )


@cache
def live_statements(schema: str) -> dict[str, str]:
    """Return the statements of live.sql, with the parts that several of them share."""
    found = statements("live.sql", schema)
    for part in ("fits", "begin", "lanes", "dues"):
        found = {name: text.replace(f"{{{part}}}", found[part]) for name, text in found.items()}
    shared = {"{id_mark}": ID_MARK, "{int_max}": str(INT_MAX)}
    for place, value in shared.items():
        found = {name: text.replace(place, value) for name, text in found.items()}
    return found
