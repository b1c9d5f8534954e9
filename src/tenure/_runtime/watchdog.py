"""A thread that ends the process when work runs beyond its term, for ``overrun="exit"``, whatever its loops do.

The renewal thread's timer ends the process, too, but its loop may be stuck; this thread depends on no loop.
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

LAST_WORDS = 0.2
"""Seconds that a process which is to exit takes to say why."""

LOOK_EVERY = 1.0
"""Seconds between looks at the clock: a wait stands still during a suspend, and the clock does not."""

NEVER = float("inf")

_saying = threading.Lock()
_has_said = False


class Deadline:
    """When the process ends unless the work of one term has ended before; made by :meth:`Watchdog.deadline`.

    It counts from :meth:`begin` until :meth:`lift`.
    """

    __slots__ = ("_watchdog", "at", "why")

    def __init__(self, watchdog: Watchdog, at: float, why: str) -> None:
        self.at: float = at
        self.why: str = why
        self._watchdog: Watchdog | None = watchdog

    def begin(self) -> None:
        """The work begins: from here on this deadline ends the process. Does nothing once lifted."""
        if (watchdog := self._watchdog) is not None:
            watchdog.watch(self)

    def move(self, at: float) -> None:
        """End the process then, and not when it was said before. Does nothing once lifted."""
        self.at = at
        if (watchdog := self._watchdog) is not None:
            watchdog.look_by(at)

    def lift(self) -> None:
        """The work has ended: this deadline ends nothing. From any thread, and again."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.forget(self)


class Watchdog:
    """A daemon thread that waits for the nearest deadline.

    A forked child has no such thread, and no term either: it must not ask for anything here, as the lock may be held.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._deadlines: set[Deadline] = set()
        self._changed = threading.Condition()
        self._looks_at = NEVER  # when the thread looks next, however its wait ends
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="tenure-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: The system gives no thread.
        """
        self._thread.start()

    def end(self) -> None:
        """End the thread. Nothing is watched any more."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join()

    def deadline(self, at: float, why: str) -> Deadline:
        """Return what will end the process at this time of the clock, and say *why*, once it has begun."""
        return Deadline(self, at, why)

    def watch(self, deadline: Deadline) -> None:
        with self._changed:
            self._deadlines.add(deadline)
        self.look_by(deadline.at)

    def look_by(self, at: float) -> None:
        """Let the thread look at that time at the latest."""
        with self._changed:
            if at < self._looks_at:
                self._changed.notify()

    def forget(self, deadline: Deadline) -> None:
        with self._changed:
            self._deadlines.discard(deadline)

    def overdue(self) -> Deadline | None:
        """Return a deadline that has come, or None; from then on, the next look is due at the nearest one."""
        now = self._clock.now()
        first = min(self._deadlines, key=lambda deadline: deadline.at, default=None)
        self._looks_at = first.at if first is not None else NEVER
        return first if first is not None and first.at <= now else None

    def _run(self) -> None:
        overdue: Deadline | None = None
        with self._changed:
            while not self._is_ending and (overdue := self.overdue()) is None:
                self._changed.wait(self._pause())
        if overdue is not None:
            end_process(overdue.why)

    def _pause(self) -> float | None:
        if self._looks_at == NEVER:
            return None
        return max(0.0, min(self._looks_at - self._clock.now(), LOOK_EVERY))


def end_process(why: str) -> None:
    """Say *why* on stderr, briefly, and end this process at once, with :data:`EXIT_OVERRUN`, whatever else fails."""
    try:
        _say_briefly(why)
    finally:  # also if no thread is to be had
        os._exit(EXIT_OVERRUN)


def _say_briefly(why: str) -> None:
    # The reader of our stderr may be stuck, or the work may hold its lock: that must not keep us alive.
    saying = threading.Thread(target=_say, args=(f"tenure: {why}\n",), daemon=True)
    saying.start()
    saying.join(LAST_WORDS)


def _say(what: str) -> None:
    global _has_said
    with _saying:  # another thread may end the process at this time, too, and be saying it
        if not _has_said:
            _has_said = True
            sys.stderr.write(what)
            sys.stderr.flush()
