"""What a claim leaves behind."""

from __future__ import annotations

import pytest

from tenure._queue.broker import Broker
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, LAPSED, Renewed, Settled
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    LATE,
    QueueSuite,
    dead_letter,
    needs,
    receive_session,
    send,
    settle,
)

LONGER = 5.0
"""How many times as long as its successor a lock is."""


class LeftoverTests(QueueSuite):
    """Nothing that a claim has noted, here or in the store, outlives it."""

    @pytest.mark.parametrize("kind", ["message", "dead letter"])
    async def test_a_longer_lock_before_it_prolongs_no_lock(self, harness: QueueHarness, name: str, kind: str) -> None:
        needs(harness.traits.renewal)
        needs(harness.traits.fencing)
        if not harness.traits.lock_per_claim:
            pytest.skip("all locks of a queue last equally long here")
        broker, other = await harness.open(), await harness.open()
        where = dead_letters_of(name) if kind == "dead letter" else name
        await (dead_letter(broker, harness, name, b"a") if kind == "dead letter" else send(broker, name, b"a"))
        old = await _received(broker, where, harness.lock * LONGER)
        assert isinstance((await broker.renew([old], harness.lock * LONGER))[0], Renewed)
        assert await settle(broker, [old], GIVE_BACK) == [Settled()]
        new = await _received(broker, where, harness.lock)
        assert isinstance((await broker.renew([new], harness.lock))[0], Renewed)
        await harness.pass_time(harness.lock * LATE)
        assert await settle(broker, [old, new], COMPLETE) == [LAPSED, LAPSED]
        last = await _received(other, where, harness.lock)
        assert last.body == b"a"
        assert last.delivery_count == (1 if kind == "dead letter" else 2)
        assert await settle(other, [last], COMPLETE) == [Settled()]

    async def test_a_longer_lock_before_it_prolongs_no_lock_of_a_session(
        self, harness: QueueHarness, name: str
    ) -> None:
        needs(harness.traits.renewal)
        needs(harness.traits.sessions)
        if not harness.traits.lock_per_claim:
            pytest.skip("all locks of a queue last equally long here")
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(b"a", session="s")])
        old = await broker.accept(name, "s", harness.lock * LONGER)
        assert isinstance(old, SessionLock)
        assert isinstance((await broker.renew([old], harness.lock * LONGER))[0], Renewed)
        assert await broker.release(old) == Settled()
        new = await broker.accept(name, "s", harness.lock)
        assert isinstance(new, SessionLock)
        [message] = await receive_session(broker, new)
        assert isinstance((await broker.renew([new], harness.lock))[0], Renewed)
        await harness.pass_time(harness.lock * LATE)
        assert await settle(broker, [message], COMPLETE) == [LAPSED]
        last = await other.accept(name, "s", harness.lock)
        assert isinstance(last, SessionLock)
        assert [one.body for one in await receive_session(other, last)] == [b"a"]


async def _received(broker: Broker, name: str, lock: float) -> Delivery:
    """Claim the only message of a queue for so long; it may come a little later, where a store delivers by itself."""
    found: list[Delivery] = []

    async def look() -> bool:
        found.extend((await broker.receive(name, 1, lock)).deliveries)
        return bool(found)

    await until(look)
    return found[0]
