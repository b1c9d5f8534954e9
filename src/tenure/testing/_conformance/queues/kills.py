"""A client that is killed between any two steps of a verb: nothing is lost, and nothing there twice in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest

from tenure._queue.broker import EVERYTHING, Broker
from tenure._queue.message import Delivery
from tenure._queue.verdicts import COMPLETE, GIVE_BACK, Abandon, DeadLetter
from tenure.errors import TenureError
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness, needs_fault
from tenure.testing._conformance.queues.steps import LATE, QueueSuite, dead_letter, receive, receive_some, send, settle

BODIES = [b"a", b"b", b"c", b"d", b"e"]

Act = Callable[[Broker, str, Sequence[Delivery]], Awaitable[object]]

VERDICTS: dict[str, Act] = {
    "complete": lambda broker, _, got: settle(broker, got, COMPLETE),
    "give back": lambda broker, _, got: settle(broker, got, GIVE_BACK),
    "abandon": lambda broker, _, got: settle(broker, got, Abandon()),
    "dead-letter": lambda broker, _, got: settle(broker, got, DeadLetter("because", "")),
}
"""What is done with messages that the client has received."""


def kills() -> Iterator[int]:
    """Yield after how many writes to kill a client: after each of the first ones, later more seldom."""
    after = 0
    while after < 1_000:
        yield after
        after += 1 + after // 3


class KillTests(QueueSuite):
    """A verb that takes several steps leaves a state that is right behind each of them."""

    @pytest.mark.parametrize("act", VERDICTS)
    async def test_a_client_that_is_killed_while_it_settles_loses_nothing(
        self, harness: QueueHarness, name: str, act: str
    ) -> None:
        needs_fault(harness, "kill")
        for after in kills():
            queue = f"{name}-{after}"
            broker, other = await harness.open(), await harness.open()
            await send(other, queue, *BODIES)
            got = await receive_some(broker, queue, harness, len(BODIES))
            if not await _is_killed(harness, broker, after, lambda: VERDICTS[act](broker, queue, got)):  # noqa: B023
                return
            wanted = [] if act == "complete" else BODIES  # some may be completed
            await _expect_each_once(harness, other, queue, wanted, act, after)
        raise AssertionError("it takes too many writes")

    async def test_a_client_that_is_killed_while_it_redrives_loses_nothing(
        self, harness: QueueHarness, name: str
    ) -> None:
        needs_fault(harness, "kill")
        for after in kills():
            queue = f"{name}-{after}"
            broker, other = await harness.open(), await harness.open()
            await dead_letter(other, harness, queue, *BODIES)
            await broker.peek_dead(queue, EVERYTHING, 1)  # connected

            async def redrive(broker: Broker = broker, queue: str = queue) -> int:
                return await broker.redrive(queue, EVERYTHING, None)

            if not await _is_killed(harness, broker, after, redrive):
                return
            await _expect_each_once(harness, other, queue, BODIES, "redrive", after)
        raise AssertionError("it takes too many writes")

    async def test_a_client_that_is_killed_while_it_declares_leaves_a_queue_that_works(
        self, harness: QueueHarness, name: str
    ) -> None:
        needs_fault(harness, "kill")
        for after in kills():
            queue = f"{name}-{after}"
            broker, other = await harness.open(), await harness.open()
            await other.settings(f"{name}-other")

            async def declare(broker: Broker = broker, queue: str = queue) -> object:
                return await broker.declare(queue, {"max_deliveries": 7})

            if not await _is_killed(harness, broker, after, declare):
                return
            assert (await other.declare(queue, {"max_deliveries": 9})).max_deliveries == 9
            await send(other, queue, *BODIES)
            await _expect_each_once(harness, other, queue, BODIES, "declare", after)
        raise AssertionError("it takes too many writes")


async def _is_killed(harness: QueueHarness, broker: Broker, after: int, act: Callable[[], Awaitable[object]]) -> bool:
    """Return whether *broker* was killed before *act* had taken its last step."""
    killing = harness.kill(broker, after)
    try:
        await act()
    except TenureError:
        assert killing.has_happened
    return killing.has_happened


async def _expect_each_once(
    harness: QueueHarness, broker: Broker, queue: str, wanted: Sequence[bytes], act: str, after: int
) -> None:
    """Check that each message is ready or dead, and none twice but as many as the store's page says."""
    what = f"{act}, killed after {after} writes"
    await harness.pass_time(harness.lock * LATE)
    found: Counter[bytes] = Counter()

    async def are_there() -> bool:
        got = await receive(broker, queue, harness)
        found.update(one.body for one in got)
        await settle(broker, got, COMPLETE)
        dead = await broker.peek_dead(queue, EVERYTHING, 100)
        return not got and found.keys() | {one.body for one in dead} >= set(wanted)

    try:
        await until(are_there)
    except AssertionError:
        raise AssertionError(f"{what}: only {sorted(found)} are ready") from None
    found.update(one.body for one in await broker.peek_dead(queue, EVERYTHING, 100))
    twice = sum(times - 1 for times in found.values())
    assert twice <= harness.copies_after_kill.get(act, 0), f"{what}: {found}"
