"""The renewal thread: one background thread per process with a loop of its own, on which leases and locks are renewed.

A handler that blocks the caller's event loop must neither lose its lock nor delay another's renewal, so renewals live
where no user code runs: log handlers and hooks are called on a thread beside (:mod:`tenure._telemetry.aside`), and
nothing
here sees the context variables of a caller.
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
from tenure._telemetry.aside import Aside, aside


class RenewalThread(LoopThread):
    """A loop to keep leases on: the process's own thread, or, in tests, the loop that is running now."""

    _shared: ClassVar[RenewalThread | None] = None
    _users: ClassVar[int] = 0
    _guard: ClassVar[threading.Lock] = threading.Lock()
    shows_context: ClassVar[bool] = False

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(loop)
        self._aside = Aside()
        self._watchdog: Watchdog | None = None

    @classmethod
    def enter(cls) -> RenewalThread:
        """Return the process's keeper, started if it isn't running; pair it with :meth:`leave`."""
        with cls._guard:
            if cls._shared is None:
                renewal_thread = cls()
                renewal_thread._aside.start("tenure-telling")
                try:
                    renewal_thread.start("tenure-renewals")
                except BaseException:  # no thread is to be had
                    renewal_thread._aside.end()
                    raise
                cls._shared, cls._users = renewal_thread, 0
            cls._users += 1
            return cls._shared

    @classmethod
    def here(cls) -> RenewalThread:
        """Return a keeper on the loop that is running now, so that a test has one virtual time for everything."""
        return cls(asyncio.get_running_loop())

    def leave(self) -> None:
        """Give the renewal thread back; the last one out ends its thread."""
        with RenewalThread._guard:
            if RenewalThread._shared is not self:  # a test's own; or a forked child dropped it, see below
                return
            RenewalThread._users -= 1
            if RenewalThread._users > 0:
                return
            RenewalThread._shared = None
        self.end()
        self._aside.end()
        if self._watchdog is not None:
            self._watchdog.end()

    def watchdog(self, clock: Clock) -> Watchdog | None:
        """Return the thread that ends the process at a deadline, started if it isn't running; None in a test's loop.

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

    def _prepare(self) -> None:
        self._aside.use_here()
        self.loop.set_exception_handler(_report)


def _report(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    """Let *loop* say what went wrong as it usually does, which is by the log."""
    aside(loop.default_exception_handler, dict(context))


class LoopProbe:
    """Whether an event loop still turns: asked on the renewal loop, answered by the loop itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: asyncio.Future[None] | None = None

    async def responds(self, within: float) -> bool:
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
        return  # the renewal thread has ended while we were blocked: nobody asks any more


def _settle(answer: asyncio.Future[None]) -> None:
    if not answer.done():
        answer.set_result(None)


def _forget() -> None:
    """In a forked child the thread is gone: start anew there, and leave the parent's loop alone."""
    RenewalThread._shared = None
    RenewalThread._users = 0
    RenewalThread._guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
