"""Who is alive, as far as can be told: a member that was not heard of for some heartbeats is taken for dead.

A guess, and used as one: it makes elections short, and where ``quorum="none"``, it is what they stand on. Whom a
majority vouches for does not depend on it.
"""

from __future__ import annotations

import math

from tenure._backends.peers.fleet import Fleet
from tenure._jitter import Rng, sooner


class Liveness:
    """What one member thinks of the others.

    Costs ``n − 1`` messages per member and heartbeat: ``n·(n − 1)`` for the fleet.
    """

    def __init__(self, fleet: Fleet, rng: Rng, now: float) -> None:
        self._fleet = fleet
        self._rng = rng
        self._heard: dict[int, float] = {}
        self.beat_at = now if fleet.me is not None and fleet.others else math.inf
        """When to tell the others again that we live."""

    def heard(self, member: int, now: float) -> bool:
        """Note a sign of life; return whether it comes from one that was taken for dead."""
        news = not self.is_alive(member, now)
        self._heard[member] = now
        return news

    def beat(self, now: float) -> None:
        """Note that the others have been told."""
        self.beat_at = now + sooner(self._fleet.heartbeat, self._rng)

    def is_alive(self, member: int, now: float) -> bool:
        """Return whether *member* is taken for alive; we ourselves always are."""
        return member == self._fleet.me or now - self._heard.get(member, -math.inf) <= self._fleet.suspect_after

    def alive(self, now: float) -> list[int]:
        """Return all who are taken for alive, ourselves included, by rank."""
        return [member for member in range(self._fleet.size) if self.is_alive(member, now)]

    def dies_at(self, member: int) -> float:
        """Return from when on *member* is taken for dead, if nothing more is heard of it."""
        return self._heard.get(member, -math.inf) + self._fleet.suspect_after
