"""What one seed draws: the setting of a run, and the hand that breaks things while it lasts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tenure.election.machine import Hint, Resign, Stop, Together
from tenure.pacing import Timing

if TYPE_CHECKING:
    from tenure.testing.sim.node import Node
    from tenure.testing.sim.simulation import Simulation

TIMINGS: tuple[Timing, ...] = (
    Timing(),
    Timing(ttl=6.0),
    Timing(ttl=2.0),
    Timing(ttl=60.0, renew_every=10.0, grace=10.0),
    Timing(ttl=10.0, renew_every=2.0, retry_every=0.5, drift=0.2, margin=0.5, grace=1.0),
    Timing(ttl=15.0, drift=0.0, margin=0.0),  # equal clocks: only counting from the question keeps it safe
    Timing(ttl=9.0, renew_every=1.0, retry_every=3.0, drift=0.0, margin=0.0, grace=0.0),
    Timing(ttl=15.0, drift=0.1, margin=0.0, grace=0.5),
    Timing(ttl=5.0, renew_every=1.0, retry_every=0.25, drift=0.02, margin=0.1, grace=0.0),
)
"""Settings a run may have; every one is valid, some just so."""

FAULTS: tuple[str, ...] = (
    "pause",
    "kill",
    "cut_up",
    "cut_down",
    "cut_off",
    "store_down",
    "store_frozen",
    "store_forgets",
    "store_slow",
    "lossy",
    "stall",
    "resign",
    "ask_to_resign",
    "stop",
    "lie",
    "together",
)
"""What may go wrong, or be asked for; each seed has a part of them, so that rare meetings are not drowned."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The setting of one run. Rates and offsets are those of the hosts' clocks; times are in true seconds."""

    nodes: int
    timing: Timing
    hints: bool
    hints_expiry: bool
    watched: bool
    tells_remaining: bool
    store_rate: float
    rates: tuple[float, ...]
    offsets: tuple[float, ...]
    latency: float
    loss: float
    slow: float
    slowest: float
    duplicate: float
    patience: float
    ignores: float
    overrun_exits: bool
    turnover: float
    faults: tuple[str, ...]
    fault_every: float
    seconds: float

    def __str__(self) -> str:
        store = "watched" if self.watched else "clock"
        hints = "hints" if self.hints else "no hints"
        return f"{self.nodes} nodes, ttl {self.timing.ttl:g} s, {store} store, {hints}"


def draw(dice: random.Random) -> Plan:
    """Draw the setting of a run."""
    timing = dice.choice(TIMINGS)
    ttl = timing.ttl
    nodes = dice.randint(2, 7)
    # Any two clocks keep the promise: neither runs slower than the other by more than drift.
    slowest = dice.uniform(0.9, 1.0)
    fastest = slowest / (1.0 - timing.drift)
    faulty = dice.random() < 0.9
    return Plan(
        nodes=nodes,
        timing=timing,
        hints=dice.random() < 0.5,
        hints_expiry=dice.random() < 0.5,
        watched=dice.random() < 0.25,
        tells_remaining=dice.random() < 0.7,
        store_rate=_rate(dice, fastest, slowest),
        rates=tuple(_rate(dice, slowest, fastest) for _ in range(nodes)),
        offsets=tuple(dice.uniform(-1000.0, 1000.0) for _ in range(nodes)),
        latency=ttl * dice.choice((0.0003, 0.003, 0.02)),
        loss=dice.choice((0.0, 0.02, 0.1)) if faulty else 0.0,
        slow=dice.choice((0.0, 0.01, 0.05)) if faulty else 0.0,
        slowest=dice.choice((0.5, 1.2, 3.0)),
        duplicate=dice.choice((0.0, 0.02)),
        patience=dice.choice((0.8 * timing.retry_every, 1.5 * timing.retry_every, 4.0 * ttl)),
        ignores=dice.choice((0.0, 0.1, 0.4)),
        overrun_exits=dice.random() < 0.4,
        turnover=dice.choice((0.0, 0.4, 0.9)),
        faults=tuple(fault for fault in FAULTS if dice.random() < 0.5),
        fault_every=ttl * dice.choice((0.15, 0.3, 0.8)),
        seconds=16.0 * ttl,
    )


