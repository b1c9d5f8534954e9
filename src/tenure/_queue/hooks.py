"""The error hook of a consumer: called at every failure; a failing or hanging hook harms no handler."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from tenure._queue.context import report
from tenure._queue.handlers import is_awaitable, outcome_of
from tenure._queue.received import Message
from tenure._runtime.threads import DaemonThreads

OnError = Callable[[Message, BaseException], Awaitable[None] | None]
"""``on_error(message, error)``: plain or async, it is called when a handler has failed."""

HOOK_MAX = 10.0
"""Seconds that an async error hook may take; its message stays locked meanwhile."""

HOOKS_AT_ONCE = 8
"""The number of calls of a hook that run in threads at once; a call that never ends keeps its thread."""

FAILED = "the error hook of a tenure consumer failed"


class ThreadedHook:
    """An error hook that is called in threads: a blocking one on the consumer's loop would stop all handlers."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self._threads = DaemonThreads(HOOKS_AT_ONCE, "tenure-on-error")

    async def __call__(self, message: Message, error: BaseException) -> None:
        """Call it, and return when it has ended."""
        run = contextvars.copy_context().run
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._threads, run, outcome_of, self._hook, message, error)
        if issubclass(type(answer), BaseException):
            raise answer
        if is_awaitable(answer):
            await answer

    def close(self) -> None:
        """Call the hook no more; a call that still runs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def is_interrupt(error: BaseException) -> bool:
    """Return whether *error* may be a Ctrl-C: it is raised where the main thread is, in a handler or in a hook."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


async def call_error_hook(on_error: OnError | None, message: Message, error: BaseException) -> BaseException | None:
    """Call the error hook, and return a Ctrl-C that interrupts it, which must end the consumer.

    Any other exception is reported to the loop's exception handler; a hook that does not end is no longer awaited.
    """
    if on_error is None:
        return None
    try:
        answer = on_error(message, error)
        if not is_awaitable(answer):
            return None
    except BaseException as failed:
        return _interrupt_or_reported(failed)
    running = asyncio.ensure_future(_failure_of(answer))
    try:
        await asyncio.wait({running}, timeout=HOOK_MAX)
    except asyncio.CancelledError:
        running.cancel()
        raise
    if not running.done():
        running.cancel()
        report(FAILED, TimeoutError(f"on_error did not end within {HOOK_MAX:g} s; it was cancelled"))
    elif not running.cancelled() and (failure := running.exception() or running.result()) is not None:
        return _interrupt_or_reported(failure)
    return None


def _interrupt_or_reported(failed: BaseException) -> BaseException | None:
    if is_interrupt(failed):
        return failed
    report(FAILED, failed)
    return None


async def _failure_of(answer: Awaitable[Any]) -> BaseException | None:
    """Await *answer*, and return the exception that it raises: raised by a task, some would end the loop."""
    try:
        await answer
    except GeneratorExit:  # perhaps the hook's own, perhaps the end of the loop
        raise
    except BaseException as error:
        return error
    return None
