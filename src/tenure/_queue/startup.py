"""The start of a consumer: waits for a store that can be asked."""

from __future__ import annotations

import asyncio

from tenure._jitter import later
from tenure._queue.context import QueueContext
from tenure._queue.lock_group import NEVER
from tenure.errors import Unavailable
from tenure.events import (
    BrokerAnswered,
    BrokerAwaited,
)

PAUSE_MIN, PAUSE_MAX = 0.1, 2.0
"""Seconds between the questions of a consumer whose store is not there yet: short at first, then longer."""


async def wait_until_ready(
    context: QueueContext, drained: asyncio.Event, stop: asyncio.Event | None, wait: float | None
) -> bool:
    """Make *context* ready for a consumer; False if that is *drained* or stopped before, whatever the store does.

    Raises:
        Unavailable: There was no answer within *wait* seconds.
        ConfigError: The store can never be used as it is.
    """
    events = [drained, stop] if stop is not None else [drained]
    ready = asyncio.ensure_future(_readied(context, wait))
    tasks = [ready, *(asyncio.ensure_future(event.wait()) for event in events)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if any(event.is_set() for event in events):
        return False
    ready.result()
    return True


async def _readied(context: QueueContext, wait: float | None) -> None:
    """Make *context* ready, asking as long as there is no answer, for *wait* seconds at most; for any time if None."""
    began = context.clock.now()
    why, is_reported = "the store did not answer", False
    pause, left = PAUSE_MIN, wait
    while True:
        # With no time to wait, the store's own time limit counts.
        limit = asyncio.timeout(left if left and left < NEVER else None)
        try:
            async with limit:
                was_ready = context.is_ready
                await context.ready()
                if was_ready and wait is not None:  # then nothing was asked
                    await context.broker.settings(context.name)
            break
        except (Exception, asyncio.CancelledError) as error:
            if not (limit.expired() and isinstance(error, TimeoutError)):
                if (found := context.why_unanswered(error)) is None:
                    raise
                why = found
            waited = context.clock.now() - began
            if wait is not None and waited >= wait:
                if not wait:
                    raise
                raise Unavailable(f"{why} (there was no answer within {wait:g} s)") from error
            if not is_reported:
                is_reported = True
                context.emit(BrokerAwaited(context.clock.now(), context.name, context.holder, why))
        rest = pause if wait is None else min(pause, max(PAUSE_MIN, (wait - waited) / 2))
        await asyncio.sleep(later(rest, context.rng))
        if wait:
            left = max(1e-9, wait - (context.clock.now() - began))
        pause = min(1.5 * pause, PAUSE_MAX)
    if is_reported:
        now = context.clock.now()
        context.emit(BrokerAnswered(now, context.name, context.holder, now - began))
