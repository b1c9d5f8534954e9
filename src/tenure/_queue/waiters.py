"""Chooses the waiters of a queue that ask the store when a hint comes, as a pure state machine.

Rules:

- A hint means that there may be messages. One request sent after it answers that for all waiters with the same
  request: if it finds nothing, there is nothing for the others either. So a hint wakes one idle waiter, not all.
- A request that finds messages may have left some: then two more idle waiters are woken. So many messages reach many
  waiters within a few round trips, and one message costs three requests at most.
- A hint is never lost. It stays with a waiter until a request that this waiter sent after the hint is answered. A
  waiter that leaves before passes the hint on; so does one whose request fails. If no other is idle, that one keeps
  the hint until it asks again, or until another waiter gets an answer and takes the hint over. A failed waiter is not
  idle until it has an answer, so that failed waiters don't pass a hint to one another.
- If no waiter is idle, all are woken, and each asks once when it can: a busy one may be the first to have room.

::

             wake, or by itself        answered: nothing, or passed on
    idle ──────────────────────▶ asking ──────────────────────▶ idle
                                   │ failed
                                   ▼
                                 failed, asks again by itself
"""

from __future__ import annotations

from collections.abc import Callable

SPREAD = 2
"""The number of idle waiters that are woken when a request has found messages."""


class Waiter:
    """A consumer, or a call of ``receive``, that waits for messages. Made by :meth:`Waiters.join`.

    Attributes:
        idle: Whether it would ask at once if it was woken: its last request found nothing, and none is unanswered.
        asking: Whether a request of its own is unanswered.
        has_hint: Whether there was a hint for which it has not asked yet.
    """

    __slots__ = ("_asks_for_hint", "_wake", "asking", "has_hint", "idle")

    def __init__(self, wake: Callable[[], bool]) -> None:
        self.idle: bool = False  # it begins with a request
        self.asking: bool = False
        self._wake = wake
        self.has_hint = False  # for which no request has been sent
        self._asks_for_hint = False  # the unanswered request was sent for a hint


class Waiters:
    """All waiters with the same request to one queue."""

    def __init__(self) -> None:
        self._all: dict[Waiter, None] = {}  # the one idle for longest comes first
        self._kept: dict[Waiter, None] = {}  # the waiters that keep a hint, and can't ask yet

    def __len__(self) -> int:
        return len(self._all)

    def join(self, wake: Callable[[], bool]) -> Waiter:
        """Return a new waiter, which asks by itself at first.

        Args:
            wake: Called to let it ask at once, or as soon as it can. Returns whether it asks at once.
        """
        waiter = Waiter(wake)
        self._all[waiter] = None
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Remove *waiter*."""
        self._all.pop(waiter, None)
        self._kept.pop(waiter, None)
        if waiter.has_hint or waiter._asks_for_hint:
            waiter.has_hint = waiter._asks_for_hint = False
            self.hint()

    def hint(self) -> None:
        """Note that there may be messages."""
        if not self._wake_idle(1, None):
            self._wake_all(None)

    def asks(self, waiter: Waiter) -> None:
        """Note that *waiter* sends a request."""
        waiter.idle, waiter.asking = False, True
        self._kept.pop(waiter, None)
        waiter._asks_for_hint, waiter.has_hint = waiter.has_hint, False

    def answered(self, waiter: Waiter, *, found: bool, again: bool = False) -> None:
        """Note the answer to the request of *waiter*.

        Args:
            found: Whether it found messages.
            again: Whether *waiter* asks again by itself at once, because the store has not processed all due messages.
        """
        had_hint = self._ends(waiter)
        if again and not found:
            waiter.has_hint |= had_hint
            return
        waiter.idle = not waiter.has_hint
        if waiter in self._all:
            self._all[waiter] = self._all.pop(waiter)  # to the end
            if waiter.idle and self._kept:
                self._take_over(waiter)
        if had_hint and found and not self._wake_idle(SPREAD, waiter):
            self._wake_all(waiter)

    def failed(self, waiter: Waiter) -> None:
        """Note that the request of *waiter* got no answer. *waiter* asks again by itself."""
        if self._ends(waiter) or waiter.has_hint:
            waiter.has_hint = not self._wake_idle(1, waiter)
            if waiter.has_hint and waiter in self._all:
                self._kept[waiter] = None

    def _ends(self, waiter: Waiter) -> bool:
        """Note the end of a request; return whether it was sent for a hint."""
        had_hint, waiter._asks_for_hint = waiter._asks_for_hint, False
        waiter.asking = False
        return had_hint

    def _take_over(self, waiter: Waiter) -> None:
        """Let *waiter*, which is idle, ask for a hint that another keeps."""
        other, _ = self._kept.popitem()
        other.has_hint = False
        waiter.idle, waiter.has_hint = False, True
        if not waiter._wake():
            self._kept[waiter] = None

    def _wake_idle(self, most: int, but: Waiter | None) -> int:
        """Wake up to *most* idle waiters, and return how many ask."""
        woken = 0
        for waiter in [one for one in self._all if one.idle and one is not but]:
            if not waiter.idle:  # the answer to one before came at once, and has woken this one
                continue
            waiter.idle, waiter.has_hint = False, True
            woken += waiter._wake()
            if woken >= most:
                break
        return woken

    def _wake_all(self, but: Waiter | None) -> None:
        for waiter in list(self._all):
            if waiter is not but and not waiter.has_hint:
                waiter.idle, waiter.has_hint = False, True
                waiter._wake()
