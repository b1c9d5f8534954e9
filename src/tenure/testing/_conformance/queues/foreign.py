"""Messages that other programs have written, with properties and notes of any form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenure._queue.broker import EVERY_LIVE, EVERYTHING, Broker
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import Delivery, Stats, count_of
from tenure._queue.verdicts import COMPLETE, Abandon, DeadLetter, Settled, Verdict
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import (
    ERROR,
    QueueSuite,
    bodies,
    dead_letter,
    only_dead_letter,
    receive,
    receive_some,
    send,
    settle,
)

MOST = 200
"""More messages than there are in a queue of these tests."""


class ForeignMessageTests(QueueSuite):
    """No message that others wrote disturbs its neighbours, other queues or locks; it can be settled like any."""

    async def test_foreign_messages_disturb_no_other(self, harness: QueueHarness, name: str) -> None:
        needs_foreign(harness)
        broker, other = await harness.open(), f"{name}-2"
        await send(broker, other, b"held")
        [held] = await receive_some(broker, other, harness, 1)
        await send(broker, name, b"first")
        await _write_all(harness, name)
        await send(broker, name, b"last")
        await send(broker, other, b"next")
        found = await _settle_all(broker, harness, name, COMPLETE, b"first", b"last")
        assert {one.body: one.delivery_count for one in found if one.body in (b"first", b"last")} == {
            b"first": 1,
            b"last": 1,
        }
        assert len({one.sequence for one in found}) == len(found), "each was handed out once"
        assert await settle(broker, [held], COMPLETE) == [Settled()], "its lock was touched"
        [following] = await receive_some(broker, other, harness, 1)
        assert (following.body, following.delivery_count) == (b"next", 1)

    async def test_foreign_messages_are_counted_and_shown(self, harness: QueueHarness, name: str) -> None:
        needs_foreign(harness)
        broker = await harness.open()
        await send(broker, name, b"first")
        await _write_all(harness, name)

        async def is_counted() -> bool:
            return (await broker.stats(name)).ready >= 1

        await until(is_counted)
        assert b"first" in bodies(await broker.peek(name, EVERY_LIVE, MOST))

    async def test_foreign_messages_can_fail_and_die(self, harness: QueueHarness, name: str) -> None:
        needs_foreign(harness)
        broker = await harness.open()
        await _write_all(harness, name)
        await send(broker, name, b"last")
        await _settle_all(broker, harness, name, Abandon(error=ERROR), b"last")
        await _settle_all(broker, harness, name, DeadLetter("because", "", ERROR), b"last")
        await _redrive_and_purge(broker, harness, name, b"last")

    async def test_foreign_dead_letters_disturb_no_other(self, harness: QueueHarness, name: str) -> None:
        needs_foreign(harness)
        broker = await harness.open()
        await dead_letter(broker, harness, name, b"first")
        await _write_all(harness, dead_letters_of(name))
        await dead_letter(broker, harness, name, b"last")
        await _redrive_and_purge(broker, harness, name, b"first", b"last")

    @pytest.mark.parametrize("is_dead", [False, True], ids=["a retried message", "a dead letter"])
    async def test_a_forwarded_message_begins_anew(self, harness: QueueHarness, name: str, is_dead: bool) -> None:
        if not harness.forwards:
            pytest.skip("nobody else can pass a message on here")
        broker = await harness.open()
        source = f"{name}-2"
        await broker.declare(name, {"max_deliveries": 2})
        await send(broker, source, b"forwarded")
        for _ in range(2):
            await settle(broker, await receive_some(broker, source, harness, 1), Abandon(error=ERROR))
        if is_dead:
            await settle(broker, await receive_some(broker, source, harness, 1), DeadLetter("because", "", ERROR))
            await only_dead_letter(broker, harness, source)
            source = dead_letters_of(source)
        await harness.forward(source, name)
        [got] = await receive_some(broker, name, harness, 1)
        assert (got.body, got.delivery_count) == (b"forwarded", 1)
        assert await settle(broker, [got], Abandon(error=ERROR)) == [Settled()]
        [again] = await receive_some(broker, name, harness, 1)
        assert again.delivery_count == 2
        await settle(broker, [again], DeadLetter("again", "", ERROR))
        letter = await only_dead_letter(broker, harness, name)
        assert (letter.reason, [one.number for one in letter.history]) == ("again", [1, 2])


def needs_foreign(harness: QueueHarness) -> None:
    """Skip the test if nobody else can write to the queues of *harness*."""
    if not harness.foreign:
        pytest.skip("nobody else can write messages here")


async def _write_all(harness: QueueHarness, queue: str) -> None:
    for how in harness.foreign:
        await harness.write_foreign(queue, how)


async def _settle_all(
    broker: Broker, harness: QueueHarness, name: str, verdict: Verdict, *wanted: bytes
) -> list[Delivery]:
    """Pass *verdict* on each message that comes, until all that are *wanted* have; return them.

    If the verdict is final, no message may be left then: each was handed out, or became a dead letter by itself.
    """
    found: list[Delivery] = []
    is_final = not isinstance(verdict, Abandon)

    async def have_come() -> bool:
        for one in await receive(broker, name, harness):
            found.append(one)
            [answer] = await settle(broker, [one], verdict)
            assert isinstance(answer, Settled), (one, answer)
        return set(wanted) <= set(bodies(found)) and not (is_final and count_of(await _live(broker, name)))

    await until(have_come)
    return found


async def _live(broker: Broker, name: str) -> Stats:
    """Count the messages that are no dead letters."""
    return replace(await broker.stats(name), dead=0)


async def _redrive_and_purge(broker: Broker, harness: QueueHarness, name: str, *wanted: bytes) -> None:
    """Look at dead letters, of which some are *wanted*, put all of them back, and remove them when they died again."""

    async def are_shown() -> bool:
        return set(wanted) <= set(bodies(await broker.peek_dead(name, EVERYTHING, MOST)))

    async def are_gone() -> bool:
        await broker.purge(name, EVERYTHING, None)
        return not await broker.peek_dead(name, EVERYTHING, MOST)

    await until(are_shown)
    assert await broker.redrive(name, EVERYTHING, None) >= len(wanted)
    await _settle_all(broker, harness, name, DeadLetter("again"), *wanted)
    await until(are_shown)
    await until(are_gone)
