"""The server in front of a simulated store of leases, and the resource that leaders write to."""

from __future__ import annotations

from typing import Any

from tenure._election.effects import Hint, Withdrawn
from tenure._lease import Grant, NoAnswer, Released
from tenure.testing._sim.elections.protocols import LeaseServerRun
from tenure.testing._sim.elections.stores import NO_HOLDER, Attempt, Question
from tenure.testing._sim.server import Server
from tenure.testing._sim.world import BLUR


class LeaseServer(Server):
    """Answer for a store of leases, and send hints."""

    def __init__(self, run: LeaseServerRun) -> None:
        super().__init__(run.world, run.network, NoAnswer)
        self._run = run
        self._store = run.store
        self._checkers = run.checkers
        self._expiry_watched = False

    def perform(self, process: Any, message: Any) -> Any:
        """Let the store do what *message* of *process* asks for."""
        before = self._store.expires
        answer = self._store.perform(message)
        question: Question = message.question if isinstance(message, Attempt) else message
        self._checkers.processed(process, question, answer)
        if not self._run.plan.watched:
            self._checkers.counted(question, answer, self._store.expires - before)
        if self._world.traced:
            self._world.log("store", f"{process.name}: {question} → {answer}")
        if isinstance(answer, (Released, Withdrawn)):
            self._hint()
        elif self._run.plan.hints_expiry and not self._expiry_watched:
            self._watch_expiry()
        return answer

    def ask_to_resign(self) -> None:
        """Ask the present leader to step down, as an operator would."""
        if self.is_up and self._store.ask_to_resign():
            self._hint()

    # --- hints ---

    def _hint(self) -> None:
        if not self._run.plan.hints:
            return
        for node in self._run.nodes:
            delay = self.network.down(node.number)
            if delay is not None:
                self._world.after(delay, node.feed, Hint())

    def _watch_expiry(self) -> None:
        store = self._store
        if store.holder == NO_HOLDER or not self._run.plan.hints or self._run.plan.watched:
            return
        self._expiry_watched = True
        self._world.at(store.clock.moment(store.expires) + BLUR, self._expired)

    def _expired(self) -> None:
        self._expiry_watched = False
        is_held = self._store.held()
        if is_held:
            self._watch_expiry()
        if not is_held or self._run.plan.queued:  # the next one in the queue may have it
            self._hint()


class Resource:
    """A fenced resource: it refuses a token older than the newest it has seen."""

    def __init__(self, run: LeaseServerRun) -> None:
        self._checkers = run.checkers
        self.newest = 0

    def write(self, grant: Grant) -> None:
        """Accept a write in the name of *grant*, or refuse it."""
        if grant.token >= self.newest:
            self.newest = grant.token
            self._checkers.wrote(grant)
