"""Hints, counted: some are spurious, so a test waits until no more come, and then makes the change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

QUIET = 0.1
"""Seconds without a hint after which those of earlier changes have come. One that comes later costs a test its edge,
and never fails it."""

HINT_WITHIN = 30.0
"""Seconds for a hint after a cut. Nothing polls there: one that is not sent doesn't come later."""


class CountedHints:
    """The hints that have come since the last change."""

    def __init__(self) -> None:
        self.count = 0

    async def no_more(self) -> None:
        """Return when the hints of earlier changes, and of the subscription itself, have come; count from 0 again."""
        before = -1
        while before != self.count:
            before = self.count
            await asyncio.sleep(QUIET)
        self.count = 0

    async def follow(self, hints: AsyncIterator[object]) -> None:
        """Count *hints* for ever."""
        async for _ in hints:
            self.count += 1


@asynccontextmanager
async def counted(hints: AsyncIterator[object]) -> AsyncIterator[CountedHints]:
    """Count *hints* inside the block."""
    counts = CountedHints()
    counting = asyncio.ensure_future(counts.follow(hints))
    try:
        yield counts
    finally:
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)
