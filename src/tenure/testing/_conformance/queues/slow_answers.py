"""Slow answers of a broker: a lock counts from before the request for it, however late its answer comes.

The time that passes while an answer is held back passes for the broker and for the client. So a client that counts a
lock from the answer trusts it after another process may have the message.
"""

from __future__ import annotations

import time

import pytest

from tenure._queue.broker import Broker, NoSession
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, LAPSED, Abandon, Complete, Defer, Renewed, Settled
from tenure.testing._conformance.harness import QueueHarness, needs_fault
from tenure.testing._conformance.queues.steps import (
    QueueSuite,
    accept,
    bodies,
    needs,
    receive,
    receive_session,
    receive_some,
    send,
    settle,
)

SLOW = 0.6
"""The share of a lock for which an answer is held back."""
ROUNDED = 1.0  # seconds by which a store may round the end of a lock that it shows, or show it too early
OVER = 1.15
"""The share of a lock after which it is over: early enough that one that counts from a slow answer is not."""


class SlowAnswerTests(QueueSuite):
    """What the answer to a request gives begins before the request was sent."""

    @pytest.mark.parametrize("then", ["settle", "renew"])
    async def test_a_lock_does_not_begin_with_a_slow_answer(self, harness: QueueHarness, name: str, then: str) -> None:
        needs_fault(harness, "hold")
        if then == "renew":
            needs(harness.traits.renewal)
        broker, other = await harness.open(), await harness.open()
        begun = time.monotonic()
        before = await receive_once(broker, name, harness)
        await send(broker, name, b"a", b"b")
        async with harness.hold(broker) as begin:
            asking = await begin(broker.receive(name, 10, harness.lock))
            await harness.pass_time(harness.lock * SLOW)
        got = list((await asking).deliveries)
        assert sorted(bodies(got)) == [b"a", b"b"]
        assert got[0].locked_until - before.locked_until <= ROUNDED + time.monotonic() - begun
        await harness.pass_time(harness.lock * (0.8 - SLOW))
        assert await settle(broker, got[:1], COMPLETE) == [Settled()]
        await harness.pass_time(harness.lock * (OVER - 0.8))
        assert await asked(broker, got[1], harness, then) == [LAPSED]
        [again] = await receive_some(other, name, harness, 1)
        assert (again.body, again.delivery_count) == (got[1].body, 2)
        assert await settle(other, [again], COMPLETE) == [Settled()]

    @pytest.mark.parametrize("then", ["settle in time", "settle late"])
    async def test_a_lock_of_a_deferred_message_does_not_begin_with_a_slow_answer(
        self, harness: QueueHarness, name: str, then: str
    ) -> None:
        needs_fault(harness, "hold")
        needs(harness.traits.deferral)
        broker, other = await harness.open(), await harness.open()
        begun = time.monotonic()
        await send(broker, name, b"a")
        [before] = await receive_some(broker, name, harness, 1)
        assert await settle(broker, [before], Defer()) == [Settled()]
        unknown = await broker.receive_deferred(name, [before.sequence + 1], harness.lock)
        assert unknown.deliveries == ()  # so that the next claim is one request
        async with harness.hold(broker) as begin:
            asking = await begin(broker.receive_deferred(name, [before.sequence], harness.lock))
            await harness.pass_time(harness.lock * SLOW)
        [got] = (await asking).deliveries
        assert got.locked_until - before.locked_until <= ROUNDED + time.monotonic() - begun
        await harness.pass_time(harness.lock * ((0.8 if then == "settle in time" else OVER) - SLOW))
        if then == "settle in time":
            assert await settle(broker, [got], COMPLETE) == [Settled()]
            return
        assert await settle(broker, [got], COMPLETE) == [LAPSED]
        [again] = (await other.receive_deferred(name, [before.sequence], harness.lock)).deliveries
        assert (again.body, again.delivery_count) == (b"a", 3)
        assert await settle(other, [again], COMPLETE) == [Settled()]

    async def test_a_renewed_lock_does_not_begin_with_a_slow_answer(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "hold")
        needs(harness.traits.renewal)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        begun = time.monotonic()
        got = await receive(broker, name, harness)
        await broker.renew(got, harness.lock)  # so that the next renewal is one request
        await harness.pass_time(harness.lock * 0.2)
        async with harness.hold(broker) as begin:
            asking = await begin(broker.renew(got, harness.lock))
            await harness.pass_time(harness.lock * SLOW)
        [answer] = await asking
        assert isinstance(answer, Renewed)
        passed = harness.lock * 0.2 + time.monotonic() - begun
        assert answer.locked_until - got[0].locked_until <= ROUNDED + passed
        await harness.pass_time(harness.lock * (0.8 - SLOW))  # later than the first end
        assert await receive(other, name, harness) == []
        await harness.pass_time(harness.lock * (OVER - 0.8))
        assert await settle(broker, got, COMPLETE) == [LAPSED]
        assert bodies(await receive_some(other, name, harness, 1)) == [b"a"]

    @pytest.mark.parametrize("verb", ["accept", "renew"])
    async def test_a_session_does_not_begin_with_a_slow_answer(
        self, harness: QueueHarness, name: str, verb: str
    ) -> None:
        needs_fault(harness, "hold")
        needs(harness.traits.sessions)
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(b"a", session="s"), Outgoing(b"b", session="s")])
        held = await accept(broker, name, harness)
        await broker.renew([held], harness.lock)  # so that the next request is one on the wire
        if verb == "accept":
            assert await broker.release(held) == Settled()
        async with harness.hold(broker) as begin:
            is_new = verb == "accept"
            asking = await begin(
                broker.accept(name, None, harness.lock) if is_new else broker.renew([held], harness.lock)
            )
            await harness.pass_time(harness.lock * SLOW)
        answer = await asking
        held = answer if is_new else held
        assert isinstance(held, SessionLock)
        await harness.pass_time(harness.lock * (0.8 - SLOW))
        [first] = await receive_session(broker, held, limit=1)
        assert await settle(broker, [first], COMPLETE) == [Settled()]
        assert isinstance(await other.accept(name, "s", harness.lock), NoSession)
        await harness.pass_time(harness.lock * (OVER - 0.8))
        assert await broker.receive_session(held, 1) == LAPSED
        assert await broker.renew([held], harness.lock) == [LAPSED]
        assert bodies(await receive_session(other, await accept(other, name, harness))) == [b"b"]

    async def test_a_renewal_answered_after_the_first_end_is_true(self, harness: QueueHarness, name: str) -> None:
        needs_fault(harness, "hold")
        needs(harness.traits.renewal)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, harness)
        await broker.renew(got, harness.lock)  # as above
        await harness.pass_time(harness.lock * 0.6)
        async with harness.hold(broker) as begin:
            asking = await begin(broker.renew(got, harness.lock))
            await harness.pass_time(harness.lock * SLOW)
        [answer] = await asking  # where the store's answer doesn't prove that it came in time, the lock is given up
        if isinstance(answer, Renewed):
            assert await receive(other, name, harness) == []
            await harness.pass_time(harness.lock * (OVER - SLOW))
        assert await settle(broker, got, COMPLETE) == [LAPSED]

    async def test_a_renewal_that_arrives_after_the_end_does_not_stand(self, harness: QueueHarness, name: str) -> None:
        """The client has sent it in time, and waits for the answer; meanwhile, another process has the message."""
        needs_fault(harness, "hold")
        needs(harness.traits.renewal)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, harness)
        await harness.pass_time(harness.lock * 0.6)
        async with harness.hold(broker, "up") as begin:
            asking = await begin(broker.renew(got, harness.lock))
            await harness.pass_time(harness.lock * SLOW)
            taken = await receive(other, name, harness)
        [answer] = await asking
        if taken:
            assert answer == LAPSED
        elif answer == LAPSED:  # the client has given it up, and says so only now
            taken = await receive_some(other, name, harness, 1)
        else:
            other, taken = broker, got
        assert await settle(other, taken, COMPLETE) == [Settled()]
        assert await settle(broker, got, COMPLETE) == [LAPSED]

    @pytest.mark.parametrize("verdict", [COMPLETE, Abandon()], ids=repr)
    async def test_a_verdict_answered_after_the_end_is_true(
        self, harness: QueueHarness, name: str, verdict: Complete | Abandon
    ) -> None:
        needs_fault(harness, "hold")
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, harness)
        await harness.pass_time(harness.lock * 0.6)
        async with harness.hold(broker) as begin:
            asking = await begin(settle(broker, got, verdict))
            await harness.pass_time(harness.lock * SLOW)
        answer = await asking
        assert answer in ([Settled()], [LAPSED])
        left = bodies(await receive(other, name, harness))
        if answer == [Settled()]:
            assert left == ([] if isinstance(verdict, Complete) else [b"a"])
        assert await settle(broker, got, verdict) == [LAPSED]

    @pytest.mark.parametrize("verdict", [COMPLETE, Abandon()], ids=repr)
    async def test_a_verdict_that_arrives_after_the_end_does_not_stand(
        self, harness: QueueHarness, name: str, verdict: Complete | Abandon
    ) -> None:
        """The client has sent it in time, and waits for the answer; meanwhile, another process has the message."""
        needs_fault(harness, "hold")
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, harness)
        await harness.pass_time(harness.lock * 0.6)
        async with harness.hold(broker, "up") as begin:
            asking = await begin(settle(broker, got, verdict))
            await harness.pass_time(harness.lock * SLOW)
            taken = await receive(other, name, harness)
        if taken:
            assert await asking == [LAPSED]
            assert await settle(other, taken, COMPLETE) == [Settled()]
        elif await asking == [LAPSED]:  # it is delivered a little later
            assert await settle(other, await receive_some(other, name, harness, 1), COMPLETE) == [Settled()]
        else:  # the lock lasts as long as its verdict is under way
            assert await asking == [Settled()]
        assert await settle(broker, got, COMPLETE) == [LAPSED]


async def receive_once(broker: Broker, name: str, harness: QueueHarness) -> Delivery:
    """Send, receive and complete one message, so that the next claim is one request; return it."""
    await send(broker, name, b"before")
    [got] = await receive_some(broker, name, harness, 1)
    assert await settle(broker, [got], COMPLETE) == [Settled()]
    return got


async def asked(broker: Broker, one: Delivery, harness: QueueHarness, verb: str) -> list[object]:
    """Return the answer to a verdict or to a renewal."""
    if verb == "settle":
        return [*await settle(broker, [one], COMPLETE)]
    return [*await broker.renew([one], harness.lock)]
