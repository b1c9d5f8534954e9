"""Sends messages; and has the requests that wait for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from tenure._queue.context import QueueContext
from tenure._queue.outgoing import Outgoing, checked

if TYPE_CHECKING:
    from tenure._queue.requests import Requests


class Producer:
    """Sends to one queue."""

    def __init__(self, context: QueueContext) -> None:
        self._context = context

    async def send(self, message: Outgoing) -> str:
        """Send one message; return its id once the store has it."""
        context = self._context
        await context.ready()
        ready = checked((message,), context.settings.body_max, context.broker.traits.body_max)
        send = context.broker.send if context.telemetry is None else self._send_observed
        ids = await send(context.name, ready)
        if context.expected:
            await context.stay_ready()
        return ids[0]

    async def send_batch(self, messages: Iterable[Outgoing]) -> list[str]:
        """Send many messages in one step; return their ids once the store has them."""
        context = self._context
        await context.ready()
        ready = checked(list(messages), context.settings.body_max, context.broker.traits.body_max)
        if not ready:
            return []
        send = context.broker.send if context.telemetry is None else self._send_observed
        ids = await send(context.name, ready)
        if context.expected:
            await context.stay_ready()
        return list(ids)

    async def _send_observed(self, queue: str, messages: Sequence[Outgoing]) -> Sequence[str]:
        context = self._context
        assert context.telemetry is not None
        begun = context.clock.now()
        with (
            nullcontext(messages)
            if context.tracing is None
            else context.tracing.sending(queue, list(messages)) as ready
        ):
            ids = await context.broker.send(queue, ready)
        context.telemetry.sent(queue, len(ids), context.clock.now() - begun)
        return ids


class OpenRequests:
    """The requests of one backend: those of each queue on each event loop have a reply queue of their own."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, asyncio.AbstractEventLoop], Requests] = {}

    def __iter__(self) -> Iterator[Requests]:
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def here(self, context: QueueContext) -> Requests:
        """Return the requests to a queue from the running loop."""
        key = context.name, asyncio.get_running_loop()
        if key not in self._open:
            for name, loop in list(self._open):
                if loop.is_closed():
                    self._open.pop((name, loop), None)
            from tenure._queue.requests import Requests

            self._open[key] = Requests(context)
        return self._open[key]

    def take(self, queue: str | None = None) -> list[Requests]:
        """Return the requests to *queue*, or all of them, and keep them no longer: they are to be closed."""
        keys = [key for key in list(self._open) if queue in (None, key[0])]
        return [self._open.pop(key) for key in keys]
