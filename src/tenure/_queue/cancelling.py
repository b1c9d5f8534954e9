"""Cancellations that come while something must end in an orderly way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def is_being_closed(task: asyncio.Task[Any]) -> bool:
    """Return whether *task* is being discarded after the end of its loop, instead of running."""
    try:
        return asyncio.current_task() is not task
    except RuntimeError:
        return True


async def undo_cancellations(task: asyncio.Task[Any]) -> None:
    """Undo cancellations of *task*, the current one, that its handler has caused by itself."""
    while task.cancelling() > 0:
        task.uncancel()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)  # one may still be on its way


async def wait_through_cancellation(
    work: asyncio.Future[Any], on_cancel: Callable[[], object] | None = None
) -> asyncio.CancelledError | None:
    """Wait for the end of *work*, however often we are cancelled meanwhile.

    Returns:
        The first cancellation, upon which *on_cancel* was called at once. The caller raises it at its end.
    """
    cancelled = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            if cancelled is None:
                cancelled = error
                if on_cancel is not None:
                    on_cancel()
    if work.cancelled():  # the loop is ending, and with it every task on it
        return cancelled or asyncio.CancelledError()
    work.result()
    return cancelled
