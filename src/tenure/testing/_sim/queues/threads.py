"""The renewal thread coming in between two steps of the caller's loop, and the other way round."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from tenure._queue.message import Delivery


class Interleaved(deque[Delivery]):
    """The waiting messages of a group, between whose steps another thread may come in."""

    def __init__(self, waiting: Iterable[Delivery], other_thread: Callable[[], None]) -> None:
        super().__init__(waiting)
        self._other_thread = other_thread

    def popleft(self) -> Delivery:
        """Take the first, if the other thread leaves it to us."""
        self._other_thread()
        return super().popleft()

    def pop(self, *_: Any) -> Delivery:
        """Take the last, if the other thread leaves it to us."""
        self._other_thread()
        return super().pop()
