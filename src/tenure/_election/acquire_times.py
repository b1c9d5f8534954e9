"""When a candidate asks for its name: the time of the next request, and the limits of the rate."""

from __future__ import annotations

import math

from tenure._jitter import Rng, later, sooner
from tenure._timing import Timing

HINTS_AT_ONCE = 3
"""How many hints may be followed without a pause; a hand-over gives two or three."""

FRESH_SHARE = 1 / 4
"""A lease is fresh if it began, or was renewed, within this share of ``retry_every``."""

BEFORE_END_SHARE = 1 / 2
"""Of the requests of a candidate that gets hints, this share is sent before the lease can end, the others at its end.

A request at the end comes just after a renewal, so the next one is due as late as possible. But this end is the same
for all that have seen the same renewal: the others keep hundreds of candidates from asking within the same second.
"""


def outage_pause(timing: Timing) -> float:
    """Return how long a candidate waits between requests that had no answer for a ``ttl``: no lease of before lasts."""
    return min(3 * timing.retry_every, timing.ttl / 3)


class AcquireTimes:
    """The times at which a candidate that stands by asks for the name; its methods report what has happened.

    Args:
        timing: The durations of the election.
        rng: Source of jitter.
        hints: Whether the store can report vacancies; while it doesn't, a candidate asks every ``timing.retry_every``.
        queued: Whether candidates stand in a queue in the store.
        now: The present time; the first request is due at once.
    """

    def __init__(self, timing: Timing, rng: Rng, *, hints: bool, queued: bool, now: float) -> None:
        self.due = now
        """When to ask next."""
        self._timing = timing
        self._rng = rng
        self._can_hint = hints
        self._hints = hints  # whether hints come now
        self._queued = queued
        self._asked_at = -math.inf
        self._failing_since = math.inf  # since when no request was answered
        self._failed_at = -math.inf  # when the newest of these was given up
        self._recovers_until = -math.inf  # until then, the first hint may come to all candidates that are back
        self._hints_followed_until = -math.inf  # the end of the pauses that belong to the hints which were followed
        self._yield_until = -math.inf  # until then other candidates go first
        self._ends_at = math.inf  # when the lease of the other holder ends, if it is not renewed
        self._is_together = True  # other candidates may begin to wait just now, too

    def asked(self, now: float) -> None:
        """The name has been asked for."""
        self._asked_at = now
        self._ends_at = math.inf

    def refused(self, remaining: float | None, now: float) -> None:
        """Another holder has the name, with *remaining* seconds left, if the store knows that."""
        if self._is_away(now):
            self._recovers_until = now + outage_pause(self._timing)
        self._failing_since = math.inf
        self._ends_at = math.inf
        if remaining is not None and remaining >= self._timing.retry_every / 10:
            self._ends_at = now + remaining
        self.due = self._earliest(now + self._wait_while_held(remaining), self._asked_at)
        self._is_together = False

    def granted(self) -> None:
        """The name is ours."""
        self._failing_since, self._recovers_until = math.inf, -math.inf

    def failed(self, now: float) -> None:
        """No answer has come, or none that could be used."""
        self._failing_since = min(self._failing_since, now)
        self._failed_at = now
        self._is_together = True
        self.due = now + later(self._pause_after_failure(now), self._rng)

    def hints_absent(self, now: float) -> None:
        """No vacancy is reported from now on."""
        if self._hints and self._failing_since == math.inf:  # others may learn of it now, too: don't ask in step
            at = now + self._timing.retry_every * self._rng.random()
            self.due = min(self.due, self._earliest(at, self._asked_at))
        self._hints = False

    def hints_come(self) -> None:
        """Vacancies are reported, as far as the store can do that."""
        self._hints = self._can_hint

    def hinted(self, now: float) -> None:
        """Something may have changed."""
        retry_every = self._timing.retry_every
        self._is_together = True
        if self._failing_since < math.inf:  # hints may come all the while: keep half of the pause
            now = max(now, self._failed_at + self._pause_after_failure(now) / 2)
        if self._is_away(now) or now < self._recovers_until:
            # The store is back, and each candidate gets a hint, as it may have missed one.
            self._recovers_until = -math.inf
            at = now + outage_pause(self._timing) * self._rng.random()
            self.due = min(self.due, self._earliest(at, self._asked_at))
            return
        left = self._ends_at + retry_every - now
        if left <= retry_every and not self._queued:
            # Nobody can release a lease that has ended, so another candidate has won, and all others know it: ask
            # again, but not in step; and in time, if the hint was wrong.
            self._ends_at = math.inf
            self.due = self._earliest(now + max(0.0, left) * self._rng.random(), self._asked_at)
            return
        # At once, also shortly after another request: the hint may report the vacancy. If more than a few hints come,
        # they are followed no faster than others are: hints may be wrong.
        pause = retry_every / 10
        at = self._earliest(now, self._hints_followed_until - HINTS_AT_ONCE * pause)
        if at < self.due:
            self.due = at
            self._hints_followed_until = max(at, self._hints_followed_until) + pause

    def term_over(self, now: float, *, yields: bool) -> None:
        """A term of our own is over; if it *yields*, other candidates go first."""
        self.due = now + later((2 if yields else 1) * self._timing.retry_every, self._rng)
        if yields:  # whatever hints come: these are about our own release
            self._yield_until = self.due

    @property
    def _keeps_place(self) -> bool:
        return self._queued and self._hints

    def _earliest(self, at: float, last: float) -> float:
        # Limits the rate, whatever hints come, and however often a store says "held, 0 s left".
        return max(at, last + self._timing.retry_every / 10, self._yield_until)

    def _pause_after_failure(self, now: float) -> float:
        return outage_pause(self._timing) if self._is_away(now) else self._timing.retry_every

    def _is_away(self, now: float) -> bool:
        """Whether the store has not answered for long. (In a queue, who is back first has the first place: look on.)"""
        return now - self._failing_since >= self._timing.ttl and not self._queued

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
        return self._spread(min(remaining, longest), remaining)

    def _spread(self, wait: float, remaining: float) -> float:
        """Return *wait*, so changed that candidates which begin to wait, or end it, together don't go on in step."""
        timing = self._timing
        if self._keeps_place:
            pass
        elif self._hints and wait > timing.ttl / 2:  # if the leader lives, the lease has a new end when we ask
            if self._is_together:
                return wait - (wait - timing.ttl / 2) * self._rng.random()
            if self._rng.random() < BEFORE_END_SHARE:
                return wait - min(timing.renew_every, wait - timing.ttl / 2) * self._rng.random()
            return min(wait + self._soon(), timing.ttl)
        elif (
            not (self._hints or self._queued) and remaining > timing.ttl - FRESH_SHARE * timing.retry_every
        ):  # others asked just now, too
            return wait - wait / 2 * self._rng.random()
        # The lease may be renewed meanwhile; then we ask again later. A tenth of retry_every spreads candidates that
        # wait for the same moment: few, so that a successor soon leads.
        return wait + self._soon()

    def _soon(self) -> float:
        return 0.1 * self._timing.retry_every * self._rng.random()