def _rate(dice: random.Random, worst: float, best: float) -> float:
    # The ends of the range are where a promise breaks first.
    kind = dice.random()
    return worst if kind < 0.4 else best if kind < 0.6 else dice.uniform(min(worst, best), max(worst, best))


class Nemesis:
    """Break one thing after another, until :meth:`rest`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._dice = simulation.world.dice
        self._plan = simulation.plan
        self._resting = False
        self._ways: dict[str, Callable[[Node], None]] = {
            fault: getattr(self, f"_{fault}") for fault in simulation.plan.faults
        }

    def begin(self) -> None:
        """Break the first thing soon."""
        if self._plan.faults:
            self._world.after(self._dice.expovariate(1.0) * self._plan.fault_every, self._strike)

    def rest(self) -> None:
        """Break nothing more. What was broken is mended by the simulation."""
        self._resting = True

    def _strike(self) -> None:
        if self._resting:
            return
        self.begin()
        victim = self._victim()
        if victim is not None:
            fault = self._dice.choice(self._plan.faults)
            if self._world.traced:
                self._world.note("fault", f"{fault.replace('_', ' ')} ({victim.name})")
            self._ways[fault](victim)

    def _victim(self) -> Node | None:
        living = [node for node in self._simulation.nodes if node.alive]
        leaders = [node for node in living if node.work is not None]
        if leaders and self._dice.random() < 0.6:
            return self._dice.choice(leaders)
        return self._dice.choice(living) if living else None

    def _for(self, longest: float) -> float:
        return self._dice.random() * longest * self._plan.timing.ttl

    # --- to a candidate ---

    def _pause(self, node: Node) -> None:
        node.pause()
        self._world.after(self._for(3.0), node.resume)

    def _kill(self, node: Node) -> None:
        node.die("killed")
        self._world.after(self._for(1.5), self._simulation.rebirth, node.number)

    def _stop(self, node: Node) -> None:
        node.feed(Stop())
        self._simulation.reborn_later(node.number)

    def _stall(self, node: Node) -> None:
        node.stall()
        self._world.after(self._for(2.5), node.unstall)

    def _resign(self, node: Node) -> None:
        node.feed(Resign())

    def _lie(self, node: Node) -> None:
        for _ in range(self._dice.randint(1, 5)):
            node.feed(Hint())

    def _together(self, node: Node) -> None:
        node.feed(Together())

    # --- to the road ---

    def _cut_up(self, node: Node) -> None:
        network, host = self._simulation.network, node.number
        network.cut_up.add(host)
        self._world.after(self._for(2.0), network.cut_up.discard, host)

    def _cut_down(self, node: Node) -> None:
        network, host = self._simulation.network, node.number
        network.cut_down.add(host)
        self._world.after(self._for(2.0), network.cut_down.discard, host)

    def _cut_off(self, node: Node) -> None:
        self._cut_up(node)
        self._cut_down(node)

    def _lossy(self, node: Node) -> None:
        network, before = self._simulation.network, self._plan.loss
        network.loss = self._dice.uniform(0.2, 0.8)
        self._world.after(self._for(1.0), self._loses, before)

    def _loses(self, share: float) -> None:
        if not self._resting:
            self._simulation.network.loss = share

    def _store_slow(self, node: Node) -> None:
        network = self._simulation.network
        network.usual = self._plan.timing.retry_every * self._dice.uniform(0.2, 2.0)
        self._world.after(self._for(1.0), self._usual, self._plan.latency)

    def _usual(self, delay: float) -> None:
        if not self._resting:
            self._simulation.network.usual = delay

    # --- to the store ---

    def _store_down(self, node: Node) -> None:
        self._simulation.site.go_down(self._for(1.5), refuses=self._dice.random() < 0.5)

    def _store_frozen(self, node: Node) -> None:
        self._simulation.site.freeze(self._for(1.0))

    def _store_forgets(self, node: Node) -> None:
        if self._dice.random() < 0.5:
            self._simulation.site.go_down(self._for(0.3), refuses=True)
        else:  # what was asked meanwhile is answered by a store that knows nothing of it
            self._simulation.site.freeze(self._for(1.2))
        self._simulation.store.forget()
        if self._dice.random() < 0.5:  # one who tidies up restarts more than one thing
            self._world.after(self._for(0.3), node.feed, Resign())

    def _ask_to_resign(self, node: Node) -> None:
        self._world.after(self._simulation.network.usual_delay(), self._simulation.site.ask_to_resign)
