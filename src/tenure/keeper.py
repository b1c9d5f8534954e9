"""The keeper: one background thread per process with a loop of its own, on which leases and locks are renewed.

A handler that blocks the caller's event loop must neither lose its lock nor delay another's renewal, so renewals live
where no user code runs. The keeper is also the loop behind :mod:`tenure.sync`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

from tenure.errors import Unavailable

T = TypeVar("T")


class Keeper:
    """A loop to keep leases on: the process's own thread, or, in tests, the loop that is running now."""

    _shared: ClassVar[Keeper | None] = None
    _users: ClassVar[int] = 0
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread | None = None) -> None:
        self.loop = loop
        self._thread = thread

    @classmethod
    def enter(cls) -> Keeper:
        """Return the process's keeper, started if it isn't running; pair it with :meth:`leave`."""
        with cls._guard:
            if cls._shared is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_turn, args=(loop,), name="tenure-keeper", daemon=True)
                thread.start()
                cls._shared, cls._users = cls(loop, thread), 0
            cls._users += 1
            return cls._shared

    @classmethod
    def here(cls) -> Keeper:
        """Return a keeper on the loop that is running now, so that a test has one virtual time for everything."""
        return cls(asyncio.get_running_loop())

    def leave(self) -> None:
        """Give the keeper back; the last one out ends its thread."""
        if self._thread is None:
            return
        with Keeper._guard:
            if Keeper._shared is not self:  # a forked child dropped it, see below
                return
            Keeper._users -= 1
            if Keeper._users > 0:
                return
            Keeper._shared = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that *start* makes on the keeper's loop, and return its result on ours."""
        if asyncio.get_running_loop() is self.loop:
            return await start()
        return await asyncio.wrap_future(self.submit(start))

    def submit(self, start: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run the coroutine that *start* makes on the keeper's loop; cancel the future to cancel it."""
        if self.loop.is_closed():
            raise Unavailable("the backend is closed, and its keeper with it; connect again")
        return asyncio.run_coroutine_threadsafe(start(), self.loop)

    def call_blocking(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that *start* makes on the keeper's loop, and block this thread until it has ended.

        An interrupt (Ctrl-C) cancels the coroutine, waits until it has tidied up, and is raised only then.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("tenure.sync was called on the keeper's own thread, which would wait for itself")
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self.loop.create_task(start())
            tasks.append(task)
            task.add_done_callback(lambda done: _hand_over(done, outcome))

        self.loop.call_soon_threadsafe(begin)
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done():
                self.loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                outcome.exception()
            raise


class Pulse:
    """Whether an event loop still turns: asked on the keeper's loop, answered by the loop itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: asyncio.Future[None] | None = None

    async def beats(self, within: float) -> bool:
        """Return whether the loop answers *within* so many seconds. Who asks meanwhile shares the question."""
        asking = asyncio.get_running_loop()
        if asking is self._loop:
            return True
        if self._waiting is None or self._waiting.done():
            self._waiting = answer = asking.create_future()
            try:
                self._loop.call_soon_threadsafe(lambda: _answer(asking, answer))
            except RuntimeError:  # the loop is closed
                return False
        done, _ = await asyncio.wait({self._waiting}, timeout=within)
        return bool(done)


def _answer(asking: asyncio.AbstractEventLoop, answer: asyncio.Future[None]) -> None:
    try:
        asking.call_soon_threadsafe(_settle, answer)
    except RuntimeError:
        return  # the keeper has ended while we were blocked: nobody asks any more


def _settle(answer: asyncio.Future[None]) -> None:
    if not answer.done():
        answer.set_result(None)


def _hand_over(task: asyncio.Task[T], outcome: Future[T]) -> None:
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError())
    elif error := task.exception():
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _forget() -> None:
    """In a forked child the thread is gone: start anew there, and leave the parent's loop alone."""
    Keeper._shared = None
    Keeper._users = 0
    Keeper._guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
