"""Failure detection: a member that was silent for some heartbeats counts as dead.

It is a guess: it makes elections short, and with ``quorum="none"`` they depend on it. The votes of a majority don't.
"""

from __future__ import annotations

import math

from tenure._backends.peers.fleet import Fleet
from tenure._jitter import Rng, sooner


class Liveness:
    """One member's view of the others.

    Costs ``n − 1`` messages per member and heartbeat: ``n·(n − 1)`` for the fleet.
    """

    def __init__(self, fleet: Fleet, rng: Rng, now: float) -> None:
        self._fleet = fleet
        self._rng = rng
        self._heard: dict[int, float] = {}
        self.beat_at = now if fleet.me is not None and fleet.others else math.inf
        """When to send the next heartbeat."""

    def heard(self, member: int, now: float) -> bool:
        """Note a sign of life; return whether its sender counted as dead."""
        news = not self.is_alive(member, now)
        self._heard[member] = now
        return news

    def beat(self, now: float) -> None:
        """Note that a heartbeat was sent to all."""
        self.beat_at = now + sooner(self._fleet.heartbeat, self._rng)

    def is_alive(self, member: int, now: float) -> bool:
        """Return whether *member* counts as alive; this member itself always does."""
        return member == self._fleet.me or now - self._heard.get(member, -math.inf) <= self._fleet.suspect_after

    def alive(self, now: float) -> list[int]:
        """Return all members that count as alive, this one included, by rank."""
        return [member for member in range(self._fleet.size) if self.is_alive(member, now)]

    def dies_at(self, member: int) -> float:
        """Return from when on *member* counts as dead, if it stays silent."""
        return self._heard.get(member, -math.inf) + self._fleet.suspect_after
