"""The consumers and schedules of a queue that run in this process, drained together from any loop or thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

CURRENT_CONSUMER: ContextVar[object | None] = ContextVar("tenure_current_consumer", default=None)
"""The consumer that calls the handler of this context, also in tasks that it starts; None outside of handlers."""


class Drained(Protocol):
    """A consumer, or a schedule."""

    def drain(self, grace: float | None = None) -> None:
        """End it."""
        ...


@runtime_checkable
class Paused(Drained, Protocol):
    """A consumer."""

    def pause(self) -> None:
        """Claim nothing, until :meth:`resume`."""
        ...

    def resume(self) -> None:
        """Claim again."""
        ...


class RunningConsumer:
    """A consumer or a schedule, on the loop that it runs on."""

    def __init__(self, consumer: Drained) -> None:
        self.consumer = consumer
        self.ended: Future[None] = Future()
        self._loop = asyncio.get_running_loop()

    def call(self, verb: Callable[..., object], *arguments: Any) -> None:
        """Call a *verb* of the consumer on its loop, from any loop or thread."""
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            verb(*arguments)
        else:
            with suppress(RuntimeError):  # the loop is closed, and the consumer has ended
                self._loop.call_soon_threadsafe(verb, *arguments)


class RunningConsumers:
    """The running consumers of one queue object; and its schedule, which can't be paused so."""

    def __init__(self) -> None:
        self._running: list[RunningConsumer] = []

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def keeping(self, consumer: Drained) -> Iterator[None]:
        """Keep *consumer* while it runs, in this block."""
        one = RunningConsumer(consumer)
        self._running.append(one)
        try:
            yield
        finally:
            self._running.remove(one)
            one.ended.set_result(None)

    def pause(self) -> None:
        """Pause all of them; see :meth:`Consumer.pause`."""
        for one in list(self._running):
            if isinstance(one.consumer, Paused):
                one.call(one.consumer.pause)

    def resume(self) -> None:
        """Resume all of them."""
        for one in list(self._running):
            if isinstance(one.consumer, Paused):
                one.call(one.consumer.resume)

    def begin_drain(self, grace: float | None) -> Sequence[RunningConsumer]:
        """Drain all of them, see :meth:`Consumer.drain`; return them without waiting for their end."""
        running = list(self._running)
        for one in running:
            one.call(one.consumer.drain, grace)
        return running

    async def drain(self, grace: float | None) -> None:
        """Drain all of them and wait until they have ended; don't wait if a handler of theirs calls."""
        running = self.begin_drain(grace)
        current = CURRENT_CONSUMER.get()
        if current is None or all(one.consumer is not current for one in running):
            await _ended(running)

    async def end(self) -> None:
        """End all of them at once, and wait until they have ended."""
        await _ended(self.begin_drain(grace=0.0))


async def _ended(running: Sequence[RunningConsumer]) -> None:
    if running:
        await asyncio.wait([asyncio.wrap_future(one.ended) for one in running])
