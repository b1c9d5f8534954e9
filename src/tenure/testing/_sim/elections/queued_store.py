"""A simulated store in which candidates stand in a queue: the first of those whose time is not over has the lease."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tenure._election.effects import Withdraw, Withdrawn
from tenure._lease import Grant, Granted, HeldBy, Released
from tenure.testing._sim.elections.plan import Plan
from tenure.testing._sim.elections.stores import NO_HOLDER, ClockStore
from tenure.testing._sim.world import SkewedClock, World


@dataclass(slots=True)
class Place:
    """A place in the queue. Its token is the revision at which it was made, its end is by the store's clock."""

    holder: str
    token: int
    expires: float


class QueuedStore(ClockStore):
    """A queue of places. Each request of a holder keeps its place for another ttl."""

    def __init__(self, world: World, plan: Plan, clock: SkewedClock, ages: Random, name: str) -> None:
        super().__init__(world, plan, clock, ages, name)
        self.places: list[Place] = []
        self.revision = 0
        self.on_end: Callable[[str], object] = lambda holder: None
        """Called with the holder of a place whose time is over."""

    def perform(self, message: Any) -> Any:
        """Do what *message* asks for, now."""
        if isinstance(message, Withdraw):
            return self.withdraw(message.holder)
        return super().perform(message)

    def acquire(self, holder: str) -> Granted | HeldBy:
        """Keep the place of *holder*, or give it one; it has the lease if that is the first."""
        place = self.place_of(holder)
        if place is None:
            if self.now() < self.silent_until:
                return HeldBy(self.name, "somebody", self.token, self.silent_until - self.now())
            self.revision += 1
            place = Place(holder, self.revision, -1.0)
            self.places.append(place)
        if place is self.places[0]:
            place.expires = self.lasting(place.expires)
            self.held()
        else:
            place.expires = self.now() + self.ttl
            return HeldBy(self.name, self.holder, self.token, self.remaining())
        return Granted(Grant(self.name, holder, place.token), self.resign_asked, self.age)

    def renew(self, grant: Grant) -> Any:
        """Extend the lease if *grant* still has it."""
        answer = super().renew(grant)
        if isinstance(answer, Granted):
            self.places[0].expires = self.expires
        return answer

    def release(self, grant: Grant) -> Any:
        """Take the lease back if *grant* still has it; the next one in the queue has it then."""
        answer = super().release(grant)
        if isinstance(answer, Released):
            del self.places[0]
            self.held()
        return answer

    def withdraw(self, holder: str) -> Withdrawn:
        """End the place of *holder*, and its lease if it has come to the front."""
        self.places = [place for place in self.places if place.holder != holder]
        self.held()
        return Withdrawn()

    def forget(self) -> None:
        """Lose all places in a restart."""
        super().forget()
        self.places.clear()

    def place_of(self, holder: str) -> Place | None:
        """Return the place of *holder* whose time is not over."""
        self.held()
        return next((place for place in self.places if place.holder == holder), None)

    def held(self) -> bool:
        """End the places whose time is over; return whether there is a first one."""
        for place in [place for place in self.places if self.is_over(place)]:
            self.places.remove(place)
            self.on_end(place.holder)
        if not self.places:
            self.holder = NO_HOLDER
            return False
        first = self.places[0]
        if (first.holder, first.token) != (self.holder, self.token):
            self.resign_asked = False
        self.holder, self.token, self.expires = first.holder, first.token, first.expires
        return True

    def is_over(self, place: Place) -> bool:
        """Return whether the time of *place* is over."""
        return self.now() >= place.expires
