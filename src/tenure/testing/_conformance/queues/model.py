"""Statistics, and random programs that compare the broker with a model."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tenure._queue.broker import (
    EVERY_LIVE,
    EVERYTHING,
    Broker,
    LiveSelection,
)
from tenure._queue.message import Delivery, State, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    COMPLETE,
    GIVE_BACK,
    LAPSED,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    LATE,
    QueueSuite,
    bodies,
    receive,
    send,
    settle,
)


class ModelTests(QueueSuite):
    """Statistics and live messages agree with a model."""

    async def test_age_is_that_of_the_oldest_ready(self, harness: QueueHarness, name: str) -> None:
        if not harness.traits.exact_stats:
            pytest.skip("this broker's statistics are not exact")
        broker = await harness.open()
        await send(broker, name, b"a")
        await harness.pass_time(harness.lock / 2)
        await send(broker, name, b"b")
        assert (await broker.stats(name)).oldest_age == pytest.approx(harness.lock / 2, rel=0.2)
        await receive(broker, name, harness, limit=1)
        assert (await broker.stats(name)).oldest_age < harness.lock / 4

    @pytest.mark.parametrize("seed", range(12))
    async def test_a_random_program_agrees_with_the_model(self, harness: QueueHarness, name: str, seed: int) -> None:
        if not harness.traits.exact_stats:
            pytest.skip("this broker's statistics are not exact")
        program = RandomProgram(await harness.open(), await harness.open(), harness, name, random.Random(seed))
        await program.run(steps=120)


@dataclass(slots=True, eq=False)
class ModelMessage:
    """One message in the model."""

    number: int
    """In the order sent; it is also the body."""
    priority: int
    state: str = "ready"
    count: int = 0
    until: float = 0.0  # when its lock or delay ends
    delivery: Delivery | None = None


@dataclass(slots=True)
class RandomProgram:
    """Random operations on a broker, each compared with a simple model."""

    broker: Broker
    other: Broker
    harness: QueueHarness
    name: str
    rng: random.Random
    now: float = 0.0
    number: int = 0
    messages: dict[int, ModelMessage] = field(default_factory=dict)
    old: list[Delivery] = field(default_factory=list)

    async def run(self, steps: int) -> None:
        """Perform so many operations, and compare after each."""
        await self.broker.declare(self.name, {"lock": self.harness.lock, "max_deliveries": 3})
        operations = [self.send, self.send, self.receive, self.receive, self.settle, self.settle, self.settle]
        operations += [self.renew, self.pass_time, self.settle_old, self.redrive, self.purge]
        for _ in range(steps):
            await self.rng.choice(operations)()
            await self.compare()

    def pick(self) -> Broker:
        return self.rng.choice([self.broker, self.other])

    def locked(self) -> list[ModelMessage]:
        found = [one for one in self.messages.values() if one.state == "locked"]
        self.rng.shuffle(found)
        return found[: self.rng.randint(0, 4)]

    async def send(self) -> None:
        """Send a few, some with a delay."""
        delays = [self.rng.choice([0.0, 0.0, self.harness.lock]) for _ in range(self.rng.randint(1, 4))]
        highest = 0 if self.harness.traits.priorities == "impossible" else 2
        sent = []
        for delay in delays:
            self.number += 1
            named = f"{self.name}-{self.number}"
            one = Outgoing(b"%d" % self.number, id=named, delay=delay, priority=self.rng.randint(0, highest))
            sent.append(one)
            state = "delayed" if delay else "ready"
            self.messages[self.number] = ModelMessage(self.number, one.priority, state, until=self.now + delay)
        await self.pick().send(self.name, sent)

    async def receive(self) -> None:
        """Claim a few: the right ones, in order."""
        limit = self.rng.randint(1, 5)
        claim = await self.pick().receive(self.name, limit, self.harness.lock)
        ready = [one for one in self.messages.values() if one.state == "ready"]
        expected = sorted(ready, key=lambda one: (-one.priority, one.number))[:limit]
        assert bodies(claim.deliveries) == [b"%d" % one.number for one in expected]
        for one, delivery in zip(expected, claim.deliveries, strict=True):
            one.state, one.count, one.delivery = "locked", one.count + 1, delivery
            one.until = self.now + self.harness.lock
            assert delivery.delivery_count == one.count
            self.old.append(delivery)

    async def settle(self) -> None:
        """Pass verdicts on some that are locked."""
        some = self.locked()
        kinds: list[Verdict] = [COMPLETE, COMPLETE, Abandon(), Abandon(self.harness.lock), GIVE_BACK, DeadLetter("why")]
        if self.harness.traits.deferral != "impossible":
            kinds.append(Defer())
        verdicts = [self.rng.choice(kinds) for _ in some]
        answers = await self.pick().settle(
            [Settlement(one.delivery, verdict) for one, verdict in zip(some, verdicts, strict=True) if one.delivery]
        )
        for one, verdict, answer in zip(some, verdicts, answers, strict=True):
            assert answer == Settled(dead=isinstance(verdict, Abandon) and one.count >= 3)
            self.apply(one, verdict)

    def apply(self, one: ModelMessage, verdict: Verdict) -> None:
        """Apply a verdict to the model."""
        one.delivery = None
        match verdict:
            case Complete():
                del self.messages[one.number]
            case Abandon(delay=delay):
                one.state = "dead" if one.count >= 3 else "delayed" if delay else "ready"
                one.until = self.now + delay
            case Defer():
                one.state = "deferred"
            case DeadLetter():
                one.state = "dead"
            case _:
                one.state, one.count = "ready", one.count - 1

    async def settle_old(self) -> None:
        """Try to settle deliveries whose lock has ended."""
        current = [one.delivery for one in self.messages.values()]
        late = [one for one in self.old[-20:] if one not in current]
        assert await settle(self.pick(), late, COMPLETE) == [LAPSED] * len(late)

    async def renew(self) -> None:
        """Renew some that are locked, together with one that is not."""
        some = [one for one in self.locked() if one.delivery]
        answers = await self.pick().renew([one.delivery for one in some if one.delivery], self.harness.lock)
        assert [type(answer) for answer in answers] == [Renewed] * len(some)
        for one in some:
            one.until = self.now + self.harness.lock

    async def pass_time(self) -> None:
        """Let locks and delays end."""
        seconds = self.harness.lock * self.rng.choice([0.3, 0.6, LATE])
        await self.harness.pass_time(seconds)
        self.now += seconds
        for one in self.messages.values():
            if one.until <= self.now and one.state in ("locked", "delayed"):
                one.state = "dead" if one.state == "locked" and one.count >= 3 else "ready"
                one.delivery = None

    async def redrive(self) -> None:
        """Put some dead letters back."""
        limit = self.rng.randint(1, 2)
        dead = sorted(one.number for one in self.messages.values() if one.state == "dead")[:limit]
        assert await self.pick().redrive(self.name, EVERYTHING, limit) == len(dead)
        for number in dead:
            self.messages[number].state, self.messages[number].count = "ready", 0

    async def purge(self) -> None:
        """Purge some that are not locked."""
        states: list[State] = ["ready", "delayed", "deferred"]
        chosen = frozenset(self.rng.sample(states, self.rng.randint(0, 2)))
        picked = self.rng.sample(sorted(self.messages), min(3, len(self.messages)))
        ids = frozenset(f"{self.name}-{number}" for number in picked)
        gone = [number for number in picked if self.messages[number].state in chosen]
        which = LiveSelection(states=chosen, ids=ids)
        assert await self.pick().purge_live(self.name, which, dry_run=True) == len(gone)
        assert await self.pick().purge_live(self.name, which) == len(gone)
        for number in gone:
            del self.messages[number]

    async def compare(self) -> None:
        """Compare the statistics and all live messages with the model."""
        shown = [
            (int(one.body), one.state, one.delivery_count) for one in await self.pick().peek(self.name, EVERY_LIVE, 999)
        ]
        alive = sorted(self.messages.items())
        assert shown == [(number, one.state, one.count) for number, one in alive if one.state != "dead"]
        stats = await self.pick().stats(self.name)
        states = Counter(one.state for one in self.messages.values())
        counts = (states[state] for state in ("ready", "locked", "delayed", "deferred", "dead"))
        expected = Stats(*counts)  # type: ignore[arg-type]  # of five fields
        assert Stats(stats.ready, stats.locked, stats.delayed, stats.deferred, stats.dead) == expected
        assert (stats.oldest_age > 0) <= (stats.ready > 0)
