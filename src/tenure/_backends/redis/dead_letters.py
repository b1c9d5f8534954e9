"""Dead letters: peeked at, redriven and purged, part by part."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from typing import Literal

from tenure._backends.redis.message_format import bounded, dead_message, deliveries_of, encoded_dead_letters, selected
from tenure._backends.redis.queue_scripts import QueueScripts
from tenure._backends.redis.scripts import Answer, Argument
from tenure._queue.broker import Selection
from tenure._queue.identity import ID_MARK
from tenure._queue.message import DeadMessage


class DeadLetters:
    """The dead letters of queues."""

    def __init__(self, scripts: QueueScripts, *, is_cluster: bool) -> None:
        self._scripts = scripts
        self._is_cluster = is_cluster

    async def peek(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters."""
        found: list[DeadMessage] = []
        async for _, more in self._dead("peek", queue, which, limit):
            found += (dead_message(queue, one) for one in deliveries_of(queue, "", 0.0, more[0]))
        return found

    async def redrive(
        self, queue: str, which: Selection, limit: int | None, *, dry_run: bool = False, to: str | None = None
    ) -> int:
        """Put dead letters back into *queue*."""
        if to is not None and not dry_run:
            return await self._move(queue, which, limit, to)
        return sum([count async for count, _ in self._dead("count" if dry_run else "redrive", queue, which, limit)])

    async def _move(self, queue: str, which: Selection, limit: int | None, to: str) -> int:
        """Move dead letters to another queue; in a cluster, each part is written there before it is removed here."""
        await self._scripts.list(to)
        if not self._is_cluster:
            return sum([count async for count, _ in self._dead("move", queue, which, limit, to)])
        total = 0
        async for _, more in self._dead("peek", queue, which, limit):
            letters = list(deliveries_of(queue, "", 0.0, more[0]))
            if letters:
                await self._scripts.run("send_dead_letters", to, *encoded_dead_letters(letters, more[0][5]))
                only = Selection(sequences=frozenset(letter.sequence for letter in letters))
                total += sum([count async for count, _ in self._dead("purge", queue, only, None)])
        await self._scripts.list(to)  # the queue may have been deleted meanwhile
        return total

    async def purge(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""
        return sum([count async for count, _ in self._dead("purge", queue, which, limit)])

    async def _dead(
        self,
        action: Literal["peek", "count", "redrive", "purge", "move"],
        queue: str,
        which: Selection,
        limit: int | None,
        to: str | None = None,
    ) -> AsyncIterator[tuple[int, Answer]]:
        """Yield, for each part of the dead letters, the number of selected ones and the rest of the script's answer.

        A part is small, so that no script runs for long.
        """
        left = 10**9 if limit is None else limit
        before: Argument = "" if which.dead_before is None else math.ceil(which.dead_before * 1_000)
        if which.dead_for is not None:
            before = f"-{bounded(which.dead_for)}"
        after: Argument = which.after
        while left > 0 and after != -1:
            count, after, *more = await self._scripts.run(
                "dead",
                queue,
                *(action, left, after, before, which.reason or "", f"{queue}{ID_MARK}"),
                *selected(which.sequences),
                *selected(which.ids),
                to=to,
            )
            left -= count
            yield count, more
