"""When a consumer asks its broker for messages or sessions, and for how many messages: two parts of its pump."""

from __future__ import annotations

from collections.abc import Collection

from tenure._jitter import Rng, later, sooner
from tenure._queue.effects import Look
from tenure._queue.lock_group import NEVER, LockGroup
from tenure._queue.pump_settings import PumpSettings

HORIZON = 0.25
"""Seconds of work that a buffer should hold: longer than any claim takes, too short to keep work from others."""


EARLY_LOOK_SHARE = 0.6
"""A look at an empty queue may come this share of its wait early: the consumers of a process share a request."""

CLAIM_EVERY = 600.0
"""Seconds after which an empty queue is claimed from, not only looked at: so the store also does what it does with a
claim, such as forgetting old ids, and an error in its counts costs no more than that. Half of it at least."""


class ClaimTimes:
    """Decide when to claim next: at once while there is more, else when time or a hint brings something.

    Args:
        settings: The settings of the consumer.
        rng: Source of jitter.
        now: The present moment; the first claim is due at once.
    """

    def __init__(self, settings: PumpSettings, rng: Rng, *, now: float) -> None:
        self.next_at = now
        """When to claim next, if there is room."""
        self.retry_at = -NEVER
        """When all abandoned messages are back."""
        self.empty_since = now
        """Since when nothing is in hand; infinity while something is."""
        self._settings = settings
        self._rng = rng
        self._not_before = -NEVER  # also if a hint comes
        self._empty_claims = 0  # in a row
        self._is_hinted = False  # since the last claim was sent
        self._is_quiet = False  # the last claim found nothing, and time alone brings nothing either
        self._is_unanswered = False  # the last request had no answer
        self._claimed_at = -NEVER  # when it claimed last, and did not look
        self._asked_at = now
        self._claim_by = now  # and not only look

    def hint(self, now: float) -> None:
        """Note that messages may have become claimable."""
        self._is_hinted = True
        self.claim_at_once(now)

    def claim_at_once(self, now: float) -> None:
        """Claim at once, or as soon as :meth:`hold_off` allows."""
        self.next_at = min(self.next_at, max(now, self._not_before))

    def note_emptiness(self, now: float) -> None:
        """Note that since *now* nothing is in hand, or something is again."""
        if self.empty_since < NEVER:
            self.empty_since = NEVER
        else:
            self.empty_since = now
            if self._settings.until_empty:  # look at once whether more has come, also if a claim is unanswered
                self.next_at = min(self.next_at, now)
                self._is_hinted = True

    def asked(self, now: float) -> Look:
        """Note that a claim is sent; return whether to look before it."""
        is_routine = self._is_routine(now)
        self._is_hinted = False
        self._asked_at = now
        if is_routine:
            return Look.INSTEAD
        if self._settings.surveys:
            self._claim_by = now + sooner(CLAIM_EVERY, self._rng, share=0.5)
        if self._looks_first(now):
            return Look.FIRST
        self._claimed_at = now
        return Look.NONE

    def _looks_first(self, now: float) -> bool:
        """Whether to look before a claim, as the last request had no answer; until what it may have locked is free.

        Then it claims: a broker may answer claims and no looks, as one that permits this user no more.
        """
        is_locked = now < self._claimed_at + self._settings.timing.ttl
        return self._is_unanswered and self._settings.looks_first and is_locked

    def _is_routine(self, now: float) -> bool:
        settings = self._settings
        may_look = settings.surveys and settings.hints and not settings.until_empty
        return may_look and self._is_quiet and not self._is_hinted and now < self._claim_by and self.retry_at <= now

    def look_along(self, now: float) -> None:
        """Claim at once if the next claim begins with a look, and some part of the wait for it is over."""
        early = EARLY_LOOK_SHARE * (self.next_at - self._asked_at)
        if self.next_at - early <= now < self.next_at and (self._looks_first(now) or self._is_routine(now)):
            self.claim_at_once(now)

    def found(self) -> None:
        """Note that a claim has brought something."""
        self._empty_claims = 0
        self._is_quiet = False

    def found_nothing(self, asked_at: float, due_in: float | None, *, is_held_back: bool) -> bool:
        """Note that a claim sent at *asked_at* has brought nothing; return whether the queue is empty for good.

        It is not if messages may have come since, if abandoned ones are still to come back, or if some are held back by
        the limits of the queue.
        """
        self._empty_claims += 1
        self._is_quiet = due_in is None and not is_held_back
        is_recent = asked_at >= max(self.retry_at, self.empty_since)
        return due_in != 0 and not self._is_hinted and is_recent and not is_held_back

    def answered(self, asked_at: float, is_more: bool, due_in: float | None, now: float) -> None:
        """Set when to claim next after the answer to a claim of *asked_at*: at once if there may be more."""
        self._is_unanswered = False
        if is_more or self._is_hinted:
            self.next_at = max(now, self._not_before)
        else:
            self.next_at = max(now + self._pause(due_in), self._not_before)
            if self.retry_at > asked_at:  # the store may not tell when abandoned messages are back
                self.next_at = max(min(self.next_at, max(now, self.retry_at)), self._not_before)

    def unanswered(self, again_at: float) -> None:
        """Claim again at *again_at*, or at a hint; look before it."""
        self.next_at = again_at
        self._is_unanswered = True
        self._is_quiet = False  # a look may be answered where a claim is not: by a store that can only be read

    def hold_off(self, until: float) -> None:
        """Don't claim before *until*, whatever is hinted."""
        self._not_before = until
        self.next_at = max(self.next_at, until)

    def resume(self) -> None:
        """Undo :meth:`hold_off`."""
        self._not_before = -NEVER

    def _pause(self, due_in: float | None) -> float:
        """Return how long to wait for a hint before looking again."""
        longest = self._settings.poll_every
        if not self._settings.hints:  # no hint will come: look often at first, then less and less
            longest = min(longest, 0.05 * 1.5 ** min(self._empty_claims, 20))
        longest = later(longest, self._rng)
        # A thousandth more, so as not to come too early by the store's clock.
        return longest if due_in is None else min(longest, max(due_in, 0.0) + 0.001)


