"""The simulated road: delay and loss, and between a process and its store cuts in one direction or in both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenure._timing import Timing
    from tenure.testing._sim.world import World

CALM_SPREAD = 3.0
"""On a calm road, no message takes longer than this many times the usual delay."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What the road is like: the usual delay, the shares that are lost, slow or asked twice, the slowest in ttls."""

    latency: float
    loss: float
    slow: float
    slowest: float
    duplicate: float


def draw_weather(rng: random.Random, ttl: float, losses: Sequence[float], *, faulty: bool) -> Weather:
    """Draw what the road is like in one run; *losses* are the shares that may be lost."""
    return Weather(
        latency=ttl * rng.choice((0.0003, 0.003, 0.02)),
        loss=rng.choice(losses) if faulty else 0.0,
        slow=rng.choice((0.0, 0.01, 0.05)) if faulty else 0.0,
        slowest=rng.choice((0.5, 1.2, 3.0)),
        duplicate=rng.choice((0.0, 0.02)),
    )


class Road:
    """Say of each message how long it is on its way, or that it is lost."""

    def __init__(self, world: World, weather: Weather, timing: Timing) -> None:
        self._world = world
        self._timing = timing
        self.weather = weather
        self.loss = weather.loss
        self.usual = weather.latency
        self.calm = False
        self.latest = 0.0
        """When the last message arrives of those that were delayed far beyond the usual."""

    def delay(self) -> float | None:
        """Return the delay of a message, None if it is lost."""
        if self.calm:
            return self.usual_delay()
        draw = self._world.rng.random()
        if draw < self.loss:
            return None
        return self.far_delay() if draw > 1.0 - self.weather.slow else self.usual_delay()

    def usual_delay(self) -> float:
        """Return the delay of a message that nothing happens to."""
        return min(self._world.rng.expovariate(1.0) * self.usual, CALM_SPREAD * self.usual)

    def far_delay(self) -> float:
        """Return a delay that may be longer than a lease."""
        delay = self._world.rng.uniform(0.0, self.weather.slowest * self._timing.ttl)
        self.latest = max(self.latest, self._world.now + delay)
        return delay

    def heal(self) -> None:
        """Lose nothing more, delay nothing more."""
        self.calm = True
        self.loss = 0.0
        self.usual = min(self.weather.latency, self._timing.retry_every / 20)


class Network(Road):
    """The road between hosts and their store. Hosts are known by number.

    Each direction is drawn anew, so that a question may arrive and its answer not.
    """

    def __init__(self, world: World, weather: Weather, timing: Timing) -> None:
        super().__init__(world, weather, timing)
        self.cut_up: set[int] = set()
        self.cut_down: set[int] = set()

    def up(self, host: int) -> float | None:
        """Return the delay of a message from *host* to the store, None if it is lost."""
        return None if host in self.cut_up else self.delay()

    def down(self, host: int) -> float | None:
        """Return the delay of a message from the store to *host*, None if it is lost."""
        return None if host in self.cut_down else self.delay()

    def heal(self) -> None:
        """Lose nothing more, delay nothing more, and join what was cut."""
        super().heal()
        self.cut_up.clear()
        self.cut_down.clear()
