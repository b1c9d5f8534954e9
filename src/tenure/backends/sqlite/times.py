"""What time it is for queues: locks by the time since boot, the rest by a wall clock that never goes back."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass

from tenure.backends.sqlite.boot import agreed, this_boot
from tenure.backends.sqlite.client import statements
from tenure.clock import Clock

_SQL = statements("queue.sql")
_STEP = 0.01  # seconds by which the wall clock must have been set forward to be worth writing down
_EVERY = 1.0  # seconds after which the time is written down again


class FileClock:
    """What time it is for the queues of a file.

    Args:
        clock: Common to all that share the file; judges locks.
        wall: The wall clock, in Unix seconds.
        boot: What *clock* counts from; found out when not given.
    """

    def __init__(self, clock: Clock, wall: Callable[[], float] = time.time, boot: str = "") -> None:
        self._clock = clock
        self._wall = wall
        self.boot = boot

    def read(self, connection: sqlite3.Connection) -> Moment:
        """Return the present moment, and what else stands in the row of the clock."""
        if not self.boot:
            self.boot = agreed(this_boot(), [boot for (boot,) in connection.execute(_SQL["boots"])])
        origin, sequence, boot, ahead, seen = connection.execute(_SQL["clock"]).fetchone()
        now = self._clock.now()
        is_ours = boot == self.boot
        known = ahead if is_ours else seen - now
        ahead = max(known, self._wall() - now)
        is_news = not is_ours or ahead - known > _STEP or now + ahead - seen > _EVERY
        return Moment(now, now + ahead, ahead, self.boot, origin, sequence, is_news)


@dataclass(slots=True)
class Moment:
    """The row of the clock, read at one moment."""

    now: float
    wall: float
    ahead: float
    boot: str
    origin: str
    sequence: int
    is_news: bool
    """Whether the row must be written anew."""
