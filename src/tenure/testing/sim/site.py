"""What stands around a simulated store: its process, which may be down or frozen, and what leaders write to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenure.election.machine import Hint, NoAnswer
from tenure.lease import Grant, Released
from tenure.testing.sim.stores import NOBODY, Question
from tenure.testing.sim.world import BLUR

if TYPE_CHECKING:
    from tenure.testing.sim.node import Node
    from tenure.testing.sim.simulation import Simulation


class Site:
    """The process that answers for a store: takes questions in, sends answers and hints out."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._network = simulation.network
        self._store = simulation.store
        self._checkers = simulation.checkers
        self._down_until = 0.0
        self._frozen_until = 0.0
        self._refuses = False
        self._expiry_watched = False

    # --- faults ---

    def go_down(self, seconds: float, *, refuses: bool) -> None:
        """Answer nothing for *seconds*: refuse at once, or let the questions vanish."""
        self._down_until = max(self._down_until, self._world.now + seconds)
        self._refuses = refuses

    def freeze(self, seconds: float) -> None:
        """Do nothing for *seconds*, then everything that was asked meanwhile."""
        self._frozen_until = max(self._frozen_until, self._world.now + seconds)

    def heal(self) -> None:
        """Come up, with what was asked while frozen coming in now or when its time comes."""
        self._down_until = self._world.now
        self._network.latest = max(self._network.latest, self._frozen_until)

    # --- questions ---

    def receive(self, node: Node, question: Question, message: Any) -> None:
        """Take in *message*, which stands for *question*, and send the answer on its way."""
        if self._world.now < self._frozen_until:
            self._world.at(self._frozen_until, self.receive, node, question, message)
            return
        if self._world.now < self._down_until:
            if self._refuses:
                self._answer(node, question, NoAnswer("connection refused"))
            else:
                node.unanswered(question.ask)
            return
        self._answer(node, question, self._perform(node, question, message))
        if not self._network.calm and self._world.dice.random() < self._simulation.plan.duplicate:
            # A driver that retries by itself, or a proxy, may ask twice; nobody waits for the second answer.
            self._world.after(self._network.far_delay(), self._perform, node, question, message)

    def _perform(self, node: Node, question: Question, message: Any) -> Any:
        answer = self._store.perform(message)
        self._checkers.processed(node, question, answer)
        if self._world.traced:
            self._world.note("store", f"{node.name}: {question} → {answer}")
        if isinstance(answer, Released):
            self._hint()
        elif self._simulation.plan.hints_expiry and not self._expiry_watched:
            self._watch_expiry()
        return answer

    def _answer(self, node: Node, question: Question, answer: Any) -> None:
        delay = self._network.down(node.number)
        if delay is None or self._world.now + delay > node.patience_ends(question.ask):
            node.unanswered(question.ask)
        else:
            self._world.after(delay, node.hear, question.ask, answer)

    def ask_to_resign(self) -> None:
        """Ask the present leader to step down, as an operator would."""
        if self._world.now >= max(self._down_until, self._frozen_until) and self._store.ask_to_resign():
            self._hint()

    # --- hints ---

    def _hint(self) -> None:
        if not self._simulation.plan.hints:
            return
        for node in self._simulation.nodes:
            delay = self._network.down(node.number)
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
    """What a leader writes to: it refuses a token older than the newest it has seen."""

    def __init__(self, simulation: Simulation) -> None:
        self._checkers = simulation.checkers
        self.newest = 0

    def write(self, grant: Grant) -> None:
        """Accept a write in the name of *grant*, or refuse it."""
        if grant.token >= self.newest:
            self.newest = grant.token
            self._checkers.wrote(grant)
