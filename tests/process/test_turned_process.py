"""The clocks of a process, put forward while it runs."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tenure.testing import ManualClock
from tests.servers.turned_process import CAN_TURN, TurnedProcess, steps

TELLS = """
import sys, time
for _ in sys.stdin:
    print(time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), time.process_time(), flush=True)
"""
pytestmark = pytest.mark.skipif(not CAN_TURN, reason="clocks of processes are turned on Linux on x86-64 only")


@contextmanager
def clocks() -> Iterator[subprocess.Popen[str]]:
    """Run a process that tells its clocks when it is asked."""
    with subprocess.Popen([sys.executable, "-c", TELLS], stdin=-1, stdout=-1, text=True) as process:
        try:
            told(process)  # it runs
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> list[float]:
    """Return what its clocks show."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return [float(one) for one in process.stdout.readline().split()]


def test_all_clocks_but_those_of_cpu_time_are_turned() -> None:
    with clocks() as process:
        turned = TurnedProcess(process.pid)
        for ahead, more in ((1_000.75, 1_000.75), (1_001.5, 0.75)):
            turned.turn(more)
            before = [time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)]
            *shown, used = told(process)
            after = [time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)]
            for least, seen, most in zip(before, shown, after, strict=True):
                assert least + ahead <= seen <= most + ahead
            assert used < 100.0


def test_clocks_of_others_are_not_turned() -> None:
    with clocks() as process, clocks() as other:
        TurnedProcess(process.pid).turn(1_000.0)
        assert abs(told(other)[1] - time.monotonic()) < 100.0


def test_the_time_that_steps_take_passes_too() -> None:
    clock = ManualClock()

    def turned(seconds: float, longest: float, each_takes: float) -> list[float]:
        found = []
        for step in steps(seconds, longest, clock.now):
            found.append(step)
            clock.advance(each_takes)
        return found

    assert turned(10.0, 4.0, 0.0) == [4.0, 4.0, 2.0]
    assert turned(10.0, 4.0, 0.5) == [4.0, 4.0, 1.0]
    assert turned(10.0, 4.0, 3.0) == [4.0, 3.0]
    assert turned(10.0, math.inf, 0.5) == [10.0]
    assert turned(0.0, 4.0, 0.5) == []
