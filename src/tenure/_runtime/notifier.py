"""Notifications by topic inside one process: from any thread, to listeners on any event loop.

No notification is lost: each listener keeps one until it is iterated. Several that come before that count as one.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress


class Notifier:
    """Wake the listeners of a topic."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Lists keep the order of arrival, so that a simulation replays; weak, so that a dropped listener is collected.
        self._listeners: dict[str, list[weakref.ref[Listener]]] = {}
        self._waiting: set[Listener] = set()  # strong references: asyncio itself would let a waiting task be collected
        self._closed = False

    def listen(self, topic: str) -> Listener:
        """Return an iterator that yields once for every notification, or burst of them, from now on."""
        with self._lock:
            listener = Listener(self._lock, self._waiting, closed=self._closed)
            self._keep(topic, [*self._alive(topic), listener])
        return listener

    def notify(self, topic: str) -> None:
        """Wake every listener of *topic*."""
        with self._lock:
            has_ended = False
            for ref in self._listeners.get(topic, ()):
                listener = ref()
                if listener is None or listener.closed:
                    has_ended = True
                else:
                    listener.wake()
            if has_ended:
                self._keep(topic, self._alive(topic))

    def notify_all(self) -> None:
        """Wake every listener of every topic."""
        for topic in list(self._listeners):
            self.notify(topic)

    def count(self, topic: str) -> int:
        """Return how many listen for *topic*."""
        with self._lock:
            return len(self._alive(topic))

    def _alive(self, topic: str) -> list[Listener]:
        found = (ref() for ref in self._listeners.get(topic, ()))
        return [listener for listener in found if listener is not None and not listener.closed]

    def _keep(self, topic: str, listeners: list[Listener]) -> None:
        if listeners:
            self._listeners[topic] = [weakref.ref(listener) for listener in listeners]
        else:
            self._listeners.pop(topic, None)

    def close(self) -> None:
        """End every iterator, and every one that is made later."""
        with self._lock:
            self._closed = True
            for refs in self._listeners.values():
                for ref in refs:
                    if (listener := ref()) is not None:
                        listener.end()
            self._listeners.clear()


class Listener(AsyncIterator[None]):
    """Yields whenever the topic was notified since the last time; iterate it from one task at a time."""

    def __init__(self, lock: threading.Lock, waiting: set[Listener], *, closed: bool) -> None:
        self._lock = lock
        self._waiting = waiting
        self._notified = False
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
        """Stop listening; for a task that waits in the iterator, it ends."""
        with self._lock:
            self.end()

    def _take(self) -> bool:
        """Return whether it was notified, and reset that."""
        notified, self._notified = self._notified, False
        return notified

    # --- called by the notifier, with its lock held ---

    def wake(self) -> None:
        """Note a notification, and wake the waiting task."""
        self._notified = True
        self._wake_waiter()

    def end(self) -> None:
        """End the iterator, and wake the waiting task."""
        self.closed = True
        self._wake_waiter()

    def _wake_waiter(self) -> None:
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
