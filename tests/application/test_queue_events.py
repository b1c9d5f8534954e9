"""Events of a queue: each is emitted once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from tenure._queue.context import DEATHS_PER_TURN
from tenure._queue.message import Died, Stats
from tenure._queue.pump_settings import lock_trusted_until
from tenure._queue.queue import Queue
from tenure._queue.received import Message
from tenure._queue.retry import Reject, RetryPolicy
from tenure._timing import Timing
from tenure.errors import LockLost
from tenure.events import (
    BrokerUnanswered,
    Event,
    LockEnded,
    MessageDied,
    MessageFailed,
    ResultDiscarded,
)
from tenure.testing.loop import run
from tests.application.queue_setup import LOCK, Log, QueueSetup, fill, in_virtual_time


@in_virtual_time
async def test_many_deaths_are_reported_in_portions_and_the_loop_runs_between(setup: QueueSetup) -> None:
    died = [Died(number, f"gone {number}", 0, "expired") for number in range(1_000)]
    context = setup.queue()._context
    context.report_dead(died)
    counts = [len(setup.emitted(MessageDied))]  # after each turn
    while counts[-1] < len(died):
        await asyncio.sleep(0)
        counts.append(len(setup.emitted(MessageDied)))
    assert [one.id for one in setup.emitted(MessageDied)] == [one.id for one in died]
    assert max(after - before for before, after in pairwise([0, *counts])) == DEATHS_PER_TURN


def test_a_loop_that_ends_reports_all_deaths_before() -> None:
    events: list[Event] = []

    async def main() -> None:
        context = QueueSetup().queue()._context
        context.on_event = events.append
        context.report_dead([Died(number, "gone", 0, "expired") for number in range(1_000)])

    run(main())
    assert len(events) == 1_000


@in_virtual_time
async def test_deaths_that_are_found_late_are_reported(setup: QueueSetup) -> None:
    """By a request that was given up: messages that expired, and messages that die when they are given back."""
    queue = setup.queue()
    await queue.send(b"late", id="a", expires_in=1.0)
    setup.broker.delay = 5.0
    asks: list[Callable[[], Coroutine[Any, Any, object]]] = [queue.receive, queue.session().__aenter__]
    for number, ask in enumerate(asks):
        await queue.send(b"late", id=f"gone {number}", expires_in=1.0)
        await asyncio.sleep(2.0)
        asking = asyncio.ensure_future(ask())
        await asyncio.sleep(1.0)
        asking.cancel()
        await asyncio.sleep(20.0)
    await queue.send(b"late", id="given back", expires_in=1.0)
    asking = asyncio.ensure_future(queue.receive())
    await asyncio.sleep(0.5)
    asking.cancel()
    await asyncio.sleep(20.0)
    assert [one.id for one in setup.emitted(MessageDied)] == ["a", "gone 0", "gone 1", "given back"]


@in_virtual_time
async def test_a_death_by_a_limit_that_another_process_has_lowered_is_reported_with_its_reason(
    setup: QueueSetup,
) -> None:
    queue = setup.queue(max_deliveries=5)
    await queue.send(b"a")
    [message] = await queue.receive()
    await setup.broker.declare(queue.name, {"max_deliveries": 1})
    await message.abandon()
    [letter] = await queue.dead_letters.peek()
    assert [one.reason for one in setup.emitted(MessageDied)] == [letter.reason] == ["max_deliveries"]


@in_virtual_time
async def test_a_result_that_comes_too_late_is_reported_once(setup: QueueSetup) -> None:
    for sessions in (False, True):
        setup.events.clear()
        queue = setup.queue(f"orders-{sessions}")
        await queue.send(b"a", session="s" if sessions else None)
        delivered: list[int] = []

        async def handler(message: Message, delivered: list[int] = delivered) -> None:
            delivered.append(message.delivery_count)
            if message.delivery_count == 1:
                setup.loop.block(2 * LOCK)  # this process does not run, and no timer has fired

        await queue.consume(handler, sessions=sessions, until_empty=True)
        assert delivered == [1, 2]
        assert len(setup.emitted(ResultDiscarded)) + len(setup.emitted(LockEnded)) == 1
        if not sessions:
            [discarded] = setup.emitted(ResultDiscarded)
            assert (discarded.why, discarded.delivery_count) == ("stalled", 1)


@in_virtual_time
async def test_a_handler_cut_short_because_its_process_was_stopped_is_not_counted(setup: QueueSetup) -> None:
    queue = setup.queue(max_deliveries=2)
    await queue.send(b"a")
    timing = Timing(LOCK)
    delivered: list[int] = []

    async def handler(message: Message) -> None:
        delivered.append(message.delivery_count)
        if len(delivered) < 4:
            setup.loop.block(
                lock_trusted_until(0.0, timing) - timing.grace / 2
            )  # too long to go on, and the lock still holds
            await asyncio.sleep(LOCK)

    await queue.consume(handler, until_empty=True)
    assert delivered == [1, 1, 1, 1]
    assert {event.why for event in setup.emitted(LockEnded)} == {"stalled"}
    assert setup.emitted(MessageFailed) == setup.emitted(MessageDied) == []
    assert await queue.stats() == Stats()


@in_virtual_time
async def test_a_verb_that_comes_too_late_is_reported_once(setup: QueueSetup) -> None:
    for sessions in (False, True):
        setup.events.clear()
        queue = setup.queue(f"orders-{sessions}")
        await queue.send(b"a", session="s" if sessions else None)

        async def handler(message: Message) -> None:
            if message.delivery_count == 1:
                setup.loop.block(2 * LOCK)
                with pytest.raises(LockLost):
                    await message.complete()

        await queue.consume(handler, sessions=sessions, until_empty=True)
        assert len(setup.emitted(ResultDiscarded)) + len(setup.emitted(LockEnded)) == 1


@in_virtual_time
async def test_a_verdict_without_an_answer_at_the_end_is_reported(setup: QueueSetup) -> None:
    queue = setup.queue()
    await fill(queue, 1)
    setup.broker.settling = False
    await asyncio.gather(queue.consume(Log(), grace=1.0), _drain_after(queue, 1.0))
    [discarded] = setup.emitted(ResultDiscarded)
    assert discarded.why == "unanswered"
    setup.broker.settling = True


@in_virtual_time
async def test_a_session_lost_while_its_verdict_has_no_answer_is_reported(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send(b"a", session="s")
    hooked: list[str] = []

    async def handler(message: Message) -> None:
        if message.delivery_count == 1:
            setup.broker.settling = setup.broker.renewing = False

    def note(message: Message, error: BaseException) -> None:
        hooked.append(str(error))
        setup.broker.settling = setup.broker.renewing = True

    async with setup.consuming(queue, handler, sessions=True, concurrency=1, on_error=note):
        await asyncio.sleep(3 * LOCK)
    [discarded] = setup.emitted(ResultDiscarded)
    assert (discarded.why, discarded.delivery_count) == ("unanswered", 1)
    assert setup.emitted(LockEnded) == []
    [error] = hooked
    assert "before there was an answer to its verdict" in error
    assert await queue.stats() == Stats()


async def _drain_after(queue: Queue, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await queue.drain(grace=1.0)


@in_virtual_time
async def test_every_death_is_reported_once(setup: QueueSetup) -> None:
    for sessions in (False, True):
        setup.events.clear()
        queue = setup.queue(f"orders-{sessions}", max_deliveries=1)
        one = "s" if sessions else None
        for body in (b"rejected", b"failed", b"by hand", b"never", b"fine"):
            await queue.send(body, session=one)
        await queue.send(b"expired", session=one, expires_in=1.0)

        async def handler(message: Message) -> None:
            match message.body:
                case b"rejected":
                    raise Reject("odd")
                case b"failed":
                    raise ValueError
                case b"never":
                    raise KeyError
                case b"by hand":
                    await message.dead_letter("by hand")

        await asyncio.sleep(2.0)
        await queue.consume(handler, sessions=sessions, until_empty=True, retry=RetryPolicy(never=(KeyError,)))
        assert [event.reason for event in setup.emitted(MessageDied)].count("max_deliveries") == 1
        reported = sorted((event.sequence, event.reason) for event in setup.emitted(MessageDied))
        dead = [(letter.sequence, letter.reason) for letter in await queue.dead_letters.peek()]
        assert reported == dead
        assert len(dead) == 5


@in_virtual_time
async def test_the_death_of_a_message_whose_last_lock_ended_is_reported(setup: QueueSetup) -> None:
    queue = setup.queue(max_deliveries=1)
    await fill(queue, 1)
    await queue.receive()  # and never settled, as by a process that crashed
    await asyncio.sleep(2 * LOCK)
    await queue.stats()  # this finds it dead
    await queue.consume(Log(), until_empty=True)
    [died] = setup.emitted(MessageDied)
    assert (died.reason, died.delivery_count) == ("max_deliveries", 1)


@in_virtual_time
async def test_a_death_that_a_receiver_finds_is_reported(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send(b"late", expires_in=1.0)
    await queue.send(b"live")
    await asyncio.sleep(2.0)
    [got] = await queue.receive()
    assert got.body == b"live"
    [died] = setup.emitted(MessageDied)
    assert (died.reason, died.delivery_count) == ("expired", 0)


@in_virtual_time
async def test_an_unanswered_accept_is_reported(setup: QueueSetup) -> None:
    queue = setup.queue()
    setup.broker.loses_answers = True
    async with setup.consuming(queue, Log(), sessions=True, concurrency=1):
        await asyncio.sleep(3.0)
        setup.broker.loses_answers = False
    assert {event.what for event in setup.emitted(BrokerUnanswered)} == {"accept"}
