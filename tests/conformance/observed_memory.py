"""Leases in memory whose end each client judges by what it has seen, as in Kubernetes and NATS, without a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from tenure._election.store import LeaseTraits, require_name, require_ttl
from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, Released, Vacant
from tenure._runtime.clock import Clock, SystemClock
from tenure._runtime.notifier import Notifier

TRAITS = LeaseTraits(
    ttl_min=0.01,
    ttl_max=86_400.0,
    fencing="native",
    expiry="observed",
    hints=True,
    survives_restart=False,
    tells_remaining=False,
    follows_renewals=True,
)


@dataclass(frozen=True, slots=True)
class Record:
    """What is stored about a name. Each acquisition, renewal and release writes a new stamp."""

    holder: str | None
    token: int
    ttl: float
    stamp: int
    metadata: Metadata
    resign_asked: bool = False

    def grant(self, name: str) -> Grant:
        """Return the grant of its holder."""
        assert self.holder is not None
        return Grant(name, self.holder, self.token)


@dataclass(slots=True)
class Records:
    """The state of the store, shared by its clients."""

    kept: dict[str, Record] = field(default_factory=dict)
    stamps: int = 0
    notifier: Notifier = field(default_factory=Notifier)
    written: Notifier = field(default_factory=Notifier)
    """Notified of each write, which those who follow are told of."""

    def close(self) -> None:
        """End the waits of all clients."""
        self.notifier.close()
        self.written.close()


class ObservedMemoryLeases:
    """A ``LeaseStore`` in memory: a lease ends its own ttl after this client saw its record last changed."""

    def __init__(self, clock: Clock | None = None, records: Records | None = None) -> None:
        self.clock = clock or SystemClock()
        self.records = records or Records()
        self.seen: dict[str, tuple[int, float]] = {}  # by name: the stamp, and when it was seen first
        self.changed: set[str] = set()  # names that were seen to change: so it is known how old their record is

    @property
    def traits(self) -> LeaseTraits:
        return TRAITS

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        require_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, TRAITS)
        record = self._read(name)
        if record is not None and self._left(name, record) > 0.0:
            if record.holder == holder:
                return self._renewed(name, record, ttl)
            return replace(self._held_by(name, record), resign_asked=False)
        token = record.token + 1 if record is not None else 1
        new = self._write(name, Record(holder, token, ttl, 0, FrozenDict(metadata)))
        self._changed(name)
        return Granted(new.grant(name))

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        require_ttl(ttl, TRAITS)
        answers: list[Granted | Lost] = []
        for grant in grants:
            record = self._read(grant.name)
            answers.append(
                self._renewed(grant.name, record, ttl)
                if record is not None and self._is_of(record, grant)
                else Lost(grant)
            )
        return answers

    async def release(self, grant: Grant) -> Released | Lost:
        record = self._read(grant.name)
        if record is None or not self._is_of(record, grant):
            return Lost(grant)
        self._write(grant.name, Record(None, grant.token, 0.0, 0, NO_METADATA))
        self._changed(grant.name)
        return Released(grant)

    async def inspect(self, name: str) -> HeldBy | Vacant:
        require_name(name)
        record = self._read(name)
        if record is None:
            return Vacant(name)
        left = self._left(name, record)
        return self._held_by(name, record) if left > 0.0 else Vacant(name, record.token, -left)

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        return [await self.inspect(name) for name in names]

    async def names(self) -> Sequence[str]:
        return sorted(self.records.kept)

    async def ask_to_resign(self, name: str) -> bool:
        require_name(name)
        record = self._read(name)
        if record is None or self._left(name, record) <= 0.0:
            return False
        self.records.kept[name] = replace(record, resign_asked=True)  # with the same stamp: it is no renewal
        self._changed(name)
        return True

    def hints(self, name: str) -> AsyncIterator[None]:
        require_name(name)
        return self.records.notifier.listen(name)

    async def follow_renewals(self, prefix: str) -> AsyncIterator[object]:
        async for _ in self.records.written.listen(""):
            for name in self.records.kept:
                if name.startswith(prefix):
                    self._told(name)
            yield None

    # --- parts, which planted bugs replace ---

    def _told(self, name: str) -> None:
        self._read(name)

    def _read(self, name: str) -> Record | None:
        record = self.records.kept.get(name)
        if record is not None and self.seen.get(name, (0, 0.0))[0] != record.stamp:
            if name in self.seen:
                self.changed.add(name)
            self.seen[name] = record.stamp, self.clock.now()
        return record

    def _left(self, name: str, record: Record) -> float:
        """Return the seconds until the lease has ended, as seen from here; 0 or less if it has, or nobody holds it."""
        return self.seen[name][1] + record.ttl - self.clock.now()

    def _is_of(self, record: Record, grant: Grant) -> bool:
        return (record.holder, record.token) == (grant.holder, grant.token)

    def _renewed(self, name: str, record: Record, ttl: float) -> Granted:
        new = self._write(name, replace(record, ttl=self._ttl_of_renewal(ttl, self._left(name, record))))
        return Granted(new.grant(name), new.resign_asked)

    def _ttl_of_renewal(self, ttl: float, left: float) -> float:
        return max(ttl, left)

    def _write(self, name: str, record: Record) -> Record:
        self.records.stamps += 1
        new = self.records.kept[name] = replace(record, stamp=self.records.stamps)
        self._read(name)
        self.records.written.notify("")
        return new

    def _changed(self, name: str) -> None:
        self.records.notifier.notify(name)

    def _held_by(self, name: str, record: Record) -> HeldBy:
        assert record.holder is not None
        left = self._left(name, record) if name in self.changed else None
        return HeldBy(name, record.holder, record.token, left, record.metadata, record.resign_asked)
