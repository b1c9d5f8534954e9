"""Calls on another event loop, as at the end of what has a part on each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

LOOP_WAIT = 5.0
"""Seconds for which another loop is waited for: it may be blocked."""


async def on_loop(
    loop: asyncio.AbstractEventLoop, act: Callable[[], Awaitable[object]], *, within: float = LOOP_WAIT
) -> None:
    """Call *act* on *loop*, wait until it has ended, and raise what it raises.

    On another loop, it is waited for up to *within* seconds, and cancelled then. If that loop doesn't run any more,
    nothing is done: what belongs to it has ended. If the caller is cancelled, so is *act*, once it has begun.
    """
    if loop is asyncio.get_running_loop():
        await act()
        return
    if not loop.is_running():
        return

    async def run() -> None:
        await act()

    work = run()
    try:
        running = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
    except RuntimeError:  # it was closed just now
        work.close()
        return
    try:
        await asyncio.wait({running}, timeout=within)
        if running.done() and not running.cancelled():
            running.result()
    finally:
        if running.done() or not loop.is_closed():  # a closed loop has nothing left to cancel
            running.cancel()  # if it has failed already, that is not logged as an error that nobody looked at
