"""Parts are closed in their order; none is left out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from tenure._runtime.closing import close_in_order, close_together


class Parts:
    def __init__(self) -> None:
        self.closed: list[str] = []
        self.hangs = asyncio.Event()

    def part(self, name: str, fails: Exception | None = None) -> Callable[[], Awaitable[None]]:
        async def close() -> None:
            self.closed.append(name)
            if fails is not None:
                raise fails

        return close

    async def hang(self) -> None:
        self.hangs.set()
        await asyncio.Event().wait()


async def test_parts_are_closed_in_their_order() -> None:
    parts = Parts()
    await close_in_order(parts.part("hints"), parts.part("queues"), parts.part("connections"))
    assert parts.closed == ["hints", "queues", "connections"]


async def test_a_part_that_fails_leaves_none_open() -> None:
    parts = Parts()
    with pytest.raises(OSError, match="gone"):
        await close_in_order(parts.part("hints", OSError("gone")), parts.part("connections"))
    assert parts.closed == ["hints", "connections"]


async def test_a_caller_that_gives_up_leaves_none_open() -> None:
    parts = Parts()
    closing = asyncio.ensure_future(close_in_order(parts.hang, parts.part("queues"), parts.part("connections")))
    await parts.hangs.wait()
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    assert parts.closed == ["queues", "connections"]


async def test_all_parts_are_closed_at_once_and_one_that_fails_ends_no_other() -> None:
    parts, may_end = Parts(), asyncio.Event()

    async def close_last() -> None:
        await may_end.wait()
        parts.closed.append("last")

    async def fail() -> None:
        may_end.set()
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await close_together(close_last, fail)
    assert parts.closed == ["last"]


async def test_nothing_is_closed_together() -> None:
    await close_together()


async def cancelled_as_it_begins(close: Callable[..., Awaitable[object]]) -> list[str]:
    """Return the parts that were closed by *close* although its caller gave up before they could begin."""
    parts = Parts()

    async def drop() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            parts.closed.append("dropped")

    with suppress(TimeoutError):
        async with asyncio.timeout(0):  # it cancels before a task that begins here takes its first step
            await close(drop, drop)
    return parts.closed


async def test_a_caller_that_gives_up_at_once_leaves_none_open() -> None:
    assert await cancelled_as_it_begins(close_together) == ["dropped", "dropped"]


async def close_by_gathering(*parts: Callable[[], Awaitable[object]]) -> None:
    await asyncio.gather(*(part() for part in parts))


async def test_gathering_would_leave_them_open() -> None:
    assert await cancelled_as_it_begins(close_by_gathering) == []
