"""Answers that are always late: a consumer keeps what it handles all the same, and others get the rest in time.

It is the real consumer, with its real handlers. Its clock is turned together with the broker's.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any, Literal, cast

import pytest

from tenure._queue.broker import Broker, Claim
from tenure._queue.received import Message
from tenure._runtime.alarms import Alarms
from tenure._timing import Timing
from tenure.testing import until
from tenure.testing._conformance.client_time import LATE_SHARE, ClientTime, LateAnswers
from tenure.testing._conformance.harness import FaultyBroker, QueueHarness, needs_fault
from tenure.testing._conformance.queues.consumers import ObservedQueue
from tenure.testing._conformance.queues.one_way import CONCURRENCY, MESSAGES, Other
from tenure.testing._conformance.queues.steps import QueueSuite, needs

LOCKS = 3
"""For how many locks handlers run."""
FREE_SHARE = 0.75
"""The share of a lock after which others have all that it doesn't handle."""
LATE = 1.2
"""By which share longer than a lock to wait until one that nobody renews is surely over."""
STEP_SHARE = 0.02
"""The share of a lock that passes at least, whenever time passes."""
QUIET = 30
"""The iterations of the loop without a request after which a consumer has nothing to do at this time."""
ANSWERED_WITHIN = 60.0
"""Seconds in which a busy broker answers."""

Then = Literal["finishes", "hangs"]


class LateAnswerTests(QueueSuite):
    """A consumer whose answers are late by most of the time that it waits for them."""

    @pytest.mark.parametrize("then", ["finishes", "hangs"])
    @pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])
    async def test_a_consumer_whose_answers_are_late_keeps_what_it_handles_and_nothing_else(
        self, harness: QueueHarness, name: str, sessions: bool, then: Then
    ) -> None:
        needs_fault(harness, "lose_answer")
        if sessions:
            needs(harness.traits.sessions)
        bob = ObservedQueue(await harness.open(), name, harness.lock, max_deliveries=10)
        wanted = {f"{number}" for number in range(MESSAGES)}
        await bob.send(sorted(wanted), sessions=sessions)
        other = Other(bob.broker, name, harness.lock, sessions=sessions)
        ann = LateConsumer(await harness.open(), name, harness, sessions=sessions)
        try:
            await ann.until_busy()
            held = {*ann.running}
            await ann.pass_time(harness.lock * FREE_SHARE, other)
            await handle(other, wanted - held)
            await ann.pass_time(harness.lock * (LOCKS - FREE_SHARE), other)
            assert {*ann.running} == held
            assert {*other.handled} == wanted - held
            if then == "hangs":
                await harness.pass_time(harness.lock * LATE)
                await handle(other, wanted)
                return
            ann.finish.set()
            await ann.stop()
            assert ann.handled == Counter(held)
        finally:
            await ann.end()
        await harness.pass_time(harness.lock * LATE)
        await other.handle_all()
        assert {*other.handled} == wanted - held
        assert (await bob.broker.stats(name)).dead == 0


async def handle(other: Other, wanted: set[str]) -> None:
    """Let *other* handle what is free, which are these messages; a broker may push them a moment later."""

    async def has_all() -> bool:
        await other.handle_all()
        return wanted <= {*other.handled}

    await until(has_all, within=ANSWERED_WITHIN, what=f"that others get all of {sorted(wanted)}")
    assert {*other.handled} == wanted