class ClaimSizes:
    """Decide how many messages to claim: fast handlers never wait, slow ones hoard nothing.

    Args:
        settings: The settings of the consumer.
    """

    def __init__(self, settings: PumpSettings) -> None:
        self.target = 0
        """How many messages should wait in the buffer."""
        self.done = 0
        """How many handlers have ended since the last claim."""
        self.is_limited = False
        """Whether the queue has limits: then nothing waits in the buffer, where it would take places from others."""
        self._horizon = min(HORIZON, settings.timing.renew_every / 4)
        self._prefetch = settings.prefetch
        self._max_bytes = settings.max_bytes
        self._body = 1.0  # mean bytes of the bodies of the last claim
        self._wanted = settings.concurrency + settings.prefetch
        self._limit = 0  # of the last claim
        self._most = NEVER  # of the next one: the broker could not answer one of twice as many

    def set_target(self, elapsed: float, busy: int) -> None:
        """Let the buffer hold what is handled within the horizon, by the pace since the last claim, *elapsed* ago."""
        if self.is_limited:
            self.target = 0
        elif self.done:
            self.target = (
                min(self._prefetch, int(self.done / elapsed * self._horizon)) if elapsed > 0 else self._prefetch
            )
        elif busy:
            self.target = 0

    def brought(self, count: int, size: int) -> None:
        """Note that a claim has brought *count* messages, whose bodies have *size* bytes."""
        self._body = max(1.0, size / count)

    def fitting(self, room: int, groups: Collection[LockGroup]) -> int:
        """Return how many of *room* to claim while *groups* are in hand, so that the bodies don't have too many bytes.

        At least one, if nothing is in hand.
        """
        most = self._max_bytes
        if sum(group.bytes for group in groups) + room * self._body <= most:  # as nearly always
            return room
        left = most - sum(group.bytes_in_hand() for group in groups)
        return min(room, max(1, int(left / self._body))) if left > 0 else 0

    def asked(self, room: int) -> int:
        """Return how many to claim when there is *room* for so many; note that this claim is sent."""
        self._limit = int(min(room, self._most))
        self.done = 0
        return self._limit

    def is_full(self, count: int) -> bool:
        """Return whether the last claim brought as many as it asked for."""
        return count >= self._limit

    def ask_less(self) -> None:
        """Ask for half as many the next time: the answer may have been too much to arrive in time."""
        self._most = max(1, self._limit // 2)

    def ask_more(self) -> None:
        """Ask for twice as many again, as there was an answer; and for any number when that is more than is wanted."""
        self._most *= 2
        if self._most >= self._wanted:
            self._most = NEVER
