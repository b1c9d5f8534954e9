"""Which waiters of a queue ask the store when a hint comes, as a pure state machine.

House rules:

- A hint says that there may be messages. One question that begins after it answers that for all waiters who would ask
  the same: if it brings nothing, there is nothing for the others either. So a hint wakes one idle waiter, not all.
- A question that brings something may have left something: then two more idle waiters are woken. So many messages
  reach many waiters within a few round trips, and one message costs three questions at most.
- A hint is never lost. It stays with a waiter until a question that this waiter began after the hint is answered. A
  waiter that leaves before passes the hint on; so does one whose question fails. If no other is idle, that one keeps
  the hint until it asks again, or until another has had an answer and takes it over. A failed waiter is not idle until
  it has had an answer, so failures are not passed round in a circle.
- If no waiter is idle, all get the hint, and each asks once when it can: a busy one may be the first to have room.

::

             wake, or by itself        answered: nothing, or passed on
    idle ──────────────────────▶ asking ──────────────────────▶ idle
                                   │ failed
                                   ▼
                                 failed, asks again in its own time
"""

from __future__ import annotations

from collections.abc import Callable

SPREAD = 2
"""So many idle waiters are woken when a question has brought something."""


class Waiter:
    """One that waits for messages: a consumer, or a call of ``receive``. Made by :meth:`Waiters.join`.

    Attributes:
        idle: Whether it would ask at once if it was woken: nothing came of its last question, and none is under way.
        asking: Whether a question of its own is under way.
    """

    __slots__ = ("_asks_for_hint", "_has_hint", "_wake", "asking", "idle")

    def __init__(self, wake: Callable[[], bool]) -> None:
        self.idle: bool = False  # it begins with a question
        self.asking: bool = False
        self._wake = wake
        self._has_hint = False  # which no question has been begun for
        self._asks_for_hint = False  # the question under way is begun for one


class Waiters:
    """All waiters that would ask the same question about one queue."""

    def __init__(self) -> None:
        self._all: dict[Waiter, None] = {}  # the one idle for longest comes first
        self._kept: dict[Waiter, None] = {}  # those that keep a hint, and can't ask yet

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
        """Wait for nothing any more."""
        self._all.pop(waiter, None)
        self._kept.pop(waiter, None)
        if waiter._has_hint or waiter._asks_for_hint:
            waiter._has_hint = waiter._asks_for_hint = False
            self.hint()

    def hint(self) -> None:
        """Note that there may be messages."""
        if not self._wake_idle(1, None):
            self._tell_all(None)

    def asks(self, waiter: Waiter) -> None:
        """Note that a question of *waiter* begins."""
        waiter.idle, waiter.asking = False, True
        self._kept.pop(waiter, None)
        waiter._asks_for_hint, waiter._has_hint = waiter._has_hint, False

    def answered(self, waiter: Waiter, *, found: bool, again: bool = False) -> None:
        """Note the answer to it.

        Args:
            found: Whether it brought something.
            again: Whether *waiter* asks again by itself at once, because the store has not got through yet.
        """
        had_hint = self._ends(waiter)
        if again and not found:
            waiter._has_hint |= had_hint
            return
        waiter.idle = not waiter._has_hint
        if waiter in self._all:
            self._all[waiter] = self._all.pop(waiter)  # to the end
            if waiter.idle and self._kept:
                self._take_over(waiter)
        if had_hint and found and not self._wake_idle(SPREAD, waiter):
            self._tell_all(waiter)

    def failed(self, waiter: Waiter) -> None:
        """Note that it got no answer. *waiter* asks again in its own time."""
        if self._ends(waiter) or waiter._has_hint:
            waiter._has_hint = not self._wake_idle(1, waiter)
            if waiter._has_hint and waiter in self._all:
                self._kept[waiter] = None

    def _ends(self, waiter: Waiter) -> bool:
        """Note the end of a question; return whether it was begun for a hint."""
        had_hint, waiter._asks_for_hint = waiter._asks_for_hint, False
        waiter.asking = False
        return had_hint

    def _take_over(self, waiter: Waiter) -> None:
        """Let *waiter*, which is idle, ask for a hint that another keeps."""
        other, _ = self._kept.popitem()
        other._has_hint = False
        waiter.idle, waiter._has_hint = False, True
        if not waiter._wake():
            self._kept[waiter] = None

    def _wake_idle(self, most: int, but: Waiter | None) -> int:
        """Wake up to *most* idle waiters, and return how many ask."""
        woken = 0
        for waiter in [one for one in self._all if one.idle and one is not but]:
            waiter.idle, waiter._has_hint = False, True
            woken += waiter._wake()
            if woken >= most:
                break
        return woken

    def _tell_all(self, but: Waiter | None) -> None:
        for waiter in list(self._all):
            if waiter is not but and not waiter._has_hint:
                waiter.idle, waiter._has_hint = False, True
                waiter._wake()
