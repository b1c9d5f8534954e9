"""The line of one machine to its store: questions that go out, how long its adapter waits, answers that come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from tenure.testing._sim.process import Process

if TYPE_CHECKING:
    from tenure.testing._sim.server import Server

P = TypeVar("P", bound=Process)


class Asked(NamedTuple):
    """A question under way: when it was asked by the process's clock, and in true time when its adapter gives up."""

    question: Any
    at: float
    patience_ends: float


class Line(Generic[P]):
    """Ask a store or a broker, and hear every question's answer once, however late.

    Args:
        process: Who asks.
        server: Who answers, and the road to it.
        patience: For how many seconds the adapter waits.
        hear: Called in the process with the number of a question, what was asked, and the answer.
    """

    def __init__(
        self,
        process: P,
        server: Server,
        patience: float,
        hear: Callable[[int, Asked, Any], object],
    ) -> None:
        self.process = process
        self.asked: dict[int, Asked] = {}
        self._server = server
        self._patience = patience
        self._hear = hear

    @property
    def number(self) -> int:
        """The host it asks from."""
        return self.process.number

    def ask(self, ask: int, question: Any, message: Any = None) -> None:
        """Put question number *ask*; what is sent for it is *message*, or itself."""
        self._note(ask, question)
        delay = self._server.network.up(self.number)
        if delay is None:
            self.unanswered(ask)
        else:
            message = question if message is None else message
            self.process.world.after(delay, self._server.receive, self, ask, message)

    def withhold(self, ask: int, question: Any, answer: Any) -> None:
        """Don't send question number *ask*: *answer* is what its asker hears."""
        self._note(ask, question)
        self.process.world.after(0.0, self.hear, ask, answer)

    def _note(self, ask: int, question: Any) -> None:
        now = self.process.now()
        self.asked[ask] = Asked(question, now, self.process.clock.moment(now + self._patience))

    def patience_ends(self, ask: int) -> float:
        """Return when, in true time, the adapter gives up on question *ask*."""
        return self.asked[ask].patience_ends

    def unanswered(self, ask: int) -> None:
        """Say *no answer* once the adapter has given up: question *ask*, or its answer, is lost."""
        self.process.world.at(self.patience_ends(ask), self.hear, ask, self._server.no_answer("timed out"))

    def hear(self, ask: int, answer: Any) -> None:
        """Take in the answer to question *ask*."""
        self.process.do(self._take, ask, answer)

    def _take(self, ask: int, answer: Any) -> None:
        self._hear(ask, self.asked[ask], answer)
        del self.asked[ask]
