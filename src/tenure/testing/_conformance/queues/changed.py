"""What becomes of a program's expectation when others delete its queue, make it anew, or edit what is kept of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from tenure import Message, Queue
from tenure._queue.broker import Broker, QueueOptions, QueueSettings
from tenure._queue.context import QueueContext
from tenure._runtime.clock import SystemClock
from tenure._runtime.renewal_thread import RenewalThread
from tenure.errors import ConfigError, LockLost
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.steps import QueueSuite, bodies, needs, receive_some, send

CHECK_EVERY = 0.5
"""Seconds after which programs in these tests read settings again, where the store's answers don't tell all."""

WITHIN = 60.0
"""Seconds in which they have done so."""

Use = Callable[[Queue], Awaitable[object]]

USES: dict[str, Use] = {"send": lambda queue: queue.send(b"sent"), "receive": lambda queue: queue.receive()}


class ChangeTests(QueueSuite):
    """A queue that others delete or make anew has what a program expects after its next use; or the program is told."""

    @pytest.mark.parametrize("use", ["send", "receive"])
    async def test_a_deleted_queue_gets_its_settings_again(self, harness: QueueHarness, name: str, use: str) -> None:
        broker, other = await harness.open(), await harness.open()
        queue = program(broker, name, expected(harness), checks=False)  # each store notices that a queue is missing
        await queue.send(b"first")
        await other.delete(name, force=True)
        await USES[use](queue)
        await has_settings(other, harness, name, queue)

    @pytest.mark.parametrize("use", ["send", "receive"])
    async def test_a_queue_made_anew_by_a_sender_gets_its_settings_again(
        self, harness: QueueHarness, name: str, use: str
    ) -> None:
        broker, other = await harness.open(), await harness.open()
        queue = program(broker, name, expected(harness))
        await queue.send(b"first")
        await other.delete(name, force=True)
        await send(other, name, b"of another")  # declares nothing
        await USES[use](queue)
        await has_settings(other, harness, name, queue)

    @pytest.mark.parametrize("use", ["send", "receive"])
    async def test_a_program_is_told_of_other_settings_in_a_queue_made_anew(
        self, harness: QueueHarness, name: str, use: str
    ) -> None:
        broker, other = await harness.open(), await harness.open()
        queue = program(broker, name, expected(harness))
        await queue.send(b"first")
        await other.delete(name, force=True)
        await other.declare(name, {"max_deliveries": 7})
        told: list[str] = []

        async def is_told() -> bool:
            try:
                await USES[use](queue)
            except ConfigError as error:
                told.append(str(error))
            return bool(told)

        if not tells_all(broker):
            await until(is_told, within=WITHIN)
        elif not await is_told():
            assert await is_told(), "the second use did not tell"
        assert "max_deliveries is 7, not 3" in told[0]
        assert (await other.settings(name)).max_deliveries == 7

    async def test_two_programs_with_one_expectation_both_go_on(self, harness: QueueHarness, name: str) -> None:
        clients = [await harness.open() for _ in range(2)]
        queues = [program(one, name, expected(harness)) for one in clients]
        await asyncio.gather(*(one.send(b"first") for one in queues))
        await clients[0].delete(name, force=True)
        await asyncio.gather(*(one.send(b"second") for one in queues))
        await has_settings(clients[1], harness, name, *queues)
        assert bodies(await receive_some(clients[0], name, harness, 2)) == [b"second"] * 2

    async def test_a_deletion_while_a_receiver_waits(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        queue = program(broker, name, expected(harness))
        assert await queue.receive() == []
        waiting = asyncio.ensure_future(received(queue))
        await harness.standing(broker, name)
        await other.delete(name, force=True)
        await send(other, name, b"after it")
        [message] = await waiting
        assert message.body == b"after it"
        await has_settings(other, harness, name, queue)
        await message.complete()

    async def test_a_deletion_while_a_consumer_waits(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        queue, came = program(broker, name, expected(harness)), list[bytes]()

        async def handle(message: Message) -> None:
            came.append(message.body)

        consuming = asyncio.ensure_future(queue.consume(handle, sigterm=False, poll_every=0.2))
        await queue.send(b"before it")
        await until(lambda: came == [b"before it"])
        await harness.standing(broker, name)
        await other.delete(name, force=True)
        await send(other, name, b"after it")
        await until(lambda: came == [b"before it", b"after it"], within=WITHIN)
        await has_settings(other, harness, name, queue)
        await queue.drain()
        await consuming

    async def test_a_deletion_while_a_message_is_in_hand(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        queue = program(broker, name, expected(harness))
        await queue.send(b"first")
        held: list[Message] = []

        async def has_come() -> bool:
            held.extend(await queue.receive())
            return bool(held)

        await until(has_come)
        await other.delete(name, force=True)
        await queue.send(b"second")
        with pytest.raises(LockLost):
            await held[0].complete()
        await has_settings(other, harness, name, queue)

    async def test_a_program_without_expectation_declares_nothing(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        queue = program(broker, name, {})
        await queue.send(b"first")
        await other.delete(name, force=True)
        await queue.send(b"second")
        await queue.receive()
        assert await other.settings(name) == QueueSettings()
        await other.declare(name, {"max_deliveries": 7})
        await queue.send(b"third")
        assert await other.settings(name) == QueueSettings(max_deliveries=7)

    async def test_a_change_by_others_is_no_new_queue(self, harness: QueueHarness, name: str) -> None:
        broker, other = await harness.open(), await harness.open()
        queue = program(broker, name, expected(harness))
        await queue.send(b"first")
        await other.declare(name, {"max_deliveries": 7})  # as the next version of the program does in its migration
        broker.generations.rise(name)  # as where the queue seems to be missing for a moment
        await queue.send(b"second")
        await queue.receive()
        await queue.send(b"third")
        assert (await other.settings(name)).max_deliveries == 7

    async def test_nothing_is_declared_again_while_nothing_changes(self, harness: QueueHarness, name: str) -> None:
        counting = _CountingBroker(await harness.open())
        queue = program(cast(Broker, counting), name, expected(harness), checks=False)
        for _ in range(3):
            await queue.send(b"a")
            await queue.receive()
            await queue.dead_letters.receive()
        assert counting.declared == 1

    async def test_no_claim_of_a_queue_made_anew_exceeds_the_expected_limits(
        self, harness: QueueHarness, name: str
    ) -> None:
        needs(harness.traits.limits)
        broker, other = await harness.open(), await harness.open()
        queue = program(broker, name, {"max_locked": 1})
        await queue.send(b"first")
        await other.delete(name, force=True)
        await send(other, name, b"a", b"b", b"c")
        got = await queue.receive(max=3)
        assert [(one.body, one.delivery_count) for one in got] == [(b"a", 1)]
        assert (await other.stats(name)).locked == 1

    @pytest.mark.parametrize("use", ["send", "receive"])
    async def test_an_edit_by_an_administrator_is_repaired(self, harness: QueueHarness, name: str, use: str) -> None:
        if not harness.edits:
            pytest.skip("nobody else can edit this store")
        for how in harness.edits:
            broker, other, edited = await harness.open(), await harness.open(), f"{name}-{how}"
            queue = program(broker, edited, expected(harness))
            await queue.send(b"first")
            await harness.edit(edited, how)
            await USES[use](queue)
            await has_settings(other, harness, edited, queue)


class _CountingBroker:
    """A broker that counts calls of ``declare``."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.declared = 0

    async def declare(self, queue: str, changes: QueueOptions, *, only_undeclared: bool = False) -> QueueSettings:
        self.declared += 1
        return await self._broker.declare(queue, changes, only_undeclared=only_undeclared)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)


