"""What this process has seen of each Lease, and since when: the record's own duration after that, it has expired.

The time of another machine is never compared with ours. A record counts from when it was first seen, after the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenure._backends.kubernetes.records import Json, duration_of, holder_of, record_of, token_of
from tenure._lease import TOKEN_MAX
from tenure._runtime.clock import Clock


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
        known = self._known.get(name)
        if known is not None and record_of(known.lease) == record_of(lease):
            known.lease = lease
            return known
        new = self._known[name] = Observation(lease, self._clock.now(), known is None)
        return new

    def note_missing(self, name: str) -> None:
        """Note that there is no Lease of this name; its newest token is remembered."""
        self._known.pop(name, None)

    def newest_token(self, name: str) -> int:
        """Return the newest token that this process has seen for *name*, even if its Lease was deleted since."""
        return self._tokens.get(name, 0)
