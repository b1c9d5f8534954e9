"""A thread's event, carried over to a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LOOK = 0.2
"""Seconds between checks by the waiting thread that it is still needed."""


class Stopping:
    """A request to stop, from any thread or signal handler; it also counts before the loop's event exists."""

    def __init__(self) -> None:
        self._told = False
        self._heard: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def tell(self) -> None:
        """Set the event, now or as soon as there is one."""
        self._told = True
        if self._heard is not None:
            loop, event = self._heard
            with suppress(RuntimeError):  # the loop is closed: its work has ended
                loop.call_soon_threadsafe(event.set)

    def here(self) -> asyncio.Event:
        """Return the event, which belongs to the running loop."""
        event = asyncio.Event()
        self._heard = asyncio.get_running_loop(), event
        if self._told:  # before the event existed; from here on, tell() sets it
            event.set()
        return event


@contextmanager
def forwarded(stop: threading.Event | None, into: asyncio.Event | None = None) -> Iterator[asyncio.Event | None]:
    """Give an ``asyncio.Event``, *into* if that is given, which is set when *stop* is.

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
            if stop.wait(LOOK):
                loop.call_soon_threadsafe(stopping.set)
                return

    threading.Thread(target=wait, name="tenure-stop", daemon=True).start()
    try:
        yield stopping
    finally:
        ended.set()
