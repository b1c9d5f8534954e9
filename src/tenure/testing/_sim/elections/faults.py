"""Faults of candidates, of their network, and of the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tenure._election.effects import Hint, RenewTogether, Resign, Stop
from tenure.testing._sim.elections.lease_server import LeaseServer
from tenure.testing._sim.elections.node import Node
from tenure.testing._sim.elections.stores import ClockStore
from tenure.testing._sim.nemesis import StoreNemesis, WithStore


class ElectionRun(WithStore, Protocol):
    """The run, as its nemesis sees it."""

    @property
    def server(self) -> LeaseServer: ...
    @property
    def store(self) -> ClockStore: ...
    @property
    def nodes(self) -> Sequence[Node]: ...
    def restart_later(self, number: int) -> None: ...


class ElectionNemesis(StoreNemesis):
    """Break candidates, the network, the store."""

    def __init__(self, run: ElectionRun) -> None:
        super().__init__(run)
        self._election_run = run

    def _victim(self) -> Node | None:
        living = [node for node in self._election_run.nodes if node.alive]
        leaders = [node for node in living if node.work is not None]
        if leaders and self._rng.random() < 0.6:
            return self._rng.choice(leaders)
        return self._rng.choice(living) if living else None

    # --- of a candidate ---

    def _stop(self, node: Node) -> None:
        node.feed(Stop())
        self._election_run.restart_later(node.number)

    def _stall(self, node: Node) -> None:
        node.stall()
        self._world.after(self._for(2.5), node.unstall)

    def _resign(self, node: Node) -> None:
        node.feed(Resign())

    def _false_hint(self, node: Node) -> None:
        for _ in range(self._rng.randint(1, 5)):
            node.feed(Hint())

    def _together(self, node: Node) -> None:
        node.feed(RenewTogether())

    # --- of user code ---

    def _health_raises(self, node: Node) -> None:
        self._health(node, "raises")

    def _health_hangs(self, node: Node) -> None:
        self._health(node, "hangs")

    def _health(self, node: Node, does: str) -> None:
        node.set_health(does)
        self._world.after(self._for(2.5), node.set_health, "")

    def _work_raises(self, node: Node) -> None:
        node.do(node.raise_from_work)

    def _event_hook_raises(self, node: Node) -> None:
        self._event_hook(node, "raises")

    def _event_hook_blocks(self, node: Node) -> None:
        self._event_hook(node, "blocks")

    def _event_hook(self, node: Node, does: str) -> None:
        node.event_hook = does
        self._world.after(self._for(2.0), setattr, node, "event_hook", "")

    # --- of the store ---

    def _store_forgets(self, node: Node) -> None:
        if self._rng.random() < 0.5:
            self._server.go_down(self._for(0.3), refuses=True)
        else:  # what was asked meanwhile is answered by a store that has no record of it
            self._server.freeze(self._for(1.2))
        self._election_run.store.forget()
        if self._rng.random() < 0.5:  # an operator may restart more than one thing
            self._world.after(self._for(0.3), node.feed, Resign())

    def _ask_to_resign(self, node: Node) -> None:
        self._world.after(self._network.usual_delay(), self._election_run.server.ask_to_resign)
