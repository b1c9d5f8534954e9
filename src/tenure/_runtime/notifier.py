"""A bell per topic: wakes who waits in this process, on whichever loop, rung from whichever thread.

A ring is never lost on a listener that exists: it is kept until the listener looks. Rings that come together are one.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress


class Notifier:
    """Bring waiters and rings together, by topic."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Lists keep the order of arrival, so that a simulation replays; weak, so that a forgotten listener just goes.
        self._listeners: dict[str, list[weakref.ref[Listener]]] = {}
        self._waiting: set[Listener] = set()  # strong: asyncio itself would let a waiting task be collected
        self._closed = False

    def listen(self, topic: str) -> Listener:
        """Return an iterator that yields once for every ring, or burst of rings, from now on."""
        with self._lock:
            listener = Listener(self._lock, self._waiting, closed=self._closed)
            known = [ref for ref in self._listeners.get(topic, ()) if ref() is not None]
            self._listeners[topic] = [*known, weakref.ref(listener)]
        return listener

    def ring(self, topic: str) -> None:
        """Wake everybody who listens to *topic*."""
        with self._lock:
            listeners = self._listeners.get(topic)
            if listeners is None:
                return
            alive = [listener for ref in listeners if (listener := ref()) is not None and not listener.closed]
            if alive:
                self._listeners[topic] = [weakref.ref(listener) for listener in alive]
            else:
                del self._listeners[topic]
            for listener in alive:
                listener.wake()

    def ring_all(self) -> None:
        """Wake everybody, whatever they listen to."""
        for topic in list(self._listeners):
            self.ring(topic)

    def close(self) -> None:
        """End every iterator, those to come too."""
        with self._lock:
            self._closed = True
            for refs in self._listeners.values():
                for ref in refs:
                    if (listener := ref()) is not None:
                        listener.end()
            self._listeners.clear()


class Listener(AsyncIterator[None]):
    """Yield whenever the bell was rung since the last time; iterate it from one task at a time."""

    def __init__(self, lock: threading.Lock, waiting: set[Listener], *, closed: bool) -> None:
        self._lock = lock
        self._waiting = waiting
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None
        self.closed: bool = closed

    async def __anext__(self) -> None:
        with self._lock:
            if self._take():
                return
            if self.closed:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("another task waits for this iterator; call hints() once for each task")
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            self._waiting.add(self)
        try:
            await waiter
        finally:
            with self._lock:
                self._waiter = None
                self._waiting.discard(self)
        if not self._take():
            raise StopAsyncIteration

    async def aclose(self) -> None:
        """Listen no longer; a task that waits in the iterator finds its end."""
        with self._lock:
            self.end()

    def _take(self) -> bool:
        """Return whether it was rung, and forget that."""
        rung, self._rung = self._rung, False
        return rung

    # --- called by the bell, with its lock held ---

    def wake(self) -> None:
        """Note a ring, and let the waiting task go on."""
        self._rung = True
        self._let_go()

    def end(self) -> None:
        """Let the waiting task find the end of the iterator."""
        self.closed = True
        self._let_go()

    def _let_go(self) -> None:
        waiter = self._waiter
        if waiter is None:
            return
        loop = waiter.get_loop()
        if loop is _running_loop():
            _settle(waiter)
            return
        with suppress(RuntimeError):  # that loop is closed, and its task with it
            loop.call_soon_threadsafe(_settle, waiter)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
