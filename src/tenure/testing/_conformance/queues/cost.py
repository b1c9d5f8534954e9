"""What a broker's questions may cost: none grows with what it doesn't return."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial

from tenure._queue.broker import EVERYTHING, Broker, Claim, NoSession
from tenure._queue.message import (
    COMPLETE,
    GIVE_BACK,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    Delivery,
    Outgoing,
    Renewed,
    SessionLock,
    Settled,
    Stats,
    dead_letters_of,
)
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

AT_ONCE = 20  # questions side by side while something is set up
SPARE = 15  # more messages than are settled where few are asked about
BATCH = 500  # messages in one claim, and verdicts in one question, while something is set up


class BrokerCostSuite(QueueSuite):
    """Each test sets up the same twice, the second time with ten times as much of what is not asked for."""

    async def test_beside_a_deep_queue(self, house: QueueHarness, name: str) -> None:
        meter = Meter.of(house)
        broker = await house.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await fill(broker, queue, depth)
            await use(meter, broker, house, queue)
        meter.require_flat()

    async def test_beside_many_that_are_locked(self, house: QueueHarness, name: str) -> None:
        meter = Meter.of(house)
        broker = await house.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await fill(broker, queue, depth)
            held = await claim_all(broker, house, queue, depth)
            await find_nothing(meter, broker, house, queue, accepts=False)
            await broker.send(queue, [Outgoing(b"one more")] * SPARE)
            await use(meter, broker, house, queue)
            await use_held(meter, broker, house, held)
        meter.require_flat()

    async def test_beside_many_that_are_delayed(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.delay)
        meter = Meter.of(house)
        broker = await house.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"later", delay=house.lock * 9, ttl=house.lock * 99)] * depth)
            await find_nothing(meter, broker, house, queue, accepts=False)
            await broker.send(queue, [Outgoing(b"one more")] * SPARE)
            await use(meter, broker, house, queue)
        meter.require_flat()

    async def test_beside_many_dead_letters(self, house: QueueHarness, name: str) -> None:
        meter = Meter.of(house)
        broker = await house.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await fill(broker, queue, depth)
            for got in batches(await claim_all(broker, house, queue, depth)):
                await settle(broker, got, DeadLetter("because"))
            await broker.send(queue, [Outgoing(b"one more")] * SPARE)
            await use(meter, broker, house, queue)
            await use_dead(meter, broker, house, queue)
        meter.require_flat()

    async def test_beside_many_that_are_deferred(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.deferral)
        meter = Meter.of(house)
        broker = await house.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await fill(broker, queue, depth)
            held = await claim_all(broker, house, queue, depth)
            for some in batches(held):
                await settle(broker, some, Defer())
            await broker.send(queue, [Outgoing(b"one more")] * SPARE)
            await use(meter, broker, house, queue)
            middle = held[depth // 2].sequence
            for _ in range(meter.scale.times):
                got = await meter.ask("receive deferred", broker.receive_deferred, queue, [middle], house.lock)
                await meter.ask("defer again", settle, broker, got.deliveries, Defer())
                await meter.ask("peek at one", broker.peek_deferred, queue, 1, middle)
        meter.require_flat()

    async def test_beside_many_ids(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.dedupe)
        meter = Meter.of(house)
        broker = await house.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a", id=f"m{number}") for number in range(depth)])
            for some in batches(await claim_all(broker, house, queue, depth)):
                await settle(broker, some, Complete(remember=house.lock * 9))
            for number in range(meter.scale.times):
                new = [Outgoing(b"a", id=f"new{number}")]
                await meter.ask("send with an id", broker.send, queue, new)
                await meter.ask("send it again", broker.send, queue, new)
                got = await meter.ask("receive", receive, broker, queue, house, limit=1)
                await meter.ask("complete, and remember", settle, broker, got, Complete(remember=house.lock))
                known = await meter.ask("ask the inbox", broker.handled, queue, [f"new{number}", "never"])
                assert known == [True, False]
        meter.require_flat()

    async def test_a_batch_with_ids_costs_by_the_message(self, house: QueueHarness, name: str) -> None:
        meter = Meter.of(house)
        broker = await house.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a")])  # it comes into being, which may cost each that meets it then
            batch = [Outgoing(b"a", id=f"m{number}") for number in range(depth)]
            _, cost = await house.work_of(partial(broker.send, queue, batch))
            meter.note("send a thousand with ids", cost * 1_000 // depth)
        meter.require_flat()

    # --- sessions ---

    async def test_beside_a_deep_session(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.sessions)
        meter = Meter.of(house)
        broker = await house.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a", session="deep")] * depth)
            await use_session(meter, broker, house, queue)
            await find_nothing(meter, broker, house, queue, accepts=False)
        meter.require_flat()

    async def test_beside_many_sessions(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.sessions)
        meter = Meter.of(house)
        broker = await house.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a", session=f"s{number}") for number in range(depth)])
            await use_session(meter, broker, house, queue)
            held = await meter.ask("accept by name", broker.accept, queue, f"s{depth // 2}", house.lock)
            assert isinstance(held, SessionLock)
            await find_nothing(meter, broker, house, queue, accepts=False)
        meter.require_flat()

    async def test_beside_many_idle_sessions_with_state(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.sessions)
        meter = Meter.of(house)
        broker = await house.open()

        async def leave_state(queue: str, session: str) -> None:
            held = await broker.accept(queue, session, house.lock)
            assert isinstance(held, SessionLock)
            await broker.write_state(held, b"state")
            await broker.release(held)

        for depth in meter.small_depths():
            queue = f"{name}-{depth}"
            await side_by_side(leave_state(queue, f"s{number}") for number in range(depth))
            await find_nothing(meter, broker, house, queue, accepts=True)
            await broker.send(queue, [Outgoing(b"a", session="busy")] * SPARE)
            await use_session(meter, broker, house, queue)
        meter.require_flat()

    async def test_beside_many_locked_sessions(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.sessions)
        meter = Meter.of(house)
        broker = await house.open()
        for depth in meter.small_depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a", session=f"s{number}") for number in range(depth)])
            await side_by_side(broker.accept(queue, f"s{number}", house.lock) for number in range(depth))
            await find_nothing(meter, broker, house, queue, accepts=True)
            await broker.send(queue, [Outgoing(b"a", session="busy")] * SPARE)
            await use_session(meter, broker, house, queue)
        meter.require_flat()

    async def test_behind_a_head_that_waits(self, house: QueueHarness, name: str) -> None:
        needs(house.traits.sessions)
        needs(house.traits.delay)
        meter = Meter.of(house)
        broker = await house.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a", session="failing")] * depth)
            held = await accept(broker, queue, house)
            head = await receive_session(broker, held, limit=1)
            await settle(broker, head, Abandon(delay=house.lock * 9))
            claim = await meter.ask("receive behind it", broker.receive_session, held, 10)
            assert isinstance(claim, Claim)
            assert claim.deliveries == ()
            await broker.release(held)
            await find_nothing(meter, broker, house, queue, accepts=True)
            await broker.send(queue, [Outgoing(b"b", session="healthy")] * SPARE)
            await use_session(meter, broker, house, queue, expected="healthy")
        meter.require_flat()

    # --- queues ---

    async def test_beside_many_queues(self, house: QueueHarness, name: str) -> None:
        meter = Meter.of(house)
        for depth in meter.small_depths():
            broker = await house.open()
            await side_by_side(broker.send(f"{name}-{depth}-{number}", [Outgoing(b"a")]) for number in range(depth))
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"a")] * SPARE)
            await use(meter, broker, house, queue)
        meter.require_flat()

    # --- what time brings is dealt with in steps ---

    async def test_everything_has_expired(self, house: QueueHarness, name: str) -> None:
        meter = Meter.of(house, in_steps=True)
        broker = await house.open()
        await broker.send(name, [Outgoing(b"old", ttl=house.lock)] * meter.scale.flood)
        await broker.send(name, [Outgoing(b"live")])
        await house.pass_time(house.lock * LATE)
        await come_to(meter, broker, house, name, b"live")
        assert await broker.stats(name) == Stats(locked=1, dead=meter.scale.flood)

    async def test_everything_is_orphaned(self, house: QueueHarness, name: str) -> None:
        meter = Meter.of(house, in_steps=True)
        broker = await house.open()
        await broker.declare(name, {"max_deliveries": 1})
        await fill(broker, name, meter.scale.flood)
        await claim_all(broker, house, name, meter.scale.flood, limit=BATCH)
        await broker.send(name, [Outgoing(b"live")])
        await house.pass_time(house.lock * LATE)
        await come_to(meter, broker, house, name, b"live")

    async def test_beside_many_that_have_expired(self, house: QueueHarness, name: str) -> None:
        meter = Meter.of(house)
        broker = await house.open()
        for depth in meter.depths():
            queue = f"{name}-{depth}"
            await broker.send(queue, [Outgoing(b"old", ttl=house.lock)] * depth)
            await house.pass_time(house.lock * LATE)
            for _ in range(depth):
                if (await broker.receive(queue, 10, house.lock)).due_in is None:
                    break
            await broker.send(queue, [Outgoing(b"one more")] * SPARE)
            await use(meter, broker, house, queue)
        meter.require_flat()


# --- words to write tests with ---


async def fill(broker: Broker, queue: str, depth: int) -> None:
    """Send so many messages, of which nothing but their number is of interest."""
    await broker.send(queue, [Outgoing(b"a")] * depth)


async def claim_all(
    broker: Broker, house: QueueHarness, queue: str, depth: int, limit: int | None = None
) -> list[Delivery]:
    """Claim so many messages, by one claim or by several of up to *limit*."""
    held: list[Delivery] = []
    while len(held) < depth:
        held += await receive(broker, queue, house, limit=limit or depth)
    return held


def batches(held: Sequence[Delivery]) -> Iterable[Sequence[Delivery]]:
    """Cut what is held into parts for one question each."""
    return [held[first : first + BATCH] for first in range(0, len(held), BATCH)]


async def side_by_side(questions: Iterable[Awaitable[object]]) -> None:
    """Ask much, some of it at a time."""
    free = asyncio.Semaphore(AT_ONCE)

    async def ask(question: Awaitable[object]) -> None:
        async with free:
            await question

    await asyncio.gather(*map(ask, questions))


async def use(meter: Meter, broker: Broker, house: QueueHarness, queue: str) -> None:
    """Ask all that is asked about a few messages of *queue*, where SPARE are ready."""
    for _ in range(meter.scale.times):
        [one] = await meter.ask("receive", receive, broker, queue, house, limit=1)
        if house.traits.renewal != "impossible":
            [answer] = await meter.ask("renew", broker.renew, [one], house.lock)
            assert isinstance(answer, Renewed)
        assert await meter.ask("give back", settle, broker, [one], GIVE_BACK) == [Settled()]
        for verdict in (COMPLETE, Abandon(), DeadLetter("because")):
            got = await receive(broker, queue, house, limit=1)
            assert await meter.ask(f"settle {verdict!r}", settle, broker, got, verdict) == [Settled()]
        await meter.ask("send", broker.send, queue, [Outgoing(b"a")])
        await meter.ask("send another id", broker.send, queue, [Outgoing(b"a", id="another")])
        await meter.ask("stats", broker.stats, queue)


async def use_held(meter: Meter, broker: Broker, house: QueueHarness, held: Sequence[Delivery]) -> None:
    """Renew and settle a few of the many that are locked."""
    for one in held[-meter.scale.times :]:
        if house.traits.renewal != "impossible":
            [answer] = await meter.ask("renew one of them", broker.renew, [one], house.lock)
            assert isinstance(answer, Renewed)
        assert await meter.ask("complete one of them", settle, broker, [one], COMPLETE) == [Settled()]


async def use_dead(meter: Meter, broker: Broker, house: QueueHarness, queue: str) -> None:
    """Ask all that is asked about a few of the dead letters of *queue*."""
    dead = dead_letters_of(queue)
    for _ in range(meter.scale.times):
        got = await meter.ask("receive a dead letter", receive, broker, dead, house, limit=1)
        if house.traits.renewal != "impossible":
            await meter.ask("renew a dead letter", broker.renew, got, house.lock)
        assert await meter.ask("complete a dead letter", settle, broker, got, COMPLETE) == [Settled()]
        await meter.ask("peek at a dead letter", broker.peek_dead, queue, EVERYTHING, 1)
        assert await meter.ask("redrive one", broker.redrive, queue, EVERYTHING, 1) == 1
        assert await meter.ask("purge one", broker.purge, queue, EVERYTHING, 1) == 1


async def use_session(
    meter: Meter, broker: Broker, house: QueueHarness, queue: str, expected: str | None = None
) -> None:
    """Ask all that is asked about a session: the next free one of *queue*."""
    for _ in range(meter.scale.times):
        held = await meter.ask("accept", broker.accept, queue, None, house.lock)
        assert isinstance(held, SessionLock)
        assert expected in (None, held.session)
        for verdict in (GIVE_BACK, COMPLETE):
            [got] = await meter.ask("receive in a session", receive_session, broker, held, limit=1)
            assert await meter.ask(f"settle {verdict!r}", settle, broker, [got], verdict) == [Settled()]
        await meter.ask("renew a session", broker.renew, [held], house.lock)
        await meter.ask("write state", broker.write_state, held, b"state")
        await meter.ask("read state", broker.read_state, held)
        await meter.ask("send to a session", broker.send, queue, [Outgoing(b"a", session=held.session)])
        await meter.ask("release", broker.release, held)


async def find_nothing(meter: Meter, broker: Broker, house: QueueHarness, queue: str, *, accepts: bool) -> None:
    """Ask where there is nothing to be had."""
    for _ in range(meter.scale.times):
        assert await meter.ask("receive nothing", receive, broker, queue, house) == []
        if accepts:
            answer = await meter.ask("accept nothing", broker.accept, queue, None, house.lock)
            assert isinstance(answer, NoSession)
        await meter.ask("stats", broker.stats, queue)


async def come_to(meter: Meter, broker: Broker, house: QueueHarness, queue: str, body: bytes) -> None:
    """Ask until what is behind all that time has brought is received."""
    for _ in range(meter.scale.flood):
        if bodies(await meter.ask_step("receive", receive, broker, queue, house, limit=10)) == [body]:
            return
    raise AssertionError(f"{body!r} is never received")
