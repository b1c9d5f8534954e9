"""Tasks that no request waits for: moves to the dead letters, and verdicts whose answer is late."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from tenure._runtime.closing import close_together
from tenure._runtime.on_loop import on_loop
from tenure._runtime.tasks import Tasks

CLOSE_WAIT = 2.0
"""Seconds that the tasks have to finish when the backend is closed."""


class Background:
    """Keeps tasks until they are done: a loop keeps no reference to its tasks."""

    def __init__(self) -> None:
        self._tasks = Tasks()

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Let *task* run to its end; its exception is dropped."""
        self._tasks.keep(task).add_done_callback(lambda task: task.cancelled() or task.exception())

    async def close(self) -> None:
        """Wait up to ``CLOSE_WAIT`` seconds for the tasks of every loop, then cancel them."""
        await close_together(*(partial(on_loop, loop, self._finish) for loop in self._tasks.loops()))

    async def _finish(self) -> None:
        if not (tasks := self._tasks.here()):
            return
        _, late = await asyncio.wait(tasks, timeout=CLOSE_WAIT)
        for task in late:
            task.cancel()  # its message is delivered again
        if late:
            await asyncio.wait(late)
