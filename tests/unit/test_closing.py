"""Parts are closed in their order; none is left out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tenure._runtime.closing import close_in_order


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
