"""The client of one machine: it asks a server, waits as long as an adapter would, and delivers the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from tenure.testing._sim.process import Process
from tenure.testing._sim.server import Server

P = TypeVar("P", bound=Process)


class Pending(NamedTuple):
    """A question under way: when it was asked by the process's clock, and in true time when its adapter gives up."""

    question: Any
    at: float
    patience_ends: float


class Client(Generic[P]):
    """Ask a server over the network; every question gets one answer, however late, if only ``no answer``.

    Args:
        process: Asks the questions.
        server: Answers them; its network carries both.
        patience: For how many seconds the adapter waits.
        on_answer: Called in the process with the number of a question, what was asked, and the answer.
    """

    def __init__(
        self,
        process: P,
        server: Server,
        patience: float,
        on_answer: Callable[[int, Pending, Any], object],
    ) -> None:
        self.process = process
        self.pending: dict[int, Pending] = {}
        self._server = server
        self._patience = patience
        self._on_answer = on_answer

    @property
    def number(self) -> int:
        """The host it asks from."""
        return self.process.number

    def ask(self, ask: int, question: Any, message: Any = None) -> None:
        """Put question number *ask*; what is sent for it is *message*, or itself."""
        self._register(ask, question)
        delay = self._server.network.up(self.number)
        if delay is None:
            self.unanswered(ask)
        else:
            message = question if message is None else message
            self.process.world.after(delay, self._server.receive, self, ask, message)

    def withhold(self, ask: int, question: Any, answer: Any) -> None:
        """Don't send question number *ask*: deliver *answer* instead."""
        self._register(ask, question)
        self.process.world.after(0.0, self.deliver, ask, answer)

    def _register(self, ask: int, question: Any) -> None:
        now = self.process.now()
        self.pending[ask] = Pending(question, now, self.process.clock.moment(now + self._patience))

    def patience_ends(self, ask: int) -> float:
        """Return when, in true time, the adapter gives up on question *ask*."""
        return self.pending[ask].patience_ends

    def unanswered(self, ask: int) -> None:
        """Say *no answer* once the adapter has given up: question *ask*, or its answer, is lost."""
        self.process.world.at(self.patience_ends(ask), self.deliver, ask, self._server.no_answer("timed out"))

    def deliver(self, ask: int, answer: Any) -> None:
        """Take in the answer to question *ask*."""
        self.process.do(self._take, ask, answer)

    def _take(self, ask: int, answer: Any) -> None:
        self._on_answer(ask, self.pending[ask], answer)
        del self.pending[ask]
