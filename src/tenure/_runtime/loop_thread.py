"""A background thread with an event loop of its own, and the ways to run coroutines on it."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, ClassVar, Generic, TypeVar

from tenure._runtime.threads import DaemonThreads
from tenure._telemetry.callbacks import run_callback
from tenure.errors import ConfigError, Unavailable

T = TypeVar("T")

_log = logging.getLogger("tenure")

ENDING = 5.0
"""Seconds that tasks have to end when their thread ends."""

LOOK_EVERY = 0.5
"""Seconds after which a main thread that waits handles a signal that came just before, or in another thread."""

THREADS = 8
"""Threads of a loop's default executor: drivers look up the addresses of hosts there."""

CLOSED = "the backend is closed, and its threads with it; connect again"


class LoopThread:
    """A daemon thread that runs an event loop, from :meth:`start` to :meth:`end`.

    Calls run with the context variables of their caller; where :attr:`keeps_context` is False, only with those given.

    Args:
        loop: The loop; a new one unless given. A given loop is run by its owner, and :meth:`start` is not called.
    """

    keeps_context: ClassVar[bool] = True

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop: asyncio.AbstractEventLoop = loop or _new_loop()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._is_ending = False  # the loop takes no further call
        self._pending: set[Future[Any]] = set()

    @property
    def is_current(self) -> bool:
        """Whether this code runs on this thread, where waiting for its loop would never end."""
        return threading.current_thread() is self._thread

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child: the thread stayed with the parent."""
        return os.getpid() != self._process

    @property
    def fork_message(self) -> str:
        """The error text for calls in a forked child."""
        return (
            f"this backend was opened in process {self._process}, and this is {os.getpid()}, its child by fork; "
            "connect again after the fork"
        )

    @property
    def is_ending(self) -> bool:
        """Whether the thread has been told to end."""
        return self._is_ending

    def start(self, name: str) -> None:
        """Run the loop, in a thread of this *name*."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Cancel the calls that run, end the thread, and wait for that unless this is the thread itself."""
        if _is_finalizing():
            return
        with self._lock:
            self._is_ending = True
            self.loop.call_soon_threadsafe(self.loop.stop)
        if self._thread is not None and not self.is_current:
            self._thread.join()

    async def call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine that *start* makes on this loop, and return its result on the caller's."""
        if asyncio.get_running_loop() is self.loop:
            return await start()
        return await asyncio.wrap_future(self.submit(start))

    def submit(self, start: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run the coroutine that *start* makes on the loop; cancel the future to cancel it.

        Raises:
            Unavailable: The thread has ended, with the last backend that used it.
            ConfigError: This is a forked child, and the thread stayed with the parent.
        """
        call = _Call(self, start)
        self._submit(call)
        call.outcome.add_done_callback(lambda outcome: call.cancel() if outcome.cancelled() else None)
        return call.outcome

    def call_blocking(
        self, start: Callable[[], Coroutine[Any, Any, T]], context: contextvars.Context | None = None
    ) -> T:
        """Run the coroutine that *start* makes on the loop, and block this thread until it has ended.

        An interrupt (Ctrl-C) cancels the coroutine, waits until it has cleaned up, and is raised only then. It may come
        at any moment, also before this thread knows that the coroutine was submitted.
        """
        if self.is_current:
            raise RuntimeError("tenure.sync was called on its own background thread, which would wait for itself")
        call = _Call(self, start)
        try:
            self._submit(call, context)
            _wait(call.outcome)
            return call.outcome.result()
        except BaseException:
            if call.outcome in self._pending:
                call.cancel()
                _wait(call.outcome)
            raise

    def _submit(self, call: _Call[Any], context: contextvars.Context | None = None) -> None:
        if self.is_forked:
            raise ConfigError(self.fork_message)
        if _is_finalizing():
            raise Unavailable(CLOSED)
        call.outcome.add_done_callback(self._pending.discard)
        with self._lock:
            if self._is_ending:
                raise Unavailable(CLOSED)
            self._pending.add(call.outcome)
            if context is None:
                context = contextvars.copy_context() if self.keeps_context else contextvars.Context()
            self.loop.call_soon_threadsafe(call.begin, context=context)

    def _run(self) -> None:
        """Run the loop until the thread ends."""
        loop = self.loop
        asyncio.set_event_loop(loop)
        self._on_start()
        try:
            while not self._is_ending:
                try:
                    loop.run_forever()
                except BaseException as error:  # SystemExit in one callback must not end the work of all others
                    loop.call_exception_handler(
                        {"message": "a callback tried to end a background thread of tenure", "exception": error}
                    )
            # Calls that still wait fail with the reason, and are not just cancelled.
            for outcome in list(self._pending):
                with suppress(InvalidStateError):
                    outcome.set_exception(Unavailable(CLOSED))
            loop.run_until_complete(_end_tasks(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def _on_start(self) -> None:
        """Prepare the thread; called on it before the loop runs."""


def _wait(outcome: Future[Any]) -> None:
    """Wait for *outcome*, and let signals be handled meanwhile.

    A signal ends a wait of the main thread only if it comes in that thread and during that wait.
    """
    within = LOOK_EVERY if threading.current_thread() is threading.main_thread() else None
    ended = threading.Event()  # the outcome's own wait would raise what a handler of the program may raise, too
    outcome.add_done_callback(lambda _: ended.set())
    while not ended.wait(within):
        pass


def _is_finalizing() -> bool:
    """Whether the interpreter ends, and has stopped all other threads, some perhaps while they held a lock."""
    return sys.is_finalizing()


def _new_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(DaemonThreads(THREADS, "tenure-resolver"))
    return loop


async def _end_tasks(left: set[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that are *left*, and wait for their end, but at most :data:`ENDING` seconds."""
    left = left - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        _, running = await asyncio.wait(left, timeout=ENDING)
        for task in running:
            run_callback(_log.warning, "%s ignored its cancellation and was abandoned", task)


class _Call(Generic[T]):
    """A coroutine that was submitted to the thread's loop, and the future of its result."""

    def __init__(self, thread: LoopThread, start: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self.outcome: Future[T] = Future()
        self._loop = thread.loop
        self._start = start
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        if not self.outcome.done():
            self._task = self._loop.create_task(self._start())
            self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancel it, from any thread; its outcome follows later."""
        with suppress(RuntimeError):  # the loop is closed, and everything there has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._loop.call_soon(self._task.cancel)  # after its first step, so that its try/finally has been entered
        elif self.outcome.cancel():  # it was not started
            self.outcome.set_running_or_notify_cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        with suppress(InvalidStateError):  # the caller has gone, or has its answer already
            if task.cancelled():
                self.outcome.set_exception(asyncio.CancelledError())
            elif error := task.exception():
                self.outcome.set_exception(error)
            else:
                self.outcome.set_result(task.result())
