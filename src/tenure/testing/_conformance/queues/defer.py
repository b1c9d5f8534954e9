"""Deferred messages."""

from __future__ import annotations

from tenure._queue.message import Stats
from tenure._queue.verdicts import COMPLETE, LAPSED, Abandon, Defer, Settled
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    LATE,
    QueueSuite,
    needs,
    receive,
    send,
    settle,
)


class DeferTests(QueueSuite):
    """A deferred message is received only by its sequence."""

    async def test_a_deferred_message_comes_by_sequence_only(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.deferral)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a", b"b", b"c")
        got = await receive(broker, name, harness)
        await settle(broker, got[:2], Defer())
        await settle(broker, got[2:], COMPLETE)
        a, b, c = (one.sequence for one in got)
        await harness.pass_time(harness.lock * LATE)
        assert await receive(broker, name, harness) == []
        assert (await broker.stats(name)).deferred == 2
        seen = await broker.peek_deferred(name, 10)
        assert [(one.sequence, one.body) for one in seen] == [(a, b"a"), (b, b"b")]
        assert [one.sequence for one in await broker.peek_deferred(name, 10, after=a)] == [b]
        found = (await other.receive_deferred(name, [b, c, a, a, 10**9], harness.lock)).deliveries
        assert [(one.body, one.delivery_count) for one in found] == [(b"b", 2), (b"a", 2)]
        assert (await other.receive_deferred(name, [a, b], harness.lock)).deliveries == ()
        if harness.traits.exact_stats:
            assert (await broker.stats(name)).locked == 2
        assert await settle(other, found[:1], COMPLETE) == [Settled()]
        assert await settle(other, found[1:], Abandon()) == [Settled()]
        assert await receive(broker, name, harness) == []
        assert await broker.stats(name) == Stats(deferred=1)

    async def test_a_deferred_message_stays_so_when_its_lock_ends(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.deferral)
        broker = await harness.open()
        await send(broker, name, b"a")
        got = await receive(broker, name, harness)
        await settle(broker, got, Defer())
        [found] = (await broker.receive_deferred(name, [got[0].sequence], harness.lock)).deliveries
        await harness.pass_time(harness.lock * LATE)
        assert await settle(broker, [found], COMPLETE) == [LAPSED]
        assert await broker.stats(name) == Stats(deferred=1)
        assert await receive(broker, name, harness) == []
        [again] = (await broker.receive_deferred(name, [got[0].sequence], harness.lock)).deliveries
        assert again.delivery_count == 3
