"""Services for programs without asyncio."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar, Unpack, overload
from weakref import WeakSet

import tenure
from tenure import ConfigError, ConsumeOptions, ElectionOptions, Event, Missed, QueueOptions
from tenure._runtime.renewal_thread import RenewalThread
from tenure._runtime.threads import DaemonThreads
from tenure.sync._elections import Work
from tenure.sync._typed_queues import TypedQueue
from tenure.telemetry import Telemetry

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
WorkT = TypeVar("WorkT", bound=Work)
HookT = TypeVar("HookT", bound=Callable[[], Any])


class Service:
    """Handlers of queues, leaders and hooks, declared in one place. See :class:`tenure.Service`.

    Its functions are plain ones, and run in threads: a handler takes the body, a :class:`tenure.sync.Message`, or both,
    and a leader a :class:`tenure.sync.Term`. Its queues block. Hooks and the lifespan run on
    one thread of their own, outside of any event loop.

    Args:
        url: As for :class:`tenure.Service`.
        credentials: As for :func:`tenure.sync.connect`.
        on_event: As for :class:`tenure.Service`.
        telemetry: As for :func:`tenure.connect`.
        lifespan: ``lifespan(service)`` returns a block, which is around all handlers, leaders and hooks.

    Example::

        service = tenure.sync.Service("sqlite:///work.db")
        receipts = service.queue("receipts", Receipt)


        @service.handler("orders", concurrency=10)
        def serve(order: Order) -> None:
            receipts.send(Receipt(order.id))


        if __name__ == "__main__":
            service.run()
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        credentials: tenure.AskCredentials | None = None,
        on_event: Callable[[Event], None] | None = None,
        telemetry: Telemetry | Sequence[Telemetry] | None = None,
        lifespan: Lifespan | None = None,
    ) -> None:
        self._behind = tenure.Service(
            url, credentials=credentials, on_event=on_event, telemetry=telemetry, lifespan=self._around
        )
        self._lifespan = lifespan
        self._startup: list[Callable[[], Any]] = []
        self._shutdown: list[Callable[[], Any]] = []
        self._entered: RenewalThread | None = None
        self._turn = threading.Lock()  # while it is opened or closed
        _made.add(self)

    @overload
    def queue(self, name: str, **settings: Unpack[QueueOptions]) -> TypedQueue[bytes]: ...
    @overload
    def queue(self, name: str, kind: type[T], **settings: Unpack[QueueOptions]) -> TypedQueue[T]: ...
    @overload
    def queue(self, name: str, kind: object, **settings: Unpack[QueueOptions]) -> TypedQueue[Any]: ...
    def queue(self, name: str, kind: Any = bytes, **settings: Unpack[QueueOptions]) -> TypedQueue[Any]:
        """Return the queue called *name*, whose bodies are all of one type. See :meth:`tenure.Service.queue`."""
        return self._behind.queue(name, kind, **settings).blocking

    @overload
    def handler(self, queue: str, **options: Unpack[ConsumeOptions]) -> Callable[[F], F]: ...
    @overload
    def handler(self, queue: TypedQueue[T], **options: Unpack[ConsumeOptions]) -> tenure.TypedHandler[T]: ...
    def handler(self, queue: str | TypedQueue[Any], **options: Unpack[ConsumeOptions]) -> Any:
        """Declare the decorated function as the handler of a queue. See :meth:`tenure.Service.handler`."""
        return self._behind.handler(queue if isinstance(queue, str) else queue._behind, **options)

    def every(
        self,
        every: str | float | timedelta,
        *,
        name: str | None = None,
        timezone: str = "UTC",
        missed: Missed = "once",
        missed_after: float = 60.0,
        **options: Unpack[ConsumeOptions],
    ) -> Callable[[F], F]:
        """Declare the decorated function as the handler of a schedule. See :meth:`tenure.Service.every`."""
        return self._behind.every(
            every, name=name, timezone=timezone, missed=missed, missed_after=missed_after, **options
        )

    def leader(self, name: str, *, again: bool = False, **options: Unpack[ElectionOptions]) -> Callable[[WorkT], WorkT]:
        """Declare the decorated function as the work of the leader of *name*. See :meth:`tenure.Service.leader`."""
        return self._behind.leader(name, again=again, **options)

    def on_startup(self, hook: HookT) -> HookT:
        """Declare a hook that is called before any handler or leader. See :meth:`tenure.Service.on_startup`."""
        self._startup.append(_checked_hook("on_startup", hook))
        return hook

    def on_shutdown(self, hook: HookT) -> HookT:
        """Declare a hook that is called after all handlers and leaders. See :meth:`tenure.Service.on_shutdown`."""
        self._shutdown.append(_checked_hook("on_shutdown", hook))
        return hook

    def observe(self, *telemetry: Telemetry) -> None:
        """Add metrics or traces. See :meth:`tenure.Service.observe`."""
        self._behind.observe(*telemetry)

    @property
    def backend(self) -> tenure.sync.Backend:
        """The open backend.

        Raises:
            ConfigError: The service is not open.
        """
        return self._behind.blocking

    def open(self) -> Service:
        """Open the backend unless it is open, so that queues can be used, and return the service.

        ``with service:`` does the same, and closes it. In a child by fork of a process that has it open, it is opened
        anew. Any number of threads may call it.

        Raises:
            ConfigError: No store is named, or it can never be used as it is.
        """
        with self._turn:
            if self._entered is None or self._entered.is_forked:
                renewal_thread = RenewalThread.enter()
                try:
                    renewal_thread.call_blocking(self._behind.open)
                except BaseException:
                    renewal_thread.leave()
                    raise
                self._entered = renewal_thread
        return self

    def close(self) -> None:
        """Close the backend, if :meth:`open` has opened it."""
        with self._turn:
            renewal_thread, self._entered = self._entered, None
            if renewal_thread is None or renewal_thread.is_forked:
                return
            try:
                renewal_thread.call_blocking(self._behind.aclose)
            finally:
                renewal_thread.leave()

    def __enter__(self) -> Service:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def status(self) -> tenure.ServiceStatus:
        """Return what runs here. See :meth:`tenure.Service.status`."""
        renewal_thread = self._entered
        if renewal_thread is None or renewal_thread.is_forked:
            return tenure.ServiceStatus()
        return renewal_thread.call_blocking(self._behind.status)

    def run(self, *, until_empty: bool = False) -> None:
        """Run the service until SIGTERM or Ctrl-C, or until all its work has ended. See :meth:`tenure.Service.run`."""
        self._behind.run(until_empty=until_empty)

    @property
    def service(self) -> tenure.Service:
        """The :class:`tenure.Service` that runs it."""
        return self._behind

    @asynccontextmanager
    async def _around(self, _: tenure.Service) -> AsyncIterator[None]:
        """Run the lifespan and the hooks on one thread, outside of any event loop, around the block."""
        if self._lifespan is not None and not callable(self._lifespan):
            raise ConfigError(f"lifespan must be a function that returns a block, not {self._lifespan!r:.80}")
        thread = DaemonThreads(1, "tenure-hooks")
        loop = asyncio.get_running_loop()
        try:
            entering = loop.run_in_executor(thread, _called, self._enter)
            try:
                block = await asyncio.shield(entering)
            except asyncio.CancelledError:  # once it is entered, it is left
                block = await entering
                await loop.run_in_executor(thread, _called, block.__exit__, None, None, None)
                raise
            failure: BaseException | None = None
            try:
                for hook in self._startup:
                    await loop.run_in_executor(thread, _called, hook)
                try:
                    yield
                finally:
                    await loop.run_in_executor(thread, _called, self._shut_down)
            except BaseException as error:
                failure = error
            kind, trace = (type(failure), failure.__traceback__) if failure is not None else (None, None)
            is_handled = await loop.run_in_executor(thread, _called, block.__exit__, kind, failure, trace)
            if failure is not None and not is_handled:
                raise failure
        finally:
            thread.shutdown(wait=False)

    def _enter(self) -> AbstractContextManager[Any]:
        block: AbstractContextManager[Any] = nullcontext() if self._lifespan is None else self._lifespan(self)
        block.__enter__()
        return block

    def _shut_down(self) -> None:
        with ExitStack() as stack:
            for hook in self._shutdown:
                stack.callback(hook)

    def __repr__(self) -> str:
        return repr(self._behind)


Lifespan = Callable[[Service], AbstractContextManager[Any]]
"""``lifespan(service)``: a block around all that the service does."""


def _called(function: Callable[..., T], *arguments: Any) -> T:
    """Call *function*; a future can't raise a ``StopIteration``, and would never be done."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError("a hook or the lifespan raised StopIteration") from error


def _checked_hook(what: str, hook: HookT) -> HookT:
    if inspect.iscoroutinefunction(hook):
        raise ConfigError(f"{what} of a tenure.sync.Service must be a plain function, and {hook.__qualname__} is async")
    return tenure.Service._checked_hook(what, hook)


_made: WeakSet[Service] = WeakSet()


def _note_fork() -> None:
    for service in list(_made):
        service._turn = threading.Lock()  # a thread of the parent may have held the old one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
