"""Consumers that are paused, drained, cancelled or stopped."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from tenure._queue.broker import Claim, QueueSettings
from tenure._queue.context import QueueContext
from tenure._queue.message import Stats
from tenure._queue.queue import Queue
from tenure._queue.received import Message
from tenure._runtime.renewal_thread import RenewalThread
from tenure.errors import ConfigError, LockLost
from tenure.events import (
    GivenBack,
    HandlerOverran,
)
from tests.application.queue_setup import LOCK, Log, QueueSetup, fill, in_virtual_time


@in_virtual_time
async def test_pause_gives_the_buffer_back_and_resume_goes_on(setup: QueueSetup) -> None:
    queue, log = setup.queue(), Log(seconds=0.01)
    await fill(queue, 500)
    async with setup.consuming(queue, log, concurrency=2):
        await asyncio.sleep(1.0)
        queue.pause()
        await asyncio.sleep(1.0)
        done = len(log.ended)
        assert 0 < done < 500
        stats = await queue.stats()
        assert (stats.locked, stats.ready) == (0, 500 - done)
        await asyncio.sleep(100.0)
        assert len(log.ended) == done
        queue.resume()
        await asyncio.sleep(5.0)
        assert len(log.ended) == 500
        await queue.send(b"one more")
        await asyncio.sleep(1.0)
    assert len(set(log.ended)) == 501


@in_virtual_time
async def test_draining_does_not_count(setup: QueueSetup) -> None:
    queue = setup.queue(max_deliveries=2)
    await fill(queue, 100)
    log = Log(seconds=5.0)
    for _ in range(5):
        task = asyncio.ensure_future(queue.consume(log, concurrency=3))
        await asyncio.sleep(1.0)
        await queue.drain(grace=1.0)
        await task
    assert await queue.stats() == Stats(ready=100, oldest_age=(await queue.stats()).oldest_age)
    assert log.ended == []
    assert len(log.cancelled) == 15
    assert {one.delivery_count for one in await queue.receive(100)} == {1}


@in_virtual_time
async def test_draining_lets_handlers_finish_inside_grace(setup: QueueSetup) -> None:
    queue, log, stop = setup.queue(), Log(seconds=5.0), asyncio.Event()
    await fill(queue, 10)
    task = asyncio.ensure_future(queue.consume(log, concurrency=3, stop=stop, grace=10.0))
    await asyncio.sleep(1.0)
    stop.set()
    await task
    assert setup.clock.now() == pytest.approx(5.0, abs=0.1)
    assert len(log.ended) == 3
    assert (await queue.stats()).ready == 7


@in_virtual_time
async def test_a_drain_is_honoured_before_the_consumer_has_begun(setup: QueueSetup) -> None:
    for sessions in (False, True):
        queue, log = setup.queue(), Log()
        await queue.send(b"a", session="s" if sessions else None)
        setup.broker.requests.clear()
        consumer = queue.consumer(log, sessions=sessions)
        consumer.drain()
        await consumer.run()
        stop = asyncio.Event()
        stop.set()
        await queue.consume(log, sessions=sessions, stop=stop)
        assert log.began == []
        assert not [one for one in setup.broker.requests if one.startswith("receive")]


@in_virtual_time
async def test_a_drain_is_honoured_while_the_store_is_slow_to_answer(setup: QueueSetup) -> None:
    for sessions in (False, True):
        queue, log = setup.queue(max_deliveries=7), Log()
        setup.broker.answers.clear()
        consuming = asyncio.ensure_future(queue.consume(log, sessions=sessions))
        await asyncio.sleep(1.0)
        queue.pause()
        await queue.drain()
        assert setup.clock.now() < 3.0
        await consuming
        setup.broker.answers.set()
        assert log.began == []


@in_virtual_time
async def test_a_pause_that_comes_first_is_honoured(setup: QueueSetup) -> None:
    queue, log = setup.queue(), Log()
    await fill(queue, 1)
    consumer = queue.consumer(log)
    consumer.pause()
    running = asyncio.ensure_future(consumer.run())
    await asyncio.sleep(10.0)
    assert log.began == []
    consumer.resume()
    await asyncio.sleep(1.0)
    assert log.began == [b"0"]
    consumer.drain()
    await running


@in_virtual_time
async def test_a_consumer_uses_the_declared_settings(setup: QueueSetup) -> None:
    await setup.queue(lock=5.0).send(b"a")
    queue = Queue(
        QueueContext(
            "orders", setup.broker, RenewalThread.here(), setup.clock, QueueSettings(lock=LOCK), "me", expected={}
        )
    )
    left: list[float] = []
    began = setup.clock.now()

    async def handler(message: Message) -> None:
        left.append(message.locked_until - message.enqueued_at)
        await asyncio.sleep(60.0)

    await queue.consumer(handler, until_empty=True).run()
    assert left == [5.0]
    assert setup.clock.now() - began < 61.0
    assert len([one for one in setup.broker.requests if one.startswith("renew")]) > 20


@in_virtual_time
async def test_a_cancelled_consumer_gives_back_and_releases(setup: QueueSetup) -> None:
    queue, log = setup.queue(), Log(seconds=500.0)
    await fill(queue, 10)
    task = asyncio.ensure_future(queue.consume(log, concurrency=3))
    await asyncio.sleep(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(log.cancelled) == 3
    assert (await queue.stats()).ready == 10
    assert {one.delivery_count for one in await queue.receive(10)} == {1}


@in_virtual_time
async def test_it_ends_even_if_a_handler_catches_what_is_to_cancel_it(setup: QueueSetup) -> None:
    for session in (None, "s"):
        queue, go_on, began = setup.queue(), asyncio.Event(), asyncio.Event()
        await queue.send(b"a", session=session)

        async def stubborn(message: Message, began: asyncio.Event = began, go_on: asyncio.Event = go_on) -> None:
            began.set()
            while not go_on.is_set():
                with suppress(asyncio.CancelledError):
                    await go_on.wait()

        consuming = asyncio.ensure_future(queue.consume(stubborn, sessions=session is not None))
        await began.wait()
        since = setup.clock.now()
        async with asyncio.timeout(20.0):
            await queue.drain(grace=5.0)
        await consuming
        assert setup.clock.now() - since <= 5.0 + 3 * 2.0  # grace, and three times what a handler has to stop
        assert len(setup.emitted(HandlerOverran)) == (1 if session is None else 2)
        assert (await queue.stats()).locked == 1
        go_on.set()
        await asyncio.sleep(2 * LOCK)


@in_virtual_time
async def test_a_receiver_uses_the_declared_lock(setup: QueueSetup) -> None:
    await fill(setup.queue(lock=5.0), 3)
    first = await setup.queue(lock=5.0).receive(2)
    await first[0].defer()
    await first[1].dead_letter("bad")

    def other_process() -> Queue:
        return Queue(
            QueueContext(
                "orders", setup.broker, RenewalThread.here(), setup.clock, QueueSettings(lock=LOCK), "me", expected={}
            )
        )

    [deferred] = await other_process().receive_deferred(first[0].sequence)
    [dead] = await other_process().dead_letters.receive()
    await asyncio.sleep(5.0)
    for message in (deferred, dead):
        with pytest.raises(LockLost):
            await message.complete()


@in_virtual_time
async def test_it_ends_even_if_the_broker_can_not_be_asked(setup: QueueSetup) -> None:
    queue, log = setup.queue(), Log(seconds=1.0)
    await fill(queue, 3)
    task = asyncio.ensure_future(queue.consume(log))
    await asyncio.sleep(0.5)
    setup.broker.cut = True
    await asyncio.sleep(2.0)
    await queue.drain(grace=3.0)
    await task
    setup.broker.cut = False
    await asyncio.sleep(LOCK)
    assert (await queue.stats()).ready == 3  # kept: the verdicts were not delivered


@in_virtual_time
async def test_what_waits_too_long_is_given_back_uncounted(setup: QueueSetup) -> None:
    queue = setup.queue()
    await fill(queue, 300)
    seconds = 0.01

    async def handler(message: Message) -> None:
        await asyncio.sleep(seconds)

    async with setup.consuming(queue, handler, concurrency=1):
        await asyncio.sleep(1.0)
        seconds = 500.0  # all at once, they have become slow
        await asyncio.sleep(60.0)
        stats = await queue.stats()
        assert stats.locked == 1
        assert stats.ready > 100
        assert {one.delivery_count for one in await queue.receive(200)} == {1}
        assert setup.emitted(GivenBack)


@in_virtual_time
async def test_two_consumers_share_and_neither_gets_the_others(setup: QueueSetup) -> None:
    queue = setup.queue()
    bodies = await fill(queue, 1_000)
    logs = [Log(seconds=0.01) for _ in range(4)]
    await asyncio.gather(*(queue.consume(log, concurrency=5, until_empty=True) for log in logs))
    assert sorted(sum((log.ended for log in logs), [])) == sorted(bodies)  # noqa: RUF017
    assert min(len(log.ended) for log in logs) > 150


@in_virtual_time
async def test_a_broken_broker_ends_it(setup: QueueSetup) -> None:
    queue = setup.queue()

    async def broken(queue: str, limit: int, lock: float) -> Claim:
        raise ConfigError("this is no queue")

    setup.broker.receive = broken  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="no queue"):
        await queue.consume(Log())


@in_virtual_time
async def test_a_failing_hook_changes_nothing(setup: QueueSetup) -> None:
    queue = setup.queue(max_deliveries=1)
    await fill(queue, 1)

    def hook(message: Message, error: BaseException) -> None:
        raise RuntimeError("the hook is broken")

    async def handler(message: Message) -> None:
        raise ValueError("x")

    await queue.consume(handler, on_error=hook, until_empty=True)
    assert (await queue.stats()).dead == 1
    assert "error hook" in setup.loop.unhandled.pop()["message"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"concurrency": 0}, "concurrency must be a whole number of at least 1"),
        ({"prefetch": -1}, "prefetch must be"),
        ({"max_hold": 0}, "max_hold must be more than 0"),
        ({"grace": -1}, "grace must be"),
        ({"run_in": "cellar"}, "run_in must be"),
        ({"run_in": "process"}, "an async handler runs on the loop"),
        ({"inbox_window": -1}, "inbox_window must be"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], complaint: str) -> None:
    @in_virtual_time
    async def test(setup: QueueSetup) -> None:
        with pytest.raises(ConfigError, match=complaint):
            await setup.queue().consume(Log(), **options)
        with pytest.raises(ConfigError, match="handler must be a function"):
            await setup.queue().consume("x")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="max must be"):
            await setup.queue().receive(0)

    test()
