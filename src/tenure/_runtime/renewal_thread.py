"""The renewal thread: one background thread per process with a loop of its own, on which leases and locks are renewed.

A handler that blocks the caller's event loop must neither lose its lock nor delay another's renewal, so renewals run
where no user code runs: log handlers and hooks are called on a thread of their own
(:mod:`tenure._telemetry.callbacks`), and calls here don't get the context variables of their caller.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

from tenure._runtime.clock import Clock
from tenure._runtime.loop_thread import LoopThread
from tenure._runtime.watchdog import Watchdog
from tenure._telemetry.callbacks import CallbackThread, run_callback


class RenewalThread(LoopThread):
    """The loop on which leases are renewed: the process's own thread, or, in tests, the loop that is running now."""

    _shared: ClassVar[RenewalThread | None] = None
    _users: ClassVar[int] = 0
    _guard: ClassVar[threading.Lock] = threading.Lock()
    keeps_context: ClassVar[bool] = False

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(loop)
        self._callbacks = CallbackThread()
        self._watchdog: Watchdog | None = None

    @classmethod
    def enter(cls) -> RenewalThread:
        """Return the process's renewal thread, started if it isn't running; pair it with :meth:`leave`."""
        with cls._guard:
            if cls._shared is None:
                renewal_thread = cls()
                renewal_thread._callbacks.start("tenure-callbacks")
                try:
                    renewal_thread.start("tenure-renewals")
                except BaseException:  # the system gives no thread
                    renewal_thread._callbacks.end()
                    raise
                cls._shared, cls._users = renewal_thread, 0
            cls._users += 1
            return cls._shared

    @classmethod
    def here(cls) -> RenewalThread:
        """Return one on the loop that is running now, so that a test has one virtual time for everything."""
        return cls(asyncio.get_running_loop())

    def leave(self) -> None:
        """Give the renewal thread back; the last user ends it."""
        with RenewalThread._guard:
            if RenewalThread._shared is not self:  # made by here(), or dropped in a forked child, see below
                return
            RenewalThread._users -= 1
            if RenewalThread._users > 0:
                return
            RenewalThread._shared = None
        self.end()
        self._callbacks.end()
        if self._watchdog is not None:
            self._watchdog.end()

    def watchdog(self, clock: Clock) -> Watchdog | None:
        """Return the thread that ends the process at a deadline, started if need be; None on a loop of :meth:`here`.

        Raises:
            RuntimeError: The system gives no thread.
        """
        if self._thread is None:
            return None
        with RenewalThread._guard:
            if self._watchdog is None:
                watchdog = Watchdog(clock)
                watchdog.start()
                self._watchdog = watchdog
            return self._watchdog

    def _on_start(self) -> None:
        self._callbacks.serve_current_thread()
        self.loop.set_exception_handler(_report)


def _report(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Report an error of *loop* as asyncio does, by the log, but on the callback thread."""
    run_callback(loop.default_exception_handler, dict(context))


class LoopProbe:
    """Checks from the renewal loop whether another event loop still runs callbacks, or is blocked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._probe: asyncio.Future[None] | None = None

    async def responds(self, within: float) -> bool:
        """Return whether the loop runs a callback *within* so many seconds. Concurrent calls share one callback."""
        asking = asyncio.get_running_loop()
        if asking is self._loop:
            return True
        if self._probe is None or self._probe.done():
            self._probe = answer = asking.create_future()
            try:
                self._loop.call_soon_threadsafe(lambda: _answer(asking, answer))
            except RuntimeError:  # the loop is closed
                return False
        done, _ = await asyncio.wait({self._probe}, timeout=within)
        return bool(done)


def _answer(asking: asyncio.AbstractEventLoop, answer: asyncio.Future[None]) -> None:
    try:
        asking.call_soon_threadsafe(_set_done, answer)
    except RuntimeError:
        return  # the renewal thread ended while this loop was blocked: there is no probe any more


def _set_done(answer: asyncio.Future[None]) -> None:
    if not answer.done():
        answer.set_result(None)


def _after_fork() -> None:
    """In a forked child the thread does not exist: start a new one there, and leave the parent's loop alone."""
    RenewalThread._shared = None
    RenewalThread._users = 0
    RenewalThread._guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
