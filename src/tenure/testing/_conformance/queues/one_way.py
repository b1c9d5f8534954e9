"""Links that work one way: one consumer is half cut off for ten locks, and others get the messages all the same.

Its requests arrive, and their answers don't; or they don't arrive. It is the real pump, with the real requests, and its
clock is turned together with the broker's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import cast

import pytest

from tenure._queue.broker import Broker, Claim
from tenure._queue.broker_requests import BrokerRequests
from tenure._queue.effects import REQUESTS, PumpInput, Request, Tick
from tenure._queue.hints import Subscription
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.pump import Pump
from tenure._queue.pump_settings import PumpSettings
from tenure._queue.session_pump import SessionPump
from tenure._queue.verdicts import COMPLETE, Settled, Settlement
from tenure._timing import Timing
from tenure.testing import ManualClock, until
from tenure.testing._conformance.harness import Fault, FaultyBroker, QueueHarness, needs_fault
from tenure.testing._conformance.queues.consumers import ObservedQueue
from tenure.testing._conformance.queues.steps import QueueSuite, needs

LOCKS = 5
"""How often it is tried, for more than two locks each time, while the link works one way."""
STEP_MIN = 0.001
"""Seconds that pass at least, whenever time passes."""
CONCURRENCY = 5
"""How many messages the consumer that is half cut off would handle at once."""
MESSAGES = 20
LATE = 1.2
"""By which share longer than a lock to wait until what was locked just before is surely back."""


class OneWayTests(QueueSuite):
    """A consumer whose link works one way keeps no message from the others."""

    @pytest.mark.parametrize("fault", ["lose_answer", "cut"])
    @pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])
    async def test_a_consumer_that_is_half_cut_off_keeps_messages_from_nobody(
        self, harness: QueueHarness, name: str, fault: Fault, sessions: bool
    ) -> None:
        """What a claim has locked comes back by itself, and it claims once in a lock: else, it waits for an answer."""
        needs_fault(harness, fault)
        traits = harness.traits
        if not traits.surveys and traits.connects:
            pytest.skip("a client that hears nothing loses its connection here, and can claim nothing over another one")
        if sessions:
            needs(traits.sessions)
        link = FaultyBroker(await harness.open())
        ann = ObservedQueue(cast(Broker, link), name, harness.lock, max_deliveries=10)
        bob = ObservedQueue(await harness.open(), name, harness.lock, max_deliveries=10)
        wanted = {f"first {number}" for number in range(MESSAGES)}
        await bob.send(sorted(wanted), sessions=sessions)
        await ann.context.ready()  # it has worked before
        other = Other(bob.broker, name, harness.lock, sessions=sessions)
        async with link.lose_answer() if fault == "lose_answer" else link.cut():
            consumer = HalfCutOff(ann, harness, sessions=sessions)
            try:
                await consumer.begin()
                await other.handle_all()
                await consumer.pass_time(harness.lock * LATE, other)
                for round_ in range(LOCKS):
                    assert len(wanted - other.handled.keys()) <= 1, round_  # it may have locked one again just now
                    later = [f"later {round_} {number}" for number in range(CONCURRENCY)]
                    wanted.update(later)
                    await bob.send(later, sessions=sessions)
                    await consumer.pass_time(harness.lock)
                    await other.handle_all()
                    assert len(wanted - other.handled.keys()) <= 1, round_  # it claims once in a lock
                    await consumer.pass_time(harness.lock * LATE, other)
                assert consumer.pump.misses >= LOCKS
            finally:
                await consumer.end()
        await harness.pass_time(harness.lock * LATE)
        await other.handle_all()
        assert other.handled.keys() == wanted
        assert (await bob.broker.stats(name)).dead == 0


class Other:
    """A consumer that works: it handles whatever it can get."""

    def __init__(self, broker: Broker, name: str, lock: float, *, sessions: bool) -> None:
        self.handled: dict[str, int] = {}
        """The number of deliveries of each message, by its body."""
        self._broker = broker
        self._name = name
        self._lock = lock
        self._sessions = sessions

    async def handle_all(self) -> None:
        """Handle every message that is free."""
        while await (self._handle_session() if self._sessions else self._handle_some()):
            pass

    async def _handle_some(self) -> bool:
        claim = await self._broker.receive(self._name, 100, self._lock)
        return await self._handle(claim.deliveries)

    async def _handle_session(self) -> bool:
        lock = await self._broker.accept(self._name, None, self._lock)
        if not isinstance(lock, SessionLock):
            return False
        claim = await self._broker.receive_session(lock, 100)
        assert isinstance(claim, Claim)
        await self._handle(claim.deliveries)
        await self._broker.release(lock)
        return True

    async def _handle(self, deliveries: Sequence[Delivery]) -> bool:
        for answer in await self._broker.settle([Settlement(one, COMPLETE) for one in deliveries]):
            assert isinstance(answer, Settled)
        self.handled |= {one.body.decode(): one.delivery_count for one in deliveries}
        return bool(deliveries)


class HalfCutOff:
    """A consumer whose requests bring nothing. Its time passes only in :meth:`pass_time`."""

    def __init__(self, queue: ObservedQueue, harness: QueueHarness, *, sessions: bool) -> None:
        self._clock = ManualClock()
        self._harness = harness
        self.has_ended = False
        traits, lock = queue.broker.traits, harness.lock
        settings = PumpSettings(Timing(lock), CONCURRENCY, hints=traits.hints, surveys=traits.surveys, looks_first=True)
        kind = SessionPump if sessions else Pump
        self.pump: Pump = kind("q", "ann", settings, random.Random(0), {}, now=self._clock.now())
        self._requests = BrokerRequests(queue.context, lock, self.pump, cast(Subscription, NoHints()), self)

    async def begin(self) -> None:
        """Send the first claim."""
        await self._feed(Tick())

    async def pass_time(self, seconds: float, other: Other | None = None) -> None:
        """Let so many seconds pass, in which both do whatever is due: this one first."""
        until_at = self._clock.now() + seconds
        while (left := until_at - self._clock.now()) > 0:
            wait = min(max(self.pump.wake_at - self._clock.now(), STEP_MIN), left)
            await self._harness.pass_time(wait)
            self._clock.advance(wait)
            await self._feed(Tick())
            if other is not None:
                await other.handle_all()

    async def _feed(self, event: PumpInput) -> None:
        for request in self.decide(event):
            self._requests.begin(request)
        await until(lambda: not self._requests.tasks)

    async def end(self) -> None:
        """End it: what it asks for is cancelled."""
        self.has_ended = True
        for task in list(self._requests.tasks):
            task.cancel()
        await asyncio.gather(*self._requests.tasks, return_exceptions=True)

    # --- as the host of its requests ---

    def decide(self, event: PumpInput) -> Sequence[Request]:
        """Give *event* to the pump; return the requests that it makes."""
        effects = self.pump.handle(event, self._clock.now())
        return [cast(Request, one) for one in effects if type(one) in REQUESTS]

    def feed_soon(self, event: PumpInput) -> None:
        """Give *event* to the pump: nothing was received, so it brings no message of a session."""
        for request in self.decide(event):
            self._requests.begin(request)

    def fail(self, error: BaseException) -> None:
        """Let the test fail."""
        raise error


class NoHints:
    """A place among those that wait for hints, to which none comes."""

    is_asking = has_hint = may_take_arrived = False

    def asks(self) -> None:
        """Nobody counts who asks."""

    def failed(self) -> None:
        """Nobody else is woken."""

    def answered(self, found: bool, due_in: float | None) -> None:
        """Nobody else is woken."""
