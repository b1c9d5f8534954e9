"""Tasks that run beside others, kept until they are done; and whether one is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def is_cancelled() -> bool:
    """Whether the current task is being cancelled: also what it waits for may be, and user code may raise that, too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Tasks:
    """Keeps tasks until they are done: a loop holds its tasks only weakly, and would let them be collected.

    Tasks of several loops may be kept together; each is begun on its own loop.
    """

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._tasks))  # a copy: other loops begin and end theirs meanwhile

    def keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Keep *task* until it is done, and return it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def spawn(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Begin *work* on the running loop, and keep its task."""
        return self.keep(asyncio.get_running_loop().create_task(work, name=name))

    def here(self) -> set[asyncio.Task[Any]]:
        """Return the tasks of the running loop."""
        here = asyncio.get_running_loop()
        return {task for task in self if task.get_loop() is here}

    def loops(self) -> set[asyncio.AbstractEventLoop]:
        """Return the loops on which tasks are running."""
        return {task.get_loop() for task in self}

    async def cancel_all(self) -> None:
        """Cancel every task, and wait until all have ended, however they do. All are of the running loop."""
        tasks = list(self)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
