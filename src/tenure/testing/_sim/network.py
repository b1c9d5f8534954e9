"""The simulated network: delays and losses; between a process and its store, cuts in one direction or in both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tenure._timing import Timing
from tenure.testing._sim.world import World

SPREAD_MAX = 3.0
"""Once the network is healed, no message takes longer than this many times the usual delay."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """The usual delay, the shares of messages that are lost, slow or duplicated, and the slowest delay in ttls."""

    latency: float
    loss: float
    slow: float
    slowest: float
    duplicate: float


def draw_conditions(rng: random.Random, ttl: float, losses: Sequence[float], *, faulty: bool) -> Conditions:
    """Draw the conditions of one run; *losses* are the shares that may be lost."""
    return Conditions(
        latency=ttl * rng.choice((0.0003, 0.003, 0.02)),
        loss=rng.choice(losses) if faulty else 0.0,
        slow=rng.choice((0.0, 0.01, 0.05)) if faulty else 0.0,
        slowest=rng.choice((0.5, 1.2, 3.0)),
        duplicate=rng.choice((0.0, 0.02)),
    )


class Network:
    """Decide for each message how long it takes, or that it is lost."""

    def __init__(self, world: World, conditions: Conditions, timing: Timing) -> None:
        self._world = world
        self._timing = timing
        self.conditions = conditions
        self.loss = conditions.loss
        self.usual = conditions.latency
        self.healed = False
        self.latest = 0.0
        """When the last message arrives of those that were delayed far beyond the usual."""

    def delay(self) -> float | None:
        """Return the delay of a message, None if it is lost."""
        if self.healed:
            return self.usual_delay()
        draw = self._world.rng.random()
        if draw < self.loss:
            return None
        return self.far_delay() if draw > 1.0 - self.conditions.slow else self.usual_delay()

    def usual_delay(self) -> float:
        """Return the delay of an ordinary message."""
        return min(self._world.rng.expovariate(1.0) * self.usual, SPREAD_MAX * self.usual)

    def far_delay(self) -> float:
        """Return a delay that may be longer than a lease."""
        delay = self._world.rng.uniform(0.0, self.conditions.slowest * self._timing.ttl)
        self.latest = max(self.latest, self._world.now + delay)
        return delay

    def heal(self) -> None:
        """Lose nothing more, delay nothing more."""
        self.healed = True
        self.loss = 0.0
        self.usual = min(self.conditions.latency, self._timing.retry_every / 20)


class StoreNetwork(Network):
    """The network between hosts and their store. Hosts are known by number.

    Each direction is drawn anew, so that a question may arrive and its answer not.
    """

    def __init__(self, world: World, conditions: Conditions, timing: Timing) -> None:
        super().__init__(world, conditions, timing)
        self.cut_up: set[int] = set()
        self.cut_down: set[int] = set()
        self.half_cut: int | None = None
        """The host that gets no answer, though its requests arrive, also once the network is healed."""

    def up(self, host: int) -> float | None:
        """Return the delay of a message from *host* to the store, None if it is lost."""
        return None if host in self.cut_up else self.delay()

    def down(self, host: int) -> float | None:
        """Return the delay of a message from the store to *host*, None if it is lost."""
        return None if host in self.cut_down or host == self.half_cut else self.delay()

    def heal(self) -> None:
        """Lose nothing more, delay nothing more, and join what was cut, but for the host that is half cut."""
        super().heal()
        self.cut_up.clear()
        self.cut_down.clear()
