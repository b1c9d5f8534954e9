"""The simulated broker: the memory backend's, on a skewed clock, behind a network; the book looks over its shoulder."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tenure._backends.memory.client import Memory
from tenure._backends.memory.queue import MemoryBroker
from tenure._lease import NoAnswer
from tenure._queue.broker import EVERYTHING, Claim, SettingChanges
from tenure._queue.machine import Receive, Renew, Settle
from tenure._queue.message import DeadMessage, Delivery, Lapsed, Outgoing, Renewed, SessionLock, Stats
from tenure.testing._sim.server import Server
from tenure.testing._sim.world import SkewedClock, World

if TYPE_CHECKING:
    from tenure.testing._sim.line import Line
    from tenure.testing._sim.queues.simulation import Simulation

QUEUE = "q"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Send:
    """Keep these messages."""

    ask: int
    messages: Sequence[Outgoing]


class BrokerClock:
    """The broker's clock, as the door wants it."""

    def __init__(self, world: World, clock: SkewedClock) -> None:
        self._world = world
        self._clock = clock

    def now(self) -> float:
        """Return the time by the broker's clock."""
        return self._clock.reading(self._world.now)


class SimulatedBroker(MemoryBroker):
    """The memory broker without a loop: it does at once what it is asked for."""

    def __init__(self, simulation: Simulation, clock: BrokerClock) -> None:
        memory = Memory()
        memory.epoch = 0.0  # the wall clock has no part in a run
        super().__init__(clock, memory)
        self._simulation = simulation
        self.full_until = self.away_until = 0.0
        self.cut_until: dict[int, float] = {}
        """By the sequence of a message: until when somebody else holds its row. All three in true time."""
        self.begun_at = 0.0
        """When what is being done was begun, by the broker's clock: it may have waited for a row since."""

    def refusal(self, message: object) -> str:
        """Say why nothing of *message* can be done now; an empty text if it can be."""
        now = self._simulation.world.now
        if now < self.away_until:
            return "the schema is away"
        if isinstance(message, Send) and now < self.full_until:
            return "the store is full"
        if isinstance(message, Settle) and any(self.is_cut(one) for one, _ in message.settlements):
            return "a row is locked"
        return ""

    def is_cut(self, one: Delivery | SessionLock) -> bool:
        """Whether nothing can be done to this message now."""
        return isinstance(one, Delivery) and self._simulation.world.now < self.cut_until.get(one.sequence, 0.0)

    def renew_others(
        self, held: Sequence[Delivery | SessionLock], lock: float
    ) -> Sequence[Renewed | Lapsed | NoAnswer]:
        """Extend the locks that can be asked about."""
        cut = [self.is_cut(one) for one in held]
        answers = iter(at_once(self.renew([one for one, is_cut in zip(held, cut, strict=True) if not is_cut], lock)))
        return [NoAnswer("a row is locked") if is_cut else next(answers) for is_cut in cut]

    def heal(self) -> None:
        """Be in order again."""
        self.full_until = self.away_until = 0.0
        self.cut_until.clear()

    def _ring(self, name: str) -> None:
        if name == QUEUE:
            self._simulation.site.hint()


def at_once(asking: Coroutine[Any, Any, T]) -> T:
    """Return what *asking* comes to, which waits for nothing."""
    try:
        asking.send(None)
    except StopIteration as done:
        answer: T = done.value
        return answer
    raise RuntimeError("a simulated broker must not wait")


