"""Cancellation at any moment: locks are released, nothing is renewed for ever, and no task is cancelled later."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

import tenure
from tenure._backend import connect
from tenure._queue.lock_renewer import LockRenewer
from tenure._queue.message import Stats
from tenure._runtime.renewal_thread import RenewalThread
from tests.durations import PATIENCE, until

MOMENTS = 16
"""Starting takes at least so many turns of the loop."""


@asynccontextmanager
async def nothing_is_renewed() -> AsyncIterator[None]:
    """Check that no locks are renewed at the end."""
    before = {id(one): one for one in gc.get_objects() if type(one) is LockRenewer}

    def kept() -> list[LockRenewer]:
        found = [one for one in gc.get_objects() if type(one) is LockRenewer and id(one) not in before]
        return [one for one in found if not one._ended]

    yield
    await until(lambda: not kept())


@pytest.fixture
def renewal_thread() -> Any:
    """The process's renewal thread, which runs in a thread of its own."""
    renewal_thread = RenewalThread.enter()
    yield renewal_thread
    renewal_thread.leave()


async def nothing() -> None:
    """Do nothing: when it has run, everything before it has."""


async def cancel_at(moment: int, task: asyncio.Task[Any], renewal_thread: RenewalThread) -> None:
    """Cancel *task* after so many turns of the loop, when the renewal thread has answered, before the
    answer is received."""
    for _ in range(moment):
        await asyncio.sleep(0)
    renewal_thread.call_blocking(nothing)
    task.cancel()


@pytest.mark.parametrize("how", ["once, while closing", "repeatedly"])
async def test_a_consumer_that_is_cancelled_keeps_no_lock(how: str) -> None:
    async with nothing_is_renewed(), connect("memory:") as backend:
        queue = backend.queue("orders", lock=1.0)
        await queue.send(b"a")
        began, ended = asyncio.Event(), asyncio.Event()

        async def handler(message: tenure.Message) -> None:
            began.set()
            while not ended.is_set():
                with suppress(asyncio.CancelledError):
                    await ended.wait()

        consumer = queue.consumer(handler, sigterm=False)
        running = asyncio.ensure_future(consumer.run())
        await began.wait()
        if how == "repeatedly":  # as by anyio
            while not running.done():
                running.cancel()
                await asyncio.sleep(0)
        else:
            consumer.drain(grace=0.1)
            assert consumer._driver is not None
            await asyncio.wait({consumer._driver.ended})
            for _ in range(3):
                await asyncio.sleep(0)
            assert not running.done()  # it waits for its handlers
            running.cancel()
            await asyncio.wait({running})
        assert running.cancelled()
        ended.set()
        assert (await queue.receive(wait=PATIENCE))[0].delivery_count > 1  # its lock has run out


async def test_a_consumer_may_be_cancelled_while_it_begins(renewal_thread: RenewalThread) -> None:
    async with nothing_is_renewed(), connect("memory:") as backend:
        for moment in range(MOMENTS):
            running = asyncio.ensure_future(backend.queue("orders", lock=30).consume(print, sigterm=False))
            await cancel_at(moment, running, renewal_thread)
            await asyncio.wait({running})
            assert running.cancelled()


async def test_a_task_that_fails_to_enter_a_session_is_not_cancelled_later(renewal_thread: RenewalThread) -> None:
    async with nothing_is_renewed(), connect("memory:") as backend:
        queue = backend.queue("orders", lock=30)
        entered = 0

        async def enters(name: str) -> None:
            nonlocal entered
            session = queue.session(name)
            try:
                await session.__aenter__()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                await asyncio.sleep(1.0)
            else:
                entered += 1
                with pytest.raises(asyncio.CancelledError):
                    async with asyncio.timeout(PATIENCE):
                        await asyncio.Event().wait()
                await session.__aexit__(None, None, None)

        for moment in range(MOMENTS):
            await queue.send(b"a", session=f"s{moment}")
        tasks = [asyncio.ensure_future(enters(f"s{moment}")) for moment in range(MOMENTS)]
        for task in tasks:
            await cancel_at(1, task, renewal_thread)
        await asyncio.gather(*tasks)
        for moment in range(MOMENTS):
            async with queue.session(f"s{moment}", wait=0.0):
                pass
        assert entered < MOMENTS


@pytest.mark.parametrize("cancels", [1, 3])
async def test_a_session_that_is_left_by_a_cancellation_is_free(cancels: int, renewal_thread: RenewalThread) -> None:
    async with nothing_is_renewed(), connect("memory:") as backend:
        queue = backend.queue("orders", lock=30)
        await queue.send(b"a", session="s")
        inside, go_on = asyncio.Event(), threading.Event()

        async def uses() -> None:
            async with queue.session():
                inside.set()
                await asyncio.sleep(0.05)

        using = asyncio.ensure_future(uses())
        await inside.wait()
        renewal_thread.loop.call_soon_threadsafe(go_on.wait, PATIENCE)  # it is busy
        await asyncio.sleep(0.1)
        for _ in range(cancels):
            using.cancel()
            await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait({using})
        assert using.cancelled()
        async with queue.session(wait=0.0) as session:
            [message] = await session.receive()
            assert message.delivery_count == 1
            await message.complete()
        assert await queue.stats() == Stats()
