"""Fault injection: faults of any process, of any network, and of a store and the network to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tenure._timing import Timing
from tenure.testing._sim.network import Network, StoreNetwork
from tenure.testing._sim.server import Server
from tenure.testing._sim.world import World


class Victim(Protocol):
    """A process that can be broken."""

    name: str
    number: int

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def die(self, why: str) -> None: ...


class Rules(Protocol):
    """The plan of a run, as far as it is about faults."""

    @property
    def timing(self) -> Timing: ...
    @property
    def faults(self) -> Sequence[str]: ...
    @property
    def fault_every(self) -> float: ...


class Breakable(Protocol):
    """A run, as far as the nemesis reaches into it."""

    @property
    def world(self) -> World: ...
    @property
    def plan(self) -> Rules: ...
    @property
    def network(self) -> Network: ...
    def restart(self, number: int) -> None: ...


class WithStore(Breakable, Protocol):
    """A run in which processes ask a store."""

    @property
    def network(self) -> StoreNetwork: ...
    @property
    def server(self) -> Server: ...


class Nemesis:
    """Break one thing after another, until :meth:`rest`. Each fault of the plan is a method of its name."""

    def __init__(self, run: Breakable) -> None:
        self._run = run
        self._world = run.world
        self._rng = run.world.rng
        self._plan = run.plan
        self._resting = False
        self._ways: dict[str, Callable[[Any], None]] = {fault: getattr(self, f"_{fault}") for fault in run.plan.faults}

    def begin(self) -> None:
        """Break the first thing soon."""
        if self._plan.faults:
            self._world.after(self._rng.expovariate(1.0) * self._plan.fault_every, self._strike)

    def rest(self) -> None:
        """Break nothing more. The simulation ends the faults that go on."""
        self._resting = True

    def _strike(self) -> None:
        if self._resting:
            return
        self.begin()
        victim = self._victim()
        if victim is not None:
            fault = self._rng.choice(self._plan.faults)
            if self._world.traced:
                self._world.log("fault", f"{fault.replace('_', ' ')} ({victim.name})")
            self._ways[fault](victim)

    def _victim(self) -> Victim | None:
        raise NotImplementedError

    def _for(self, longest: float) -> float:
        return self._rng.random() * longest * self._plan.timing.ttl

    # --- of a process ---

    def _pause(self, victim: Victim) -> None:
        victim.pause()
        self._world.after(self._for(3.0), victim.resume)

    def _kill(self, victim: Victim) -> None:
        victim.die("killed")
        self._world.after(self._for(1.5), self._run.restart, victim.number)

    # --- of the network ---

    def _lossy(self, victim: Victim) -> None:
        network = self._run.network
        network.loss = self._rng.uniform(0.2, 0.8)
        self._world.after(self._for(1.0), self._loses, network.conditions.loss)

    def _loses(self, share: float) -> None:
        if not self._resting:
            self._run.network.loss = share

    def _slow(self, victim: Victim) -> None:
        network = self._run.network
        network.usual = self._plan.timing.retry_every * self._rng.uniform(0.2, 2.0)
        self._world.after(self._for(1.0), self._usual, network.conditions.latency)

    def _usual(self, delay: float) -> None:
        if not self._resting:
            self._run.network.usual = delay


class StoreNemesis(Nemesis):
    """Break also the store, and the network to it."""

    def __init__(self, run: WithStore) -> None:
        super().__init__(run)
        self._network = run.network
        self._server = run.server

    # --- of the network ---

    def _cut_up(self, victim: Victim) -> None:
        self._network.cut_up.add(victim.number)
        self._world.after(self._for(2.0), self._network.cut_up.discard, victim.number)

    def _cut_down(self, victim: Victim) -> None:
        self._network.cut_down.add(victim.number)
        self._world.after(self._for(2.0), self._network.cut_down.discard, victim.number)

    def _cut_off(self, victim: Victim) -> None:
        self._cut_up(victim)
        self._cut_down(victim)

    def _store_slow(self, victim: Victim) -> None:
        self._slow(victim)

    # --- of the server ---

    def _store_down(self, victim: Victim) -> None:
        self._server.go_down(self._for(1.5), refuses=self._rng.random() < 0.5)

    def _store_frozen(self, victim: Victim) -> None:
        self._server.freeze(self._for(1.0))
