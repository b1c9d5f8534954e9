"""Locks, and their renewal."""

from __future__ import annotations

from tenure._queue.verdicts import COMPLETE, Abandon, Lapsed, Renewed, Settled
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    LATE,
    QueueSuite,
    expect_counts,
    needs,
    receive,
    send,
    settle,
)


class RenewTests(QueueSuite):
    """While a lock lasts or is renewed, no other consumer gets the message."""

    async def test_a_locked_message_is_not_claimed_again(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        await receive(broker, name, harness)
        assert await receive(other, name, harness) == []
        assert (await broker.stats(name)).locked == 1

    async def test_when_a_lock_ends_the_message_is_claimable(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        [old] = await receive(broker, name, harness)
        claim = await other.receive(name, 10, harness.lock)
        assert claim.deliveries == ()
        assert claim.due_in is None or 0 < claim.due_in <= harness.lock
        await harness.pass_time(harness.lock * LATE)
        await expect_counts(broker, harness, name, ready=1, locked=0)
        [new] = await receive(other, name, harness)
        assert (new.sequence, new.id, new.delivery_count) == (old.sequence, old.id, 2)
        assert new.token != old.token

    async def test_a_renewed_lock_is_kept(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.renewal)
        broker, other = await harness.open(), await harness.open()
        await send(broker, name, b"a")
        [got] = await receive(broker, name, harness)
        for _ in range(3):
            await harness.pass_time(harness.lock * 0.7)
            [answer] = await broker.renew([got], harness.lock)
            assert isinstance(answer, Renewed)
            assert answer.locked_until > got.locked_until
            assert await receive(other, name, harness) == []
        assert await settle(broker, [got], COMPLETE) == [Settled()]

    async def test_many_are_renewed_each_with_its_own_answer(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.renewal)
        broker = await harness.open()
        await send(broker, name, *[b"%d" % number for number in range(6)])
        await send(broker, f"{name}-2", b"other")
        got = await receive(broker, name, harness)
        [other] = await receive(broker, f"{name}-2", harness)
        await settle(broker, [got[1]], COMPLETE)
        await settle(broker, [got[4]], Abandon())
        answers = await broker.renew([got[0], got[1], other, got[4], got[5]], harness.lock)
        assert [type(answer) for answer in answers] == [Renewed, Lapsed, Renewed, Lapsed, Renewed]
        await harness.pass_time(harness.lock * 0.7)
        await broker.renew([got[5]], harness.lock)
        await harness.pass_time(harness.lock * 0.7)
        answers = await broker.renew([*got, other], harness.lock)
        assert [type(answer) for answer in answers] == [Lapsed] * 5 + [Renewed, Lapsed]
