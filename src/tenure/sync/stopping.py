"""A thread's event, carried over to a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LOOK = 0.2
"""Seconds after which the thread that waits looks whether it is still needed."""


@contextmanager
def forwarded(stop: threading.Event | None) -> Iterator[asyncio.Event | None]:
    """Give an ``asyncio.Event`` that is set when *stop* is. Only a thread can wait for a thread's event."""
    if stop is None:
        yield None
        return
    stopping = asyncio.Event()
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
