"""Hints of one queue: given while the service has leave to deliver one message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from tenure._runtime.notifier import Listener


class Hints(AsyncIterator[None]):
    """A listener that tells its feed when it begins and ends."""

    def __init__(self, listener: Listener, end: Callable[[], None]) -> None:
        self._listener = listener
        self._end: Callable[[], None] | None = end

    async def __anext__(self) -> None:
        try:
            await anext(self._listener)
        except StopAsyncIteration:
            self._leave()
            raise

    async def aclose(self) -> None:
        """Stop listening."""
        self._leave()
        await self._listener.aclose()

    def _leave(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()

    def __del__(self) -> None:
        self._leave()