class LateConsumer:
    """A consumer whose answers are late. Its time passes only in the methods of this, for the broker too."""

    def __init__(self, broker: Broker, name: str, harness: QueueHarness, *, sessions: bool) -> None:
        self.running: set[str] = set()
        """The bodies of the messages whose handlers run."""
        self.handled: Counter[str] = Counter()
        self.finish = asyncio.Event()
        """Set when the handlers may end."""
        self._lock = harness.lock
        self._time = ClientTime(harness)
        clock = self._time.clock
        self._answers = LateAnswers(clock, LATE_SHARE * Timing(harness.lock).retry_every)
        self._link = Link(broker, self._answers)
        queue = ObservedQueue(cast(Broker, self._link), name, harness.lock, max_deliveries=10, clock=clock)
        self._consumer = queue.queue.consumer(self._handle, concurrency=CONCURRENCY, sessions=sessions, sigterm=False)
        self._run = asyncio.create_task(self._consumer.run())

    async def _handle(self, message: Message) -> None:
        body = message.body.decode()
        self.running.add(body)
        try:
            await self.finish.wait()
            self.handled[body] += 1
        finally:
            self.running.discard(body)

    async def until_busy(self) -> None:
        """Let time pass until each of its handlers has a message."""
        until_at = self._time.clock.now() + self._lock
        while len(self.running) < CONCURRENCY:
            left = until_at - self._time.clock.now()
            assert left > 0, f"after a lock it has {len(self.running)} messages"
            await self._step(left)

    async def pass_time(self, seconds: float, other: Other) -> None:
        """Let so many seconds pass, in which both do whatever is due: this one first."""
        until_at = self._time.clock.now() + seconds
        while (left := until_at - self._time.clock.now()) > 0:
            await self._step(left)
            await other.handle_all()

    async def stop(self) -> None:
        """Drain it, and let time pass until it has ended."""
        self._consumer.drain()
        until_at = self._time.clock.now() + self._lock
        while not self._run.done():
            left = until_at - self._time.clock.now()
            assert left > 0, "it does not end"
            await self._step(left)
        await self._run

    async def _step(self, most: float) -> None:
        """Let time pass until it has something to do, but no more than *most* seconds."""
        await self._settle()
        due = min(self._answers.due, *(one._first() for one in self._alarms), math.inf)
        wait = min(max(due - self._time.clock.now(), STEP_SHARE * self._lock), most)
        await self._time.pass_time(wait)
        self._answers.let_through()
        self._ring()
        await self._settle()

    def _ring(self) -> None:
        for alarms in self._alarms:
            alarms._ring()

    @property
    def _alarms(self) -> list[Alarms]:
        loop = asyncio.get_running_loop()
        return [one for one in Alarms._known if one._loop is loop and one._is_on(self._time.clock)]

    async def _settle(self) -> None:
        """Wait until the broker has answered every request, and no other one is sent at this time."""
        quiet = 0
        while quiet < QUIET:
            quiet += 1
            if self._link.asked > self._answers.waiting:
                await until(lambda: self._link.asked <= self._answers.waiting, within=ANSWERED_WITHIN)
                quiet = 0
            await asyncio.sleep(0)

    async def end(self) -> None:
        """End it, whatever is unanswered."""
        self._link.give_up()
        self._run.cancel()
        async with asyncio.timeout(ANSWERED_WITHIN):
            while not self._run.done():
                self._time.clock.advance(self._lock)  # it asks again and again, until its locks are over
                self._ring()
                await asyncio.sleep(0)
        await asyncio.gather(self._run, return_exceptions=True)


class Link(FaultyBroker):
    """The link of one client, to which every answer comes late, and nothing comes unasked but hints."""

    def __init__(self, broker: Broker, answers: LateAnswers) -> None:
        super().__init__(broker)
        self.asked = 0
        """How many requests have no answer here yet."""
        self._answers = answers

    def give_up(self) -> None:
        """Let no request through any more."""
        self._is_cut = True
        self._answers.end()

    def receive_arrived(self, queue: str, limit: int, lock: float) -> Claim | None:
        """Return that nothing has arrived: it may be late."""
        return None

    async def _ask(self, request: Any, *args: Any, **options: Any) -> Any:
        self.asked += 1
        try:
            return await super()._ask(request, *args, **options)
        finally:
            self.asked -= 1

    async def _before_answer(self) -> None:
        await self._answers.hold_back()
        await super()._before_answer()
