"""What a process remembers of the sessions that it holds, until their locks have ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

SWEPT_FROM = 128
"""So many sessions are remembered before the ended ones are looked for; later, twice as many as were left then."""


@dataclass(slots=True)
class _Held:
    ends: float  # by when the lock has ended, unless it is extended
    in_hand: set[int] = field(default_factory=set)
    is_unsure: bool = False


class HeldSessions:
    """Remembers by the token of a session's lock what reached the caller, and whether a claim was not answered.

    A lock can end without a word: the process that held it asks no more. So each is remembered with a time.
    """

    def __init__(self) -> None:
        self._held: dict[int | str, _Held] = {}
        self._swept_at = SWEPT_FROM

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
        if len(self._held) >= self._swept_at:
            for old, held in list(self._held.items()):
                if held.ends <= now:
                    self.forget(old)
            self._swept_at = max(SWEPT_FROM, 2 * len(self._held))
        self._held[token] = _Held(ends)

    def forget(self, token: int | str) -> None:
        """Forget a lock that has ended, or never was."""
        self._held.pop(token, None)

    def received(self, token: int | str, numbers: Iterable[int]) -> None:
        """Note which messages reached the caller under a lock; they are in its hands until it settles them."""
        if held := self._held.get(token):
            held.in_hand.update(numbers)

    def settled(self, token: int | str, number: int) -> None:
        """Note that a message is no longer in the caller's hands."""
        if held := self._held.get(token):
            held.in_hand.discard(number)

    def in_hand(self, token: int | str) -> list[int]:
        """Return the messages in the caller's hands."""
        held = self._held.get(token)
        return sorted(held.in_hand) if held else []

    def doubt(self, token: int | str, is_unsure: bool) -> None:
        """Note whether the last claim under a lock was not answered: it may have claimed messages, or will."""
        if held := self._held.get(token):
            held.is_unsure = is_unsure

    def is_unsure(self, token: int | str) -> bool:
        """Return whether the last claim under a lock was not answered."""
        held = self._held.get(token)
        return held is not None and held.is_unsure
