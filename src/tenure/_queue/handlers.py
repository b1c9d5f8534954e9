"""Runs handlers: async ones on the loop, plain functions in threads, CPU-bound ones in processes."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, cast

from tenure._queue.failures import text_of
from tenure._queue.message import Delivery, Token
from tenure._queue.outcomes import NeverBegins, NotBegun
from tenure._queue.received import BlockingMessage, Message, Received
from tenure._runtime.threads import DaemonThreads
from tenure._timing import Timing
from tenure.errors import ConfigError, Unavailable, refuse_generator
from tenure.events import HandlerNotBegun

if TYPE_CHECKING:
    from tenure._queue.processes import Processes

Handler = Callable[[Message], object] | Callable[[BlockingMessage], object] | Callable[[Received], object]
"""``handler(message)``: async, it takes a ``Message``; plain, a ``BlockingMessage``; in a process, a ``Received``."""

RunIn = Literal["auto", "thread", "process"]
"""Where a handler runs; ``auto``: an async one on the loop, a plain one in a thread."""

Served = Callable[[Message], Awaitable[object]]
"""Calls the handler, and returns what it returns; of one in a thread or a process, also the exception it raises."""

PAUSE = 1.0
"""Seconds until the next attempt after no process could be started."""

KILL_SHARE = 0.25
"""The share of the grace between the end of a process by itself and the end of the trust in the lock."""


class RanToEnd(asyncio.CancelledError):
    """A handler was cancelled, but its thread ran to the end, with this *outcome*: an exception or a result."""

    def __init__(self, outcome: object) -> None:
        super().__init__()
        self.outcome = outcome


class LockTimes(Protocol):
    """The times of the locks while handlers run: the consumer. Called from any thread."""

    @property
    def timing(self) -> Timing:
        """The times of a lock."""
        ...

    def remaining(self, message: Message) -> float:
        """Return for how many seconds the lock of *message* is safe to rely on without another renewal."""
        ...


class Handlers:
    """A handler, made callable on the loop, with the threads or processes that run it.

    Args:
        handler: ``handler(message)``, async or not.
        run_in: ``"auto"`` runs async ones on the loop and others in threads; ``"process"`` needs a function that can be
            imported, and gives it the message without verbs.
        concurrency: The number of handlers that run at once.
        lock_times: The times that limit how long a process may run by itself.
    """

    def __init__(self, handler: Handler, run_in: RunIn, concurrency: int, lock_times: LockTimes) -> None:
        if not callable(handler):
            raise ConfigError(f"handler must be a function that takes a message, not {handler!r:.80}")
        refuse_generator("handler", handler)
        if run_in not in ("auto", "thread", "process"):
            raise ConfigError(f"run_in must be 'auto', 'thread' or 'process', not {run_in!r}")
        is_async = is_async_function(handler)
        if is_async and run_in != "auto":
            raise ConfigError(
                f"an async handler runs on the loop; leave out run_in={run_in!r}, or pass a plain function"
            )
        if run_in == "process":
            _check_may_have_children()
            _check_portable(handler)
        self._handler = handler
        self._concurrency = concurrency
        self._lock_times = lock_times
        self._threads: DaemonThreads | None = None
        self._processes: Processes | None = None
        self._left: set[tuple[Token, int]] = set()
        self.serve: Served = (
            cast(Served, handler) if is_async else self._in_process if run_in == "process" else self._in_thread
        )

    def is_left_behind(self, delivery: Delivery) -> bool:
        """Return whether a thread still works on *delivery*, although no task waits for it any more."""
        return (delivery.token, delivery.sequence) in self._left

    def close(self) -> None:
        """Shut down threads and processes; don't wait for handlers that still run there."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()

    async def _in_thread(self, message: Message) -> object:
        mine = BlockingMessage(message, functools.partial(_block, asyncio.get_running_loop()))
        call = cast(Callable[[BlockingMessage], object], self._handler)
        running = self._pool(message).submit(contextvars.copy_context().run, outcome_of, call, mine)
        outcome = await self._end_of(message, running)
        # The plain function may return an awaitable, as a lambda around an async function does.
        return await outcome if is_awaitable(outcome) else outcome

    async def _in_process(self, message: Message) -> object:
        from tenure._queue.processes import Lock, Processes  # with multiprocessing, which others don't need

        if self._processes is None:
            self._processes = Processes(self._handler)
        content = Received(message._delivery)
        lock = Lock(functools.partial(self._until, message), self._lock_times.timing.renew_every / 4)
        task = self._processes.task(content, lock)
        outcome = await self._end_of(message, self._pool(message).submit(outcome_of, task), task.stop)
        if isinstance(outcome, NotBegun):
            context, one = message._context, message.delivery
            named = (one.id, one.sequence, one.delivery_count)
            context.emit(HandlerNotBegun(context.clock.now(), context.name, context.holder, *named, text_of(outcome)))
            if not isinstance(outcome, NeverBegins):
                await asyncio.sleep(PAUSE)  # it would be tried again at once
        return outcome

    def _until(self, message: Message) -> float:
        """Return when a process ends its handler if that still runs; the consumer may have ended by then."""
        from tenure._queue.handler_process import CLOCK

        now = CLOCK.now()  # read before the remaining time, so that the result is never too late
        return now + self._lock_times.remaining(message) - KILL_SHARE * self._lock_times.timing.grace

    def _pool(self, message: Message) -> DaemonThreads:
        if self._threads is None:
            self._threads = DaemonThreads(self._concurrency, f"tenure-{message.queue}")
        return self._threads

    async def _end_of(self, message: Message, running: Future[Any], stop: Callable[[], None] | None = None) -> Any:
        """Return the result of *running*. If this task is cancelled, call *stop*.

        Its end is still awaited, as a thread can't be stopped. After a second cancellation it is no longer awaited.

        Raises:
            RanToEnd: This task was cancelled, and the thread ran to its end meanwhile.
        """
        ended = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            # Otherwise asyncio would log an exception that was never retrieved.
            ended.add_done_callback(lambda done: done.cancelled() or done.exception())
            if not running.cancel():
                if stop is not None:
                    stop()
                await self._wait_for(message.delivery, running, ended)
                if stop is None and (ran_to_end := _ran_to_end(running)) is not None:
                    raise ran_to_end from None
            raise

    async def _wait_for(self, delivery: Delivery, running: Future[Any], ended: asyncio.Future[Any]) -> None:
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            one = (delivery.token, delivery.sequence)
            self._left.add(one)
            running.add_done_callback(lambda _: self._left.discard(one))
            raise


