"""Consuming: the verdict on a message after its handler, and handlers that are late."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from tenure._queue import handlers
from tenure._queue.message import Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.queue import Queue
from tenure._queue.received import Message, Received
from tenure._queue.retry import Reject, Retry, RetryPolicy
from tenure._queue.verdicts import Lapsed, Settled, Settlement
from tenure._timing import Timing
from tenure.errors import ConfigError, LockLost
from tenure.events import (
    HandlerOverran,
    LockEnded,
    MessageDied,
    MessageFailed,
)
from tenure.testing import ManualClock
from tests.application.queue_setup import AT_ONCE, LOCK, Log, QueueSetup, fill, in_virtual_time


@in_virtual_time
async def test_a_handler_that_returns_completes(setup: QueueSetup) -> None:
    queue, log = setup.queue(), Log()
    bodies = await fill(queue, 2_500)
    await queue.consume(log, until_empty=True)
    assert log.ended == bodies
    assert await queue.stats() == Stats()
    assert max(int(one.split()[1]) for one in setup.broker.requests if one.startswith("settle")) > 50


@in_virtual_time
async def test_so_many_handlers_run_at_once_and_no_more(setup: QueueSetup) -> None:
    queue = setup.queue()
    await fill(queue, 40)
    running, most = 0, 0

    async def handler(message: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1.0)
        running -= 1

    await queue.consume(handler, concurrency=4, until_empty=True)
    assert most == 4
    assert setup.clock.now() == pytest.approx(10.0, abs=1.0)


@in_virtual_time
async def test_consuming_until_empty_ends_at_once_also_when_handlers_settle_themselves(setup: QueueSetup) -> None:
    queue = setup.queue()
    await fill(queue, 3)

    async def handler(message: Message) -> None:
        await message.complete()

    await queue.consume(handler, concurrency=1, until_empty=True)
    assert await queue.stats() == Stats()
    assert setup.clock.now() < 1.0  # it did not wait for the next poll


@pytest.mark.parametrize("sessions", [False, True])
def test_until_empty_goes_on_while_the_store_has_more_to_look_through(sessions: bool) -> None:
    @in_virtual_time
    async def test(setup: QueueSetup) -> None:
        queue = setup.queue()
        await queue.send(b"behind", session="s" if sessions else None)
        setup.broker.parts_to_go = 20
        log = Log()
        await queue.consume(log, concurrency=1, sessions=sessions, until_empty=True)
        assert log.ended == [b"behind"]
        assert setup.clock.now() < 1.0  # it did not wait for the next poll

    test()


@in_virtual_time
async def test_a_renewal_that_comes_after_a_handlers_own_complete_is_no_loss(setup: QueueSetup) -> None:
    queue = setup.queue()
    await fill(queue, 1)
    failures: list[BaseException] = []

    async def handler(message: Message) -> None:
        setup.broker.delay = LOCK / 2  # the answer arrives during a renewal
        completing = asyncio.ensure_future(message.complete())
        await asyncio.sleep(0)
        setup.broker.delay = 0.0
        await completing

    await queue.consume(handler, on_error=lambda message, error: failures.append(error), until_empty=True)
    assert "renew 1" in setup.broker.requests
    assert failures == []
    assert setup.emitted(LockEnded) == []
    assert await queue.stats() == Stats()


@in_virtual_time
async def test_slow_handlers_prefetch_little(setup: QueueSetup) -> None:
    queue, log = setup.queue(), Log(seconds=10.0)
    await fill(queue, 50)
    async with setup.consuming(queue, log, concurrency=3):
        await asyncio.sleep(25.0)
        assert (await queue.stats()).locked <= 4


@in_virtual_time
async def test_large_bodies_in_hand_are_bounded_by_their_bytes(setup: QueueSetup) -> None:
    queue, log = setup.queue(), Log(seconds=10.0)
    await queue.send_batch([Outgoing(bytes(1_000))] * 50)
    async with setup.consuming(queue, log, concurrency=20, max_bytes=5_000):
        await asyncio.sleep(1.0)
        assert (await queue.stats()).locked == 20  # nothing is known of the bodies before the first claim
        most = 0
        for _ in range(100):
            await asyncio.sleep(1.0)
            stats = await queue.stats()
            if stats.ready + stats.locked <= 30:
                most = max(most, stats.locked)
        assert most == 5
        assert (await queue.stats()).ready == 0


@in_virtual_time
async def test_later_messages_wake_the_consumer(setup: QueueSetup) -> None:
    queue, log = setup.queue(), Log()
    async with setup.consuming(queue, log):
        await asyncio.sleep(100.0)
        polls = len(setup.broker.requests)
        await queue.send(b"a")
        await asyncio.sleep(0.01)
        assert log.ended == [b"a"]
        await queue.send(b"b", delay=7.0)
        await asyncio.sleep(6.99)
        assert log.ended == [b"a"]
        await asyncio.sleep(0.1)
        assert log.ended == [b"a", b"b"]
    assert polls < 25  # an idle consumer polls rarely


@in_virtual_time
async def test_a_failure_is_retried_with_growing_delays_and_then_dead(setup: QueueSetup) -> None:
    queue = setup.queue(max_deliveries=4)
    await queue.send(b"failing", id="p")
    tried_at: list[float] = []
    hooked: list[str] = []

    async def handler(message: Message) -> None:
        tried_at.append(setup.clock.now())
        raise ValueError(f"try {message.delivery_count}")

    async def hook(message: Message, error: BaseException) -> None:
        hooked.append(f"{message.id} {error}")

    policy = RetryPolicy(initial=1.0, factor=3.0, jitter=0.0)
    async with setup.consuming(queue, handler, retry=policy, on_error=hook):
        await asyncio.sleep(60.0)
    gaps = [later - earlier for earlier, later in pairwise(tried_at)]
    assert gaps == pytest.approx([1.0, 3.0, 9.0], abs=0.1)
    assert hooked == ["p try 1", "p try 2", "p try 3", "p try 4"]
    [dead] = await queue.dead_letters.peek()
    assert (dead.id, dead.reason, dead.delivery_count) == ("p", "max_deliveries", 4)
    assert dead.error is not None
    assert (dead.error.type, dead.error.message) == ("ValueError", "try 4")
    assert "raise ValueError" in dead.error.traceback
    assert [one.error and one.error.message for one in dead.history] == ["try 1", "try 2", "try 3", "try 4"]
    assert len(setup.emitted(MessageFailed)) == 4
    assert [one.reason for one in setup.emitted(MessageDied)] == ["max_deliveries"]


@pytest.mark.parametrize("how", ["return", "raise"])
def test_retry_and_reject_are_values_and_exceptions(how: str) -> None:
    @in_virtual_time
    async def test(setup: QueueSetup) -> None:
        queue = setup.queue()
        await queue.send_batch([Outgoing(b"retry"), Outgoing(b"reject"), Outgoing(b"never")])
        seen: list[tuple[bytes, float]] = []

        async def handler(message: Message) -> object:
            seen.append((message.body, setup.clock.now()))
            if message.body == b"never":
                raise KeyError("k")
            if message.delivery_count > 1:
                return None
            what = Retry(delay=33.0) if message.body == b"retry" else Reject("unreadable", "no JSON")
            if how == "raise":
                try:
                    raise OSError("below")
                except OSError as error:
                    raise what from error
            return what

        policy = RetryPolicy(never=(LookupError,))
        async with setup.consuming(queue, handler, concurrency=1, retry=policy):
            await asyncio.sleep(40.0)
        assert [body for body, _ in seen] == [b"retry", b"reject", b"never", b"retry"]
        assert seen[3][1] == pytest.approx(33.0, abs=0.2)
        rejected, never = await queue.dead_letters.peek()
        assert (rejected.reason, rejected.description, rejected.delivery_count) == ("unreadable", "no JSON", 1)
        assert (rejected.error is not None and rejected.error.type) == (how == "raise" and "OSError")
        assert (never.reason, never.error and never.error.message) == ("KeyError", "'k'")

    test()


@in_virtual_time
async def test_a_handler_may_settle_by_itself(setup: QueueSetup) -> None:
    queue = setup.queue()
    await fill(queue, 3)

    async def handler(message: Message) -> None:
        if message.body == b"0":
            await message.complete()
        elif message.body == b"1":
            await message.defer()
        else:
            await message.dead_letter("mine")
            raise ValueError("after that, it changes nothing")

    await queue.consume(handler, until_empty=True)
    assert await queue.stats() == Stats(deferred=1, dead=1)
    assert (await queue.dead_letters.peek())[0].reason == "mine"


@in_virtual_time
async def test_without_auto_complete_the_handler_decides(setup: QueueSetup) -> None:
    queue = setup.queue()
    await fill(queue, 3)
    kept: list[Message] = []

    async def handler(message: Message) -> None:
        if message.body == b"0":
            await message.complete()
        else:
            kept.append(message)

    async with setup.consuming(queue, handler, auto_complete=False, max_hold=200.0):
        await asyncio.sleep(100.0)  # longer than the lock, which is renewed
        assert (await queue.stats()).locked == 2
        await kept[0].complete()
        assert (await queue.stats()).locked == 1
        await asyncio.sleep(150.0)  # beyond max_hold, it has no consumer
        assert len(kept) == 3
        with pytest.raises(LockLost):
            await kept[1].complete()
    assert (await queue.stats()).ready == 1  # what was kept was given back


@in_virtual_time
async def test_messages_kept_beyond_max_hold_are_released(setup: QueueSetup) -> None:
    queue, kept = setup.queue(), list[Message]()
    await fill(queue, 2)

    async def handler(message: Message) -> None:
        kept.append(message)

    async with asyncio.timeout(60.0):
        await queue.consume(handler, auto_complete=False, max_hold=50.0, until_empty=True, sigterm=False)
    assert len(kept) == 2
    assert 50.0 <= setup.clock.now() < 52.0
    assert [one.why for one in setup.emitted(LockEnded)] == ["max_hold", "max_hold"]
    assert setup.emitted(HandlerOverran) == []  # they ended long ago
    assert (await queue.stats()).locked == 2  # not given back: their handlers may still act on them
    await asyncio.sleep(LOCK)
    with pytest.raises(LockLost):
        await kept[0].complete()


@in_virtual_time
async def test_a_drain_waits_for_what_is_kept_until_it_is_lost(setup: QueueSetup) -> None:
    queue, kept = setup.queue(), list[Message]()
    await fill(queue, 1)

    async def handler(message: Message) -> None:
        kept.append(message)

    consuming = asyncio.ensure_future(queue.consume(handler, auto_complete=False, sigterm=False))
    await asyncio.sleep(1.0)
    setup.broker.renewing = False
    await queue.drain(grace=500.0)
    await consuming
    assert setup.clock.now() < LOCK  # when the lock could not be trusted any more
    assert setup.emitted(HandlerOverran) == []


@in_virtual_time
async def test_locks_are_renewed_while_handlers_run(setup: QueueSetup) -> None:
    queue, log = setup.queue(), Log(seconds=100.0)
    await fill(queue, 20)
    await queue.consume(log, concurrency=20, until_empty=True)
    assert sorted(log.ended) == sorted(log.began)
    assert len(log.ended) == 20
    assert "renew 20" in setup.broker.requests  # in one request
    assert len([one for one in setup.broker.requests if one.startswith("renew")]) < 20


@in_virtual_time
async def test_a_handler_that_takes_too_long_is_cancelled_and_abandoned(setup: QueueSetup) -> None:
    queue, log = setup.queue(max_deliveries=2), Log(seconds=1_000.0)
    await queue.send(b"slow")
    async with setup.consuming(queue, log, max_hold=50.0, retry=AT_ONCE):
        await asyncio.sleep(51.0)
        assert log.cancelled == [b"slow"]
        await asyncio.sleep(100.0)
    [dead] = await queue.dead_letters.peek()
    assert dead.delivery_count == 2
    assert dead.error is not None
    assert "max_hold" in dead.error.message
    assert {one.why for one in setup.emitted(LockEnded)} == {"max_hold"}


@in_virtual_time
async def test_a_handler_is_cancelled_before_its_lock_ends(setup: QueueSetup) -> None:
    queue, other = setup.queue(), setup.queue()
    await queue.send(b"a")
    log, hooked = Log(seconds=100.0), list[BaseException]()
    setup.broker.renewing = False
    async with setup.consuming(queue, log, on_error=lambda message, error: hooked.append(error)):
        async with asyncio.timeout(LOCK):
            while not log.cancelled:
                await asyncio.sleep(0.1)
        assert setup.clock.now() < LOCK
        assert await other.receive() == []
        assert isinstance(hooked[0], LockLost)
    assert [one.why for one in setup.emitted(LockEnded)] == ["unanswered"]


@in_virtual_time
async def test_a_message_lost_before_its_handler_stops_is_reported_once(setup: QueueSetup) -> None:
    for why in ("unanswered", "max_hold"):
        queue = setup.queue(why)
        await queue.send(b"a")
        hooked: list[BaseException] = []

        async def stubborn(message: Message) -> None:
            ending = asyncio.ensure_future(asyncio.sleep(2 * LOCK))
            while not ending.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({ending})
            raise asyncio.CancelledError

        def note(
            message: Message, error: BaseException, hooked: list[BaseException] = hooked, queue: Queue = queue
        ) -> None:
            hooked.append(error)
            queue.pause()

        setup.broker.renewing = why == "max_hold"
        most = 5.0 if why == "max_hold" else 1_000.0
        async with setup.consuming(queue, stubborn, on_error=note, concurrency=1, max_hold=most):
            await asyncio.sleep(2 * LOCK + 5.0)
        assert [type(error) for error in hooked] == [LockLost]
        assert setup.emitted(MessageFailed) == []
        assert (await queue.stats()).ready == 1


@in_virtual_time
async def test_a_lock_that_was_lost_cancels_at_once_and_discards_the_result(setup: QueueSetup) -> None:
    queue = setup.queue()
    await queue.send(b"a", id="a")
    stubborn: list[str] = []

    async def handler(message: Message) -> None:
        try:
            await asyncio.sleep(1_000.0)
        except asyncio.CancelledError:
            stubborn.append("went on")  # and returns normally

    async with setup.consuming(queue, handler):
        await asyncio.sleep(1.0)
        [row] = setup.broker._memory.queues["orders"].live.messages.values()
        row.token = 999  # another consumer has it
        await asyncio.sleep(15.0)
        assert stubborn == ["went on"]
        assert (await queue.stats()).locked == 1
        row.token = 0
    assert [one.why for one in setup.emitted(LockEnded)] == ["denied"]


@in_virtual_time
async def test_a_request_whose_answer_is_lost_is_repeated(setup: QueueSetup) -> None:
    queue, log = setup.queue(), Log()
    hooked: list[BaseException] = []
    await fill(queue, 5)
    async with setup.consuming(queue, log, on_error=lambda message, error: hooked.append(error)):
        await asyncio.sleep(0.0)
        setup.broker.loses_answers = True
        await asyncio.sleep(10.0)
        setup.broker.loses_answers = False
        await asyncio.sleep(60.0)
    assert set(log.ended) == {b"0", b"1", b"2", b"3", b"4"}
    assert await queue.stats() == Stats()


@in_virtual_time
async def test_a_cut_connection_is_waited_out(setup: QueueSetup) -> None:
    queue, log = setup.queue(), Log(seconds=1.0)
    await fill(queue, 30)
    async with setup.consuming(queue, log, concurrency=3):
        for _ in range(5):
            await asyncio.sleep(2.5)
            setup.broker.cut = True
            await asyncio.sleep(4.0)
            setup.broker.cut = False
        await asyncio.sleep(30.0)
    assert sorted(set(log.ended), key=int) == [b"%d" % number for number in range(30)]
    assert len(log.ended) == 30  # each once: a verdict is kept until it is answered, its lock meanwhile
    assert await queue.stats() == Stats()


def _handles(message: Received) -> None:
    """Do nothing; runs in a process."""


def test_the_deadline_of_a_process_is_what_remains_of_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, timing = ManualClock(100.0), Timing(LOCK)

    class RenewalThread:
        def __init__(self) -> None:
            self.timing = timing

        def remaining(self, message: Message) -> float:
            clock.advance(3.0)  # a thread may be delayed anywhere
            return 20.0

    monkeypatch.setattr("tenure._queue.handler_process.CLOCK", clock)
    served = handlers.Handlers(_handles, "process", 1, RenewalThread())
    asked: Any = None  # only its delivery tracker is used
    assert served._until(asked) == 100.0 + 20.0 - handlers.KILL_SHARE * timing.grace


@in_virtual_time
async def test_after_a_failure_no_further_handler_begins(setup: QueueSetup) -> None:
    queue = setup.queue()
    fast = [b"fast"] * 100
    await queue.send_batch([Outgoing(body) for body in [*fast, b"slow", b"waits", *fast]])
    has_failed, is_cancelled, late = False, asyncio.Event(), []

    async def refused(settlements: Sequence[Settlement]) -> Sequence[Settled | Lapsed]:
        nonlocal has_failed
        has_failed = True
        raise ConfigError("the broker has no such verb")

    async def handler(message: Message) -> None:
        if has_failed:
            late.append(message.body)
        match message.body:
            case b"slow":
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(1_000.0)
                setup.broker.settle = refused  # type: ignore[method-assign]
                is_cancelled.set()
                await asyncio.sleep(3.0)  # it cleans up
            case b"waits":
                await is_cancelled.wait()
            case _:
                await asyncio.sleep(0.001)

    with pytest.raises(ConfigError, match="no such verb"):
        await queue.consume(handler, concurrency=2, prefetch=50, max_hold=5.0, sigterm=False)
    assert late == []
