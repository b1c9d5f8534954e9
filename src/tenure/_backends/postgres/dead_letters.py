"""Dead letters: peeked at, redriven and purged in steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tenure._backends.postgres.client import Client
from tenure._backends.postgres.connections import Connection, transaction
from tenure._backends.postgres.functions import QueueFunctions
from tenure._backends.postgres.live import PLANNED, live_statements
from tenure._backends.postgres.rows import dead_message
from tenure._backends.postgres.wake import Wake
from tenure._queue.broker import Selection
from tenure._queue.identity import spellings_of
from tenure._queue.message import DeadMessage

REDRIVE_BATCH = 5_000
"""Dead letters that are put back or removed in one statement."""

MOVE_BATCH = 200
"""Dead letters that are put into another queue in one transaction."""


class DeadLetters:
    """The dead letters of queues."""

    def __init__(self, client: Client, functions: QueueFunctions, wake: Wake) -> None:
        self._client = client
        self._functions = functions
        self._wake = wake
        self._schema = client.options.schema

    async def peek(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters."""
        await self._functions.apply_due(queue)
        rows = await self._functions.rows("peek_dead", queue, *_conditions(await self._dated(which)), limit)
        return [dead_message(queue, row) for row in rows]

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*."""
        if dry_run:
            await self._functions.apply_due(queue)
            which = await self._dated(which)
            counted: int = await self._functions.call("revive", queue, *_conditions(which), limit, False, True)
            return counted
        return await self._revive(queue, which, limit, purge=False, to=to)

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""
        return await self._revive(queue, which, limit, purge=True)

    async def _revive(
        self, queue: str, which: Selection, limit: int | None, *, purge: bool, to: str | None = None
    ) -> int:
        """Go through dead letters in steps, each of which ends long before the server's time limit."""
        await self._functions.apply_due(queue)
        which = await self._dated(which)
        batch = REDRIVE_BATCH if to is None else MOVE_BATCH
        if limit is None or limit > batch:  # a redriven message that dies again meanwhile is not redriven again
            [[now]] = await self._client.fetch(f"SELECT {self._schema}.clock()")
            which = replace(which, dead_before=now if which.dead_before is None else min(now, which.dead_before))
        total = 0
        while limit is None or total < limit:
            most = batch if limit is None else min(batch, limit - total)
            if to is None:
                found: int = await self._functions.call("revive", queue, *_conditions(which), most, purge, False)
            else:
                found = await self._move(queue, which, most, to)
            total += found
            if found and not purge:  # at each step: consumers need not wait for the last step, which may fail
                self._wake.notify(f"queue:{to or queue}")
            if not found:  # fewer than requested may be found while consumers settle some of them
                break
        return total

    async def _move(self, queue: str, which: Selection, most: int, to: str) -> int:
        """Send dead letters to another queue and remove them, in one step."""
        known = live_statements(self._schema)

        async def move(connection: Connection) -> int:
            async with transaction(connection, self._client.bound()):
                await connection.execute(PLANNED)
                row = await connection.fetchrow(known["move"], queue, *_conditions(which), most, to)
                if row is None:
                    return 0
                await connection.execute(known["moved"], *row)
            return len(row[0])

        return await self._client.run(move)

    async def _dated(self, which: Selection) -> Selection:
        """Return *which* with an absolute time, by the server's clock, in place of an age."""
        if which.dead_for is None:
            return which
        [(now,)] = await self._client.fetch(f"SELECT {self._schema}.clock()")
        return which.at(now)


def _conditions(which: Selection) -> tuple[Any, ...]:
    ids = which.ids
    if ids is not None:  # functions of an older release generate ids in another way
        ids = frozenset(name for one in ids for name in spellings_of(one))
    return (
        None if which.sequences is None else sorted(which.sequences),
        None if ids is None else sorted(ids),
        which.reason,
        which.dead_before,
        which.after,
    )
