"""The line of one machine to the broker: questions that go out, how long its adapter waits, answers that come in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.queue.machine import NoAnswer

if TYPE_CHECKING:
    from tenure.testing.sim.network import Network
    from tenure.testing.sim.process import Process
    from tenure.testing.sim.server import Server

TIMED_OUT = NoAnswer("timed out")


class Asked(NamedTuple):
    """A question under way: when it was asked by the process's clock, and in true time when its adapter gives up."""

    question: Any
    at: float
    patience_ends: float


class Line:
    """Ask the broker, and hear every question's answer once, however late.

    Args:
        process: Who asks.
        network: The road.
        site: Who answers.
        patience: For how many seconds the adapter waits.
        hear: Called in the process with the number of a question, what was asked, and the answer.
    """

    def __init__(
        self,
        process: Process,
        network: Network,
        site: Server,
        patience: float,
        hear: Callable[[int, Asked, Any], object],
    ) -> None:
        self.process = process
        self.asked: dict[int, Asked] = {}
        self._network = network
        self._site = site
        self._patience = patience
        self._hear = hear

    @property
    def number(self) -> int:
        """The host it asks from."""
        return self.process.number

    def ask(self, ask: int, question: Any) -> None:
        """Put question number *ask*."""
        process, world = self.process, self.process.world
        now = process.now()
        self.asked[ask] = Asked(question, now, process.clock.moment(now + self._patience))
        delay = self._network.up(self.number)
        if delay is None:
            self.unanswered(ask)
        else:
            world.after(delay, self._site.receive, self, ask, question, question)

    def patience_ends(self, ask: int) -> float:
        """Return when, in true time, the adapter gives up on question *ask*."""
        asked = self.asked.get(ask)
        return asked.patience_ends if asked is not None else -math.inf

    def unanswered(self, ask: int) -> None:
        """Say *no answer* once the adapter has given up: question *ask*, or its answer, is lost."""
        self.process.world.at(self.patience_ends(ask), self.hear, ask, TIMED_OUT)

    def hear(self, ask: int, answer: Any) -> None:
        """Take in the answer to question *ask*."""
        self.process.do(self._take, ask, answer)

    def _take(self, ask: int, answer: Any) -> None:
        self._hear(ask, self.asked.pop(ask), answer)
