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
    from tenure._telemetry.telemetry import Telemetry


class Producer:
    """Sends to one queue."""

    def __init__(self, context: QueueContext) -> None:
        self._context = context

    async def send(self, message: Outgoing) -> str:
        """Send one message; return its id once the store has it."""
        context = self._context
        await context.ready()
        ready = checked((message,), context.settings.body_max, context.broker.traits.body_max)
        if context.telemetry is not None:
            return (await self._send_observed(ready, context.telemetry))[0]
        return (await self._send(ready))[0]

    async def send_batch(self, messages: Iterable[Outgoing]) -> list[str]:
        """Send many messages in one step; return their ids once the store has them."""
        context = self._context
        await context.ready()
        ready = checked(list(messages), context.settings.body_max, context.broker.traits.body_max)
        if ready and context.telemetry is not None:
            return list(await self._send_observed(ready, context.telemetry))
        return list(await self._send(ready)) if ready else []

    async def _send(self, messages: Sequence[Outgoing]) -> Sequence[str]:
        context = self._context
        ids = await context.broker.send(context.name, messages)
        if not context.is_ready:
            await context.stay_ready()
        return ids

    async def _send_observed(self, messages: list[Outgoing], telemetry: Telemetry) -> Sequence[str]:
        context = self._context
        begun = context.clock.now()
        with (
            nullcontext(messages)
            if context.tracing is None
            else context.tracing.sending(context.name, messages) as ready
        ):
            ids = await self._send(ready)
        telemetry.sent(context.name, len(ids), context.clock.now() - begun)
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
