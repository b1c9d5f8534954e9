"""
How long tests wait: for a condition, up to one limit; or for a time that grows with how slow the machine is now.

A test on a busy machine does everything late: its threads, processes and servers wait for a CPU. So it waits for
conditions, which take as long as they take, or turns a clock. Where only real time will do (a lease or a lock that must
not run out while the test works, a time in which something must *not* happen), it asks :func:`stretched`, when it
begins and never at import. ``python -m scripts.short_durations`` refuses short times that are written out elsewhere.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

PATIENCE = 100.0
"""Seconds after which a test fails as hanging: before pytest ends it, which can't say what it waited for."""

ANSWERED_WITHIN = 60.0
"""Seconds that a client of a store waits for an answer, where no test is about that: as many as it allows."""

LATE_BY = 10
"""How many times in a row what a test waits for may be woken late: a request through a server wakes several threads."""
CROWD_MAX, LATE_MAX = 20.0, 2.0
"""No duration grows by more than these, so that a measurement that went wrong makes no test wait for ever."""
NAP, NAPS = 0.01, 5
"""How the lateness is measured: by the worst of so many sleeps of so many seconds."""


class Slowness(NamedTuple):
    """How slow the machine is: 1 and 0 if it does nothing else."""

    crowd: float
    """How many threads want each core. Each gets a share of it, so its work takes so many times as long."""
    late: float
    """By how many seconds a sleeping thread wakes up late."""


def measured() -> Slowness:
    """Measure how slow the machine is now. It takes 50 ms, and nothing while nobody asks."""
    late = lateness(time.monotonic, time.sleep)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Slowness(load() / cores, late)


def stretched(seconds: float, measure: Callable[[], Slowness] = measured) -> float:
    """Return the time that the machine needs, as slow as it is now, for what takes *seconds* when it does nothing else.

    For a lease, a lock or a timeout that must not run out while the test works, and for a time in which something must
    not happen. Ask when the test begins, or later: not at import, when other tests made the machine slow, or none did.
    """
    crowd, late = measure()
    return seconds * min(max(crowd, 1.0), CROWD_MAX) + LATE_BY * min(late, LATE_MAX)


def lateness(now: Callable[[], float], sleep: Callable[[float], None]) -> float:
    """Return by how much the worst of a few short sleeps was too long."""
    worst = 0.0
    for _ in range(NAPS):
        due = now() + NAP
        sleep(NAP)
        worst = max(worst, now() - due)
    return worst


def load() -> float:
    """Return how many threads run or want to, now or, if that is more, over the last minute.

    The moment alone may fall between two bursts; the average alone learns of a new load a minute late.
    """
    try:
        with open("/proc/loadavg") as file:
            return parse_load(file.read())
    except OSError:  # only Linux has it
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 1.0


def parse_load(text: str) -> float:
    """Return the larger of the average of a minute and the number now, without this thread, which only reads them."""
    minute, _, _, running, *_ = text.split()
    return max(float(minute), float(running.partition("/")[0]) - 1)


async def until(condition: Callable[[], object | Awaitable[object]], *, what: str = "the condition") -> None:
    """Wait until *condition* holds, which may be a coroutine function; fail as hanging if it never does.

    As ``tenure.testing.until``, which is not used here: servers wait through this module, and reach no code of tenure.
    """
    now = asyncio.get_running_loop().time
    give_up = now() + PATIENCE
    pause = 0.001
    while not (await answer if inspect.isawaitable(answer := condition()) else answer):
        if now() >= give_up:
            raise AssertionError(f"{what} did not hold within {PATIENCE:g} s")
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, 0.05)


def wait_until(
    condition: Callable[[], object],
    explain: Callable[[], str] = lambda: "it did not happen",
    within: float | None = None,
) -> None:
    """Block the thread until *condition* holds; fail as hanging, with the result of *explain*, if it never does."""
    within = PATIENCE if within is None else within
    give_up = time.monotonic() + within
    pause = 0.001
    while not condition():
        if time.monotonic() > give_up:
            raise AssertionError(f"{explain()} (within {within:g} s)")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.03)
