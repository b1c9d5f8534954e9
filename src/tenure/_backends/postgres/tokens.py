"""The tokens of claims. Each tells which process made the claim, and when by its clock, to people who look at a lock.

A token has 31 bits of a random number, under which the process notes its name in the table ``process``, and 32 bits of
the time, in steps of a quarter of a millisecond: they begin anew after twelve days, and no lock is as old. It is
negative; the random tokens of older versions are not.
"""

from __future__ import annotations

import secrets
import threading
import time

TICKS = 4_000
"""Steps in a second."""

_SPAN = 2**32


class ClaimTokens:
    """The tokens of one process."""

    def __init__(self) -> None:
        self.origin: int = 1 + secrets.randbelow(2**31 - 1)
        self._last = 0
        self._lock = threading.Lock()

    def new(self) -> int:
        """Return a token that no other claim has."""
        with self._lock:  # claims are made on several loops
            self._last = max(self._last + 1, int(time.time() * TICKS))
            return -(self.origin * _SPAN + self._last % _SPAN)


def since_of(token: int, now: float) -> float | None:
    """Return when the claim with *token* was made, or None for one of an older version; *now* by the wall clock."""
    if token >= 0:
        return None
    age = (int(now * TICKS) + token) % _SPAN  # -token is the time, and a multiple of the span
    return now - (age / TICKS if age < _SPAN // 2 else 0.0)  # later than now: many claims, or another clock
