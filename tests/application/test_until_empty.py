"""When a consumer with ``until_empty`` ends, and what ``raise_errors`` raises; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

import tenure
from tenure._queue.broker import Broker
from tenure._queue.message import Stats
from tenure.testing import connect_here
from tenure.testing._conformance.harness import FaultyBroker
from tenure.testing.loop import run

KINDS = pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])

DAY = 86_400.0


def in_a_queue(test: Callable[[tenure.Queue, bool], Awaitable[None]], sessions: bool, **settings: float) -> float:
    """Run *test* with a queue of its own, and return how many seconds that took."""

    async def main() -> float:
        async with connect_here("memory:") as backend:
            await test(backend.queue("orders", **settings), sessions)  # type: ignore[arg-type]
            return asyncio.get_running_loop().time()

    return run(main(), limit=DAY)


async def send(queue: tenure.Queue, sessions: bool, *bodies: bytes, delay: float = 0.0) -> None:
    for body in bodies:
        await queue.send(body, session=f"of {body.decode()}" if sessions else None, delay=delay)


@KINDS
@pytest.mark.parametrize("by", ["raises", "Retry", "abandons"])
def test_a_failed_message_is_waited_for(sessions: bool, by: str) -> None:
    async def test(queue: tenure.Queue, sessions: bool) -> None:
        async def handle(message: tenure.Message) -> None:
            if message.delivery_count == 1 or (message.body == b"often" and message.delivery_count < 4):
                match by:
                    case "raises":
                        raise ValueError("not yet")
                    case "Retry":
                        raise tenure.Retry(delay=600)
                    case _:
                        await message.abandon(delay=600)

        await send(queue, sessions, b"once", b"often", b"never")
        policy = tenure.RetryPolicy(initial=600, factor=1, maximum=600, jitter=0)
        await queue.consume(handle, until_empty=True, sessions=sessions, retry=policy, poll_every=float("inf"))
        assert await queue.stats() == Stats()

    assert 1_800 <= in_a_queue(test, sessions) < 1_810


@KINDS
def test_a_dead_letter_is_not_waited_for(sessions: bool) -> None:
    async def test(queue: tenure.Queue, sessions: bool) -> None:
        def handle(message: tenure.Message) -> object:
            return ValueError("never")

        async def handle_here(message: tenure.Message) -> object:
            return handle(message)

        await send(queue, sessions, b"one")
        policy = tenure.RetryPolicy(initial=600, factor=1, maximum=600, jitter=0)
        await queue.consume(handle_here, until_empty=True, sessions=sessions, retry=policy)
        assert await queue.stats() == Stats(dead=1)

    assert 600 <= in_a_queue(test, sessions, max_deliveries=2) < 610


@KINDS
def test_messages_delayed_by_others_are_not_waited_for(sessions: bool) -> None:
    async def test(queue: tenure.Queue, sessions: bool) -> None:
        async def fail_once(message: tenure.Message) -> None:
            if message.delivery_count == 1:
                raise ValueError("not yet")

        await send(queue, sessions, b"later", delay=3_600)
        await send(queue, sessions, b"one")
        await queue.consume(fail_once, until_empty=True, sessions=sessions)
        assert await queue.stats() == Stats(delayed=1)

    assert in_a_queue(test, sessions) < 10


def test_a_failed_message_that_another_consumer_has_is_not_waited_for() -> None:
    async def test(queue: tenure.Queue, sessions: bool) -> None:
        async def fail(message: tenure.Message) -> None:
            raise ValueError("not yet")

        await queue.send(b"one")
        policy = tenure.RetryPolicy(initial=100, factor=1, maximum=100, jitter=0)
        ending = asyncio.create_task(queue.consume(fail, until_empty=True, retry=policy))
        await asyncio.sleep(50)
        queue.pause()
        assert len(await queue.receive(wait=100)) == 1
        queue.resume()
        await ending
        assert await queue.stats() == Stats(locked=1)

    assert in_a_queue(test, False) < 110


@KINDS
def test_late_messages_are_handled_with_full_concurrency(sessions: bool) -> None:
    """The queue was empty for a while, but a handler was running."""

    async def test(queue: tenure.Queue, sessions: bool) -> None:
        async def handle(message: tenure.Message) -> None:
            await asyncio.sleep(100)
            if message.body == b"first":
                await send(queue, sessions, b"one", b"two", b"three")

        await send(queue, sessions, b"first")
        await queue.consume(handle, concurrency=3, until_empty=True, sessions=sessions)
        assert await queue.stats() == Stats()

    assert 200 <= in_a_queue(test, sessions) < 210


@KINDS
def test_the_first_exception_of_a_handler_is_raised(sessions: bool) -> None:
    async def test(queue: tenure.Queue, sessions: bool) -> None:
        stopped: list[bytes] = []

        async def handle(message: tenure.Message) -> None:
            match message.body:
                case b"retry" if message.delivery_count == 1:
                    raise tenure.Retry(delay=0)  # verdicts are none
                case b"reject":
                    raise tenure.Reject("odd")
                case b"bad":
                    await asyncio.sleep(100)
                    raise ValueError("as ever")
                case b"slow":
                    try:
                        await asyncio.sleep(3_600)
                    finally:
                        stopped.append(message.body)

        await send(queue, sessions, b"retry", b"reject", b"bad", b"slow")
        with pytest.raises(ValueError, match="as ever") as raised:
            await queue.consume(handle, until_empty=True, raise_errors=True, sessions=sessions)
        assert raised.traceback[-1].name == "handle"
        assert stopped == [b"slow"]
        left = await queue.stats()
        assert (left.ready, left.delayed, left.dead) == (1, 1, 1)  # given back, abandoned, rejected

    assert 100 <= in_a_queue(test, sessions) < 101


@KINDS
def test_a_handler_that_is_cancelled_at_max_hold_raises_too(sessions: bool) -> None:
    async def test(queue: tenure.Queue, sessions: bool) -> None:
        async def handle(message: tenure.Message) -> None:
            await asyncio.sleep(3_600)

        await send(queue, sessions, b"one")
        with pytest.raises(tenure.LockLost, match="max_hold"):
            await queue.consume(handle, max_hold=60, raise_errors=True, sessions=sessions)
        assert (await queue.stats()).delayed == 1

    assert 60 <= in_a_queue(test, sessions) < 61


@KINDS
@pytest.mark.parametrize("by", ["raises", "abandons"])
def test_a_message_abandoned_without_an_answer_is_waited_for(sessions: bool, by: str) -> None:
    """The verdict was carried out, and its repetition gets LockLost."""

    async def test(queue: tenure.Queue, sessions: bool) -> None:
        handled: list[int] = []
        broker, lost = FaultyBroker(queue._context.broker), asyncio.Event()
        queue._context.broker = cast(Broker, broker)

        async def handle(message: tenure.Message) -> None:
            handled.append(message.delivery_count)
            if message.delivery_count > 1:
                return
            lost.set()
            await asyncio.sleep(0.01)
            if by == "raises":
                raise ValueError("not yet")
            await message.abandon(delay=600)

        async def lose_an_answer() -> None:
            await lost.wait()
            async with broker.lose_answer():
                await asyncio.sleep(0.1)

        await send(queue, sessions, b"one")
        losing = asyncio.create_task(lose_an_answer())
        policy = tenure.RetryPolicy(initial=600, factor=1, maximum=600, jitter=0)
        await queue.consume(handle, until_empty=True, sessions=sessions, retry=policy, poll_every=float("inf"))
        await losing
        assert handled == [1, 2]

    assert 600 <= in_a_queue(test, sessions) < 660


@KINDS
def test_a_handler_that_cancels_itself_raises_an_error_that_no_task_group_swallows(sessions: bool) -> None:
    async def test(queue: tenure.Queue, sessions: bool) -> None:
        async def handle(message: tenure.Message) -> None:
            raise asyncio.CancelledError("by itself")

        await send(queue, sessions, b"one")
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.TaskGroup() as group:
                group.create_task(queue.consume(handle, raise_errors=True, sessions=sessions))
        [error] = raised.value.exceptions
        assert isinstance(error, RuntimeError)
        assert "the handler cancelled itself" in str(error)
        assert isinstance(error.__cause__, asyncio.CancelledError)
        assert (await queue.stats()).delayed == 1

    assert in_a_queue(test, sessions) < 1
