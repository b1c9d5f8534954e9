"""What this process has seen of each Lease, and since when: the record's own duration after that, it has expired.

The time of another machine is never compared with ours. A record counts from when it was first seen, after the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenure._backends.kubernetes.records import Json, duration_of, grant_of, holder_of, record_of, token_of
from tenure._lease import TOKEN_MAX, Grant
from tenure._runtime.clock import Clock

FOLLOWED_MAX = 20_000
"""Leases that are followed and were never asked for; of more, those that were renewed last are known. A group with the
most partitions has about as many."""


@dataclass(slots=True)
class Observation:
    """The newest known state of a Lease. Times are of this process's monotonic clock."""

    lease: Json
    since: float
    """When this record was first seen: renewed, or with another holder."""
    is_first: bool
    """Whether no change of it was seen yet: then it may be much older than ``since``."""

    def left(self, now: float) -> float:
        """Return the seconds until it has expired; 0 or less if it has, or nobody holds it."""
        return self.since + duration_of(self.lease) - now if holder_of(self.lease) else 0.0

    def has_expired(self, now: float) -> bool:
        """Return whether its holder has lost it, as seen from here."""
        return self.left(now) <= 0.0

    def vacant_for(self, now: float) -> float:
        """Return for how many seconds, at least, it has been free: since its release was seen, or it has expired."""
        return max(0.0, now - self.since - (duration_of(self.lease) if holder_of(self.lease) else 0.0))


class Observations:
    """The observations of one process, by name."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, Observation] = {}
        self._followed: dict[str, Observation] = {}  # those that were never asked for, the newest last
        self._deleted: dict[str, Grant] = {}  # by name: the claim that ended as its Lease was deleted
        self._tokens: dict[str, int] = {}

    @property
    def now(self) -> float:
        """The present moment."""
        return self._clock.now()

    def find(self, name: str) -> Observation | None:
        """Return what is known about *name*."""
        return self._known.get(name)

    def note(self, name: str, lease: Json) -> Observation:
        """Note a Lease that was just read or written."""
        token = token_of(lease)
        if token < TOKEN_MAX:  # else another program has written it, and an operator may still correct that
            self._tokens[name] = max(token, self._tokens.get(name, 0))
        self._deleted.pop(name, None)
        followed = self._followed.pop(name, None)
        new = self._known[name] = self._after(self._known.get(name) or followed, lease)
        return new

    def note_followed(self, name: str, lease: Json) -> None:
        """Note a Lease that has changed, and that this process may never have asked for."""
        if name in self._known:
            self.note(name, lease)
            return
        self._followed[name] = self._after(self._followed.pop(name, None), lease)
        if len(self._followed) > FOLLOWED_MAX:
            del self._followed[next(iter(self._followed))]

    def _after(self, before: Observation | None, lease: Json) -> Observation:
        """Return what is known now: a record that is still the same counts from when it was first seen."""
        if before is not None and record_of(before.lease) == record_of(lease):
            before.lease = lease
            return before
        return Observation(lease, self._clock.now(), before is None)

    def note_missing(self, name: str) -> None:
        """Note that there is no Lease of this name; its newest token is remembered."""
        self._known.pop(name, None)
        self._followed.pop(name, None)

    def note_deleted(self, name: str, lease: Json) -> None:
        """Note that this Lease was deleted, as its watch has told."""
        self.note_missing(name)
        self._deleted[name] = grant_of(name, lease)

    def was_deleted(self, grant: Grant) -> bool:
        """Return whether a claim has ended as its Lease was deleted: a new Lease has a higher token."""
        return self._deleted.get(grant.name) == grant

    def forget_followed(self) -> None:
        """Forget what was never asked for: nothing is followed any more."""
        self._followed.clear()

    def newest_token(self, name: str) -> int:
        """Return the newest token that this process has seen for *name*, even if its Lease was deleted since."""
        return self._tokens.get(name, 0)
