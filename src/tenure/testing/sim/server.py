"""A simulated server: what answers questions that come over the network, and may be down or frozen meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tenure.testing.sim.network import Network
    from tenure.testing.sim.world import World


class Caller(Protocol):
    """Who asked, and waits for the answer with limited patience."""

    @property
    def number(self) -> int:
        """The host it asks from."""
        ...

    def patience_ends(self, ask: int) -> float:
        """Return when, in true time, it gives up on question *ask*."""
        ...

    def unanswered(self, ask: int) -> None:
        """Let it give up on question *ask* when its patience ends."""
        ...

    def hear(self, ask: int, answer: Any) -> None:
        """Take in the answer to question *ask*."""
        ...


class Server:
    """Take questions in, do what they ask for, send the answers out.

    Args:
        world: Time and dice.
        network: The road that questions came by, and answers go.
        duplicate: The share of questions that arrive twice.
        refusal: What a caller is told while nobody listens.
    """

    def __init__(self, world: World, network: Network, duplicate: float, refusal: object) -> None:
        self._world = world
        self._network = network
        self._duplicate = duplicate
        self._refusal = refusal
        self._down_until = 0.0
        self._frozen_until = 0.0
        self._refuses = False

    def perform(self, caller: Any, question: Any, message: Any) -> Any:
        """Do what *message*, which stands for *question*, asks for, and return the answer."""
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
        self._network.latest = max(self._network.latest, self._frozen_until)

    # --- questions ---

    def receive(self, caller: Caller, ask: int, question: Any, message: Any) -> None:
        """Take in *message*, which stands for *question*, and send the answer on its way."""
        if self._world.now < self._frozen_until:
            self._world.at(self._frozen_until, self.receive, caller, ask, question, message)
            return
        if self._world.now < self._down_until:
            if self._refuses:
                self._answer(caller, ask, self._refusal)
            else:
                caller.unanswered(ask)
            return
        self._answer(caller, ask, self.perform(caller, question, message))
        if not self._network.calm and self._world.dice.random() < self._duplicate:
            # A driver that retries by itself, or a proxy, may ask twice; nobody waits for the second answer.
            self._world.after(self._network.far_delay(), self.perform, caller, question, message)

    def _answer(self, caller: Caller, ask: int, answer: Any) -> None:
        delay = self._network.down(caller.number)
        if delay is None or self._world.now + delay > caller.patience_ends(ask):
            caller.unanswered(ask)
        else:
            self._world.after(delay, caller.hear, ask, answer)
