"""Consumers of sessions at the edges: handlers that settle by themselves, lost answers, ends of the loop, hints."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress

import pytest

from tenure import Retry
from tenure._queue.broker import Claim, NoSession
from tenure._queue.effects import Accept, Accepted, Answered, Claimed, ReceiveSession, Release, Settle, Tick
from tenure._queue.lock_group import DeliveryKey
from tenure._queue.message import NO_HEADERS, Delivery, SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.pump_settings import PumpSettings
from tenure._queue.received import Message
from tenure._queue.session_pump import SessionPump
from tenure._queue.verdicts import SETTLED, Abandon, Lapsed, Settled, Settlement
from tenure._timing import Timing
from tenure.errors import ConfigError, Unavailable
from tenure.events import HandlerOverran, ResultDiscarded
from tests.application.queue_setup import LOCK, QueueSetup, in_virtual_time


async def _nothing(message: Message) -> None:
    pass


@in_virtual_time
async def test_a_handler_that_settled_its_message_is_cancelled_at_max_hold(setup: QueueSetup) -> None:
    await _watched(setup, max_hold=10.0, renewing=True)


@in_virtual_time
async def test_a_handler_that_settled_its_message_is_cancelled_when_its_session_is_lost(setup: QueueSetup) -> None:
    await _watched(setup, max_hold=1_000.0, renewing=False)


async def _watched(setup: QueueSetup, *, max_hold: float, renewing: bool) -> None:
    queue, ended = setup.queue(), list[float]()
    await queue.send_batch([Outgoing(b"%d" % number, session="s") for number in range(2)])

    async def handler(message: Message) -> None:
        await message.complete()
        try:
            await asyncio.sleep(2_000.0)
        finally:
            ended.append(setup.clock.now())

    async with setup.consuming(queue, handler, sessions=True, concurrency=1, max_hold=max_hold, grace=0.0):
        await asyncio.sleep(1.0)
        setup.broker.renewing = renewing
        await asyncio.sleep(LOCK)
        assert ended
        assert ended[0] < 1.0 + LOCK
        setup.broker.renewing = True


def test_notes_on_a_delivery_do_not_apply_to_the_next_one() -> None:
    pump = SessionPump("q", "me", PumpSettings(Timing(LOCK)), random.Random(1), {}, now=0.0)
    lock = SessionLock("q", "s", 7, 0.0)
    assert [type(one) for one in pump.handle(Tick(), 0.0)] == [Accept]
    [receive] = [one for one in pump.handle(Accepted(1, lock), 0.0) if isinstance(one, ReceiveSession)]
    delivery = Delivery("q", 1, 7, "id", b"", NO_HEADERS, 1, 0.0, 0.0, "s")
    pump.handle(Claimed(receive.request_id, [delivery]), 0.0)
    assert pump.take(0.0) == delivery
    pump._groups[7].ended[DeliveryKey(delivery)] = (
        20.0  # the locks say so while the loop is blocked; their message is not here yet
    )
    assert pump.done(delivery, Abandon())
    [settle] = [one for one in pump.handle(Tick(), 1.0) if isinstance(one, Settle)]
    effects = pump.handle(Answered(settle.request_id, [SETTLED]), 1.0)
    assert not [one for one in effects if isinstance(one, ReceiveSession)]
    assert [one for one in effects if isinstance(one, Release)]


@in_virtual_time
async def test_until_empty_waits_for_messages_that_may_have_been_abandoned_in_a_lost_session(setup: QueueSetup) -> None:
    queue, handled = setup.queue(), list[tuple[int, float]]()
    await queue.send(b"a", session="s")
    settle = setup.broker.settle

    async def lost(settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        await settle(settlements)
        raise Unavailable("the answer was lost")

    async def handler(message: Message) -> Retry | None:
        handled.append((message.delivery_count, setup.clock.now()))
        setup.broker.renewing = False
        return Retry(80.0) if message.delivery_count == 1 else None

    def heal() -> None:
        setup.broker.renewing = True
        setup.broker.settle = settle  # type: ignore[method-assign]

    setup.broker.settle = lost  # type: ignore[method-assign]
    setup.loop.call_later(60.0, heal)
    async with asyncio.timeout(300.0):
        await queue.consume(handler, sessions=True, concurrency=1, until_empty=True, grace=2.0, sigterm=False)
    assert [count for count, _ in handled] == [1, 2]
    assert handled[1][1] >= 80.0
    assert await queue.stats() == Stats()


@in_virtual_time
async def test_the_end_of_the_loop_while_a_session_is_received_in_leaves_nothing_locked(setup: QueueSetup) -> None:
    queue = setup.queue()
    answer, asking = setup.broker.receive_session, asyncio.Event()

    async def slow(held: SessionLock, limit: int) -> Claim | Lapsed:
        asking.set()
        await asyncio.sleep(5.0)
        return await answer(held, limit)

    await queue.send(b"a", session="s")
    setup.broker.receive_session = slow  # type: ignore[method-assign]
    before = asyncio.all_tasks()
    running = asyncio.ensure_future(queue.consume(_nothing, sessions=True, sigterm=False))
    await asyncio.wait_for(asking.wait(), 60.0)
    began = setup.clock.now()
    for task in asyncio.all_tasks() - before:  # as asyncio.run does
        task.cancel()
    await asyncio.wait({running})
    assert setup.clock.now() - began < 1.0
    assert await queue.stats() == Stats(ready=1, oldest_age=began)


@in_virtual_time
async def test_a_hint_wakes_one_waiter_for_sessions(setup: QueueSetup) -> None:
    queue, accepts = setup.queue(), 0
    accept = setup.broker.accept

    async def counted(queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        nonlocal accepts
        accepts += 1
        return await accept(queue, session, lock)

    setup.broker.accept = counted  # type: ignore[method-assign]
    consumers = [
        queue.consumer(_nothing, sessions=True, concurrency=1, poll_every=1e6, sigterm=False) for _ in range(20)
    ]
    running = [asyncio.ensure_future(consumer.run()) for consumer in consumers]
    await asyncio.sleep(LOCK + 1.0)
    accepts = 0
    await queue.send(b"a", session="s")
    await asyncio.sleep(0.5)
    assert await queue.stats() == Stats()
    assert accepts < 10
    for consumer in consumers:
        consumer.drain(0.0)
    await asyncio.gather(*running)


@in_virtual_time
async def test_a_consumer_that_fails_releases_its_sessions(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send_batch([Outgoing(b"a", session="s"), Outgoing(b"b", session="s"), Outgoing(b"c", session="t")])
    settle = setup.broker.settle

    async def refused(settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        raise ConfigError("the broker has no such verb")

    setup.broker.settle = refused  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="no such verb"):
        await queue.consume(_nothing, sessions=True, sigterm=False)
    setup.broker.settle = settle  # type: ignore[method-assign]
    stats = await queue.stats()
    assert (stats.ready, stats.locked) == (3, 0)
    counts: list[int] = []

    async def handler(message: Message) -> None:
        counts.append(message.delivery_count)

    await queue.consume(handler, sessions=True, until_empty=True, sigterm=False)
    assert counts == [1, 1, 1]


@in_virtual_time
async def test_a_consumer_that_fails_waits_for_no_release_for_long(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send(b"a", session="s")

    async def refused(settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        raise ConfigError("the broker has no such verb")

    async def hangs(held: SessionLock) -> Settled | Lapsed:
        await asyncio.sleep(1_000.0)
        return SETTLED

    setup.broker.settle, setup.broker.release = refused, hangs  # type: ignore[method-assign]
    began = setup.clock.now()
    with pytest.raises(ConfigError, match="no such verb"):
        await queue.consume(_nothing, sessions=True, sigterm=False)
    assert setup.clock.now() - began < LOCK


@in_virtual_time
async def test_a_verdict_without_an_answer_is_reported_once(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send(b"a", session="s")

    async def handler(message: Message) -> None:
        setup.broker.renewing = setup.broker.settling = False

    async with setup.consuming(queue, handler, sessions=True, concurrency=1, grace=0.0):
        await asyncio.sleep(LOCK + 5.0)
        assert len(setup.emitted(ResultDiscarded)) == 1
    reported = [(event.delivery_count, event.why) for event in setup.emitted(ResultDiscarded)]
    assert reported == [(1, "unanswered"), (2, "unanswered")]  # the second delivery has its own end


@in_virtual_time
async def test_a_handler_that_outlasts_its_session_is_reported_once(setup: QueueSetup) -> None:
    queue, go_on = setup.queue(), asyncio.Event()
    await queue.send(b"a", session="s")

    async def stubborn(message: Message) -> None:
        setup.broker.renewing = False
        while not go_on.is_set():
            with suppress(asyncio.CancelledError):
                await go_on.wait()

    async with setup.consuming(queue, stubborn, sessions=True, concurrency=1, grace=0.0):
        await asyncio.sleep(LOCK + 5.0)
        assert len(setup.emitted(HandlerOverran)) == 1
    assert len(setup.emitted(HandlerOverran)) == 1
    go_on.set()
    await asyncio.sleep(1.0)
