"""The keeper: one background thread per process with a loop of its own, on which leases and locks are renewed.

A handler that blocks the caller's event loop must neither lose its lock nor delay another's renewal, so renewals live
where no user code runs. The keeper is also the loop behind :mod:`tenure.sync`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, ClassVar, Generic, TypeVar

from tenure.errors import ConfigError, Unavailable

T = TypeVar("T")

CLOSED = "the backend is closed, and its keeper with it; connect again"


class Keeper:
    """A loop to keep leases on: the process's own thread, or, in tests, the loop that is running now."""

    _shared: ClassVar[Keeper | None] = None
    _users: ClassVar[int] = 0
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread | None = None) -> None:
        self.loop = loop
        self._thread = thread
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._is_ending = False  # nothing is sent to the loop any more
        self._under_way: set[Future[Any]] = set()

    @classmethod
    def enter(cls) -> Keeper:
        """Return the process's keeper, started if it isn't running; pair it with :meth:`leave`."""
        with cls._guard:
            if cls._shared is None:
                keeper = cls(asyncio.new_event_loop())
                keeper._thread = threading.Thread(target=keeper._turn, name="tenure-keeper", daemon=True)
                keeper._thread.start()
                cls._shared, cls._users = keeper, 0
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
        with self._lock:
            self._is_ending = True
            self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that *start* makes on the keeper's loop, and return its result on ours."""
        if asyncio.get_running_loop() is self.loop:
            return await start()
        return await asyncio.wrap_future(self.submit(start))

    def submit(self, start: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run the coroutine that *start* makes on the keeper's loop; cancel the future to cancel it.

        Raises:
            Unavailable: The keeper has ended, with the last backend that used it.
            ConfigError: We are a forked child, and the keeper stayed with the parent.
        """
        call = self._send(start)
        call.outcome.add_done_callback(lambda outcome: call.call_off() if outcome.cancelled() else None)
        return call.outcome

    def call_blocking(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that *start* makes on the keeper's loop, and block this thread until it has ended.

        An interrupt (Ctrl-C) cancels the coroutine, waits until it has tidied up, and is raised only then.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("tenure.sync was called on the keeper's own thread, which would wait for itself")
        call = self._send(start)
        try:
            return call.outcome.result()
        except BaseException:
            if not call.outcome.done():
                call.call_off()
                concurrent.futures.wait([call.outcome])
            raise

    def _send(self, start: Callable[[], Coroutine[Any, Any, T]]) -> _Call[T]:
        if os.getpid() != self._process:
            raise ConfigError(
                f"this backend was opened in process {self._process}, and this is {os.getpid()}, its child by fork; "
                "connect again after the fork"
            )
        call = _Call(self, start)
        with self._lock:
            if self._is_ending:
                raise Unavailable(CLOSED)
            self._under_way.add(call.outcome)
            self.loop.call_soon_threadsafe(call.begin)
        call.outcome.add_done_callback(self._under_way.discard)
        return call

    def _turn(self) -> None:
        """Be the keeper's thread."""
        loop = self.loop
        asyncio.set_event_loop(loop)
        try:
            while not self._is_ending:
                try:
                    loop.run_forever()
                except BaseException as error:  # SystemExit in somebody's callback must not end everybody's renewals
                    loop.call_exception_handler({"message": "a callback tried to end the keeper", "exception": error})
            # Whoever still waits for an answer hears why none comes, and not just that it was cancelled.
            for outcome in list(self._under_way):
                with suppress(InvalidStateError):
                    outcome.set_exception(Unavailable(CLOSED))
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


class _Call(Generic[T]):
    """A coroutine on its way to the keeper's loop, and its result on the way back."""

    def __init__(self, keeper: Keeper, start: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.outcome: Future[T] = Future()
        self._loop = keeper.loop
        self._start = start
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        if not self.outcome.done():
            self._task = self._loop.create_task(self._start())
            self._task.add_done_callback(self._end)

    def call_off(self) -> None:
        """Cancel it, from whatever thread; its outcome is then still to come."""
        with suppress(RuntimeError):  # the loop is closed, and everything there has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self.outcome.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        with suppress(InvalidStateError):  # who asked has gone, or was told already
            if task.cancelled():
                self.outcome.set_exception(asyncio.CancelledError())
            elif error := task.exception():
                self.outcome.set_exception(error)
            else:
                self.outcome.set_result(task.result())


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


def _forget() -> None:
    """In a forked child the thread is gone: start anew there, and leave the parent's loop alone."""
    Keeper._shared = None
    Keeper._users = 0
    Keeper._guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
