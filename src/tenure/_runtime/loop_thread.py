"""A background thread with an event loop of its own, and the ways to have something done on it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, ClassVar, Generic, TypeVar

from tenure._runtime.threads import Threads
from tenure._telemetry.aside import aside
from tenure.errors import ConfigError, Unavailable

T = TypeVar("T")

_log = logging.getLogger("tenure")

ENDING = 5.0
"""Seconds that tasks have to end in when their thread does."""

THREADS = 8
"""How many questions a loop asks in threads at once: those of drivers for the addresses of hosts."""

CLOSED = "the backend is closed, and its threads with it; connect again"


class LoopThread:
    """A daemon thread in which an event loop turns, from :meth:`start` to :meth:`end`.

    Calls run with the context variables of their caller, or where :attr:`shows_context` is False only with those given.

    Args:
        loop: The loop; made anew unless given. One that is given and never started turns by somebody else's doing.
    """

    shows_context: ClassVar[bool] = True

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop: asyncio.AbstractEventLoop = loop or _loop_with_own_threads()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._is_ending = False  # nothing is sent to the loop any more
        self._under_way: set[Future[Any]] = set()

    @property
    def is_current(self) -> bool:
        """Whether we are in this thread, where to wait for its loop would be to wait for oneself."""
        return threading.current_thread() is self._thread

    @property
    def is_forked(self) -> bool:
        """Whether we are a forked child: the thread stayed with the parent."""
        return os.getpid() != self._process

    @property
    def of_parent(self) -> str:
        """Why nothing can be done here in a forked child."""
        return (
            f"this backend was opened in process {self._process}, and this is {os.getpid()}, its child by fork; "
            "connect again after the fork"
        )

    @property
    def is_ending(self) -> bool:
        """Whether the thread has been told to end."""
        return self._is_ending

    def start(self, name: str) -> None:
        """Let the loop turn, in a thread of this *name*."""
        self._thread = threading.Thread(target=self._turn, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End the thread, and wait for that unless it is our own; what is under way there is cancelled."""
        if _stands_still():
            return
        with self._lock:
            self._is_ending = True
            self.loop.call_soon_threadsafe(self.loop.stop)
        if self._thread is not None and not self.is_current:
            self._thread.join()

    async def call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that *start* makes on this loop, and return its result on ours."""
        if asyncio.get_running_loop() is self.loop:
            return await start()
        return await asyncio.wrap_future(self.submit(start))

    def submit(self, start: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run the coroutine that *start* makes on the loop; cancel the future to cancel it.

        Raises:
            Unavailable: The thread has ended, with the last backend that used it.
            ConfigError: We are a forked child, and the thread stayed with the parent.
        """
        call = _Call(self, start)
        self._send(call)
        call.outcome.add_done_callback(lambda outcome: call.call_off() if outcome.cancelled() else None)
        return call.outcome

    def call_blocking(
        self, start: Callable[[], Coroutine[Any, Any, T]], context: contextvars.Context | None = None
    ) -> T:
        """Run the coroutine that *start* makes on the loop, and block this thread until it has ended.

        An interrupt (Ctrl-C) cancels the coroutine, waits until it has tidied up, and is raised only then. It may come
        at any moment, also before we know that the coroutine was sent.
        """
        if self.is_current:
            raise RuntimeError("tenure.sync was called on a thread of its own, which would wait for itself")
        call = _Call(self, start)
        try:
            self._send(call, context)
            return call.outcome.result()
        except BaseException:
            if call.outcome in self._under_way:
                call.call_off()
                concurrent.futures.wait([call.outcome])
            raise

    def _send(self, call: _Call[Any], context: contextvars.Context | None = None) -> None:
        if self.is_forked:
            raise ConfigError(self.of_parent)
        if _stands_still():
            raise Unavailable(CLOSED)
        call.outcome.add_done_callback(self._under_way.discard)
        with self._lock:
            if self._is_ending:
                raise Unavailable(CLOSED)
            self._under_way.add(call.outcome)
            if context is None:
                context = contextvars.copy_context() if self.shows_context else contextvars.Context()
            self.loop.call_soon_threadsafe(call.begin, context=context)

    def _turn(self) -> None:
        """Be the thread."""
        loop = self.loop
        asyncio.set_event_loop(loop)
        self._prepare()
        try:
            while not self._is_ending:
                try:
                    loop.run_forever()
                except BaseException as error:  # SystemExit in somebody's callback must not end everybody's work
                    loop.call_exception_handler(
                        {"message": "a callback tried to end a thread of tenure's", "exception": error}
                    )
            # Whoever still waits for an answer hears why none comes, and not just that it was cancelled.
            for outcome in list(self._under_way):
                with suppress(InvalidStateError):
                    outcome.set_exception(Unavailable(CLOSED))
            loop.run_until_complete(_end_tasks(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def _prepare(self) -> None:
        """Make ready what this thread needs, in it."""


def _stands_still() -> bool:
    """Whether the interpreter ends, and has stopped all threads but this one; some perhaps with a lock in hand."""
    return sys.is_finalizing()


def _loop_with_own_threads() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(Threads(THREADS, "tenure-asking"))
    return loop


async def _end_tasks(left: set[asyncio.Task[Any]]) -> None:
    """Cancel what is *left*, and wait for its end, but not for ever."""
    left = left - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        _, stubborn = await asyncio.wait(left, timeout=ENDING)
        for task in stubborn:
            aside(_log.warning, "%s caught its cancellation and is left behind", task)


class _Call(Generic[T]):
    """A coroutine on its way to the thread's loop, and its result on the way back."""

    def __init__(self, thread: LoopThread, start: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.outcome: Future[T] = Future()
        self._loop = thread.loop
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
            self._loop.call_soon(self._task.cancel)  # after its first step: what tidies up must have begun
        elif self.outcome.cancel():  # it was never to begin
            self.outcome.set_running_or_notify_cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        with suppress(InvalidStateError):  # who asked has gone, or was told already
            if task.cancelled():
                self.outcome.set_exception(asyncio.CancelledError())
            elif error := task.exception():
                self.outcome.set_exception(error)
            else:
                self.outcome.set_result(task.result())
