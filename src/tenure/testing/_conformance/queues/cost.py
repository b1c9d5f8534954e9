"""The cost of requests to a broker: it doesn't grow with messages that are not returned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial
from typing import cast

from tenure._queue.broker import EVERYTHING, Broker, Claim, NoSession, SurveyingBroker
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import Delivery, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Abandon, Complete, DeadLetter, Defer, Renewed, Settled
from tenure.testing._conformance.cost import Meter
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    LATE,
    QueueSuite,
    accept,
    bodies,
    needs,
    receive,
    receive_session,
    settle,
)

AT_ONCE = 20  # concurrent requests of the set-up
SPARE = 15  # more ready messages than one measurement settles
BATCH = 500  # messages in one claim, and verdicts in one request, of the set-up


class BrokerCostSuite(QueueSuite):
    """Each test measures twice, the second time with ten times as many unrelated messages."""

    async def test_beside_a_deep_queue(self, harness: QueueHarness, name: str) -> None:
        meter = Meter.of(harness)
        broker = await harness.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await fill(broker, queue, depth)
            await use(meter, broker, harness, queue)
        meter.require_flat()

    async def test_beside_many_that_are_locked(self, harness: QueueHarness, name: str) -> None:
        meter = Meter.of(harness)
        broker = await harness.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await fill(broker, queue, depth)
            held = await claim_all(broker, harness, queue, depth)
            await find_nothing(meter, broker, harness, queue, accepts=False)
            await broker.send(queue, [Outgoing(b"one more")] * SPARE)
            await use(meter, broker, harness, queue)
            await use_held(meter, broker, harness, held)
        meter.require_flat()

    async def test_beside_many_that_are_delayed(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.delay)
        meter = Meter.of(harness)
        broker = await harness.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"later", delay=harness.lock * 9, expires_in=harness.lock * 99)] * depth)
            await find_nothing(meter, broker, harness, queue, accepts=False)
            await broker.send(queue, [Outgoing(b"one more")] * SPARE)
            await use(meter, broker, harness, queue)
        meter.require_flat()

    async def test_beside_many_dead_letters(self, harness: QueueHarness, name: str) -> None:
        meter = Meter.of(harness)
        broker = await harness.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await fill(broker, queue, depth)
            for got in batches(await claim_all(broker, harness, queue, depth)):
                await settle(broker, got, DeadLetter("because"))
            await broker.send(queue, [Outgoing(b"one more")] * SPARE)
            await use(meter, broker, harness, queue)
            await use_dead(meter, broker, harness, queue)
        meter.require_flat()

    async def test_beside_many_that_are_deferred(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.deferral)
        meter = Meter.of(harness)
        broker = await harness.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await fill(broker, queue, depth)
            held = await claim_all(broker, harness, queue, depth)
            for some in batches(held):
                await settle(broker, some, Defer())
            await broker.send(queue, [Outgoing(b"one more")] * SPARE)
            await use(meter, broker, harness, queue)
            middle = held[depth // 2].sequence
            for _ in range(meter.scale.times):
                got = await meter.ask("receive deferred", broker.receive_deferred, queue, [middle], harness.lock)
                await meter.ask("defer again", settle, broker, got.deliveries, Defer())
                await meter.ask("peek at one", broker.peek_deferred, queue, 1, middle)
        meter.require_flat()

    async def test_beside_many_ids(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.dedupe)
        meter = Meter.of(harness)
        broker = await harness.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a", id=f"m{number}") for number in range(depth)])
            for some in batches(await claim_all(broker, harness, queue, depth)):
                await settle(broker, some, Complete(remember=harness.lock * 9))
            for number in range(meter.scale.times):
                new = [Outgoing(b"a", id=f"new{number}")]
                await meter.ask("send with an id", broker.send, queue, new)
                await meter.ask("send it again", broker.send, queue, new)
                got = await meter.ask("receive", receive, broker, queue, harness, limit=1)
                await meter.ask("complete, and remember", settle, broker, got, Complete(remember=harness.lock))
                known = await meter.ask("look up ids in the inbox", broker.handled, queue, [f"new{number}", "never"])
                assert known == [True, False]
        meter.require_flat()

    async def test_a_batch_with_ids_costs_by_the_message(self, harness: QueueHarness, name: str) -> None:
        meter = Meter.of(harness)
        broker = await harness.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a")])  # creates the queue, which has a cost of its own
            batch = [Outgoing(b"a", id=f"m{number}") for number in range(depth)]
            _, cost = await harness.work_of(partial(broker.send, queue, batch))
            meter.note("send a thousand with ids", cost * 1_000 // depth)
        meter.require_flat()

    # --- sessions ---

    async def test_beside_a_deep_session(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        meter = Meter.of(harness)
        broker = await harness.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a", session="deep")] * depth)
            await use_session(meter, broker, harness, queue)
            await find_nothing(meter, broker, harness, queue, accepts=False)
        meter.require_flat()

    async def test_beside_many_sessions(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        meter = Meter.of(harness)
        broker = await harness.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a", session=f"s{number}") for number in range(depth)])
            await use_session(meter, broker, harness, queue)
            held = await meter.ask("accept by name", broker.accept, queue, f"s{depth // 2}", harness.lock)
            assert isinstance(held, SessionLock)
            await find_nothing(meter, broker, harness, queue, accepts=False)
        meter.require_flat()

    async def test_beside_many_idle_sessions_with_state(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        meter = Meter.of(harness)
        broker = await harness.open()

        async def leave_state(queue: str, session: str) -> None:
            held = await broker.accept(queue, session, harness.lock)
            assert isinstance(held, SessionLock)
            await broker.write_state(held, b"state")
            await broker.release(held)

        for depth in meter.small_depths():
            queue = f"{name}-{depth}"
            await side_by_side(leave_state(queue, f"s{number}") for number in range(depth))
            await find_nothing(meter, broker, harness, queue, accepts=True)
            await broker.send(queue, [Outgoing(b"a", session="busy")] * SPARE)
            await use_session(meter, broker, harness, queue)
        meter.require_flat()

    async def test_beside_many_locked_sessions(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        meter = Meter.of(harness)
        broker = await harness.open()
        for depth in meter.small_depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a", session=f"s{number}") for number in range(depth)])
            await side_by_side(broker.accept(queue, f"s{number}", harness.lock) for number in range(depth))
            await find_nothing(meter, broker, harness, queue, accepts=True)
            await broker.send(queue, [Outgoing(b"a", session="busy")] * SPARE)
            await use_session(meter, broker, harness, queue)
        meter.require_flat()

    async def test_behind_a_delayed_head(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        needs(harness.traits.delay)
        meter = Meter.of(harness)
        broker = await harness.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a", session="failing")] * depth)
            held = await accept(broker, queue, harness)
            head = await receive_session(broker, held, limit=1)
            await settle(broker, head, Abandon(delay=harness.lock * 9))
            claim = await meter.ask("receive behind it", broker.receive_session, held, 10)
            assert isinstance(claim, Claim)
            assert claim.deliveries == ()
            await broker.release(held)
            await find_nothing(meter, broker, harness, queue, accepts=True)
            await broker.send(queue, [Outgoing(b"b", session="healthy")] * SPARE)
            await use_session(meter, broker, harness, queue, expected="healthy")
        meter.require_flat()

    # --- limits ---

    async def test_at_the_limits_of_a_deep_queue(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        meter = Meter.of(harness)
        broker = await harness.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.declare(queue, {"max_locked": SPARE, "rate": (depth * 9, 600.0)})
            await fill(broker, queue, depth)
            await use(meter, broker, harness, queue)
            await receive(broker, queue, harness, limit=SPARE)
            await find_nothing(meter, broker, harness, queue, accepts=False)
            await broker.declare(queue, {"rate": (1, 600.0)})
            await find_nothing(meter, broker, harness, queue, accepts=False)
        meter.require_flat()

    async def test_beside_many_sessions_at_their_rate(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.limits)
        needs(harness.traits.sessions)
        meter = Meter.of(harness)
        broker = await harness.open()

        async def use_up(queue: str, session: str) -> None:
            held = await broker.accept(queue, session, harness.lock)
            assert isinstance(held, SessionLock)
            await settle(broker, await receive_session(broker, held, limit=1), COMPLETE)
            await broker.release(held)

        for depth in meter.small_depths():
            queue = f"{name}-{depth}"
            await broker.declare(queue, {"session_rate": (1, 600.0)})
            await broker.send(queue, [Outgoing(b"a", session=f"s{number}") for number in range(depth)] * 2)
            await side_by_side(use_up(queue, f"s{number}") for number in range(depth))
            await find_nothing(meter, broker, harness, queue, accepts=True)
            await broker.declare(queue, {"session_rate": (SPARE, 600.0)})
            await broker.send(queue, [Outgoing(b"a", session="busy")] * SPARE)
            await use_session(meter, broker, harness, queue, expected="busy")
        meter.require_flat()

    # --- queues ---

    async def test_beside_many_queues(self, harness: QueueHarness, name: str) -> None:
        meter = Meter.of(harness)
        for depth in meter.small_depths():
            broker = await harness.open()
            await side_by_side(broker.send(f"{name}-{depth}-{number}", [Outgoing(b"a")]) for number in range(depth))
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a")] * SPARE)
            await use(meter, broker, harness, queue)
        meter.require_flat()

    # --- due messages are processed in steps ---

    async def test_everything_has_expired(self, harness: QueueHarness, name: str) -> None:
        meter = Meter.of(harness, in_steps=True)
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"old", expires_in=harness.lock)] * meter.scale.flood)
        await broker.send(name, [Outgoing(b"live")])
        await harness.pass_time(harness.lock * LATE)
        await receive_behind(meter, broker, harness, name, b"live")
        assert await broker.stats(name) == Stats(locked=1, dead=meter.scale.flood)

    async def test_every_lock_has_expired(self, harness: QueueHarness, name: str) -> None:
        meter = Meter.of(harness, in_steps=True)
        broker = await harness.open()
        await broker.declare(name, {"max_deliveries": 1})
        await fill(broker, name, meter.scale.flood)
        await claim_all(broker, harness, name, meter.scale.flood, limit=BATCH)
        await broker.send(name, [Outgoing(b"live")])
        await harness.pass_time(harness.lock * LATE)
        await receive_behind(meter, broker, harness, name, b"live")

    async def test_beside_many_that_have_expired(self, harness: QueueHarness, name: str) -> None:
        meter = Meter.of(harness)
        broker = await harness.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"old", expires_in=harness.lock)] * depth)
            await harness.pass_time(harness.lock * LATE)
            for _ in range(depth):
                if (await broker.receive(queue, 10, harness.lock)).due_in is None:
                    break
            await broker.send(queue, [Outgoing(b"one more")] * SPARE)
            await use(meter, broker, harness, queue)
        meter.require_flat()


# --- steps ---


async def fill(broker: Broker, queue: str, depth: int) -> None:
    """Send *depth* plain messages."""
    await broker.send(queue, [Outgoing(b"a")] * depth)


async def claim_all(
    broker: Broker, harness: QueueHarness, queue: str, depth: int, limit: int | None = None
) -> list[Delivery]:
    """Claim so many messages, by one claim or by several of up to *limit*."""
    held: list[Delivery] = []
    while len(held) < depth:
        held += await receive(broker, queue, harness, limit=limit or depth)
    return held


def batches(held: Sequence[Delivery]) -> Iterable[Sequence[Delivery]]:
    """Split *held* into batches."""
    return [held[first : first + BATCH] for first in range(0, len(held), BATCH)]


async def side_by_side(requests: Iterable[Awaitable[object]]) -> None:
    """Await many requests, some at a time."""
    free = asyncio.Semaphore(AT_ONCE)

    async def ask(request: Awaitable[object]) -> None:
        async with free:
            await request

    await asyncio.gather(*map(ask, requests))


async def use(meter: Meter, broker: Broker, harness: QueueHarness, queue: str) -> None:
    """Measure every verb on a few messages of *queue*, where SPARE are ready."""
    for _ in range(meter.scale.times):
        [one] = await meter.ask("receive", receive, broker, queue, harness, limit=1)
        if harness.traits.renewal != "impossible":
            [answer] = await meter.ask("renew", broker.renew, [one], harness.lock)
            assert isinstance(answer, Renewed)
        assert await meter.ask("give back", settle, broker, [one], GIVE_BACK) == [Settled()]
        for verdict in (COMPLETE, Abandon(), DeadLetter("because")):
            got = await receive(broker, queue, harness, limit=1)
            assert await meter.ask(f"settle {verdict!r}", settle, broker, got, verdict) == [Settled()]
        await meter.ask("send", broker.send, queue, [Outgoing(b"a")])
        await meter.ask("send another id", broker.send, queue, [Outgoing(b"a", id="another")])
        await meter.ask("stats", broker.stats, queue)
        if harness.traits.surveys:
            await meter.ask("survey", cast(SurveyingBroker, broker).holding, [queue])


async def use_held(meter: Meter, broker: Broker, harness: QueueHarness, held: Sequence[Delivery]) -> None:
    """Renew and settle a few of the many that are locked."""
    for one in held[-meter.scale.times :]:
        if harness.traits.renewal != "impossible":
            [answer] = await meter.ask("renew one of them", broker.renew, [one], harness.lock)
            assert isinstance(answer, Renewed)
        assert await meter.ask("complete one of them", settle, broker, [one], COMPLETE) == [Settled()]


async def use_dead(meter: Meter, broker: Broker, harness: QueueHarness, queue: str) -> None:
    """Measure every verb on a few dead letters of *queue*."""
    dead = dead_letters_of(queue)
    for _ in range(meter.scale.times):
        got = await meter.ask("receive a dead letter", receive, broker, dead, harness, limit=1)
        if harness.traits.renewal != "impossible":
            await meter.ask("renew a dead letter", broker.renew, got, harness.lock)
        assert await meter.ask("complete a dead letter", settle, broker, got, COMPLETE) == [Settled()]
        await meter.ask("peek at a dead letter", broker.peek_dead, queue, EVERYTHING, 1)
        assert await meter.ask("redrive one", broker.redrive, queue, EVERYTHING, 1) == 1
        assert await meter.ask("purge one", broker.purge, queue, EVERYTHING, 1) == 1


async def use_session(
    meter: Meter, broker: Broker, harness: QueueHarness, queue: str, expected: str | None = None
) -> None:
    """Measure every verb on the next free session of *queue*."""
    for _ in range(meter.scale.times):
        held = await meter.ask("accept", broker.accept, queue, None, harness.lock)
        assert isinstance(held, SessionLock)
        assert expected in (None, held.session)
        for verdict in (GIVE_BACK, COMPLETE):
            [got] = await meter.ask("receive in a session", receive_session, broker, held, limit=1)
            assert await meter.ask(f"settle {verdict!r}", settle, broker, [got], verdict) == [Settled()]
        await meter.ask("renew a session", broker.renew, [held], harness.lock)
        await meter.ask("write state", broker.write_state, held, b"state")
        await meter.ask("read state", broker.read_state, held)
        await meter.ask("send to a session", broker.send, queue, [Outgoing(b"a", session=held.session)])
        await meter.ask("release", broker.release, held)


async def find_nothing(meter: Meter, broker: Broker, harness: QueueHarness, queue: str, *, accepts: bool) -> None:
    """Measure claims that find nothing."""
    for _ in range(meter.scale.times):
        assert await meter.ask("receive nothing", receive, broker, queue, harness) == []
        if accepts:
            answer = await meter.ask("accept nothing", broker.accept, queue, None, harness.lock)
            assert isinstance(answer, NoSession)
        await meter.ask("stats", broker.stats, queue)


async def receive_behind(meter: Meter, broker: Broker, harness: QueueHarness, queue: str, body: bytes) -> None:
    """Claim until *body*, the message behind all due ones, is received."""
    for _ in range(meter.scale.flood):
        if bodies(await meter.ask_step("receive", receive, broker, queue, harness, limit=10)) == [body]:
            return
    raise AssertionError(f"{body!r} is never received")
