"""The wall clock of a store, as this process knows it: from the moments in its answers, on this process's own clock."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime

from tenure._checks import LONGEST
from tenure._foreign import Unreadable, seconds
from tenure._runtime.clock import Clock

WHOLE_SECONDS = 1.0
"""The resolution of a moment that is told in whole seconds, rounded down."""


class RemoteClock:
    """An estimate of a store's time, in Unix seconds. Before anything was learned, it is this machine's wall clock.

    The store has shown each moment between a request and its answer. The estimate is kept if that can be; otherwise it
    is moved as little as that needs. So it is wrong by no more than the newest request took, with the resolution of its
    answer, however fast or slow the two clocks run, and also after one was set. And it doesn't jump between answers
    that agree: later events would seem to be earlier.

    Args:
        local: This process's monotonic clock.
    """

    def __init__(self, local: Clock) -> None:
        self.local: Clock = local
        self._offset: float | None = None  # of the store's time from the local clock
        self._asked_at = -math.inf  # the newest request whose answer was learned
        self.learned_at: float = -math.inf
        """When something was learned last, by the local clock."""

    @property
    def is_known(self) -> bool:
        """Whether anything was learned."""
        return self._offset is not None

    def now(self) -> float:
        """Return the estimated time of the store."""
        return time.time() if self._offset is None else self.local.now() + self._offset

    def after(self, seconds: float) -> float:
        """Return the time in *seconds*, to be stored: at most the last one that is read again, which is ``LONGEST``."""
        return min(self.now() + seconds, LONGEST)

    def learn(self, moment: float, asked_at: float, resolution: float = 0.0) -> None:
        """Note that the store's clock showed *moment*, or up to *resolution* later, between *asked_at* and now.

        An answer that comes after one that was asked later says nothing: the clock may have been set in between.

        Args:
            moment: In Unix seconds, not later than ``LONGEST``.
            asked_at: When the request was sent, by the local clock.
            resolution: In seconds; 0 for an exact moment.
        """
        if asked_at < self._asked_at:
            return
        self._asked_at, self.learned_at = asked_at, self.local.now()
        least, most = moment - self.learned_at, moment + resolution - asked_at
        self._offset = least if self._offset is None else min(max(self._offset, least), most)

    def learn_date(self, date: object, asked_at: float) -> None:
        """Note the date in an HTTP answer to a request that was sent at *asked_at*, if it is one; a proxy's may not."""
        with suppress(Unreadable):
            self.learn(http_date(date), asked_at, WHOLE_SECONDS)

    def take_local(self) -> None:
        """Note that the store tells no time: its clock has to agree with this machine's wall clock."""
        self.learned_at = self.local.now()
        self._offset = time.time() - self.learned_at


def http_date(date: object) -> float:
    """Return the Unix seconds of a date in the form of HTTP.

    Raises:
        Unreadable: It is none.
    """
    try:
        moment = parsedate_to_datetime(date).timestamp()  # type: ignore[arg-type]
    except (ValueError, TypeError, LookupError, ArithmeticError, OSError):  # whatever is wrong with it
        raise Unreadable(f"it is no date: {ascii(date)[:80]}") from None
    return seconds(moment)
