"""Which kinds of requests a store has carried out: a right that is missing for the first one may never come."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """A kind of request, by the rights that it needs."""

    READ = "read"
    LEAD = "lead"
    """Changes a lease."""
    QUEUE = "queue"
    """Sends, receives, settles, or changes a queue."""


class Worked:
    """The kinds of requests of one client that a store has carried out.

    A login that may read can be one that may not lead: so a request that changes something, and is refused, may work
    later only if one of its kind has worked before. Who may change anything may read.
    """

    def __init__(self) -> None:
        self._kinds: set[Kind] = set()

    def note(self, kind: Kind) -> None:
        """Note that a request of this *kind* was carried out, with all rights that it needs."""
        self._kinds.add(kind)

    def __bool__(self) -> bool:
        """Return whether any request was carried out."""
        return bool(self._kinds)

    def was_permitted(self, kind: Kind) -> bool:
        """Return whether requests of this *kind* were permitted: then one that is refused may be permitted again."""
        return bool(self._kinds) if kind is Kind.READ else kind in self._kinds
