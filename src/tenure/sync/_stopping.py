"""Requests to stop, passed from threads and signal handlers to a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHECK_EVERY = 0.2
"""Seconds between checks by the waiting thread that it is still needed."""


class StopRequest:
    """A request to stop, made on any thread or in a signal handler; also before the loop's event exists."""

    def __init__(self) -> None:
        self._is_made = False
        self._target: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def make(self) -> None:
        """Make the request: set the event, now or as soon as there is one."""
        self._is_made = True
        if self._target is not None:
            loop, event = self._target
            with suppress(RuntimeError):  # the loop is closed: its work has ended
                loop.call_soon_threadsafe(event.set)

    def event(self) -> asyncio.Event:
        """Return the event that the request sets; it belongs to the running loop."""
        event = asyncio.Event()
        self._target = asyncio.get_running_loop(), event
        if self._is_made:  # before the event existed; from here on, make() sets it
            event.set()
        return event


@contextmanager
def forwarded(stop: threading.Event | None, into: asyncio.Event | None = None) -> Iterator[asyncio.Event | None]:
    """Yield an ``asyncio.Event``, *into* if that is given, which is set when *stop* is.

    Only a thread can wait for a thread's event.
    """
    if stop is None:
        yield into
        return
    stopping = into or asyncio.Event()
    ended = threading.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        while not ended.is_set():
            if stop.wait(CHECK_EVERY):
                with suppress(RuntimeError):  # the loop is closed: what was to stop has ended by itself
                    loop.call_soon_threadsafe(stopping.set)
                return

    threading.Thread(target=wait, name="tenure-stop", daemon=True).start()
    try:
        yield stopping
    finally:
        ended.set()
