"""A simulated server: it answers questions that come over the network, and may be down or frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tenure.testing._sim.network import StoreNetwork
from tenure.testing._sim.world import World


class Asker(Protocol):
    """A client, as its server sees it."""

    @property
    def process(self) -> Any: ...
    @property
    def number(self) -> int:
        """The host it asks from."""
        ...

    def patience_ends(self, ask: int) -> float: ...
    def unanswered(self, ask: int) -> None: ...
    def deliver(self, ask: int, answer: Any) -> None: ...


class Server:
    """Receive questions, carry them out, send answers.

    Args:
        world: Time and random numbers.
        network: Carries questions and answers.
        no_answer: Makes the answer *no answer* of a reason.
    """

    def __init__(self, world: World, network: StoreNetwork, no_answer: Callable[[str], object]) -> None:
        self._world = world
        self.network = network
        self.no_answer = no_answer
        self._down_until = 0.0
        self._frozen_until = 0.0
        self._refuses = False

    def perform(self, process: Any, message: Any) -> Any:
        """Do what *message* of *process* asks for, and return the answer."""
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
        """Do nothing for *seconds*, then carry out all questions asked meanwhile."""
        self._frozen_until = max(self._frozen_until, self._world.now + seconds)

    def heal(self) -> None:
        """Come up, questions asked while frozen are carried out when their time comes."""
        self._down_until = self._world.now
        self.network.latest = max(self.network.latest, self._frozen_until)

    # --- questions ---

    def may_repeat(self, message: Any) -> bool:
        """Return whether *message* may be carried out twice now."""
        return not self.network.healed

    def receive(self, client: Asker, ask: int, message: Any) -> None:
        """Take in *message*, which is question number *ask* of *client*, and send the answer on its way."""
        if self._world.now < self._frozen_until:
            self._world.at(self._frozen_until, self.receive, client, ask, message)
            return
        if self._world.now < self._down_until:
            if self._refuses:
                self._answer(client, ask, self.no_answer("connection refused"))
            else:
                client.unanswered(ask)
            return
        self._answer(client, ask, self.perform(client.process, message))
        if self.may_repeat(message) and self._world.rng.random() < self.network.conditions.duplicate:
            # A driver that retries by itself, or a proxy, may ask twice; the second answer is not waited for.
            self._world.after(self.network.far_delay(), self.perform, client.process, message)

    def _answer(self, client: Asker, ask: int, answer: Any) -> None:
        delay = self.network.down(client.number)
        if delay is None or self._world.now + delay > client.patience_ends(ask):
            client.unanswered(ask)
        else:
            self._world.after(delay, client.deliver, ask, answer)
