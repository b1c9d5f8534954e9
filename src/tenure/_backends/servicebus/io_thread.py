"""The thread with the loop on which the client library runs: its objects belong to one loop, tenure's callers to many.

So a handler that blocks its own loop delays neither a heartbeat nor a renewal.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tenure._runtime.threads import in_thread

T = TypeVar("T")


class IoThread:
    """A daemon thread with a loop; started when it is first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # a collection of garbage inside may post something
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def runs(self) -> bool:
        """Whether it was started, and not stopped."""
        return self._loop is not None

    async def run(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of *request*, which runs there. If the caller is cancelled, so is the request."""
        future = asyncio.run_coroutine_threadsafe(request(), self._started())
        return await asyncio.wrap_future(future)

    def post(self, act: Callable[[], object]) -> None:
        """Call *act* there soon."""
        self._started().call_soon_threadsafe(act)

    async def stop(self) -> None:
        """Cancel what runs there, and end the thread."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        await in_thread("tenure-servicebus-end", thread.join, 10.0)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(asyncio.sleep(0))  # what was asked for begins: a task that has not can't clean up
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=5.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