def expected(harness: QueueHarness) -> QueueOptions:
    """Return what the program of a test expects."""
    return {"lock": harness.lock * 2, "max_deliveries": 3}


def tells_all(broker: Broker) -> bool:
    """Return whether the answers to the verbs show each new generation of a queue."""
    return broker.generations.check_every == math.inf


async def received(queue: Queue) -> list[Message]:
    """Receive again and again, as programs do: a storage may not tell one that waits that its queue is another one."""
    async with asyncio.timeout(WITHIN):
        while not (messages := await queue.receive(wait=WITHIN / 12)):
            pass
    return messages


def program(broker: Broker, name: str, given: QueueOptions, *, checks: bool = True) -> Queue:
    """Return a queue as a program has it that expects the settings *given*; it *checks* them often, if at all."""
    if checks and not tells_all(broker):
        broker.generations.check_every = CHECK_EVERY
    settings = QueueSettings(**given)
    return Queue(QueueContext(name, broker, RenewalThread.here(), SystemClock(), settings, "me", expected=given))


async def has_settings(other: Broker, harness: QueueHarness, name: str, *queues: Queue) -> None:
    """Check that the queue has what its programs expect: now, or where answers don't tell all, after some more uses."""

    async def is_so() -> bool:
        found = await other.settings(name)
        if all(getattr(found, option) == value for option, value in expected(harness).items()):
            return True
        for queue in queues:
            await queue.receive()
        return False

    await until(is_so, within=0.0 if tells_all(queues[0]._context.broker) else WITHIN, what="what is expected")
