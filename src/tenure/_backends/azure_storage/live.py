"""Live messages: peek, purge and statistics, as far as Azure shows them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tenure._backends.azure_storage.client import Account
from tenure._backends.azure_storage.records import FoundMessage, is_selected_live, live_message, timestamp_of
from tenure._backends.azure_storage.removal import drop, remove_selected
from tenure._backends.azure_storage.requests import PAGE, count, peek
from tenure._backends.azure_storage.service_clock import ServiceClock
from tenure._queue.broker import EVERY_LIVE, LiveSelection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import LiveMessage, Stats
from tenure._queue.refusals import VISIBLE_STATES


class LiveMessages:
    """The live messages of every queue of the account."""

    def __init__(self, account: Account, clock: ServiceClock) -> None:
        self._account = account
        self._clock = clock

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show live messages: of the 32 that Azure shows without locking."""
        found = await self._account.run(partial(peek, queue=queue))
        now = self._clock.now()
        shown = sorted((one for one in found if is_selected_live(one, which, now)), key=lambda one: one.sequence)
        return [live_message(queue, one) for one in shown[:limit]]

    async def purge(self, queue: str, which: LiveSelection, *, dry_run: bool) -> int:
        """Remove visible messages; a dry run sees no more of them than :meth:`peek`, or counts approximately."""
        if dry_run:
            shown = len(await self.peek(queue, which, PAGE))
            everything = which in (EVERY_LIVE, LiveSelection(states=VISIBLE_STATES))
            return max(shown, (await self.stats(queue)).ready) if everything else shown
        await self._clock.read(queue)
        began = self._clock.now()

        def is_selected(one: FoundMessage) -> bool:
            return timestamp_of(one.raw.inserted_on) <= began and is_selected_live(one, which, self._clock.now())

        return await remove_selected(self._account, self._clock, queue, is_selected, None, drop)

    async def stats(self, queue: str) -> Stats:
        """Count the messages of *queue*, approximately: Azure counts all, and shows 32 of the visible ones."""
        if queue.endswith(DEAD_SUFFIX):
            return Stats(dead=await self._account.run(partial(count, queue=queue)))
        total = await self._account.run(partial(count, queue=queue))
        dead = await self._account.run(partial(count, queue=dead_letters_of(queue)))
        seen = await self._account.run(partial(peek, queue=queue))
        ready = len(seen) if len(seen) < PAGE else max(total, PAGE)
        age = max(0.0, self._clock.now() - min(one.enqueued_at for one in seen)) if seen else 0.0
        # Invisible messages are locked or delayed; Azure doesn't distinguish them.
        return Stats(ready=ready, locked=max(0, total - ready), dead=dead, oldest_age=age)
