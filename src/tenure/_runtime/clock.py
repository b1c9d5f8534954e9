"""The clock: one number in seconds that never goes back, and also counts while the machine sleeps."""

from __future__ import annotations

import sys
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock that also counts the time spent in suspend."""

    def now(self) -> float:
        """Return seconds since some fixed moment."""
        ...


class SystemClock:
    """The later of CLOCK_MONOTONIC and CLOCK_BOOTTIME, or the nearest that the system has.

    CLOCK_MONOTONIC alone stands still while a laptop sleeps or a virtual machine is suspended, and a leader that
    measures its term with it would wake up and still trust an old term.
    """

    if hasattr(time, "CLOCK_BOOTTIME"):

        def now(self) -> float:
            return max(time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))
    elif sys.platform == "darwin":  # monotonic() stands still in sleep there, this one does not

        def now(self) -> float:
            return time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
    else:  # on Windows monotonic() counts sleep; elsewhere it is the best there is

        def now(self) -> float:
            return time.monotonic()
