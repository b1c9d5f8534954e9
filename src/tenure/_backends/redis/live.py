"""Live messages: peeked at and purged, part by part."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal

from tenure._backends.redis.client import Client
from tenure._backends.redis.message_format import LETTERS, deliveries_of, live_message, selected
from tenure._backends.redis.queue_scripts import QueueScripts
from tenure._backends.redis.scripts import Answer, Argument
from tenure._foreign import digits, read_or
from tenure._queue.broker import LiveSelection
from tenure._queue.identity import ID_MARK
from tenure._queue.message import STATES, LiveMessage, State

PART = 100
"""The most live messages that one script reads or purges."""
SCAN_COUNT = 500
"""The approximate number of entries of a sorted set that one command returns."""
DIGITS = 15
"""The most digits of a sequence: what is longer is no message, as in rows.lua."""
_PLACES: tuple[tuple[State, str], ...] = (
    ("delayed", "delayed"),
    ("deferred", "deferred"),
    ("ready", "waiting"),
    ("ready", "ready"),
)
"""The places of messages that are not locked, in the order of a purge: a message may move to a later one meanwhile."""


class LiveMessages:
    """The messages of queues, dead letters excepted. *apply_due* is called before each request about a queue."""

    def __init__(self, client: Client, scripts: QueueScripts, apply_due: Callable[[str], Awaitable[object]]) -> None:
        self._client = client
        self._scripts = scripts
        self._apply_due = apply_due

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages, part by part, so that no script runs for long."""
        await self._apply_due(queue)
        if which.sequences is not None:
            named = sorted(one for one in which.sequences if one > which.after)
            return await self._shown(queue, which, named, limit)
        timed = await self._timed(queue, which)
        wants = (int(which.wants("ready")), int(which.wants("deferred")))
        found: list[LiveMessage] = []
        after: int | None = which.after
        while after is not None and len(found) < limit:
            size = min(PART, limit - len(found))
            waiting = await self._scripts.run("waiting", queue, size, after, *wants)
            last = waiting[-1] if len(waiting) == size else None
            some = {*waiting, *(one for one in timed if one > after and (last is None or one <= last))}
            found += await self._shown(queue, which, sorted(some), limit - len(found))
            after = last
        return found

    async def _shown(self, queue: str, which: LiveSelection, sequences: Sequence[int], limit: int) -> list[LiveMessage]:
        """Return the selected messages among *sequences*, up to *limit*, and read few others."""
        found: list[LiveMessage] = []
        size = min(PART, limit)
        while sequences and len(found) < limit:
            part, sequences = sequences[:size], sequences[size:]
            size = PART  # few of them are selected
            _, go_on, contents, letters, moments = await self._live("peek", queue, which, part)
            deliveries = deliveries_of(queue, "", 0.0, contents)
            rows = contents[1]
            found += (live_message(*one) for one in zip(deliveries, rows, letters, moments, strict=False))
            if go_on >= 0:
                sequences = [*(one for one in part if one > go_on), *sequences]
        return found[:limit]

    async def purge(self, queue: str, which: LiveSelection, *, dry_run: bool = False) -> int:
        """Remove live messages for good, part by part, so that no script runs for long."""
        await self._apply_due(queue)
        which = replace(which, states=(STATES if which.states is None else which.states) - {"locked"})
        action: Literal["count", "purge"] = "count" if dry_run else "purge"
        if which.sequences is not None:
            return await self._purge(action, queue, which, sorted(one for one in which.sequences if one > which.after))
        newest = read_or(digits, await self._client.command("GET", f"{self._scripts.base(queue)}sequence") or b"0", 0)
        total, gone = 0, 1
        while gone and not (dry_run and total):  # repeated: a message that moves meanwhile may be missed
            gone = 0
            seen: set[int] = set()
            for state, key in _PLACES:
                if which.wants(state):
                    async for page in self._scan(queue, key):
                        some = {one for one in page if which.after < one <= newest} - seen
                        gone += await self._purge(action, queue, which, sorted(some))
                        if dry_run:  # a purge has removed them
                            seen |= some
            total += gone
        return total

    async def _purge(
        self, action: Literal["count", "purge"], queue: str, which: LiveSelection, sequences: Sequence[int]
    ) -> int:
        parts = [sequences[first : first + PART] for first in range(0, len(sequences), PART)]
        return sum([(await self._live(action, queue, which, part))[0] for part in parts])

    async def _timed(self, queue: str, which: LiveSelection) -> list[int]:
        """Return the sequences of locked and delayed messages, whose sets are in another order, if selected."""
        keys = [
            key for wanted, key in ((which.wants("locked"), "locked"), (which.wants("delayed"), "delayed")) if wanted
        ]
        return [one for key in keys async for page in self._scan(queue, key) for one in page]

    async def _scan(self, queue: str, key: str) -> AsyncIterator[list[int]]:
        """Yield the members of a sorted set; one that stays in it meanwhile is yielded at least once."""
        cursor = -1
        while cursor:
            words = ("ZSCAN", f"{self._scripts.base(queue)}{key}", max(cursor, 0), "COUNT", SCAN_COUNT)
            cursor, page = await self._client.command(*words)
            yield [int(sequence) for sequence, _ in page if len(sequence) <= DIGITS and sequence.isdigit()]

    async def _live(
        self, action: Literal["peek", "count", "purge"], queue: str, which: LiveSelection, sequences: Sequence[int]
    ) -> Answer:
        states = "".join(letter for state, letter in LETTERS.items() if which.wants(state))
        before: Argument = "" if which.sent_before is None else math.ceil(which.sent_before * 1_000)
        return await self._scripts.run(
            "live",
            queue,
            *(action, states, which.session or "", before, f"{queue}{ID_MARK}"),
            *selected(which.ids),
            *sequences,
        )
