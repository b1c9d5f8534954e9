"""The end of what consists of parts: each is closed, also if another fails, or if the caller gives up meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

Close = Callable[[], Awaitable[object]]


async def close_in_order(*parts: Close) -> None:
    """Close the first of *parts*, then the next; raise the error of the last that failed, or the cancellation."""
    async with AsyncExitStack() as stack:
        for close in reversed(parts):
            stack.push_async_callback(close)


async def close_together(*parts: Close) -> None:
    """Close *parts* at once; raise the error of the first that failed, or the cancellation, when all have ended.

    If the caller is cancelled, so is what has begun; and all have begun by then, which ``gather`` doesn't promise: it
    cancels tasks before their first step, and those close nothing.
    """
    closing = [asyncio.ensure_future(_call(close)) for close in parts]
    try:
        if closing:
            await asyncio.wait(closing)
    finally:
        for task in closing:
            task.cancel()
        ends = await asyncio.gather(*closing, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end


async def _call(close: Close) -> None:
    await close()
