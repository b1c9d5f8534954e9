"""The end of what consists of parts: each is closed, also if one before fails, or if the caller gives up meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack


async def close_in_order(*parts: Callable[[], Awaitable[object]]) -> None:
    """Call each of *parts*, one after the other; raise the last error, or the cancellation, when all have ended."""
    async with AsyncExitStack() as stack:
        for close in reversed(parts):
            stack.push_async_callback(close)
