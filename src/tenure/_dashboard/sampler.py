"""Asks the store again and again while somebody looks, once for all who look."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from tenure import Backend
from tenure._overview import History, Overview, look
from tenure.errors import TenureError

EVERY = 2.0
"""Seconds between two looks while somebody listens."""

FRESH = 1.5
"""Seconds for which a look serves pages."""

KNOWN = 30.0
"""Seconds for which a look serves pages while the next one is under way: one that takes long must not block them."""

COMMENT_EVERY = 15.0
"""Seconds after which a stream without news has a comment, so that proxies keep it open."""

TERMS_MAX = 50
"""How many terms of an election are remembered."""


class Sampler:
    """The overview of a store, and what has been seen since this process began to look.

    Args:
        backend: The store, open.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.history: History = History()
        self.terms: dict[str, list[SeenTerm]] = {}
        """The terms of each election that were seen, the newest last."""
        self.overview: Overview | None = None
        self.trouble = ""
        """Why the store did not answer the last look; empty if it did."""
        self.answered_at: float | None = None
        """When the store has answered, in Unix seconds of this machine; None: never."""
        self._looked_at = self._known_at = -math.inf
        self._turn = asyncio.Lock()
        self._news = asyncio.Condition()
        self._number = 0
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None

    async def recent(self) -> Overview | None:
        """Return the overview as it was lately; None if the store has never answered."""
        if self._turn.locked() and time.monotonic() - self._known_at < KNOWN:
            return self.overview
        async with self._turn:
            if time.monotonic() - self._looked_at > FRESH:
                await self._look()
        return self.overview

    async def listen(self) -> AsyncIterator[str]:
        """Yield server-sent events: one whenever the store was looked at."""
        self._listeners += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield "retry: 3000\n\n"
            while True:
                try:
                    async with asyncio.timeout(COMMENT_EVERY), self._news:
                        await self._news.wait()
                    yield f"event: look\ndata: {self._number}\n\n"
                except TimeoutError:
                    yield ": nothing new\n\n"
        finally:
            self._listeners -= 1

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while self._listeners > 0:
            async with self._turn:
                await self._look()
            await asyncio.sleep(EVERY)

    async def _look(self) -> None:
        try:
            found = await look(self.backend)
        except TenureError as error:
            self.trouble = str(error)
        else:
            self.trouble = ""
            self.overview = found
            self._known_at = now = time.monotonic()
            self.answered_at = time.time()
            self.history.note(found, now)
            self._note_terms(found)
        self._looked_at = time.monotonic()
        async with self._news:
            self._number += 1
            self._news.notify_all()

    def _note_terms(self, found: Overview) -> None:
        now = time.time()
        for name, leader in (found.leaders or {}).items():
            seen = self.terms.setdefault(name, [])
            current = seen[-1] if seen and seen[-1].ended is None else None
            if current is not None and (leader is None or leader.token != current.token):
                current.ended = now
                current = None
            if leader is not None and current is None:
                seen.append(SeenTerm(leader.token, leader.holder, now))
                del seen[:-TERMS_MAX]


class SeenTerm:
    """A term as it was seen here: Unix seconds of this machine."""

    def __init__(self, token: int, holder: str, began: float) -> None:
        self.token = token
        self.holder = holder
        self.began = began
        self.ended: float | None = None
