"""Connections that are replaced, because one of them is silent, while requests are still under way on the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from tenure._runtime.closing import close_together
from tenure._runtime.tasks import Tasks

CLOSED_AFTER = 60.0
"""Seconds after which retired connections are closed whatever is under way on them."""


class Closable(Protocol):
    """What has connections, as a pool."""

    async def close(self) -> None: ...


P = TypeVar("P", bound=Closable)


class Retired(Generic[P]):
    """The pools of connections that are replaced on one loop: each is closed when the last request on it has ended.

    What is idle in them would else stay open: a server that is slow for a while would fill the table of files.
    """

    def __init__(self) -> None:
        self._using = Counter[P]()
        self._retired: set[P] = set()
        self._closing = Tasks()

    @contextmanager
    def used(self, pool: P) -> Iterator[P]:
        """Note that *pool* is used inside the block."""
        self._using[pool] += 1
        try:
            yield pool
        finally:
            self._using[pool] -= 1
            if not self._using[pool]:
                del self._using[pool]
                self._close(pool)

    def retire(self, pool: P) -> None:
        """Close *pool* as soon as nothing is under way on it; nothing new may use it."""
        self._retired.add(pool)
        if pool in self._using:
            asyncio.get_running_loop().call_later(CLOSED_AFTER, self._close, pool)
        else:
            self._close(pool)

    def _close(self, pool: P) -> None:
        if pool in self._retired:
            self._retired.discard(pool)
            self._closing.spawn(pool.close())

    async def close(self) -> None:
        """Close all that are left."""
        retired, self._retired = self._retired, set()
        await close_together(*(pool.close for pool in retired))
        await asyncio.gather(*self._closing)
