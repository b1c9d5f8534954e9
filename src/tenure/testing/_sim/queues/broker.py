"""The simulated broker: the memory backend's, on a skewed clock, with faults of a store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from tenure._backends.memory.client import Memory
from tenure._backends.memory.messages import Session
from tenure._backends.memory.queue import MemoryBroker
from tenure._lease import NoAnswer
from tenure._queue.effects import Settle
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.verdicts import Lapsed, Renewed
from tenure.testing._sim.queues.protocols import Run
from tenure.testing._sim.queues.requests import Send
from tenure.testing._sim.world import SkewedClock, World

QUEUE = "q"
T = TypeVar("T")


class BrokerClock:
    """The broker's clock, as the port wants it."""

    def __init__(self, world: World, clock: SkewedClock) -> None:
        self._world = world
        self._clock = clock

    def now(self) -> float:
        """Return the time by the broker's clock."""
        return self._clock.reading(self._world.now)


class SimulatedBroker(MemoryBroker):
    """The memory broker without a loop: each verb is carried out at once."""

    def __init__(self, run: Run, clock: BrokerClock, hint: Callable[[], object]) -> None:
        memory = Memory()
        memory.epoch = 0.0  # the wall clock has no part in a run
        super().__init__(clock, memory)
        self._run = run
        self._hint = hint
        self.full_until = self.away_until = 0.0
        self.cut_until: dict[int, float] = {}
        """By the sequence of a message: until when another transaction holds its row. All three in true time."""
        self.begun_at = 0.0
        """When what is being done was begun, by the broker's clock: it may have waited for a row since."""

    def refusal(self, message: object) -> str:
        """Say why nothing of *message* can be done now; an empty text if it can be."""
        now = self._run.world.now
        if now < self.away_until:
            return "the schema is away"
        if isinstance(message, Send) and now < self.full_until:
            return "the store is full"
        if isinstance(message, Settle) and any(self.is_cut(one) for one, _ in message.settlements):
            return "a row is locked"
        return ""

    def is_cut(self, one: Delivery | SessionLock) -> bool:
        """Whether nothing can be done to this message now."""
        return isinstance(one, Delivery) and self._run.world.now < self.cut_until.get(one.sequence, 0.0)

    def renew_others(
        self, held: Sequence[Delivery | SessionLock], lock: float
    ) -> Sequence[Renewed | Lapsed | NoAnswer]:
        """Extend the locks that can be asked about."""
        cut = [self.is_cut(one) for one in held]
        answers = iter(at_once(self.renew([one for one, is_cut in zip(held, cut, strict=True) if not is_cut], lock)))
        return [NoAnswer("a row is locked") if is_cut else next(answers) for is_cut in cut]

    def sessions(self) -> Collection[Session]:
        """Return the sessions of the queue."""
        return self._queue(QUEUE).live.sessions.values()

    def heal(self) -> None:
        """Be in order again."""
        self.full_until = self.away_until = 0.0
        self.cut_until.clear()

    def _notify(self, name: str) -> None:
        if name == QUEUE:
            self._hint()


def at_once(asking: Coroutine[Any, Any, T]) -> T:
    """Return what *asking* comes to, which waits for nothing."""
    try:
        asking.send(None)
    except StopIteration as done:
        answer: T = done.value
        return answer
    raise RuntimeError("a simulated broker must not wait")
