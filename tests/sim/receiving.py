"""Processes that receive from one queue of RabbitMQ, simulated from a seed; the machine of each is the real one.

The server applies each command in one step, and the ways to it and back are ordered, with delays of any length. It
does what RabbitMQ does with a message that is on its way to a consumer that is being ended: takes it back, and counts
that. Processes listen, pause, stop, ask without listening, close, are killed, and lose their channels.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tenure._backends.rabbitmq import receiving
from tenure._backends.rabbitmq.receiving import AT_ONCE, NEVER, Receiving

Body = int
Place = tuple[int, int]
"""A channel and the number of a consumer on it."""

SIZE, ROOM = 10, 1_000
"""Bytes of a message, and how many a claim takes."""

QUIET = 20.0
"""Seconds after the last message within which all are handled."""


@dataclass(slots=True)
class Standing:
    """A consumer, as the queue knows it."""

    credit: int
    ended: bool = False


class Queue:
    """A quorum queue."""

    def __init__(self) -> None:
        self.ready: deque[Body] = deque()
        self.consumers: dict[Place, Standing] = {}
        self.held: dict[int, dict[int, tuple[Body, int | None]]] = {}
        """By channel and delivery tag."""
        self.send: Callable[[Place, int, Body], None]
        self._turns: deque[Place] = deque()
        self._tags: dict[int, itertools.count[int]] = {}

    def put(self, body: Body) -> None:
        self.ready.append(body)
        self.deliver()

    def deliver(self) -> None:
        while self.ready:
            for _ in range(len(self._turns)):
                self._turns.rotate(-1)
                if self.consumers[self._turns[0]].credit > 0:
                    break
            else:
                return
            place = self._turns[0]
            self.consumers[place].credit -= 1
            body = self.ready.popleft()
            self.send(place, self.hold(place[0], body, place[1]), body)

    def hold(self, channel: int, body: Body, consumer: int | None) -> int:
        tag = next(self._tags.setdefault(channel, itertools.count(1)))
        self.held.setdefault(channel, {})[tag] = body, consumer
        return tag

    def begin(self, place: Place, credit: int) -> None:
        assert place not in self.consumers, "a tag is used twice"
        self.consumers[place] = Standing(credit)
        self._turns.append(place)
        self.deliver()

    def end(self, place: Place) -> None:
        self.consumers[place].ended = True
        self._turns.remove(place)

    def settle(self, channel: int, tag: int, *, back: bool = False) -> None:
        held = self.held.get(channel, {}).pop(tag, None)
        if held is None:  # its channel is over
            return
        body, consumer = held
        if back:
            self.ready.append(body)
        one = None if consumer is None else self.consumers[channel, consumer]
        if one is not None and not one.ended:
            one.credit += 1
        self.deliver()

    def lose(self, channel: int) -> None:
        for place, one in self.consumers.items():
            if place[0] == channel and not one.ended:
                self.end(place)
        self.ready.extend(body for body, _ in self.held.pop(channel, {}).values())
        self.deliver()

    @property
    def known_consumers(self) -> int:
        holding = {(channel, one) for channel, held in self.held.items() for _, one in held.values()}
        return sum(not one.ended or place in holding for place, one in self.consumers.items())


@dataclass(slots=True)
class Draw:
    """What a process is like."""

    mode: str
    limit: int
    work: float
    restless: bool
    dies: bool


class Process:
    """One that receives: by a consumer ("listens"), by short receives ("short"), or without listening ("asks")."""

    def __init__(self, world: World, draw: Draw) -> None:
        self.world, self.draw = world, draw
        self.machine = world.make_machine()
        self.channel = next(world.channels)
        self.is_open = True
        self.is_listening = self.is_asking = False
        self.busy = 0
        self.claims = itertools.count(1)
        self.bodies: dict[int, Body] = {}
        self.last_came = -NEVER
        self.close_began: float | None = None
        self._up = self._down = 0.0

    # --- the ways ---

    def up(self, act: Callable[[], object]) -> None:
        """Let the server do something behind all before."""
        channel = self.channel
        self._up = max(self._up, self.world.now + self.world.delay())
        self.world.at(self._up, lambda: act() if self.channel == channel and self.is_open else None)

    def down(self, act: Callable[[], object]) -> None:
        """Let something come from the server behind all before."""
        channel = self.channel
        self._down = max(self._down, self.world.now + self.world.delay())
        self.world.at(self._down, lambda: act() if self.channel == channel and self.is_open else None)

    def feed(self, given: receiving.Input) -> None:
        for effect in self.machine.handle(given, self.world.now):
            self.carry_out(effect)
        at = self.machine.wake_at
        assert at > self.world.now, "it asks to be woken for what it should have done"
        if at < NEVER:
            self.world.at(at, self.tick)

    def tick(self) -> None:
        if self.is_open and self.machine.wake_at <= self.world.now:
            self.feed(receiving.Tick())

    def carry_out(self, effect: receiving.Effect) -> None:
        world, queue, channel = self.world, self.world.queue, self.channel
        match effect:
            case receiving.Begin(tag, credit):
                self.up(lambda: queue.begin((channel, tag), credit))
            case receiving.End(tag):
                world.ended += 1
                if self.close_began is not None and world.now < self.close_began + receiving.CLOSING:
                    is_calm = self.last_came < self.close_began - receiving.CALM
                    one = self.machine.consumers.get(tag)
                    world.hasty_closes += not is_calm and one is not None and not one.is_full
                self.up(lambda: queue.end((channel, tag)))
            case receiving.Get():
                self.up(self.get)
            case receiving.Count():
                self.up(self.count)
            case receiving.Await():
                self.up(lambda: self.down(partial(self.feed, receiving.Arrived())))
            case receiving.GiveBack(message):
                world.copies += 1
                world.returning = max(world.returning, len(self.machine.returning))
                self.up(lambda: queue.put(self.bodies[message]))
                world.at(world.now + 8 * world.latency, partial(self.settle, channel, message))
            case receiving.Answer(_, messages, is_more):
                self.answered(messages, is_more=is_more)
            case receiving.Hint():
                if self.is_listening and self.busy < self.draw.limit:
                    self.ask()
            case receiving.Closed():
                self.end()

    def count(self) -> None:
        ready, consumers = len(self.world.queue.ready), self.world.queue.known_consumers
        self.down(lambda: self.feed(receiving.Counted(ready, consumers - len(self.machine.consumers))))

    def get(self) -> None:
        queue, channel = self.world.queue, self.channel
        if not queue.ready:
            self.down(lambda: self.feed(receiving.GotNothing()))
            return
        body = queue.ready.popleft()
        tag = queue.hold(channel, body, None)
        self.down(lambda: self.came(None, tag, body))

    def came(self, consumer: int | None, tag: int, body: Body) -> None:
        self.bodies[tag] = body
        self.last_came = self.world.now
        self.feed(receiving.Came(consumer, tag, SIZE))

    def sent(self, consumer: int, tag: int, body: Body) -> None:
        """Note that the queue has sent a message: the channel takes it back if the consumer was ended meanwhile."""
        channel = self.channel
        self._down = max(self._down, self.world.now + self.world.delay())

        def arrive() -> None:
            if self.channel != channel or not self.is_open:
                return
            one = self.machine.consumers.get(consumer)
            if (one is None or one.is_ended) and self.world.queue.consumers[channel, consumer].ended:
                self.world.take_back(self, tag, body)
            else:
                self.came(consumer, tag, body)

        self.world.at(self._down, arrive)

    def settle(self, channel: int, message: int) -> None:
        if self.channel == channel and self.is_open:
            self.feed(receiving.Verdict(message))
            self.up(lambda: self.world.queue.settle(channel, message))

    # --- what it does ---

    def start(self) -> None:
        world = self.world
        if not self.is_open or self.is_listening or self.close_began is not None:
            return
        if self.draw.mode == "asks":
            self.claim(world.rng.choice([1, 5, 50]))
            world.at(world.now + world.rng.uniform(0.001, 0.1), self.start)
            return
        self.is_listening = True
        self.feed(receiving.Listen())
        self.ask()
        if self.draw.mode == "short" or self.draw.restless:
            world.at(world.now + world.rng.uniform(0.02, 1.0), self.stop)

    def stop(self) -> None:
        if not self.is_listening or not self.is_open or self.close_began is not None:
            return
        self.is_listening = False
        self.feed(receiving.Unlisten())
        if self.draw.mode == "listens" or not self.busy:
            self.world.at(self.world.now + self.world.rng.choice([0, 0.001, 0.3]), self.start)

    def ask(self) -> None:
        if not self.is_asking:
            self.is_asking = True
            self.claim(max(1, self.draw.limit - self.busy))

    def claim(self, limit: int) -> None:
        number, rng = next(self.claims), self.world.rng
        if self.is_listening and rng.random() < 0.5 and (taken := self.machine.take(limit, ROOM)):
            self.answered(taken, is_more=False)  # as another thread does, before the machine knows
            self.feed(receiving.Taken(limit - len(taken)))
            return
        self.feed(receiving.Claim(number, limit, ROOM))
        if rng.random() < 0.02:
            self.is_asking = False
            self.feed(receiving.GiveUp(number))
            self.world.at(self.world.now + 0.001, self.ask_more)

    def answered(self, messages: tuple[int, ...], *, is_more: bool) -> None:
        world = self.world
        for message in messages:
            world.handled[self.bodies[message]] += 1
            world.last_handled = world.now
            self.busy += 1
            world.at(world.now + world.rng.expovariate(1 / self.draw.work), partial(self.finish, self.channel, message))
        self.is_asking = False
        if self.is_listening and self.draw.mode == "listens" and is_more and self.busy < self.draw.limit:
            self.world.at(self.world.now, self.ask_more)
        if self.draw.mode == "short" and messages:
            self.stop()

    def ask_more(self) -> None:
        if self.is_open and self.is_listening and self.busy < self.draw.limit:
            self.ask()

    def finish(self, channel: int, message: int) -> None:
        if self.channel != channel or not self.is_open:
            return
        self.busy -= 1
        self.world.done[self.bodies[message]] += 1
        self.settle(channel, message)
        if self.is_listening and self.draw.mode == "listens" and self.busy < self.draw.limit:
            self.ask()
        if self.draw.mode == "short" and not self.busy and not self.is_listening:
            self.world.at(self.world.now + self.world.rng.choice([0, 0.001, 0.2]), self.start)

    # --- faults, and the end ---

    def lose_channel(self) -> None:
        """Lose the channel, with all that is held and on its way; go on with another one."""
        if not self.is_open or self.close_began is not None:
            return
        self.world.lose(self)
        self.machine, self.channel = self.world.make_machine(), next(self.world.channels)
        self.world.owners[self.channel] = self
        self.busy, self.is_listening, self.is_asking = 0, False, False
        self.world.at(self.world.now + 0.01, self.start)

    def close(self) -> None:
        if self.is_open and self.close_began is None:
            self.close_began = self.world.now
            self.is_listening = False
            self.feed(receiving.Close())

    def end(self) -> None:
        """End, by a close or a kill."""
        if self.is_open:
            if self.close_began is not None and self.machine.is_closed:
                self.world.closes.append(self.world.now - self.close_began)
                self.world.unseen += len(self.world.queue.held.get(self.channel, {}).keys() - self.bodies.keys())
            self.world.lose(self)
            self.is_open = False


@dataclass(slots=True)
class World:
    """A run from a seed."""

    seed: int
    make_machine: type[Receiving] = Receiving
    now: float = 0.0
    copies: int = 0
    ended: int = 0
    """Consumers that were ended."""
    counted: Counter[Body] = field(default_factory=Counter)
    """What was taken back on its way to a consumer that was ended."""
    at_closes: int = 0
    """How often that happened when a process had to end free consumers, as it closed."""
    hasty_closes: int = 0
    """Free consumers that were ended at once, although messages had come lately."""
    unseen: int = 0
    """Messages that were on their way when a process said that it was closed."""
    returning: int = 0
    """How many messages a process has given back at once, at most."""
    handled: Counter[Body] = field(default_factory=Counter)
    done: Counter[Body] = field(default_factory=Counter)
    lost: set[Body] = field(default_factory=set)
    """What was held by a channel that was lost: it may be handled twice."""
    closes: list[float] = field(default_factory=list)
    """How long each close took."""
    faults: Counter[str] = field(default_factory=Counter)
    last_handled: float = 0.0
    sent: int = 0
    last: float = 0.0
    """When the last message is sent."""
    rng: random.Random = field(init=False)
    latency: float = field(init=False)
    queue: Queue = field(default_factory=Queue)
    channels: itertools.count[int] = field(default_factory=itertools.count)
    owners: dict[int, Process] = field(default_factory=dict)
    processes: list[Process] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[[], object]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.latency = rng.choice([0.0003, 0.001, 0.004])
        self.queue.send = lambda place, tag, body: self.owners[place[0]].sent(place[1], tag, body)
        for number in range(rng.randint(1, 4)):
            mode = rng.choice(["listens", "listens", "short", "asks"])
            limit = 1 if mode == "short" else rng.choice([1, 5, 20, 100])
            work = rng.choice([0.0001, 0.005, 0.05])
            draw = Draw(mode, limit, work, restless=rng.random() < 0.6, dies=number > 0 and rng.random() < 0.7)
            process = Process(self, draw)
            self.owners[process.channel] = process
            self.processes.append(process)
            self.at(rng.uniform(0, 0.1), process.start)
        at = 0.0
        for _ in range(rng.choice([1, 3, 30])):
            at += rng.expovariate(1 / rng.choice([0.01, 0.2, 1.0]))
            for _ in range(rng.choice([1, 1, 5, 60, 400])):
                self.at(at, self.send)
        for process in self.processes:
            if process.draw.dies:
                name = rng.choice(["close", "end", "lose_channel"])
                self.faults[name] += 1
                self.at(rng.uniform(0, at), getattr(process, name))
        first = self.processes[0]
        self.at(at + 0.5, lambda: setattr(first, "draw", Draw("listens", 20, 0.001, restless=False, dies=False)))
        self.at(at + 2.0, first.start)  # so that nothing is left, whatever the others do
        self.last = at

    # --- time ---

    def at(self, at: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), act))

    def delay(self) -> float:
        return self.rng.expovariate(1 / self.latency)

    def run(self) -> str:
        """Return what is wrong; empty if nothing is."""
        end = self.last + QUIET
        while self._events and self.now < end:
            self.now, _, act = heapq.heappop(self._events)
            act()
        if self.counted:
            return f"{self.counted.total()} of {self.sent} were counted that nobody had"
        if twice := [body for body, times in self.handled.items() if times > 1 and body not in self.lost]:
            return f"{len(twice)} were handled twice"
        if left := [body for body in range(1, self.sent + 1) if not self.done[body]]:
            return f"{len(left)} of {self.sent} were not handled"
        if self.returning > AT_ONCE:
            return f"{self.returning} were given back at once"
        if self.unseen:
            return f"{self.unseen} were on their way to a process that had closed"
        if self.hasty_closes:
            return f"{self.hasty_closes} free consumers were ended at once by a close"
        if any(took > receiving.CLOSING + 400 * self.latency + 8 * self.latency * self.copies for took in self.closes):
            return f"a close took {max(self.closes):.3f} s"
        if any(one.machine.free > receiving.UNITS_MAX for one in self.processes if one.is_open):
            return "a process keeps many units in a queue that is calm"
        return ""

    # --- what happens ---

    def send(self) -> None:
        self.sent += 1
        self.queue.put(self.sent)

    def take_back(self, process: Process, tag: int, body: Body) -> None:
        if process.close_began is None:
            self.counted[body] += 1
        else:
            self.at_closes += 1
        process.bodies[tag] = body
        channel = process.channel
        process.up(lambda: self.queue.settle(channel, tag, back=True))

    def lose(self, process: Process) -> None:
        self.lost.update(body for body, _ in self.queue.held.get(process.channel, {}).values())
        self.queue.lose(process.channel)
