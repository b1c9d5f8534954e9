"""When a candidate asks for its name: the time of the next request, and the limits of the rate."""

from __future__ import annotations

import math

from tenure._jitter import Rng, later, sooner
from tenure._timing import Timing

HINTS_AT_ONCE = 3
"""How many hints may be followed without a pause; a hand-over gives two or three."""


class AcquireTimes:
    """The times at which a candidate that stands by asks for the name; its methods report what has happened.

    Args:
        timing: The durations of the election.
        rng: Source of jitter.
        hints: Whether the store reports vacancies; if not, a candidate asks every ``timing.retry_every``.
        queued: Whether candidates stand in a queue in the store.
        now: The present time; the first request is due at once.
    """

    def __init__(self, timing: Timing, rng: Rng, *, hints: bool, queued: bool, now: float) -> None:
        self.due = now
        """When to ask next."""
        self._timing = timing
        self._rng = rng
        self._hints = hints
        self._keeps_place = queued and hints
        self._asked_at = -math.inf
        self._hints_followed_until = -math.inf  # the end of the pauses that belong to the hints which were followed
        self._yield_until = -math.inf  # until then other candidates go first

    def asked(self, now: float) -> None:
        """The name has been asked for."""
        self._asked_at = now

    def refused(self, remaining: float | None, now: float) -> None:
        """Another holder has the name, with *remaining* seconds left, if the store knows that."""
        self.due = self._earliest(now + self._wait_while_held(remaining), self._asked_at)

    def failed(self, now: float) -> None:
        """No answer has come, or none that could be used."""
        self.due = now + later(self._timing.retry_every, self._rng)

    def hinted(self, now: float) -> None:
        """Something may have changed."""
        # At once, also shortly after another request: the hint may report the vacancy. If more than a few hints come,
        # they are followed no faster than others are: hints may be wrong.
        pause = self._timing.retry_every / 10
        at = self._earliest(now, self._hints_followed_until - HINTS_AT_ONCE * pause)
        if at < self.due:
            self.due = at
            self._hints_followed_until = max(at, self._hints_followed_until) + pause

    def term_over(self, now: float, *, yields: bool) -> None:
        """A term of our own is over; if it *yields*, other candidates go first."""
        self.due = now + later((2 if yields else 1) * self._timing.retry_every, self._rng)
        if yields:  # whatever hints come: these are about our own release
            self._yield_until = self.due

    def _earliest(self, at: float, last: float) -> float:
        # Limits the rate, whatever hints come, and however often a store says "held, 0 s left".
        return max(at, last + self._timing.retry_every / 10, self._yield_until)

    def _wait_while_held(self, remaining: float | None) -> float:
        timing = self._timing
        if self._keeps_place:  # hints say the rest: a request only keeps our place, for a ttl
            longest = sooner(min(timing.renew_every, timing.ttl / 3), self._rng)
        elif self._hints:  # they may be lost, so ask at least once in our own ttl, however long the other lease lasts
            longest = timing.ttl
        else:  # no early release is known, so ask soon
            longest = timing.retry_every
        if remaining is None:
            return longest if self._keeps_place else later(timing.retry_every, self._rng)
        # The lease may be renewed meanwhile; then we ask again later. A tenth of retry_every spreads candidates that
        # wait for the same moment.
        return min(remaining, longest) + 0.1 * timing.retry_every * self._rng.random()
