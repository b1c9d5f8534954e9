"""The settings that one seed draws: a fleet, its clocks, its network, its faults."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tenure._backends.peers.fleet import Fleet, Quorum, Strategy
from tenure._timing import Timing
from tenure.testing._sim.network import Conditions

TIMINGS = (
    Timing(ttl=15.0),
    Timing(ttl=6.0),
    Timing(ttl=10.0, renew_every=2.0, retry_every=0.5, drift=0.2, margin=0.5, grace=1.0),
    Timing(ttl=15.0, drift=0.0, margin=0.0),  # equal clocks: only counting from the question keeps it safe
    Timing(ttl=5.0, renew_every=1.0, retry_every=0.25, drift=0.02, margin=0.1, grace=0.0),
)
FAULTS = (
    "pause",
    "kill",
    "kill_all",
    "cut_one_way",
    "cut_off",
    "partition",
    "lossy",
    "slow",
    "resign",
    "ask_to_resign",
    "stop",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The setting of one run."""

    size: int
    strategy: Strategy
    quorum: Quorum
    timing: Timing
    ttl_max: float
    heartbeat: float
    patience: float
    rates: tuple[float, ...]
    offsets: tuple[float, ...]
    skews: tuple[float, ...]  # of the wall clocks
    candidates: tuple[int, ...]  # how many each member has
    late: tuple[bool, ...]  # which members join later
    conditions: Conditions
    ignores: float
    faults: tuple[str, ...]
    fault_every: float
    seconds: float

    def fleet(self, me: int | None) -> Fleet:
        members = tuple(f"m{number}:7000" for number in range(self.size))
        return Fleet(members, me, self.strategy, self.quorum, self.ttl_max, self.heartbeat, self.patience)

    def __str__(self) -> str:
        return f"{self.size} members, {self.strategy}, quorum {self.quorum}, ttl {self.timing.ttl:g} s"


@dataclass(frozen=True, slots=True)
class Given:
    """The part of a setting that is not drawn."""

    strategy: Strategy | None = None
    quorum: Quorum | None = None
    size: int | None = None
    faults: tuple[str, ...] = ()

    def confined(self, to: Given) -> Given:
        """Return the settings given by either; those of *to* win."""
        return Given(
            to.strategy or self.strategy, to.quorum or self.quorum, to.size or self.size, to.faults or self.faults
        )

    def __str__(self) -> str:
        values = {"strategy": self.strategy, "quorum": self.quorum, "size": self.size, "faults": ",".join(self.faults)}
        return "".join(f" --{name} {value}" for name, value in values.items() if value)


ANYTHING = Given()


def draw(rng: random.Random, given: Given) -> Plan:
    """Draw the setting of a run; *given* settings are not drawn."""
    timing = rng.choice(TIMINGS)
    ttl = timing.ttl
    size = given.size or rng.choice((2, 3, 3, 3, 4, 5, 5, 7))
    quorums: tuple[Quorum, ...] = ("majority", "majority", "majority", "none")
    strategies: tuple[Strategy, ...] = ("lowest", "bully", "ring")
    drawn_strategy, drawn_quorum = rng.choice(strategies), rng.choice(quorums)
    heartbeat = ttl / rng.choice((5, 10, 15))
    slowest = rng.uniform(0.9, 1.0)
    fastest = slowest / (1.0 - timing.drift)  # any two clocks keep the promise, some just so
    candidates = [rng.choice((0, 1, 1, 1, 1, 2)) for _ in range(size)]
    candidates[rng.randrange(size)] = 1
    faulty = rng.random() < 0.9
    return Plan(
        size=size,
        strategy=given.strategy or drawn_strategy,
        quorum=given.quorum or drawn_quorum,
        timing=timing,
        ttl_max=ttl * rng.choice((1.0, 1.0, 2.0)),
        heartbeat=heartbeat,
        patience=heartbeat / rng.choice((2, 4)),
        rates=tuple(rng.choice((slowest, fastest, rng.uniform(slowest, fastest))) for _ in range(size)),
        offsets=tuple(rng.uniform(-1000.0, 1000.0) for _ in range(size)),
        skews=tuple(rng.uniform(0.0, 0.2 * ttl) for _ in range(size)),
        candidates=tuple(candidates),
        late=tuple(rng.random() < 0.15 for _ in range(size)),
        conditions=Conditions(
            latency=ttl * rng.choice((0.0003, 0.003)),
            loss=rng.choice((0.0, 0.02, 0.1)) if faulty else 0.0,
            slow=rng.choice((0.0, 0.01, 0.05)) if faulty else 0.0,
            slowest=2.0,
            duplicate=rng.choice((0.0, 0.02, 0.1)),
        ),
        ignores=rng.choice((0.0, 0.1, 0.3)),
        faults=given.faults or (tuple(fault for fault in FAULTS if rng.random() < 0.5) if faulty else ()),
        fault_every=ttl * rng.choice((0.2, 0.4, 1.0)),
        seconds=14.0 * ttl,
    )