def outcome_of(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what *call* returns, or the exception that it raises.

    A future can't carry every exception: StopIteration would never complete it, CancelledError looks like its own,
    and SystemExit would end the loop.
    """
    try:
        return call(*arguments)
    except BaseException as error:
        return error


def is_awaitable(outcome: object) -> TypeGuard[Awaitable[object]]:
    """Return whether *outcome* can be awaited, by its type only: ``__class__`` of the object may be wrong, or raise."""
    return hasattr(type(outcome), "__await__")


def _ran_to_end(ended: Future[Any]) -> RanToEnd | None:
    result = ended.result()
    if not is_awaitable(result):
        return RanToEnd(result)
    if inspect.iscoroutine(result):  # from a plain function; there is no time left to await it
        result.close()
    return None


def _block(loop: asyncio.AbstractEventLoop, start: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run the coroutine that *start* makes on the consumer's loop, and block this thread until it ends."""
    request = start()
    try:
        answer = asyncio.run_coroutine_threadsafe(request, loop)
    except RuntimeError as error:  # the loop is closed
        request.close()
        raise Unavailable("the consumer and its loop have ended; the message is no longer locked to it") from error
    return answer.result()


def is_async_function(handler: object) -> bool:
    """Return whether calling *handler* makes a coroutine."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def _check_may_have_children() -> None:
    import multiprocessing

    from tenure._queue.processes import NAME, UNGUARDED

    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        why = (
            "run_in='process' runs this script again in each process, which would start a consumer, too; "
            "put the code that starts the script under: if __name__ == '__main__':"
        )
        if process.name == NAME:  # made by a consumer: no caller here could handle an exception
            sys.stderr.write(f"tenure: {why}\n")
            sys.stderr.flush()
            os._exit(UNGUARDED)
        raise ConfigError(why)
    if process.daemon:
        raise ConfigError(
            f"run_in='process' starts processes, but the daemonic process {process.name!r} may not; "
            "start it with daemon=False, or use run_in='thread'"
        )


def _check_portable(handler: Handler) -> None:
    import pickle

    try:
        pickle.dumps(handler)
    except Exception as error:
        raise ConfigError(
            f"run_in='process' needs a function that another process can import, not {handler!r:.80} ({error}); "
            "define it at the top of a module"
        ) from error
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None or getattr(sys, "frozen", False):
        return
    file = getattr(main, "__file__", None)
    if file is not None and not os.path.exists(file):  # python - < file
        raise ConfigError(
            f"run_in='process' runs this script again in each process, but there is no file {file!r}; "
            "put the script into a file"
        )
    while isinstance(handler, functools.partial):
        handler = handler.func
    if file is None and getattr(handler, "__module__", None) == "__main__":  # python -c, or a notebook
        raise ConfigError(
            f"run_in='process' needs a function that another process can import, but {handler!r:.80} is in no file; "
            "define it at the top of a module"
        )
