"""The sessions that a process holds: the messages received from each, until its lock has ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

SWEEP_MIN = 128
"""Sessions to remember before ended ones are removed; after each removal, twice as many as remain."""


@dataclass(slots=True)
class _Held:
    ends: float  # by when the lock has ended, unless it is extended
    received: set[int] = field(default_factory=set)  # and not settled
    is_unsure: bool = False


class HeldSessions:
    """Remembers, by the token of a session's lock, the received messages, and whether a claim was not answered.

    A lock can end without another request under it. So each is remembered with the time of its end.
    """

    def __init__(self) -> None:
        self._held: dict[int | str, _Held] = {}
        self._sweep_at = SWEEP_MIN

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, token: object) -> bool:
        return token in self._held

    def hold(self, token: int | str, ends: float, now: float) -> None:
        """Note that the lock with *token* ends at *ends* at the latest, by the same clock as *now*."""
        known = self._held.get(token)
        if known is not None:
            known.ends = max(known.ends, ends)
            return
        if len(self._held) >= self._sweep_at:
            for old, held in list(self._held.items()):
                if held.ends <= now:
                    self.forget(old)
            self._sweep_at = max(SWEEP_MIN, 2 * len(self._held))
        self._held[token] = _Held(ends)

    def forget(self, token: int | str) -> None:
        """Forget a lock that has ended, if it is known."""
        self._held.pop(token, None)

    def received(self, token: int | str, numbers: Iterable[int]) -> None:
        """Note which messages the caller received under a lock; it holds them until it settles them."""
        if held := self._held.get(token):
            held.received.update(numbers)

    def settled(self, token: int | str, number: int) -> None:
        """Note that the caller has settled a message."""
        if held := self._held.get(token):
            held.received.discard(number)

    def unsettled(self, token: int | str) -> list[int]:
        """Return the messages that the caller has received under a lock and not settled."""
        held = self._held.get(token)
        return sorted(held.received) if held else []

    def set_unsure(self, token: int | str, is_unsure: bool) -> None:
        """Note whether the last claim under a lock was not answered: it may have claimed messages, or may do so yet."""
        if held := self._held.get(token):
            held.is_unsure = is_unsure

    def is_unsure(self, token: int | str) -> bool:
        """Return whether the last claim under a lock was not answered."""
        held = self._held.get(token)
        return held is not None and held.is_unsure
