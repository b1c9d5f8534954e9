"""Messages that have come to a client, and that nobody there takes: the caller doesn't ask, or was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Literal

import pytest

from tenure._queue.broker import Broker
from tenure._queue.message import Delivery, SessionLock
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Settled
from tenure.testing import until
from tenure.testing._conformance.counted_hints import counted
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.consumers import ObservedQueue
from tenure.testing._conformance.queues.steps import QueueSuite, needs, receive_session, send, settle

STEPS = (1, 3, 6, 12, 24)
"""After how many steps of the loop a request is cancelled: before it is sent, while it is on its way, and when its
answer is here."""

SOON = 20.0
"""Seconds within which another client has the message: less than a lock that ends in real time."""


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

    async def test_a_cancelled_claim_keeps_no_message(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        for steps in STEPS:
            queue = ObservedQueue(broker, f"{name}-{steps}", harness.lock, max_deliveries=10).queue
            assert await queue.receive() == []  # so that the next claim is the next request
            await send(other, f"{name}-{steps}", b"a")
            if await got_before_cancellation(queue.receive(10), steps):
                return
            got = await claimed_soon(other, f"{name}-{steps}", harness.lock)
            assert [(one.body, one.delivery_count) for one in got] == [(b"a", 1)], steps
            assert await settle(other, got, COMPLETE) == [Settled()]

    async def test_a_cancelled_claim_keeps_no_session(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        broker, other = await harness.open(), await harness.open()
        for steps in STEPS:
            queue = ObservedQueue(broker, f"{name}-{steps}", harness.lock, max_deliveries=10).queue
            await other.send(queue.name, [Outgoing(b"first", session="first")])
            async with queue.session("first") as used:  # so that the next claim is the next request
                await (await used.receive(wait=SOON))[0].complete()
            await other.send(f"{name}-{steps}", [Outgoing(b"a", session="s")])
            if await got_before_cancellation(queue.session("s").__aenter__(), steps):
                return
            held = await accepted_soon(other, f"{name}-{steps}", harness.lock)
            got = await receive_session(other, held)
            assert [(one.body, one.delivery_count) for one in got] == [(b"a", 1)], steps


async def got_before_cancellation(question: Coroutine[Any, Any, object], steps: int) -> bool:
    """Start a call, and cancel it after so many steps of the loop; return whether it had ended before, as it may."""
    asking = asyncio.ensure_future(question)
    for _ in range(steps):
        await asyncio.sleep(0)
    asking.cancel()
    [answer] = await asyncio.gather(asking, return_exceptions=True)
    if isinstance(answer, BaseException) and not isinstance(answer, asyncio.CancelledError):
        raise answer
    return not isinstance(answer, asyncio.CancelledError)


async def accepted_soon(broker: Broker, name: str, lock: float) -> SessionLock:
    """Lock a session that is free within a short time."""
    found: list[SessionLock] = []

    async def look() -> bool:
        answer = await broker.accept(name, "s", lock)
        found.extend([answer] if isinstance(answer, SessionLock) else [])
        return bool(found)

    await until(look, within=SOON)
    return found[0]


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
