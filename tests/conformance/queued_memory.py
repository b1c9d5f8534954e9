"""Leases in memory for which candidates stand in a queue, as in etcd and ZooKeeper, for tests without a server."""

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
    expiry="store clock",
    hints=True,
    survives_restart=False,
    queued=True,
    tells_remaining=False,
    tells_vacancy=False,
)


@dataclass(slots=True)
class Place:
    """A place in a queue. The first one has the name. Its token is the revision at which it was made."""

    holder: str
    token: int
    ends_at: float
    metadata: Metadata
    resign_asked: bool = False


@dataclass(slots=True)
class Queues:
    """The state of the store, shared by its clients."""

    places: dict[str, list[Place]] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    """The newest token under which each name was held."""
    told: set[tuple[str, int]] = field(default_factory=set)
    """The names and tokens that were granted as an answer to a request: only then are the metadata known."""
    revision: int = 100
    notifier: Notifier = field(default_factory=Notifier)


class QueuedMemoryLeases:
    """A ``QueuedLeaseStore`` in memory. It doesn't tell how long a lease has left."""

    def __init__(self, clock: Clock | None = None, queues: Queues | None = None) -> None:
        self.clock = clock or SystemClock()
        self.queues = queues or Queues()

    @property
    def traits(self) -> LeaseTraits:
        return TRAITS

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        require_name(name)
        require_name(holder, of="holder")
        require_ttl(ttl, TRAITS)
        place = self._place_of(name, holder)
        if place is None:
            self.queues.revision += 1
            place = Place(holder, self.queues.revision, self._ends_at(ttl), FrozenDict(metadata))
            self._line(name).append(place)
            self._changed(name)
        self._keep(place, ttl)
        first = self._line(name)[0]
        if first is not place:
            return self._held_by(name, first)
        if (name, place.token) not in self.queues.told:
            self.queues.told.add((name, place.token))
            self._changed(name)
        return Granted(Grant(name, holder, place.token), place.resign_asked)

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        require_ttl(ttl, TRAITS)
        answers: list[Granted | Lost] = []
        for grant in grants:
            place = self._claim_of(grant)
            if place is None:
                answers.append(Lost(grant))
            else:
                self._keep(place, ttl)
                answers.append(Granted(grant, place.resign_asked))
        return answers

    async def release(self, grant: Grant) -> Released | Lost:
        place = self._claim_of(grant)
        if place is None:
            return Lost(grant)
        self._end(grant.name, place)
        return Released(grant)

    async def withdraw(self, name: str, holder: str) -> None:
        require_name(name)
        require_name(holder, of="holder")
        if place := self._place_of(name, holder):
            self._end(name, place)

    async def inspect(self, name: str) -> HeldBy | Vacant:
        require_name(name)
        line = self._line(name)
        if line:
            return replace(self._held_by(name, line[0]), resign_asked=line[0].resign_asked)
        return Vacant(name, self.queues.newest.get(name, 0))

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        return [await self.inspect(name) for name in names]

    async def names(self) -> Sequence[str]:
        return sorted(self.queues.newest)

    async def ask_to_resign(self, name: str) -> bool:
        require_name(name)
        line = self._line(name)
        if not line:
            return False
        line[0].resign_asked = True
        self.queues.notifier.notify(name)
        return True

    def hints(self, name: str) -> AsyncIterator[None]:
        require_name(name)
        return self.queues.notifier.listen(name)

    # --- parts, which planted bugs replace ---

    def _line(self, name: str) -> list[Place]:
        """Return the places for *name* that have not ended, in their order."""
        line, now = self.queues.places.setdefault(name, []), self.clock.now()
        while any(place.ends_at <= now for place in line):
            line.remove(next(place for place in line if place.ends_at <= now))
            self._changed(name)
        return line

    def _held_by(self, name: str, first: Place) -> HeldBy:
        metadata = first.metadata if (name, first.token) in self.queues.told else NO_METADATA
        return HeldBy(name, first.holder, first.token, None, metadata)

    def _place_of(self, name: str, holder: str) -> Place | None:
        return next((place for place in self._line(name) if place.holder == holder), None)

    def _claim_of(self, grant: Grant) -> Place | None:
        first = next(iter(self._line(grant.name)), None)
        return first if first and (first.holder, first.token) == (grant.holder, grant.token) else None

    def _end(self, name: str, place: Place) -> None:
        self._line(name).remove(place)
        self._changed(name)

    def _keep(self, place: Place, ttl: float) -> None:
        place.ends_at = max(place.ends_at, self._ends_at(ttl))

    def _ends_at(self, ttl: float) -> float:
        return self.clock.now() + ttl

    def _changed(self, name: str) -> None:
        if line := self.queues.places[name]:
            self.queues.newest[name] = line[0].token
        self.queues.notifier.notify(name)
