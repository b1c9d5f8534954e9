"""Messages that have come to a client, and that nobody there claims."""

from __future__ import annotations

from typing import Literal

import pytest

from tenure._queue.broker import Broker
from tenure._queue.message import Delivery
from tenure._queue.verdicts import COMPLETE, Settled
from tenure.testing import until
from tenure.testing._conformance.counted_hints import counted
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import QueueSuite, send, settle

SOON = 20.0
"""Seconds within which another client has the message; a lock may be longer."""


class UnclaimedTests(QueueSuite):
    """Where a message comes with its hint, it goes to another client if nobody claims it, uncounted."""

    @pytest.mark.parametrize("listener", ["busy", "gone"])
    async def test_a_hint_that_nobody_takes_up_keeps_no_message(
        self, harness: QueueHarness, name: str, listener: Literal["busy", "gone"]
    ) -> None:
        if not harness.traits.hints:
            pytest.skip("this broker gives no hints")
        broker, other = await harness.open(), await harness.open()
        await broker.declare(name, {"max_deliveries": 3})
        async with counted(broker.hints(name)) as hints:
            await hints.no_more()
            assert await claimed(broker, name, harness.lock) == []  # from now on, it may have one in advance
            await hints.no_more()
            await send(other, name, b"a")
            await until(lambda: hints.count, what="a hint")
            got = [] if listener == "gone" else await claimed_soon(other, name, harness.lock)
        got = got or await claimed_soon(other, name, harness.lock)
        assert [(one.body, one.delivery_count) for one in got] == [(b"a", 1)]
        assert await settle(other, got, COMPLETE) == [Settled()]


async def claimed(broker: Broker, name: str, lock: float) -> list[Delivery]:
    """Claim what is there, until the broker says that there is no more at once."""
    got: list[Delivery] = []
    while True:
        claim = await broker.receive(name, 10, lock)
        got.extend(claim.deliveries)
        if claim.due_in != 0:
            return got


async def claimed_soon(broker: Broker, name: str, lock: float) -> list[Delivery]:
    """Claim what comes within a short time."""
    got: list[Delivery] = []

    async def look() -> bool:
        got.extend(await claimed(broker, name, lock))
        return bool(got)

    await until(look, within=SOON)
    return got
