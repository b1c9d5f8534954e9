"""Hints that come by a connection that was cut, and made again."""

from __future__ import annotations

import pytest

from tenure._queue.message import Delivery
from tenure._queue.verdicts import COMPLETE, Settled
from tenure.errors import Unavailable
from tenure.testing import until
from tenure.testing._conformance.counted_hints import HINT_WITHIN, counted
from tenure.testing._conformance.harness import QueueHarness, needs_fault
from tenure.testing._conformance.queues.steps import QueueSuite, send, settle


class HintAfterCutTests(QueueSuite):
    """A client that is connected again is told of every message again."""

    async def test_every_message_gives_a_hint_again_after_a_cut(self, harness: QueueHarness, name: str) -> None:
        """A client may believe that the store still watches for it."""
        needs_fault(harness, "cut")
        if not harness.traits.hints:
            pytest.skip("this broker gives no hints")
        broker, other = await harness.open(), await harness.open()
        await send(other, name, b"first")
        got: list[Delivery] = []

        async def is_received() -> bool:
            try:
                while True:
                    claim = await broker.receive(name, 100, harness.lock)
                    got.extend(claim.deliveries)
                    if claim.due_in != 0:  # else there may be more at once, and no hint of it
                        return bool(got)
            except Unavailable:
                return False

        async with counted(broker.hints(name)) as hints:
            await until(is_received, within=HINT_WITHIN)
            assert await settle(broker, got, COMPLETE) == [Settled()]
            await hints.no_more()
            async with harness.cut(broker):
                with pytest.raises(Unavailable):
                    await send(broker, f"{name}-other", b"lost")
            for body in (b"second", b"third", b"fourth"):  # the first hint may be one of the new connection
                await hints.no_more()
                got.clear()
                await send(other, name, body)
                await until(lambda: hints.count, within=HINT_WITHIN, what=f"a hint of the {body.decode()} message")
                await until(is_received, within=HINT_WITHIN)
                assert [one.body for one in got] == [body]
                assert await settle(broker, got, COMPLETE) == [Settled()]
