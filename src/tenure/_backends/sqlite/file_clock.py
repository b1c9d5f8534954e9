"""The clock of a file's queues: locks by the time since boot, the rest by a wall clock that never goes back.

House rules:

- Since the wall clock never goes back, one reading that is far in the future would move it for good. So such a leap is
  accepted only after readings have shown it for some seconds; in a new boot at once, because the machine may have been
  off. Only a person can set the clock back: see ``clock_setting``.
- The time since boot may go back under the same name of the boot: a virtual machine was set back to a snapshot, and the
  file was not. It shows in the row of the clock, which is updated every second in which something is written.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass

from tenure._backends.sqlite.boot import common_name, this_boot
from tenure._backends.sqlite.rows import plain_text
from tenure._backends.sqlite.statements import statements
from tenure._checks import LONGEST
from tenure._foreign import read_or, seconds
from tenure._runtime.clock import Clock
from tenure.errors import ConfigError

_SQL = statements("queue.sql")
_STEP = 0.01  # seconds: if the wall clock was set forward by more, the row is updated
_EVERY = 1.0  # seconds after which the row is updated in any case
_BACK = 0.001  # seconds that the time since boot may seem to have gone back, for rounding
_LEAP = 60.0  # seconds that the wall clock may be set forward, and is accepted at once
_LEAP_LASTS = 10.0  # seconds for which a greater leap must have been seen


class FileClock:
    """The clock of a file's queues.

    Args:
        clock: Common to all that share the file; judges locks.
        wall: The wall clock, in Unix seconds.
        boot: The name of the boot from which *clock* counts; by default, that of the present boot.
    """

    def __init__(self, clock: Clock, wall: Callable[[], float] = time.time, boot: str = "") -> None:
        self._clock = clock
        self.wall = wall
        """The wall clock of this machine, in Unix seconds."""
        self.boot = boot
        self._leapt_at: float | None = None  # when the wall clock was first seen so far ahead as it is now

    def read(self, connection: sqlite3.Connection) -> ClockReading:
        """Return the present time, and the rest of the row of the clock."""
        if not self.boot:
            boots = connection.execute(_SQL["boots"])
            self.boot = common_name(this_boot(), [plain_text(boot) for (boot,) in boots])
        row = connection.execute(_SQL["clock"]).fetchone()
        if row is None:
            raise ConfigError(
                "the table tenure_queue_clock is empty, so that no sequence can be given; restore the file from a copy"
            )
        origin, sequence, boot, ahead, seen = row
        now = self._clock.now()
        unknown = self.wall() - now
        seen = read_or(_moment, seen, now + unknown)
        ahead = read_or(_moment, ahead, None)
        is_ours = boot == self.boot and ahead is not None
        ahead = unknown if ahead is None else ahead
        went_back = is_ours and now + ahead < seen - _BACK
        is_ours = is_ours and not went_back
        known = ahead if is_ours else seen - now
        ahead = max(known, self.wall() - now)
        if is_ours and self._is_leap(ahead - known, now):
            ahead = known
        needs_writing = not is_ours or ahead - known > _STEP or now + ahead - seen > _EVERY
        if type(sequence) is not int:  # another program has written it
            (sequence,) = connection.execute(_SQL["newest_sequence"]).fetchone()
        return ClockReading(now, now + ahead, ahead, self.boot, plain_text(origin), sequence, needs_writing, went_back)

    def _is_leap(self, by: float, now: float) -> bool:
        """Whether the wall clock is too far ahead to be accepted yet."""
        if by <= _LEAP:
            self._leapt_at = None
            return False
        if self._leapt_at is None or now < self._leapt_at:
            self._leapt_at = now
        return now - self._leapt_at < _LEAP_LASTS


def _moment(value: object) -> float:
    return seconds(value, least=-LONGEST)


@dataclass(slots=True, eq=False)
class ClockReading:
    """The row of the clock, and the time at which it was read."""

    now: float
    wall: float
    ahead: float
    boot: str
    origin: str
    sequence: int
    needs_writing: bool
    """Whether the row must be updated."""
    went_back: bool
    """Whether the time since boot went back, so that no lock's end can be compared with it."""
