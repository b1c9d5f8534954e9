"""What this process has seen of each election, and since when: a record's own ttl after that, its lease has expired.

The time of another machine is never compared with ours. A write counts from when it was first seen in an answer of the
store; or from when a report told its stamp, if the store then has the same stamp.

Any program may send what looks like a report. So a report says nothing about an election: the store is asked next. And
no report can make a lease seem older than it is: nobody knows a stamp before its writer has made it up, and that counts
its own lease from a still earlier moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from tenure._backends.nats.lease_records import Record
from tenure._runtime.clock import Clock

HEARD_MAX = 20_000
"""Names of which a report is kept; of more, those that were told last. A group with the most partitions has about as
many. One that is forgotten makes a lease seem younger than it is."""
HEARD_FOR = 2.0
"""How many of its own ttl a report is kept at most: who wants to know has looked by then."""


class Heard(NamedTuple):
    """What a report has told of a name, perhaps a forged one."""

    stamp: str
    at: float
    """When this stamp was first told, on this process's clock."""
    ttl: float


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
        self._heard: dict[str, Heard] = {}  # by name, the newest last

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
        heard = self._heard.get(name)
        since = heard.at if heard is not None and heard.stamp == record.stamp else self._clock.now()
        new = self._known[name] = Observation(record, revision, since, is_first=known is None)
        return new

    def note_report(self, record: Record) -> None:
        """Note that a report tells a record, which may be forged: unless it is known, what is known is in doubt."""
        known = self._known.get(record.name)
        is_known = known is not None and known.record is not None and known.record.stamp == record.stamp
        heard = self._heard.get(record.name)
        if not is_known and (heard is None or heard.stamp != record.stamp):
            self._hear(record)
        if known is not None and (not is_known or record.write == "asked to resign"):
            self._doubted.add(record.name)

    def _hear(self, record: Record) -> None:
        now = self._clock.now()
        self._heard.pop(record.name, None)
        self._heard[record.name] = Heard(record.stamp, now, record.ttl)
        for name, oldest in list(islice(self._heard.items(), 2)):
            if len(self._heard) > HEARD_MAX or now - oldest.at > HEARD_FOR * oldest.ttl:
                del self._heard[name]

    def forget_followed(self) -> None:
        """Forget the reports of names that this process knows nothing else of: they are followed no more."""
        self._heard = {name: heard for name, heard in self._heard.items() if name in self._known}

    def note_missing(self, name: str, revision: int | None) -> Observation:
        """Note that *name* has no record; its newest token is remembered."""
        self._doubted.discard(name)
        self._known.pop(name, None)
        return Observation(None, revision, self._clock.now(), is_first=True)

    def newest_token(self, name: str) -> int:
        """Return the newest token that this process has seen for *name*, even if the bucket was deleted since."""
        return self._tokens.get(name, 0)
