"""What this process has seen of each election, and since when: a record's own ttl after that, its lease has expired.

The time of another machine is never compared with ours. A write counts from when it was first seen: by an answer, or
by the message with which the bucket reports it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenure._backends.nats.lease_records import Record
from tenure._runtime.clock import Clock


@dataclass(slots=True)
class Observation:
    """The newest known state of an election. Times are of this process's monotonic clock."""

    record: Record | None
    """None if it has none, or an operator has deleted it."""
    revision: int | None
    """Of its key's last message; 0 if there is none, None if there is no bucket."""
    since: float
    """When its stamp was first seen."""
    is_first: bool
    """Whether no change of it was seen yet: then it may be much older than ``since``."""

    def left(self, now: float) -> float:
        """Return the seconds until its lease has expired; 0 or less if it has, or nobody holds it."""
        return self.since + self.record.ttl - now if self.record and self.record.holder else 0.0

    def has_expired(self, now: float) -> bool:
        """Return whether nobody holds it, as seen from here."""
        return self.left(now) <= 0.0

    def vacant_for(self, now: float) -> float | None:
        """Return for how many seconds, at least, it has been free; None if that isn't known."""
        if self.record is None:
            return None
        return now - self.since - (self.record.ttl if self.record.holder else 0.0)


class Observations:
    """The observations of one process, by name."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, Observation] = {}
        self._doubted: set[str] = set()
        self._tokens: dict[str, int] = {}

    @property
    def now(self) -> float:
        """The present moment."""
        return self._clock.now()

    def find(self, name: str) -> Observation | None:
        """Return what is known of *name*; None if nothing is, or it is in doubt."""
        return None if name in self._doubted else self._known.get(name)

    def doubt(self, name: str) -> None:
        """Note that a write of this process may have changed *name*, or may not: it got no answer."""
        self._doubted.add(name)

    def note(self, record: Record, revision: int) -> Observation:
        """Note the newest record of an election, which was just read or written."""
        name = record.name
        self._doubted.discard(name)
        self._tokens[name] = max(record.token, self._tokens.get(name, 0))
        known = self._known.get(name)
        if known is not None and known.record is not None and known.record.stamp == record.stamp:
            known.record, known.revision = record, revision
            return known
        new = self._known[name] = Observation(record, revision, self._clock.now(), is_first=known is None)
        return new

    def note_report(self, record: Record, revision: int) -> None:
        """Note a record that the bucket reports, unless a newer one was read meanwhile."""
        known = self._known.get(record.name)
        if known is None or known.revision is None or revision > known.revision:
            self.note(record, revision)

    def note_missing(self, name: str, revision: int | None) -> Observation:
        """Note that *name* has no record; its newest token is remembered."""
        self._doubted.discard(name)
        self._known.pop(name, None)
        return Observation(None, revision, self._clock.now(), is_first=True)

    def newest_token(self, name: str) -> int:
        """Return the newest token that this process has seen for *name*, even if the bucket was deleted since."""
        return self._tokens.get(name, 0)
