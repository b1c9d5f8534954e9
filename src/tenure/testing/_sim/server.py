"""A simulated server: what answers questions that come over the network, and may be down or frozen meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenure.testing._sim.client import Line
    from tenure.testing._sim.network import Network
    from tenure.testing._sim.world import World


class Server:
    """Take questions in, do what they ask for, send the answers out.

    Args:
        world: Time and dice.
        network: The road that questions came by, and answers go.
        no_answer: Makes what a caller is told, of the reason why nothing came.
    """

    def __init__(self, world: World, network: Network, no_answer: Callable[[str], object]) -> None:
        self._world = world
        self.network = network
        self.no_answer = no_answer
        self._down_until = 0.0
        self._frozen_until = 0.0
        self._refuses = False

    def perform(self, line: Line[Any], message: Any) -> Any:
        """Do what *message* asks for, and return the answer."""
        raise NotImplementedError

    @property
    def is_up(self) -> bool:
        """Whether it would act on a question now."""
        return self._world.now >= max(self._down_until, self._frozen_until)

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
        self.network.latest = max(self.network.latest, self._frozen_until)

    # --- questions ---

    def receive(self, line: Line[Any], ask: int, message: Any) -> None:
        """Take in *message*, which is question number *ask* of *line*, and send the answer on its way."""
        if self._world.now < self._frozen_until:
            self._world.at(self._frozen_until, self.receive, line, ask, message)
            return
        if self._world.now < self._down_until:
            if self._refuses:
                self._answer(line, ask, self.no_answer("connection refused"))
            else:
                line.unanswered(ask)
            return
        self._answer(line, ask, self.perform(line, message))
        if not self.network.calm and self._world.rng.random() < self.network.weather.duplicate:
            # A driver that retries by itself, or a proxy, may ask twice; nobody waits for the second answer.
            self._world.after(self.network.far_delay(), self.perform, line, message)

    def _answer(self, line: Line[Any], ask: int, answer: Any) -> None:
        delay = self.network.down(line.number)
        if delay is None or self._world.now + delay > line.patience_ends(ask):
            line.unanswered(ask)
        else:
            self._world.after(delay, line.hear, ask, answer)
