"""tests/durations.py: durations grow with how slow the machine is, as it is measured; a wait that hangs says so."""

from __future__ import annotations

import threading
import time

import pytest

from tests import durations
from tests.durations import Slowness, lateness, measured, parse_load, stretched, until, wait_until


@pytest.mark.parametrize(
    ("slowness", "seconds"),
    [
        (Slowness(0.0, 0.0), 3.0),  # an idle machine makes nothing shorter
        (Slowness(1.0, 0.0), 3.0),
        (Slowness(4.5, 0.0), 13.5),
        (Slowness(1.0, 0.25), 5.5),
        (Slowness(2.0, 0.5), 11.0),
        (Slowness(1_000.0, 1_000.0), 80.0),  # wrong measurements
    ],
)
def test_a_duration_grows_with_the_slowness(slowness: Slowness, seconds: float) -> None:
    assert stretched(3.0, lambda: slowness) == seconds


def test_the_lateness_is_that_of_the_worst_sleep() -> None:
    now = [100.0]
    late = iter([0.0, 0.125, 0.5, 0.25, 0.0])

    def sleep(seconds: float) -> None:
        now[0] += seconds + next(late)

    assert lateness(lambda: now[0], sleep) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("0.00 1.31 1.63 1/98 17101\n", 0.0),  # the reader itself
        ("2.50 1.31 1.63 1/98 17101\n", 2.5),  # busy until now
        ("0.10 1.31 1.63 9/98 17101\n", 8.0),  # busy since a moment
    ],
)
def test_the_load_is_that_of_the_moment_or_of_the_last_minute(text: str, threads: float) -> None:
    assert parse_load(text) == threads


def test_threads_that_hold_the_interpreter_make_this_machine_late() -> None:
    """Measured for real: a thread that computes lets no other one run for 5 ms, the switch interval."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1_000))

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        wait_until(lambda: measured().late > 0.001)
    finally:
        stop.set()
        thread.join()


async def test_a_wait_that_hangs_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durations, "PATIENCE", 0.0)
    with pytest.raises(AssertionError, match="the second term did not hold within 0 s"):
        await until(lambda: False, what="the second term")
    with pytest.raises(AssertionError, match=r"no second term \(within 0 s\)"):
        wait_until(lambda: False, lambda: "no second term")


async def test_a_wait_ends_when_its_condition_holds() -> None:
    asked: list[float] = []

    def third_time() -> bool:
        asked.append(time.monotonic())
        return len(asked) == 3

    await until(third_time)
    assert len(asked) == 3
    asked.clear()
    wait_until(third_time)
    assert len(asked) == 3
