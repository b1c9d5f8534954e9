"""Misbehaving drivers: errors of their own, cancellations, claims that are too large."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tenure._queue.broker import Claim
from tenure._queue.message import Stats
from tenure._queue.received import Message
from tenure.errors import Unavailable
from tenure.events import (
    BrokerUnanswered,
)
from tenure.testing import until
from tests.application.queue_setup import LOCK, Log, QueueSetup, fill, in_virtual_time


@in_virtual_time
async def test_a_foreign_error_after_something_has_worked_ends_no_consumer(setup: QueueSetup) -> None:
    for sessions in (False, True):
        setup.events.clear()
        queue = setup.queue(f"orders-{sessions}")
        log = Log()
        async with setup.consuming(queue, log, sessions=sessions):
            await queue.send(b"before", session="s" if sessions else None)
            await until(partial(_has_ended, log, b"before"))
            for verb in ("receive", "receive_session", "accept", "settle", "renew"):
                broken = getattr(setup.broker, verb)

                async def fails(*_: Any, verb: str = verb) -> Any:
                    if verb == "settle":
                        raise asyncio.CancelledError  # as a driver may, though no task was cancelled
                    raise RuntimeError("another operation is in progress")

                setattr(setup.broker, verb, fails)
                await queue.send(verb.encode(), session="t" if sessions else None)
                await asyncio.sleep(3.0)
                setattr(setup.broker, verb, broken)
                await until(partial(_has_ended, log, verb.encode()))
        assert await queue.stats() == Stats()
        assert setup.emitted(BrokerUnanswered)


def _has_ended(log: Log, body: bytes) -> bool:
    return body in log.ended


@in_virtual_time
async def test_a_foreign_error_before_anything_has_worked_ends_it(setup: QueueSetup) -> None:
    async def broken(queue: str, limit: int, lock: float) -> Claim:
        raise RuntimeError("this is no queue")

    setup.broker.receive = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no queue"):
        await setup.queue().consume(Log())


@in_virtual_time
async def test_a_cancelled_error_without_a_cancelled_task_is_no_answer(setup: QueueSetup) -> None:
    """A driver may raise one of its own, even at the first request."""
    queue = setup.queue()
    log = Log(LOCK)
    for verb in ("receive", "renew", "settle"):
        answering = getattr(setup.broker, verb)

        async def fails(*_: Any, verb: str = verb, answering: Any = answering) -> Any:
            setattr(setup.broker, verb, answering)
            raise asyncio.CancelledError

        setattr(setup.broker, verb, fails)
    async with setup.consuming(queue, log, concurrency=1, prefetch=2):
        await fill(queue, 3)
        await asyncio.sleep(5 * LOCK)
    assert log.ended == [b"0", b"1", b"2"]
    assert await queue.stats() == Stats()


@in_virtual_time
async def test_a_worker_that_is_cancelled_in_its_error_hook_leaves_nothing_locked(setup: QueueSetup) -> None:
    queue = setup.queue()
    worker: asyncio.Task[Any] | None = None
    handled = 0

    async def handler(message: Message) -> None:
        nonlocal worker, handled
        worker, handled = asyncio.current_task(), handled + 1
        if handled == 1:
            raise ValueError("the first time")

    async def on_error(message: Message, error: BaseException) -> None:
        assert worker is not None
        worker.cancel()
        await asyncio.sleep(1.0)

    async with setup.consuming(queue, handler, concurrency=1, on_error=on_error):
        await fill(queue, 2)
        await asyncio.sleep(5 * LOCK)
    assert handled == 3
    assert await queue.stats() == Stats()


@in_virtual_time
async def test_a_claim_that_is_too_large_is_halved_until_it_is_answered(setup: QueueSetup) -> None:
    queue = setup.queue()
    await fill(queue, 40)
    limits: list[int] = []
    receive = setup.broker.receive

    async def slow(queue: str, limit: int, lock: float) -> Claim:
        limits.append(limit)
        if limit > 2:
            raise Unavailable("no answer within a second: too much")
        return await receive(queue, limit, lock)

    setup.broker.receive = slow  # type: ignore[method-assign]
    log = Log()
    await queue.consume(log, concurrency=16, until_empty=True)
    assert len(log.ended) == 40
    assert limits[:4] == [16, 8, 4, 2]
    assert await queue.stats() == Stats()