class Site(Server):
    """The process that answers for the broker, and sends hints out."""

    def __init__(self, simulation: Simulation, clock: SkewedClock) -> None:
        plan = simulation.plan
        super().__init__(simulation.world, simulation.network, NoAnswer)
        self._simulation = simulation
        self._book = simulation.book
        self._lock = plan.timing.ttl
        self._hinted: set[int] = set()
        self._waits_until = 0.0
        self.clock = BrokerClock(simulation.world, clock)
        self.broker = simulation.parts.broker(simulation, self.clock)
        changes: SettingChanges = {
            "lock": self._lock,
            "max_deliveries": plan.max_deliveries,
            "dedupe_window": 1_000.0 * self._lock,
        }
        at_once(self.broker.declare(QUEUE, changes))

    # --- faults ---

    def wait(self, seconds: float) -> None:
        """Let some of what is asked within so many *seconds* wait for a row, and be carried out later."""
        self._waits_until = max(self._waits_until, self._world.now + seconds)

    def heal(self) -> None:
        """Come up, in order; what waits for a row is carried out when its time comes."""
        super().heal()
        self._waits_until = 0.0
        self.broker.heal()

    # --- questions ---

    def receive(self, line: Line[Any], ask: int, message: Any) -> None:
        """Take in *message*; or begin with it, and let it wait, also when its asker has given up."""
        if not (self.is_up and self._world.now < self._waits_until and self._world.rng.random() < 0.5):
            super().receive(line, ask, message)
            return
        begun_at, waits = self.clock.now(), self.network.far_delay()
        if self._world.now + waits > line.patience_ends(ask):
            line.unanswered(ask)
            self._world.after(waits, self._carry_out, line, message, begun_at)
        else:
            self._world.after(waits, lambda: self._answer(line, ask, self._carry_out(line, message, begun_at)))

    def perform(self, line: Line[Any], message: Any) -> Any:
        """Let the broker do what *message* asks for."""
        return self._carry_out(line, message, self.clock.now())

    def _carry_out(self, line: Line[Any], message: Any, begun_at: float) -> Any:
        self.broker.begun_at = begun_at
        why = self.broker.refusal(message)
        answer = NoAnswer(why) if why else self._done(line, message)
        if self._world.traced:
            self._world.note("broker", f"{line.process.name}: {told(message)} → {told(answer)}")
        return answer

    def _done(self, line: Line[Any], message: Any) -> Any:
        now = self.clock.now()
        answer: Any
        match message:
            case Receive(limit=limit):
                answer = at_once(self.broker.receive(QUEUE, limit, self._lock))
                self._book.claimed(answer, self._lock, now)
                self._simulation.checkers.locked(line.process, answer.deliveries)
            case Settle(settlements=settlements):
                answer = at_once(self.broker.settle(settlements))
                self._book.settled(settlements, answer, now)
            case Renew(held=held):
                answer = self.broker.renew_others(held, self._lock)
                self._book.renewed(held, answer, self._lock, now)
                self._simulation.checkers.locked(line.process, held)
            case Send(messages=messages):
                answer = at_once(self.broker.send(QUEUE, messages))
                self._book.kept(messages, answer, now)
        return answer

    # --- hints ---

    def hint(self) -> None:
        """Tell the consumers that there may be messages; for each, what comes together is one hint."""
        if not self._simulation.plan.settings.hints:
            return
        for consumer in self._simulation.consumers:
            number = consumer.number
            if number in self._hinted:
                continue
            delay = self.network.down(number)
            if delay is not None:
                self._hinted.add(number)
                self._world.after(delay, self._hint_arrives, number)

    def _hint_arrives(self, number: int) -> None:
        self._hinted.discard(number)
        self._simulation.consumers[number].hint()

    # --- looking on ---

    def stats(self) -> Stats:
        """Count what is there."""
        return at_once(self.broker.stats(QUEUE))

    def dead(self) -> Sequence[DeadMessage]:
        """Return the dead letters."""
        return at_once(self.broker.peek_dead(QUEUE, EVERYTHING, 10_000))


def told(what: Any) -> str:
    """Return a question or an answer in few words, for the log."""
    match what:
        case Receive(ask, limit):
            return f"receive #{ask}, up to {limit}"
        case Settle(ask, settlements):
            verdicts = " ".join(f"{type(verdict).__name__}:{name(one)}" for one, verdict in settlements)
            return f"settle #{ask} {verdicts}"
        case Renew(ask, held):
            return f"renew #{ask} {' '.join(map(name, held))}"
        case Send(ask, messages):
            return f"send #{ask} {' '.join(message.body.decode() for message in messages)}"
        case Claim(deliveries, due_in):
            return f"{' '.join(map(name, deliveries)) or 'nothing'}" + (f", due {due_in:.3f}" if due_in else "")
        case NoAnswer(why):
            return f"no answer ({why})"
        case [*answers]:
            return " ".join(type(answer).__name__.lower() for answer in answers)
    return str(what)


def name(delivery: Any) -> str:
    """Return what a delivery is called in the log: its body, which delivery it is, and its token."""
    return f"{delivery.body.decode()}/{delivery.delivery_count}@{delivery.token}"
