"""How often queues were made anew, as far as a process has seen: then what a program expects is declared again."""

from __future__ import annotations

import math
from collections.abc import Hashable
from itertools import count

_UNKNOWN = object()


class Generations:
    """Counts the generations of queues that the answers to one process have shown.

    A queue that is deleted and comes into being again is another one, without the settings that were declared. Its name
    doesn't tell that; a broker notes what does: a mark that its answers bring along, or that it has made the queue. It
    may be called on any thread. Of queues that nobody follows, nothing is kept.

    Args:
        check_every: Seconds after which programs that use a queue ask for its settings again, as not each answer shows
            a new generation; infinite where each does.
    """

    def __init__(self, check_every: float = math.inf) -> None:
        self.check_every = check_every
        self._counts: dict[str, int] = {}
        self._marks: dict[str, Hashable] = {}
        self.followed: set[str] = set()
        """The queues of which something is expected: of others, a broker need not ask for marks."""
        self._numbers = count(1)  # each is taken once, whatever threads there are

    def of(self, queue: str) -> int:
        """Return another number than before if *queue* was seen made anew, or missing, since this was last asked."""
        return self._counts.get(queue, 0)

    def note(self, queue: str, mark: Hashable | None) -> None:
        """Note the *mark* that an answer has of *queue*: each generation has another one. None: there is no such queue.

        An answer that comes late may bring an old mark: then the number changes in vain.
        """
        if queue in self.followed and self._marks.get(queue, _UNKNOWN) != mark:
            self._marks[queue] = mark
            self.rise(queue)

    def mark_of(self, queue: str) -> Hashable | None:
        """Return the mark of *queue* that was noted last."""
        return self._marks.get(queue)

    def rise(self, queue: str) -> None:
        """Note that *queue* seems not to be there, or was made just now: its next mark may be another one."""
        if queue in self.followed:
            self._counts[queue] = next(self._numbers)

    def follow(self, queue: str) -> None:
        """Note that something is expected of *queue*."""
        self.followed.add(queue)
