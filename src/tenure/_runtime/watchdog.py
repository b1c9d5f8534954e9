"""A thread that ends the process when work runs beyond its term, for ``overrun="exit"``, even if every loop is blocked.

The renewal thread's timer ends the process, too, but its loop may be blocked; this thread depends on no loop.
``faulthandler.dump_traceback_later(exit=True)`` would even work while C code holds the GIL. But a process has only one,
which may be the program's own; it ends the process with code 1, and its timer stands still during a suspend.
"""

from __future__ import annotations

import os
import sys
import threading

from tenure._runtime.clock import Clock

EXIT_OVERRUN = 70
"""The exit code of a process that ``overrun="exit"`` has ended: EX_SOFTWARE of sysexits."""

MESSAGE_SECONDS = 0.2
"""Seconds that a process may take to print why it exits."""

CHECK_EVERY = 1.0
"""Seconds between checks of the clock: a wait stands still during a suspend, and the clock does not."""

NEVER = float("inf")

_printing = threading.Lock()
_has_printed = False


class Deadline:
    """The time when the process ends unless the work of one term has ended before; made by :meth:`Watchdog.deadline`.

    It counts from :meth:`begin` until :meth:`lift`.
    """

    __slots__ = ("_watchdog", "at", "why")

    def __init__(self, watchdog: Watchdog, at: float, why: str) -> None:
        self.at: float = at
        self.why: str = why
        self._watchdog: Watchdog | None = watchdog

    def begin(self) -> None:
        """The work starts: from here on this deadline ends the process. Does nothing once lifted."""
        if (watchdog := self._watchdog) is not None:
            watchdog.watch(self)

    def move(self, at: float) -> None:
        """Move the deadline to *at*. Does nothing once lifted."""
        self.at = at
        if (watchdog := self._watchdog) is not None:
            watchdog.wake_by(at)

    def lift(self) -> None:
        """The work has ended: this deadline no longer ends the process. Any thread may call it, any number of times."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.forget(self)


class Watchdog:
    """A daemon thread that waits for the nearest deadline.

    A forked child has no such thread, and no term either: it must not call anything here, as the lock may be held.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._deadlines: set[Deadline] = set()
        self._changed = threading.Condition()
        self._wakes_at = NEVER  # when the thread checks next, however its wait ends
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="tenure-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: The system gives no thread.
        """
        self._thread.start()

    def end(self) -> None:
        """End the thread. No deadline is watched any more."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join()

    def deadline(self, at: float, why: str) -> Deadline:
        """Return a deadline that, once begun, ends the process *at* this time of the clock and prints *why*."""
        return Deadline(self, at, why)

    def watch(self, deadline: Deadline) -> None:
        with self._changed:
            self._deadlines.add(deadline)
        self.wake_by(deadline.at)

    def wake_by(self, at: float) -> None:
        """Make the thread check *at* this time at the latest."""
        with self._changed:
            if at < self._wakes_at:
                self._changed.notify()

    def forget(self, deadline: Deadline) -> None:
        with self._changed:
            self._deadlines.discard(deadline)

    def overdue(self) -> Deadline | None:
        """Return a deadline that has come, or None; from then on, the next check is due at the nearest one."""
        now = self._clock.now()
        first = min(self._deadlines, key=lambda deadline: deadline.at, default=None)
        self._wakes_at = first.at if first is not None else NEVER
        return first if first is not None and first.at <= now else None

    def _run(self) -> None:
        overdue: Deadline | None = None
        with self._changed:
            while not self._is_ending and (overdue := self.overdue()) is None:
                self._changed.wait(self._pause())
        if overdue is not None:
            end_process(overdue.why)

    def _pause(self) -> float | None:
        if self._wakes_at == NEVER:
            return None
        return max(0.0, min(self._wakes_at - self._clock.now(), CHECK_EVERY))


def end_process(why: str) -> None:
    """Print *why* on stderr and end this process at once, with :data:`EXIT_OVERRUN`, whatever else fails."""
    try:
        _print_briefly(why)
    finally:  # also if the system gives no thread
        os._exit(EXIT_OVERRUN)


def _print_briefly(why: str) -> None:
    # The reader of our stderr may be blocked, or the work may hold its lock: neither may keep the process alive.
    printer = threading.Thread(target=_print, args=(f"tenure: {why}\n",), daemon=True)
    printer.start()
    printer.join(MESSAGE_SECONDS)


def _print(text: str) -> None:
    global _has_printed
    with _printing:  # another thread may end the process at the same time, and print already
        if not _has_printed:
            _has_printed = True
            sys.stderr.write(text)
            sys.stderr.flush()
