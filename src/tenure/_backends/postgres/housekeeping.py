"""Housekeeping beside the calls of users: tidying queues, and raising the marks from which claims begin."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tenure._backends.postgres.functions import QueueFunctions
from tenure._runtime.closing import close_together
from tenure._runtime.on_loop import on_loop
from tenure._runtime.process_name import process_name
from tenure._runtime.tasks import Tasks
from tenure.errors import TenureError

TIDY_AFTER = 200
"""Statements after which this process tidies a queue again: each of them adds a narrow row."""

TIDY_EVERY = 10.0
"""Seconds after which it tidies a queue even after fewer statements."""

RAISE_PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses in seconds before each attempt to raise the marks; it fails until earlier writers have ended."""

RAISE_AFTER = 5_000
"""Messages after which this process raises the marks again."""

NAME_EVERY = 86_400.0
"""Seconds after which this process notes its name again: those that are not are forgotten after eight days."""

NAME_AGAIN = 10.0
"""The same, if that has failed."""

LOOK_AHEAD_EVERY = 10.0
"""Seconds until the next attempt to raise them as far as possible, if one has failed."""


@dataclass(slots=True)
class Received:
    """How much this process has received of a queue."""

    count: int = 0  # messages since it has proposed to raise the marks
    behind: int = RAISE_AFTER // 2  # since it has raised them as far as possible; the start counts as half of that
    highest: int = 0
    look_ahead_from: float = 0.0  # no attempt to raise them as far as possible before this time, after a failure


class Housekeeping:
    """Counts this process's requests for each queue, and starts housekeeping in tasks of its own."""

    def __init__(self, functions: QueueFunctions, origin: int) -> None:
        self._functions = functions
        self._origin = origin  # of this process's tokens
        self._named_until = -math.inf
        self._used: dict[str, tuple[int, float]] = {}  # statements since a queue was tidied, and when that was
        self._received: dict[str, Received] = {}
        self._raising: set[str] = set()
        self._chores = Tasks()

    def note_use(self, queue: str) -> None:
        """Count a statement, and start a task that tidies the queue if it is time to."""
        count, since = self._used.get(queue) or (0, time.monotonic())
        count += 1
        if count < TIDY_AFTER and time.monotonic() - since < TIDY_EVERY:
            self._used[queue] = count, since
            return
        self._used[queue] = 0, time.monotonic()
        self._begin(self._tidy(queue))

    def note_claim(self) -> None:
        """Start a task that notes the name of this process, if it is time to: tokens have only a number of it."""
        now = time.monotonic()
        if now >= self._named_until:
            self._named_until = now + NAME_AGAIN
            self._begin(self._note_name())

    async def _note_name(self) -> None:
        try:
            await self._functions.call("note_process", self._origin, process_name())
            self._named_until = time.monotonic() + NAME_EVERY
        except TenureError:  # a later claim does the same
            pass

    def note_received(self, queue: str, count: int, number: int, has_due: bool) -> None:
        """Count received messages, and start a task that raises the queue's marks if it is time to.

        They are raised as far as possible only if the claim looked for the next due time (*has_due*); see propose() in
        marks.sql.
        """
        received = self._received.setdefault(queue, Received())
        received.count += count
        received.behind += count
        received.highest = max(received.highest, number)
        if queue in self._raising:
            return
        now = time.monotonic()
        looks_ahead = has_due and received.behind >= RAISE_AFTER and now >= received.look_ahead_from
        if looks_ahead or received.count >= RAISE_AFTER:
            received.count = 0
            if looks_ahead:
                received.look_ahead_from = now + LOOK_AHEAD_EVERY
            self._raising.add(queue)
            self._begin(self._raise_marks(queue, received, looks_ahead))

    async def _raise_marks(self, queue: str, received: Received, looks_ahead: bool) -> None:
        """Let claims begin behind the consumed messages; see marks.sql."""
        behind = received.behind
        try:
            with suppress(TenureError):  # a later one does the same
                proposal = await self._functions.call("propose", queue, received.highest, looks_ahead)
                writers = await self._functions.call("writers")
                for pause in RAISE_PAUSES:
                    await asyncio.sleep(pause)
                    is_raised = await self._functions.call("raise_marks", queue, proposal, writers)
                    if is_raised is not False:  # None: another process has proposed since
                        received.look_ahead_from = 0.0
                        if is_raised and looks_ahead:
                            received.behind -= behind
                        return
        finally:
            self._raising.discard(queue)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._chores.spawn(work, "tenure-postgres-tidy")

    async def _tidy(self, queue: str) -> None:
        with suppress(TenureError):  # a later one does the same
            await self._functions.call("tidy", queue)

    async def finish(self) -> None:
        """Wait for the tasks of this loop."""
        if chores := self._chores.here():
            await asyncio.wait(chores, timeout=1.0)

    async def close(self) -> None:
        """Wait for the housekeeping that has begun, up to a second for each loop."""
        await close_together(*(partial(on_loop, loop, self.finish) for loop in self._chores.loops()))
