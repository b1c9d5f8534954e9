"""An asyncio event loop in virtual time: sleeping takes no real time; a seed decides the order of simultaneous events.

Rules:

- Time stands still while callbacks run, and jumps to the next timer when nothing is runnable.
- ``call_soon`` keeps its order, as asyncio promises. Timers for the same moment fire in an order drawn from the seed.
- There are no threads. ``run_in_executor`` runs its function at once, and no time passes. A function that waits for
  this loop blocks for ever.
- Nothing runnable and no timer set raises :class:`Deadlock`; too many callbacks at one moment raise :class:`Livelock`;
  both list the waiting tasks, and where they wait.

::

    from tenure.testing.loop import run


    async def main() -> None:
        await asyncio.sleep(3600)  # a virtual hour


    run(main(), seed=7, limit=7200)
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import sys
import weakref
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

__all__ = ["Deadlock", "LimitReached", "Livelock", "VirtualClock", "VirtualLoop", "run"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STEPS_MAX = 200_000
"""The number of callbacks at one moment above which it counts as a livelock."""

_log = logging.getLogger("asyncio")


class Deadlock(RuntimeError):
    """Nothing is runnable and no timer is set: the program would hang for ever."""


class Livelock(RuntimeError):
    """Callbacks ran without end while no time passed."""


class LimitReached(TimeoutError):
    """The program still ran when its limit of virtual time was over."""


def _refused(self: VirtualLoop, *args: object, **options: object) -> Any:
    """Raise ``NotImplementedError``: a loop in virtual time has no sockets, signals, pipes or processes."""
    raise NotImplementedError("a loop in virtual time has no sockets, signals, pipes or processes")


_unsupported: Any = _refused  # typed so that it may replace any method


class VirtualLoop(asyncio.AbstractEventLoop):
    """Run coroutines, futures and timers as asyncio does, in virtual time.

    Args:
        seed: Decides the order of timers that are due at the same moment. The same seed gives the same run.
        start: The loop's first time, in seconds.
    """

    is_virtual = True
    """Read by :func:`tenure.connect`, which must not wait for a thread here."""

    def __init__(self, seed: int = 0, *, start: float = 0.0) -> None:
        self.unhandled: list[dict[str, Any]] = []
        """Uncaught exceptions: the contexts that asyncio would have logged, for a test to check at its end."""
        self.steps: int = 0
        """The number of callbacks that have run."""
        self._rng = random.Random(seed)
        self._now = start
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, float, int, asyncio.TimerHandle]] = []
        self._count = 0
        self._running = False
        self._stopping = False
        self._closed = False
        self._debug = False
        self._handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self._factory: Any = None
        self._generators: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()

    # --- time ---

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def clock(self, *, rate: float = 1.0, offset: float = 0.0) -> VirtualClock:
        """Return a clock that reads ``offset + rate × time()``."""
        return VirtualClock(self, rate=rate, offset=offset)

    def block(self, seconds: float) -> None:
        """Let *seconds* pass while no callback runs, as a call that blocks the loop would."""
        self._now += max(0.0, seconds)

    # --- scheduling ---

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run *callback* before time advances, after those scheduled earlier."""
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Do as :meth:`call_soon`. A real thread may call this, but the loop does not wait for it."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run *callback* in *delay* seconds."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run *callback* at *when*; ties are broken by the seed."""
        self._check_open()
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        heapq.heappush(self._timers, (when, self._rng.random(), self._count, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is skipped when it is due."""

    def run_in_executor(self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        """Run *func* at once, without a running loop, as in a thread; no virtual time passes."""
        future: asyncio.Future[T] = self.create_future()
        inside = events._get_running_loop()
        events._set_running_loop(None)
        try:
            future.set_result(func(*args))
        except (SystemExit, KeyboardInterrupt):
            raise
        except StopIteration as error:  # a future can't carry it
            future.set_exception(RuntimeError(f"{func!r} raised StopIteration: {error}"))
        except BaseException as error:
            future.set_exception(error)
        finally:
            events._set_running_loop(inside)
        return future

    def set_default_executor(self, executor: Any) -> None:
        """Do nothing: there are no threads."""

    # --- futures and tasks ---

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """Return a task that runs *coro*."""
        self._check_open()
        if self._factory is None:
            return asyncio.Task(coro, loop=self, **options)
        name = options.pop("name", None)
        task: asyncio.Task[Any] = self._factory(self, coro, **options)
        if name is not None:
            task.set_name(name)
        return task

    def set_task_factory(self, factory: Any) -> None:
        """Make tasks with *factory*; None for the usual ones."""
        self._factory = factory

    def get_task_factory(self) -> Any:
        """Return the handler that was set, or None."""
        return self._factory

    # --- running ---

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T], *, limit: float | None = None) -> T:
        """Run until *future* is done and return its result.

        Args:
            limit: The longest time that it may take, in virtual seconds.

        Raises:
            Deadlock: It waits, and nothing is left to run.
            Livelock: Callbacks ran without end while no time passed.
            LimitReached: It was not done within *limit*.
        """
        self._check_open()
        self._check_idle()
        main: asyncio.Future[T] = asyncio.ensure_future(future, loop=self)  # type: ignore[arg-type]
        self._run(main.done, self._now + limit if limit is not None else float("inf"), may_idle=False)
        if not main.done():
            raise RuntimeError("the loop was stopped before the future was done")
        return main.result()

    def run_forever(self) -> None:
        """Run until :meth:`stop`, or until nothing is left that could call it."""
        self._run(lambda: False, float("inf"), may_idle=True)

    def stop(self) -> None:
        """Stop after the callbacks that are ready now."""
        self._stopping = True

    def is_running(self) -> bool:
        """Return whether the loop runs now."""
        return self._running

    def is_closed(self) -> bool:
        """Return whether :meth:`close` was called."""
        return self._closed

    def close(self) -> None:
        """Remove everything that is scheduled."""
        if self._running:
            raise RuntimeError("a running loop can't be closed")
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    def _run(self, done: Callable[[], bool], limit: float, *, may_idle: bool) -> None:
        self._check_idle()
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._generators.add, finalizer=self._finalize)
        events._set_running_loop(self)
        self._running, self._stopping = True, False
        at_this_time = 0
        try:
            while not done() and not self._stopping:
                before = self._now
                if not self._wake(limit):
                    if may_idle:
                        return
                    raise Deadlock(f"nothing is left to run at {self._now:g} s; {self._waiting_tasks()}")
                at_this_time = at_this_time + len(self._ready) if self._now == before else 0
                if at_this_time > STEPS_MAX:
                    raise Livelock(f"{at_this_time} callbacks ran at {self._now:g} s; {self._waiting_tasks()}")
                self._run_ready()
        finally:
            self._running = False
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _wake(self, limit: float) -> bool:
        """Make the due timers ready; advance time only if nothing is ready. Return False if nothing is left."""
        while self._timers and self._timers[0][3].cancelled():
            heapq.heappop(self._timers)
        if not self._ready:
            if not self._timers:
                return False
            if self._timers[0][0] > limit:
                self._now = max(self._now, limit)
                raise LimitReached(f"still running at {limit:g} s; {self._waiting_tasks()}")
            self._now = max(self._now, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(self._timers)[3])
        return True

    def _run_ready(self) -> None:
        """Run the callbacks that are ready now; those that become ready meanwhile run after the due timers."""
        for _ in range(len(self._ready)):
            handle = self._ready.popleft()
            if not handle.cancelled():
                self.steps += 1
                handle._run()

    def _waiting_tasks(self) -> str:
        waiting = sorted((task for task in asyncio.all_tasks(self)), key=lambda task: task.get_name())
        if not waiting:
            return "no task waits"
        return "waiting: " + "; ".join(_where(task) for task in waiting)

    # --- faults ---

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Note an uncaught exception in :attr:`unhandled`, and call the handler that was set."""
        self.unhandled.append(context)
        if self._handler is not None:
            self._handler(self, context)
        else:
            self.default_exception_handler(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log an uncaught exception, as asyncio does."""
        _log.error(context.get("message", "unhandled exception"), exc_info=context.get("exception"))

    def set_exception_handler(self, handler: Any) -> None:
        """Call *handler* with each uncaught exception; None to log it."""
        self._handler = handler

    def get_exception_handler(self) -> Any:
        """Return the handler that was set, or None."""
        return self._handler

    def get_debug(self) -> bool:
        """Return the value given to :meth:`set_debug`."""
        return self._debug

    def set_debug(self, enabled: bool) -> None:
        """Remember the value; debug mode changes nothing here."""
        self._debug = enabled

    # --- shutdown ---

    async def shutdown_asyncgens(self) -> None:
        """Close the asynchronous generators that were started and not finished."""
        generators = list(self._generators)
        self._generators.clear()
        results = await asyncio.gather(*(each.aclose() for each in generators), return_exceptions=True)
        for generator, result in zip(generators, results, strict=True):
            if isinstance(result, Exception):
                message = f"closing {generator!r} raised"
                self.call_exception_handler({"message": message, "exception": result, "asyncgen": generator})

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: there are no threads."""

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators.discard(generator)
        if not self._closed:
            self.create_task(generator.aclose())

    def _check_idle(self) -> None:
        if self._running or events._get_running_loop() is not None:
            raise RuntimeError("an event loop is running already")

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the loop is closed")

    # --- not supported ---

    add_reader = _unsupported
    add_signal_handler = _unsupported
    add_writer = _unsupported
    connect_accepted_socket = _unsupported
    connect_read_pipe = _unsupported
    connect_write_pipe = _unsupported
    create_connection = _unsupported
    create_datagram_endpoint = _unsupported
    create_server = _unsupported
    create_unix_connection = _unsupported
    create_unix_server = _unsupported
    getaddrinfo = _unsupported
    getnameinfo = _unsupported
    remove_reader = _unsupported
    remove_signal_handler = _unsupported
    remove_writer = _unsupported
    sendfile = _unsupported
    sock_accept = _unsupported
    sock_connect = _unsupported
    sock_recv = _unsupported
    sock_recv_into = _unsupported
    sock_recvfrom = _unsupported
    sock_recvfrom_into = _unsupported
    sock_sendall = _unsupported
    sock_sendfile = _unsupported
    sock_sendto = _unsupported
    start_tls = _unsupported
    subprocess_exec = _unsupported
    subprocess_shell = _unsupported


class VirtualClock:
    """A :class:`tenure._runtime.clock.Clock` on a virtual loop, with a rate and an offset of its own.

    Args:
        loop: The loop whose time is read.
        rate: Seconds of this clock per second of the loop.
        offset: The time of this clock when the loop's time is 0.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, rate: float = 1.0, offset: float = 0.0) -> None:
        self._loop = loop
        self._rate = rate
        self._offset = offset

    def now(self) -> float:
        """Return seconds by this clock."""
        return self._offset + self._rate * self._loop.time()

    def jump(self, seconds: float) -> None:
        """Go ahead by *seconds* at once: the machine was suspended, and timers did not notice."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock can't go back by {-seconds:g} s")
        self._offset += seconds


def run(main: Coroutine[Any, Any, T], *, seed: int = 0, limit: float | None = None) -> T:
    """Run *main* on a new virtual loop, as ``asyncio.run`` would: cancel what is left, close what is open.

    Args:
        seed: Decides the order of simultaneous events.
        limit: The longest time that *main* may take, in virtual seconds.

    Raises:
        Deadlock, Livelock, LimitReached: see :meth:`VirtualLoop.run_until_complete`.
    """
    loop = VirtualLoop(seed)
    try:
        return loop.run_until_complete(main, limit=limit)
    finally:
        try:
            _cancel_rest(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


def _cancel_rest(loop: VirtualLoop) -> None:
    rest = asyncio.all_tasks(loop)
    for task in rest:
        task.cancel()
    if rest:
        try:
            loop.run_until_complete(asyncio.wait(rest))
        except (Deadlock, Livelock):
            # Raising this would hide the first error; tasks that ignore their cancellation are dropped with the loop.
            _log.warning("tasks ignored their cancellation: %s", ", ".join(sorted(task.get_name() for task in rest)))


def _where(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack(limit=1)
    if not frames:
        return task.get_name()
    return f"{task.get_name()} at {frames[-1].f_code.co_qualname} line {frames[-1].f_lineno}"
