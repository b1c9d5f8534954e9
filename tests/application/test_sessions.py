"""Sessions, entered one at a time or consumed concurrently."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

import tenure
from tenure._backends.memory.queue import MemoryBroker
from tenure._queue.message import SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.pump_settings import lock_trusted_until
from tenure._queue.queue import Queue
from tenure._queue.received import Message
from tenure._queue.retry import RetryPolicy
from tenure._timing import Timing
from tenure.errors import ConfigError, LockLost
from tenure.events import (
    HandlerOverran,
    LockEnded,
    MessageFailed,
)
from tests.application.queue_setup import AT_ONCE, LOCK, Log, QueueSetup, fill, in_virtual_time


@in_virtual_time
async def test_a_session_has_one_consumer_and_is_in_order(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send_batch([Outgoing(b"%d" % number, session="ab"[number % 2]) for number in range(6)])
    async with queue.session() as first, queue.session() as second:
        assert (first.name, second.name, first.state) == ("a", "b", None)
        with pytest.raises(tenure.TimedOut, match="no free session has a message"):
            async with queue.session(wait=1.0):
                pass
        with pytest.raises(tenure.TimedOut, match=r"session 'a' of 'orders'.*locked to another"):
            async with queue.session("a", wait=1.0):
                pass
        seen = []
        async for message in first:
            seen.append(message.body)
            await message.complete()
        assert seen == [b"0", b"2", b"4"]
        await first.set_state(b"4 was the last")
        await asyncio.sleep(200.0)  # renewed all the while
        assert [one.body for one in await second.receive(10)] == [b"1", b"3", b"5"]
    async with queue.session("a") as again:
        assert again.state == b"4 was the last"
        assert await again.receive() == []
        waiting = asyncio.ensure_future(again.receive(wait=50.0))
        await asyncio.sleep(1.0)
        await queue.send(b"more", session="a")
        assert [one.body for one in await waiting] == [b"more"]
        assert await again.renew() > 0
    async with queue.session("b") as other:
        assert [one.delivery_count for one in await other.receive(10)] == [1, 1, 1]


@in_virtual_time
async def test_a_session_waits_for_its_first_message(setup: QueueSetup) -> None:
    queue = setup.queue()

    async def later() -> None:
        await asyncio.sleep(30.0)
        await queue.send(b"x", session="s")

    sending = asyncio.ensure_future(later())
    async with queue.session() as session:
        assert session.name == "s"
        assert setup.clock.now() == pytest.approx(30.0, abs=0.1)
    await sending


@in_virtual_time
async def test_a_session_that_arrives_after_the_wait_is_released(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send(b"a", session="s")
    setup.broker.delay = 1.0
    for kind in ("receiver", "consumer"):
        waiting = asyncio.ensure_future(
            queue.session().__aenter__() if kind == "receiver" else queue.consume(Log(), sessions=True, concurrency=1)
        )
        await asyncio.sleep(0.5)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(5.0)
        answer = await MemoryBroker.accept(setup.broker, "orders", None, LOCK)
        assert isinstance(answer, SessionLock), kind
        await setup.broker.release(answer)


@in_virtual_time
async def test_a_lost_session_cancels_the_block(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send(b"x", session="s")
    setup.broker.renewing = False
    with pytest.raises(LockLost, match="session 's'"):
        async with queue.session() as session:
            [message] = await session.receive()
            await asyncio.sleep(1_000.0)
    assert setup.clock.now() < LOCK
    assert session.lost.is_set()
    with pytest.raises(LockLost):
        await session.receive()
    await asyncio.sleep(LOCK)
    with pytest.raises(LockLost):
        await message.complete()


@in_virtual_time
async def test_sessions_are_consumed_side_by_side_each_in_order(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send_batch([Outgoing(b"%d" % number, session=f"s{number % 5}") for number in range(50)])
    await queue.send(b"of no session")
    seen: dict[str | None, list[int]] = {}
    running: set[str | None] = set()
    most = 0

    async def handler(message: Message) -> None:
        nonlocal most
        assert message.session not in running
        running.add(message.session)
        most = max(most, len(running))
        await asyncio.sleep(1.0)
        seen.setdefault(message.session, []).append(int(message.body))
        running.discard(message.session)

    await queue.consume(handler, concurrency=3, sessions=True, until_empty=True)
    assert seen == {f"s{number}": list(range(number, 50, 5)) for number in range(5)}
    assert most == 3
    assert (await queue.stats()).ready == 1


@in_virtual_time
async def test_a_failed_message_holds_up_its_session_until_it_is_dead(setup: QueueSetup) -> None:
    queue = setup.queue(max_deliveries=3)
    await queue.send_batch([Outgoing(b"a1", session="a"), Outgoing(b"a2", session="a"), Outgoing(b"b1", session="b")])
    seen: list[bytes] = []
    hooked: list[str] = []

    async def handler(message: Message) -> None:
        seen.append(message.body)
        if message.body == b"a1":
            raise ValueError("no")

    options: dict[str, Any] = {"sessions": True, "retry": RetryPolicy(initial=5.0, jitter=0.0)}
    async with setup.consuming(queue, handler, on_error=lambda message, error: hooked.append(str(error)), **options):
        await asyncio.sleep(60.0)
        await queue.send(b"b2", session="b")
        await asyncio.sleep(0.1)
    assert seen == [b"a1", b"b1", b"a1", b"a1", b"a2", b"b2"]
    assert hooked == ["no"] * 3
    assert await queue.stats() == Stats(dead=1)


@in_virtual_time
async def test_a_session_asks_again_when_a_verdict_is_not_answered(setup: QueueSetup) -> None:
    for way in ("cut", "loses_answers"):
        queue, log = setup.queue(), Log()
        await queue.send_batch([Outgoing(b"1", session="s"), Outgoing(b"2", session="s")])
        async with setup.consuming(queue, log, sessions=True, concurrency=1):

            async def handler_began(log: Log = log) -> None:
                while not log.began:
                    await asyncio.sleep(0.1)

            log.seconds = 1.0
            await handler_began()
            setattr(setup.broker, way, True)
            await asyncio.sleep(5.0)
            assert log.ended == [b"1"]
            setattr(setup.broker, way, False)
            await asyncio.sleep(10.0)
        assert log.ended == [b"1", b"2"]  # and not the first one again
        assert await queue.stats() == Stats()


@in_virtual_time
async def test_draining_sessions_does_not_count(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send_batch([Outgoing(b"%d" % number, session=f"s{number % 2}") for number in range(4)])
    log = Log(seconds=20.0)
    async with setup.consuming(queue, log, sessions=True):
        await asyncio.sleep(1.0)
        queue.pause()
        queue.resume()
    assert setup.clock.now() == pytest.approx(6.0)
    assert len(log.cancelled) == 2
    assert (await queue.stats()).ready == 4
    async with queue.session("s0", wait=1.0) as session:
        assert [one.delivery_count for one in await session.receive(5)] == [1, 1]


@in_virtual_time
async def test_a_handler_of_a_session_has_its_limits(setup: QueueSetup) -> None:
    queue = setup.queue(max_deliveries=1)
    await queue.send(b"slow", session="s")
    log, hooked = Log(seconds=1_000.0), list[str]()
    note = lambda message, error: hooked.append(str(error))  # noqa: E731
    async with setup.consuming(queue, log, sessions=True, max_hold=100.0, on_error=note):
        await asyncio.sleep(110.0)
    assert log.cancelled == [b"slow"]
    assert (await queue.stats()).dead == 1
    assert "max_hold" in hooked[0]
    await queue.send(b"lost", session="s")
    async with setup.consuming(queue, log, sessions=True, on_error=note):
        await asyncio.sleep(1.0)
        setup.broker.renewing = False
        await asyncio.sleep(29.0)
        assert log.cancelled == [b"slow", b"lost"]
        assert "lost while" in hooked[1]
    with pytest.raises(ConfigError, match="not for sessions"):
        await queue.consume(log, sessions=True, auto_complete=False)


@in_virtual_time
async def test_a_handler_that_runs_on_in_a_lost_session_is_reported(setup: QueueSetup) -> None:
    for why in ("unanswered", "denied"):
        queue = setup.queue(why)
        await queue.send(b"a", session="s")
        before = len(setup.events)
        began, go_on = asyncio.Event(), asyncio.Event()
        hooked: list[BaseException] = []

        async def stubborn(message: Message, began: asyncio.Event = began, go_on: asyncio.Event = go_on) -> None:
            began.set()
            while not go_on.is_set():
                with suppress(asyncio.CancelledError):
                    await go_on.wait()

        note = lambda message, error, hooked=hooked: hooked.append(error)  # noqa: E731
        async with setup.consuming(queue, stubborn, sessions=True, concurrency=1, on_error=note):
            await began.wait()
            since = setup.clock.now()
            if why == "unanswered":
                setup.broker.renewing = False
            else:
                await setup.broker.release(setup.broker.accepted[-1])
            async with queue.session("s", wait=LOCK + 1.0):  # another has it
                pass
            await asyncio.sleep(LOCK / 2)
            events = setup.events[before:]
            [ended] = [event for event in events if isinstance(event, LockEnded)]
            assert (ended.why, ended.delivery_count) == (why, 1)
            [overran] = [event for event in events if isinstance(event, HandlerOverran)]
            assert ended.at < overran.at < since + LOCK
            setup.broker.renewing = True
            go_on.set()
        assert not [event for event in events if isinstance(event, MessageFailed)]


@in_virtual_time
async def test_the_verdict_on_a_message_of_a_session_may_come_too_late(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send_batch([Outgoing(b"blocks", session="s"), Outgoing(b"settles", session="s")])
    hooked: list[str] = []
    counts: list[int] = []

    async def handler(message: Message) -> None:
        counts.append(message.delivery_count)
        match message.body, message.delivery_count:
            case b"blocks", 1:
                setup.broker.renewing = False
                setup.loop.block(2 * LOCK)
                setup.broker.renewing = True
            case b"blocks", 2:  # its verdict stands, though the answer comes only when the session is lost
                setup.broker.renewing = False
                setup.broker.delay = LOCK
            case b"settles", _:
                await message.complete()

    note = lambda message, error: hooked.append(f"{message.id} {type(error).__name__}: {error}")  # noqa: E731
    async with setup.consuming(queue, handler, sessions=True, concurrency=1, on_error=note):
        await asyncio.sleep(3.5 * LOCK)
        setup.broker.delay, setup.broker.renewing = 0.0, True
        await asyncio.sleep(2 * LOCK)
    assert counts == [1, 2, 1]
    [error] = hooked
    assert "its handler had ended, and that was too late" in error
    assert await queue.stats() == Stats()


@in_virtual_time
async def test_a_worker_outlives_handlers_that_catch_their_cancellation(setup: QueueSetup) -> None:
    queue = setup.queue(max_deliveries=20)
    await queue.send_batch([Outgoing(b"%d" % number, session="s") for number in range(3)])
    ended: list[bytes] = []

    async def handler(message: Message) -> None:
        try:
            await asyncio.sleep(100.0 if message.body == b"0" or message.delivery_count == 1 else 1.0)
        except asyncio.CancelledError:
            if message.body == b"1":
                raise ValueError("cut short") from None
            if message.body == b"2":
                raise
        ended.append(message.body)

    async with setup.consuming(queue, handler, sessions=True, concurrency=1, max_hold=5.0, retry=AT_ONCE):
        await asyncio.sleep(25.0)
        assert ended == [b"0", b"1", b"2"]
        await queue.send(b"3", session="s")
        await asyncio.sleep(1.0)
        setup.broker.renewing = False
        await asyncio.sleep(LOCK)  # lost: the worker looks for another one
        setup.broker.renewing = True
        await queue.send(b"4", session="t")
        await asyncio.sleep(LOCK)
    assert await queue.stats() == Stats()


@in_virtual_time
async def test_a_handler_may_end_its_own_consumer(setup: QueueSetup) -> None:
    for sessions in (False, True):
        queue = setup.queue(f"orders-{sessions}")
        await queue.send_batch([Outgoing(b"last", session="s" if sessions else None)])
        ended: list[bytes] = []

        async def handler(message: Message, queue: Queue = queue, ended: list[bytes] = ended) -> None:
            await queue.drain()
            ended.append(message.body)

        await queue.consume(handler, sessions=sessions)
        assert ended == [b"last"]
        assert await queue.stats() == Stats()


@in_virtual_time
async def test_a_handler_that_cancels_itself_has_failed(setup: QueueSetup) -> None:
    queue = setup.queue(max_deliveries=1)
    await fill(queue, 2)

    async def handler(message: Message) -> None:
        if message.body == b"0":
            raise asyncio.CancelledError("of my own")

    await queue.consume(handler, concurrency=1, until_empty=True)
    assert await queue.stats() == Stats(dead=1)
    [dead] = await queue.dead_letters.peek()
    assert dead.error is not None
    assert dead.error.type == "asyncio.exceptions.CancelledError"


@in_virtual_time
async def test_the_lock_of_a_session_is_counted_from_the_request(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send(b"a", session="s")
    asked_at = setup.clock.now()
    setup.broker.delay = 5.0
    async with queue.session() as session:
        assert session.remaining() == lock_trusted_until(asked_at, Timing(LOCK)) - setup.clock.now()
        setup.broker.delay = 0.0
