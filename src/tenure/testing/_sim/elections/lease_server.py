"""The server in front of a simulated store of leases, and the resource that leaders write to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenure._election.machine import Hint
from tenure._lease import Grant, NoAnswer, Released
from tenure.testing._sim.elections.stores import NOBODY, Attempt, Question
from tenure.testing._sim.server import Server
from tenure.testing._sim.world import BLUR

if TYPE_CHECKING:
    from tenure.testing._sim.client import Client
    from tenure.testing._sim.elections.node import Node
    from tenure.testing._sim.elections.simulation import Simulation


class LeaseServer(Server):
    """Answer for a store of leases, and send hints."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation.world, simulation.network, NoAnswer)
        self._simulation = simulation
        self._store = simulation.store
        self._checkers = simulation.checkers
        self._expiry_watched = False

    def perform(self, client: Client[Node], message: Any) -> Any:
        """Let the store do what *message* asks for."""
        before = self._store.expires
        answer = self._store.perform(message)
        question: Question = message.question if isinstance(message, Attempt) else message
        self._checkers.processed(client.process, question, answer)
        if not self._simulation.plan.watched:
            self._checkers.counted(question, answer, self._store.expires - before)
        if self._world.traced:
            self._world.log("store", f"{client.process.name}: {question} → {answer}")
        if isinstance(answer, Released):
            self._hint()
        elif self._simulation.plan.hints_expiry and not self._expiry_watched:
            self._watch_expiry()
        return answer

    def ask_to_resign(self) -> None:
        """Ask the present leader to step down, as an operator would."""
        if self.is_up and self._store.ask_to_resign():
            self._hint()

    # --- hints ---

    def _hint(self) -> None:
        if not self._simulation.plan.hints:
            return
        for node in self._simulation.nodes:
            delay = self.network.down(node.number)
            if delay is not None:
                self._world.after(delay, node.feed, Hint())

    def _watch_expiry(self) -> None:
        store = self._store
        if store.holder == NOBODY or not self._simulation.plan.hints or self._simulation.plan.watched:
            return
        self._expiry_watched = True
        self._world.at(store.clock.moment(store.expires) + BLUR, self._expired)

    def _expired(self) -> None:
        self._expiry_watched = False
        if self._store.held():
            self._watch_expiry()
        else:
            self._hint()


class Resource:
    """A fenced resource: it refuses a token older than the newest it has seen."""

    def __init__(self, simulation: Simulation) -> None:
        self._checkers = simulation.checkers
        self.newest = 0

    def write(self, grant: Grant) -> None:
        """Accept a write in the name of *grant*, or refuse it."""
        if grant.token >= self.newest:
            self.newest = grant.token
            self._checkers.wrote(grant)
