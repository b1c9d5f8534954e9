"""Collections of a lock group between whose steps another thread may come in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tenure._queue.message import Delivery


class InterleavedWaiting(deque[Delivery]):
    """The waiting messages of a lock group. Before one is taken out, the other thread may come in."""

    def __init__(self, waiting: Iterable[Delivery], other_thread: Callable[[], None]) -> None:
        super().__init__(waiting)
        self._other_thread = other_thread

    def popleft(self) -> Delivery:
        """Take the first, if the other thread leaves it."""
        self._other_thread()
        return super().popleft()

    def pop(self, *_: Any) -> Delivery:
        """Take the last, if the other thread leaves it."""
        self._other_thread()
        return super().pop()


class InterleavedRunning(dict[int, tuple[Delivery, float]]):
    """The messages of a lock group that were taken. Before one is added, changed or removed, the other may come in."""

    def __init__(self, running: Mapping[int, tuple[Delivery, float]], other_thread: Callable[[], None]) -> None:
        super().__init__(running)
        self._other_thread = other_thread

    def __setitem__(self, sequence: int, entry: tuple[Delivery, float]) -> None:
        self._other_thread()
        super().__setitem__(sequence, entry)

    def __delitem__(self, sequence: int) -> None:
        self._other_thread()
        super().__delitem__(sequence)

    def pop(self, sequence: int, *default: Any) -> Any:
        """Remove a message, after the other thread."""
        self._other_thread()
        return super().pop(sequence, *default)
