"""Alarms: calls at a time of the clock, also after a suspend, without a tick while nothing is due.

A loop's own timers stand still while the machine is suspended, and the clock does not. On Linux, one timer of the
kernel for each loop (``timerfd``), on the clock that counts the suspend, goes off in time, or at once on resume. Where
there is none (another system, a loop that can't watch files, a clock of a test), the clock is checked each second.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any, ClassVar, Final

from tenure._runtime.clock import Clock, SystemClock

NEVER: Final = float("inf")

CHECK_EVERY = 1.0
"""Seconds between checks of the clock, while an alarm is set and there is no timer of the kernel."""

LONGEST = 1e9
"""Seconds that a timer is set for at most: no system takes more."""

SPARE_MAX = 1_000
"""Entries of ended and moved alarms that are kept, beyond one for each alarm, before all are sorted anew."""


class Alarm:
    """Calls a function at a time that may be moved. All its methods are called on its loop.

    Args:
        clock: The clock of the times.
        call: Called at the time, on the loop that is running now.
    """

    __slots__ = ("_alarms", "at", "call", "entry_at")

    def __init__(self, clock: Clock, call: Callable[[], object]) -> None:
        self.call = call
        self.at: float = NEVER
        """When it calls next; infinity for never."""
        self.entry_at: float = NEVER
        """The time of its newest entry among those of its loop: not later than ``at``."""
        self._alarms: Alarms | None = Alarms.begin(self, clock)

    def set(self, at: float) -> None:
        """Call *at* this time, and at no other; once."""
        self.at = at
        if self._alarms is not None:
            self._alarms.moved(self)

    def end(self) -> None:
        """Call no more, whatever is set later. May be called twice."""
        self.at, self.call = NEVER, _do_nothing  # its entries stay for a while, and keep nothing else
        alarms, self._alarms = self._alarms, None
        if alarms is not None:
            alarms.end(self)


def _do_nothing() -> None:
    pass


class Alarms:
    """All alarms of one loop on one clock, with one timer. It is there while there are alarms."""

    _known: ClassVar[list[Alarms]] = []  # of all loops
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._clock = clock
        self._entries: list[tuple[float, int, Alarm]] = []  # a heap; an alarm that has moved has more than one
        self._numbers: Iterator[int] = count()
        self._members: dict[Alarm, None] = {}  # in their order, so that a simulation replays
        self._timer = _timer_of(loop, clock, self._ring)
        self._set_for = NEVER  # when the timer goes off
        self._loop = loop
        self._is_settling = False

    @classmethod
    def begin(cls, alarm: Alarm, clock: Clock) -> Alarms:
        """Add *alarm* to those of the running loop, and return them."""
        loop = asyncio.get_running_loop()
        with cls._guard:
            alarms = next((one for one in cls._known if one._loop is loop and one._is_on(clock)), None)
            if alarms is None:
                for one in [one for one in cls._known if one._loop.is_closed()]:
                    one._close()
                alarms = cls(loop, clock)
                cls._known.append(alarms)
            alarms._members[alarm] = None
            return alarms

    def end(self, alarm: Alarm) -> None:
        """Remove *alarm*."""
        self._members.pop(alarm, None)
        if not self._members:
            with self._guard:
                self._close()

    def _is_on(self, clock: Clock) -> bool:
        return self._clock is clock or (type(self._clock) is SystemClock and type(clock) is SystemClock)

    def _close(self) -> None:
        """Give the timer back: there are no alarms any more, or the loop is closed."""
        self._timer.close()
        self._members.clear()
        with suppress(ValueError):
            self._known.remove(self)

    def moved(self, alarm: Alarm) -> None:
        """Note that the time of *alarm* was set."""
        at = alarm.at
        if at < alarm.entry_at:
            alarm.entry_at = at
            heapq.heappush(self._entries, (at, next(self._numbers), alarm))
            if at < self._set_for:
                self._set_timer(at)
            if len(self._entries) > 2 * len(self._members) + SPARE_MAX:
                self._sort_anew()
        elif self._set_for == alarm.entry_at < at and not self._is_settling:
            # The timer goes off too early now. It is set once for all alarms that move in this iteration of the loop.
            self._is_settling = True
            self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        self._is_settling = False
        if self._members and (at := self._first()) != self._set_for:
            self._set_timer(at)

    def _sort_anew(self) -> None:
        self._entries = []
        for alarm in self._members:
            alarm.entry_at = alarm.at
            if alarm.at < NEVER:
                self._entries.append((alarm.at, next(self._numbers), alarm))
        heapq.heapify(self._entries)

    def _first(self) -> float:
        """Return when the first alarm is due; put back entries of alarms that have moved on."""
        entries = self._entries
        while entries:
            entry_at, _, alarm = entries[0]
            if entry_at == alarm.at:
                return entry_at
            if entry_at != alarm.entry_at:  # an older entry: a newer one is earlier, or has rung
                heapq.heappop(entries)
            elif alarm.at == NEVER:
                alarm.entry_at = NEVER
                heapq.heappop(entries)
            else:
                alarm.entry_at = alarm.at
                heapq.heapreplace(entries, (alarm.at, next(self._numbers), alarm))
        return NEVER

    def _set_timer(self, at: float) -> None:
        self._set_for = at
        self._timer.set(None if at == NEVER else min(max(0.0, at - self._clock.now()), LONGEST))

    def _ring(self) -> None:
        """Call the alarms that are due; the timer went off."""
        self._set_for = NEVER
        due: list[Alarm] = []
        now = self._clock.now()
        while self._first() <= now:
            _, _, alarm = heapq.heappop(self._entries)
            alarm.at = alarm.entry_at = NEVER
            due.append(alarm)
        self._set_for = -NEVER  # whatever is set meanwhile, the timer is set once, below
        due.reverse()
        try:
            while due:
                alarm = due.pop()
                if alarm in self._members and alarm.at == NEVER:  # else a call before has ended or moved it
                    try:
                        alarm.call()
                    except Exception as error:  # must not stop the others
                        self._loop.call_exception_handler({"message": "an alarm failed", "exception": error})
        finally:
            for alarm in due:  # the program is interrupted, and its loop may run again
                if alarm in self._members and alarm.at == NEVER:
                    alarm.set(now)
            if self._members:
                self._set_timer(self._first())


def _after_fork() -> None:
    """Forget the parent's alarms in a forked child: their loops don't run here."""
    Alarms._known = []
    Alarms._guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# --- timers ---


class CheckingTimer:
    """A timer of the loop, which checks the clock each second."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None

    def set(self, wait: float | None) -> None:
        """Ring after *wait* seconds, or earlier; not at all if None."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = None if wait is None else self._loop.call_later(min(wait, CHECK_EVERY), self._ring)

    def close(self) -> None:
        self.set(None)


class KernelTimer:
    """A timer of the kernel, on the clock that counts the time in suspend.

    Raises:
        OSError: The system has no such timer, or no file descriptor left.
        NotImplementedError: The loop can't watch files.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._pid = os.getpid()
        self._file = _timerfd_create()
        try:
            loop.add_reader(self._file, self._on_expiry)
        except BaseException:
            os.close(self._file)
            raise

    def set(self, wait: float | None) -> None:
        """Ring after *wait* seconds; not at all if None."""
        if self._pid == os.getpid():  # a forked child has the same timer, and must not move it
            _timerfd_settime(self._file, 0.0 if wait is None else max(wait, 1e-6))

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            # A closed loop watches nothing. A forked child shares its parent's watch list, and must not change it.
            if self._pid == os.getpid() and not self._loop.is_closed():
                self._loop.remove_reader(file)
            os.close(file)

    def _on_expiry(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # set anew since it went off
            return
        self._ring()


def _timer_of(loop: asyncio.AbstractEventLoop, clock: Clock, ring: Callable[[], None]) -> CheckingTimer | KernelTimer:
    if isinstance(clock, SystemClock) and sys.platform == "linux":
        with suppress(OSError, AttributeError, RuntimeError, ValueError):  # NotImplementedError is a RuntimeError
            return KernelTimer(loop, ring)
    return CheckingTimer(loop, ring)


if sys.platform == "linux" and sys.version_info >= (3, 13):

    def _timerfd_create() -> int:
        return os.timerfd_create(time.CLOCK_BOOTTIME, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC)

    def _timerfd_settime(file: int, wait: float) -> None:
        os.timerfd_settime(file, initial=wait)

else:

    def _timerfd_create() -> int:
        create, _, _, errno_of_call = _functions()
        file: int = create(time.CLOCK_BOOTTIME, os.O_NONBLOCK | os.O_CLOEXEC)  # TFD_* are the same numbers
        if file < 0:
            raise OSError(errno_of_call(), "timerfd_create failed")
        return file

    def _timerfd_settime(file: int, wait: float) -> None:
        _, settime, times, errno_of_call = _functions()
        whole = int(wait)
        if settime(file, 0, times(0, 0, whole, int((wait - whole) * 1e9)), None) < 0:
            raise OSError(errno_of_call(), "timerfd_settime failed")

    @cache
    def _functions() -> tuple[Callable[..., int], Callable[..., int], Callable[..., Any], Callable[[], int]]:
        """Return the functions of the C library, what makes a ``struct itimerspec``, and what reads the error number.

        Raises:
            OSError: This Python has no ctypes, or the system's times have another size.
            AttributeError: The C library has no such functions.
        """
        try:
            import ctypes
        except ImportError as error:
            raise OSError("this Python has no ctypes") from error
        if ctypes.sizeof(ctypes.c_long) != 8:  # 32-bit systems have two kinds of times
            raise OSError("this system has no 64-bit times")
        library = ctypes.CDLL(None, use_errno=True)
        times = ctypes.c_long * 4  # interval and value, each in seconds and nanoseconds
        return library.timerfd_create, library.timerfd_settime, times, ctypes.get_errno
