"""Calls on another loop: they end with it, fail as the call does, and leave the caller its own cancellation."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tenure._backends.azure_storage.background import Background
from tenure._backends.postgres.functions import QueueFunctions
from tenure._backends.postgres.housekeeping import Housekeeping
from tenure._runtime.on_loop import on_loop
from tests.durations import until


@contextmanager
def other_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run a loop on another thread; at its end, what still runs there is cancelled."""
    started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = concurrent.futures.Future()

    async def run() -> None:
        may_end = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), may_end))
        await may_end.wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    loop, may_end = started.result()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(may_end.set)
        thread.join()


@contextmanager
def blocked(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Block *loop* inside the block."""
    is_blocked, may_go_on = threading.Event(), threading.Event()

    def block() -> None:
        is_blocked.set()
        may_go_on.wait()

    loop.call_soon_threadsafe(block)
    is_blocked.wait()
    try:
        yield
    finally:
        may_go_on.set()


class Act:
    """A call that notes on which loop it began, and how it ended."""

    def __init__(self) -> None:
        self.began_on: asyncio.AbstractEventLoop | None = None
        self.ended: list[str] = []

    async def __call__(self) -> None:
        self.began_on = asyncio.get_running_loop()
        self.ended.append("done")

    async def hang(self) -> None:
        self.began_on = asyncio.get_running_loop()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise


async def fail() -> None:
    raise OSError("gone")


async def test_a_call_is_made_on_the_loop_that_is_named() -> None:
    act, here = Act(), Act()
    with other_loop() as loop:
        await on_loop(loop, act)
        assert act.began_on is loop
    await on_loop(asyncio.get_running_loop(), here)
    assert here.began_on is asyncio.get_running_loop()


async def test_what_the_call_raises_is_raised() -> None:
    with other_loop() as loop:
        for one in (loop, asyncio.get_running_loop()):
            with pytest.raises(OSError, match="gone"):
                await on_loop(one, fail)


async def test_nothing_is_done_on_a_loop_that_has_stopped() -> None:
    act, loop = Act(), asyncio.new_event_loop()
    await on_loop(loop, act)
    loop.close()
    await on_loop(loop, act)
    assert act.began_on is None


async def test_a_loop_that_is_closed_just_before_the_call_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    act, loop = Act(), asyncio.new_event_loop()
    loop.close()
    monkeypatch.setattr(loop, "is_running", lambda: True)  # as it was when it was asked
    await on_loop(loop, act)
    gc.collect()  # it would warn of a coroutine that was never awaited
    assert act.began_on is None


async def test_a_call_that_its_loop_cancels_has_ended() -> None:
    act = Act()
    with other_loop() as loop:
        calling = asyncio.ensure_future(on_loop(loop, act.hang))
        await until(lambda: act.began_on)
    await calling
    assert act.ended == ["cancelled"]


async def test_a_call_is_cancelled_after_its_limit() -> None:
    act = Act()
    with other_loop() as loop:
        await on_loop(loop, act.hang, within=0.0)
        await until(lambda: act.ended)
    assert act.ended == ["cancelled"]


async def test_a_blocked_loop_is_waited_for_up_to_the_limit_and_makes_the_call_later() -> None:
    act = Act()
    with other_loop() as loop:
        with blocked(loop):
            await on_loop(loop, act.hang, within=0.0)
            assert act.began_on is None
        await until(lambda: act.ended)  # what it has to close is closed, as far as one step does it
    assert act.ended == ["cancelled"]


async def test_the_cancellation_of_the_caller_is_its_own_and_the_calls() -> None:
    act = Act()
    with other_loop() as loop:
        calling = asyncio.ensure_future(on_loop(loop, act.hang))
        await until(lambda: act.began_on)
        calling.cancel()
        await asyncio.wait({calling})
        assert calling.cancelled()
        await until(lambda: act.ended)
    assert act.ended == ["cancelled"]


async def test_a_failure_that_the_caller_does_not_wait_for_any_more_is_not_reported() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    with other_loop() as loop:
        calling = asyncio.ensure_future(on_loop(loop, fail))
        await asyncio.sleep(0)  # it waits now
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()  # the call has failed; nobody knows here yet
        calling.cancel()
        await asyncio.wait({calling})
        assert calling.cancelled()
    del calling
    gc.collect()
    assert reported == []


async def test_a_loop_that_was_closed_under_a_call_is_not_told_to_cancel_it(caplog: pytest.LogCaptureFixture) -> None:
    loop, begun = asyncio.new_event_loop(), threading.Event()
    hanging: asyncio.Future[None] = loop.create_future()

    async def hang() -> None:
        begun.set()
        with suppress(GeneratorExit):  # as its loop is gone
            await hanging

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    calling = asyncio.ensure_future(on_loop(loop, hang))
    await until(begun.is_set)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    [left] = asyncio.all_tasks(loop)
    left._log_destroy_pending = False  # type: ignore[attr-defined]  # it is, on purpose
    loop.close()
    calling.cancel()
    await asyncio.wait({calling})
    assert calling.cancelled()
    assert not caplog.records


def housekeeping() -> Housekeeping:
    class NeverAnswered(QueueFunctions):
        def __init__(self) -> None: ...

        async def call(self, *_: object, **__: object) -> Any:
            await asyncio.Event().wait()

    return Housekeeping(NeverAnswered(), 0)


def begin_in_background() -> Callable[[], Awaitable[None]]:
    background = Background()
    background.keep(asyncio.ensure_future(asyncio.Event().wait()))
    return background.close


def begin_housekeeping() -> Callable[[], Awaitable[None]]:
    chores = housekeeping()
    chores.note_claim()
    return chores.close


@pytest.mark.parametrize("begin", [begin_in_background, begin_housekeeping])
async def test_a_close_can_be_given_up_while_other_loops_are_blocked(
    begin: Callable[[], Callable[[], Awaitable[None]]],
) -> None:
    async def call_begin() -> Callable[[], Awaitable[None]]:
        return begin()

    with other_loop() as loop:
        close = asyncio.run_coroutine_threadsafe(call_begin(), loop).result()
        with blocked(loop):
            closing: asyncio.Future[None] = asyncio.ensure_future(close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait({closing})
            assert closing.cancelled()
