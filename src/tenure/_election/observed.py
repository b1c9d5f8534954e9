"""What stores have in common in which the end of a lease is observed, and its holder writes how long it lasts."""

from __future__ import annotations

JUST_SEEN = 1.0
"""Seconds after which a release that was seen is looked at again before the name is claimed: its requests may still
arrive from a process that hears no answers, and would keep the name from others."""


class Promises:
    """How long each claim of this process was promised, by name; each acquisition has a holder of its own.

    A renewal never shortens a claim: an earlier request may have asked for more, and its holder may count on that. But
    what others have written into the record was never asked for: the next renewal corrects it.
    """

    def __init__(self) -> None:
        self._until: dict[str, tuple[str, float]] = {}  # by name: the holder, and until when it may count on its claim

    def extend(self, name: str, holder: str, ttl: float, *, now: float, recorded: float = 0.0) -> float:
        """Note, before the request is sent, that it asks for *ttl* seconds; return those that are promised already.

        *recorded* are those that the record leaves: they count if this process has asked for none of this claim.
        """
        known = self._until.get(name)
        until = known[1] if known is not None and known[0] == holder else now + recorded
        self._until[name] = holder, max(until, now + ttl)
        return until - now

    def end(self, name: str, holder: str) -> None:
        """Note that a claim is over."""
        known = self._until.get(name)
        if known is not None and known[0] == holder:
            del self._until[name]
