"""The cost of replacing a leader without faults: messages and time, as docs/strategies.md says."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tenure._backends.peers.fleet import Strategy
from tenure._timing import Timing
from tenure.testing._sim.network import Conditions
from tests.sim.peers.plan import Plan
from tests.sim.peers.simulation import Simulation


def failover(seed: int, strategy: Strategy, size: int) -> tuple[float, float, float]:
    """Kill a leader without faults; return the messages to choose a successor, to claim and vote, and the seconds."""
    timing = Timing(ttl=15.0)
    same = (1.0,) * size
    plan = Plan(
        size=size,
        strategy=strategy,
        quorum="majority",
        timing=timing,
        ttl_max=timing.ttl,
        heartbeat=timing.ttl / 15,
        patience=timing.ttl / 60,
        rates=same,
        offsets=same,
        skews=same,
        candidates=(1,) * size,
        late=(False,) * size,
        conditions=Conditions(latency=0.001, loss=0.0, slow=0.0, slowest=0.0, duplicate=0.0),
        ignores=0.0,
        faults=(),
        fault_every=1.0,
        seconds=0.0,
    )
    simulation = Simulation(seed, plan=plan)
    simulation.network.heal()
    world, network = simulation.world, simulation.network
    world.run_until(lambda: bool(simulation.leaders()), step=0.05, end=math.inf)
    world.run(world.now + timing.ttl * (1 + world.rng.random()))
    simulation.leaders()[0].die("killed")
    killed = world.now
    network.by_kind.clear()
    world.run_until(lambda: bool(simulation.leaders()), step=0.01, end=math.inf)
    elected = world.now
    world.run(world.now + 1.0)  # what is said after it is won
    choose = sum(network.by_kind.get(kind, 0) for kind in ("BullyElection", "BullyOk", "RingElection", "RingElected"))
    votes = sum(network.by_kind.get(kind, 0) for kind in ("Claim", "Vote", "Refusal", "ReleaseRequest", "ReleaseReply"))
    return choose, votes, elected - killed


COUNT_SEEDS = 5
HEAD = """\
| strategy | members | to choose | at most | allowed | claims and votes, at most | seconds |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Count:
    """The cost of replacing a leader, over some seeds: a line of the table in docs/strategies.md."""

    strategy: Strategy
    size: int
    choose: tuple[float, ...]
    votes: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, strategy: Strategy, size: int) -> Count:
        """Count."""
        found = [failover(seed, strategy, size) for seed in range(COUNT_SEEDS)]
        choose, votes, seconds = (tuple(sorted(each[n] for each in found)) for n in range(3))
        return cls(strategy, size, choose, votes, seconds)

    @property
    def allowed(self) -> float:
        """The bound on the messages to choose, among those that are left."""
        live = self.size - 1
        return {"lowest": 0, "bully": live * (live - 1), "ring": live * (live + 1) // 2 + live}[self.strategy]

    def __str__(self) -> str:
        middle = COUNT_SEEDS // 2
        return (
            f"| `{self.strategy}` | {self.size} | {self.choose[middle]} | {self.choose[-1]} | {self.allowed} "
            f"| {self.votes[-1]} | {self.seconds[middle]:.1f} |"
        )
