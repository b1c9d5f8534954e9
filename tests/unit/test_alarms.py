"""Alarms: in virtual time, after a suspend, and by a real timer of the kernel."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure._runtime import alarms
from tenure._runtime.alarms import Alarm, Alarms, CheckingTimer, KernelTimer
from tenure._runtime.clock import SystemClock
from tenure.testing import ManualClock, until
from tenure.testing.loop import VirtualClock, VirtualLoop
from tenure.testing.loop import run as run_in_virtual_time

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such timers")


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert not Alarms._known


class Rung:
    """Notes when alarms rang."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.rung: list[tuple[str, float]] = []

    def alarm(self, name: str) -> Alarm:
        return Alarm(self.clock, lambda: self.rung.append((name, self.clock.now())))


def _virtual_clock() -> VirtualClock:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.clock()


def test_an_alarm_rings_once_at_the_time_to_which_it_was_moved_last() -> None:
    async def main() -> None:
        rung = Rung(_virtual_clock())
        one, other = rung.alarm("one"), rung.alarm("other")
        one.set(30.0)
        one.set(10.0)
        one.set(20.0)
        other.set(25.0)
        other.set(15.0)
        await asyncio.sleep(60.0)
        assert rung.rung == [("other", 15.0), ("one", 20.0)]
        one.set(70.0)
        one.set(alarms.NEVER)
        other.set(70.0)
        other.end()
        other.set(70.0)
        await asyncio.sleep(60.0)
        assert len(rung.rung) == 2
        one.end()
        one.end()

    run_in_virtual_time(main())


def test_after_a_suspend_what_is_due_rings_within_a_second() -> None:
    async def main() -> None:
        clock = _virtual_clock()
        rung = Rung(clock)
        soon, late = rung.alarm("soon"), rung.alarm("late")
        soon.set(3_600.0)
        late.set(7_200.0)
        await asyncio.sleep(10.0)
        clock.jump(3_600.0)
        await asyncio.sleep(1.0)
        assert [name for name, _ in rung.rung] == ["soon"]
        soon.end()
        late.end()

    run_in_virtual_time(main())


def test_an_alarm_may_end_or_move_others_while_it_rings_and_its_error_stops_none() -> None:
    async def main() -> None:
        clock = _virtual_clock()
        rung = Rung(clock)
        ended, moved, last = rung.alarm("ended"), rung.alarm("moved"), rung.alarm("last")

        def act() -> None:
            ended.end()
            moved.set(9.0)
            first.set(8.0)
            raise ValueError("a bug")

        first = Alarm(clock, act)
        for alarm in (first, ended, moved, last):
            alarm.set(5.0)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        await asyncio.sleep(6.0)
        assert rung.rung == [("last", 5.0)]
        first.end()
        await asyncio.sleep(6.0)
        assert rung.rung == [("last", 5.0), ("moved", 9.0)]
        for alarm in (moved, last):
            alarm.end()

    run_in_virtual_time(main())


def test_alarms_that_come_and_go_leave_little_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms, "SPARE_MAX", 10)

    async def main() -> None:
        rung = Rung(_virtual_clock())
        stays = rung.alarm("stays")
        stays.set(5_000.0)
        for number in range(200):
            one = rung.alarm("goes")
            one.set(4_000.0 - number)
            one.end()
        for at in range(4_000, 3_000, -1):
            stays.set(float(at))
        assert stays._alarms is not None
        assert len(stays._alarms._entries) <= 13
        await asyncio.sleep(6_000.0)
        assert rung.rung == [("stays", 3_001.0)]
        stays.end()

    run_in_virtual_time(main())


# --- the timer of the kernel ---


@linux_only
async def test_the_kernel_rings_in_time_and_not_once_more() -> None:
    clock = SystemClock()
    rung: list[float] = []
    one, other = (Alarm(clock, lambda: rung.append(clock.now())) for _ in range(2))
    assert isinstance(one._alarms, Alarms)
    assert one._alarms is other._alarms
    assert isinstance(one._alarms._timer, KernelTimer)
    begun = clock.now()
    one.set(begun + 0.05)
    other.set(begun + 30.0)
    async with asyncio.timeout(10.0):
        while not rung:
            await asyncio.sleep(0.01)
    assert rung[0] >= begun + 0.05
    one.set(0.0)  # long ago
    async with asyncio.timeout(10.0):
        while len(rung) < 2:
            await asyncio.sleep(0.01)
    one.set(clock.now() + 0.02)
    one.set(clock.now() + 60.0)
    await asyncio.sleep(0.1)
    assert len(rung) == 2
    one.end()
    other.end()


def timer_of(alarm: Alarm) -> KernelTimer:
    assert isinstance(alarm._alarms, Alarms)
    assert isinstance(alarm._alarms._timer, KernelTimer)
    return alarm._alarms._timer


def told_by_the_kernel(timer: KernelTimer) -> dict[str, str]:
    """Return what the kernel tells about a timer: its clock, and the seconds and nanoseconds that are left."""
    text = Path(f"/proc/self/fdinfo/{timer._file}").read_text(encoding="ascii")
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def clock_of(timer: KernelTimer) -> int:
    return int(told_by_the_kernel(timer)["clockid"])


def time_left(timer: KernelTimer) -> float:
    seconds, nanoseconds = told_by_the_kernel(timer)["it_value"].strip("()").split(",")
    return int(seconds) + int(nanoseconds) / 1e9


@linux_only
async def test_the_timer_of_the_kernel_counts_suspends() -> None:
    alarm = Alarm(SystemClock(), lambda: None)
    assert clock_of(timer_of(alarm)) == time.CLOCK_BOOTTIME
    alarm.end()


@linux_only
@pytest.mark.parametrize("wait", [0.75, 100.75, 86_400.5])
async def test_the_timer_of_the_kernel_is_set_for_as_long_as_is_asked(wait: float) -> None:
    clock = SystemClock()
    alarm = Alarm(clock, lambda: None)
    timer = timer_of(alarm)

    def is_exact() -> bool:  # unless the machine is slow just now
        alarm.set(alarms.NEVER)
        alarm.set(clock.now() + wait)
        return wait - 0.25 < time_left(timer) <= wait + 1e-6

    await until(is_exact)
    alarm.end()


@linux_only
async def test_a_planted_clock_that_stands_still_in_suspends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    loop = asyncio.get_running_loop()
    timer = KernelTimer(loop, lambda: None)
    monkeypatch.undo()
    assert clock_of(timer) == time.CLOCK_MONOTONIC != time.CLOCK_BOOTTIME
    timer.close()


@linux_only
def test_an_idle_loop_is_not_woken_by_an_alarm_that_is_far_away() -> None:
    async def main() -> int:
        alarm = Alarm(SystemClock(), lambda: None)
        alarm.set(SystemClock().now() + 3_600.0)
        loop, turns = asyncio.get_running_loop(), 0
        select = loop._selector.select  # type: ignore[attr-defined]

        def counted(*arguments: object) -> object:
            nonlocal turns
            turns += 1
            return select(*arguments)

        loop._selector.select = counted  # type: ignore[attr-defined]
        await asyncio.sleep(2.5)
        alarm.end()
        return turns

    assert asyncio.run(main()) <= 3


@linux_only
def test_a_loop_that_is_closed_leaves_no_file_behind() -> None:
    async def forgetful() -> None:
        Alarm(SystemClock(), lambda: None).set(SystemClock().now() + 60.0)

    async def other() -> None:
        Alarm(SystemClock(), lambda: None).end()

    before = _files()
    asyncio.run(forgetful())
    asyncio.run(other())
    assert _files() == before


@linux_only
async def test_a_forked_child_does_not_move_the_timer_of_its_parent() -> None:
    clock = SystemClock()
    rung = asyncio.Event()
    alarm = Alarm(clock, rung.set)
    alarm.set(clock.now() + 0.3)
    child = os.fork()
    if child == 0:
        try:
            alarm.set(clock.now() + 3_600.0)
            alarm.set(0.0)
            alarm.end()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    async with asyncio.timeout(10.0):
        await rung.wait()
    alarm.end()


async def test_where_the_kernel_has_none_the_clock_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> int:
        raise OSError("no timerfd")

    monkeypatch.setattr(alarms, "_timerfd_create", missing)
    rung = asyncio.Event()
    alarm = Alarm(SystemClock(), rung.set)
    assert isinstance(alarm._alarms, Alarms)
    assert isinstance(alarm._alarms._timer, CheckingTimer)
    alarm.set(SystemClock().now() + 0.02)
    async with asyncio.timeout(10.0):
        await rung.wait()
    alarm.end()


async def test_a_clock_of_a_test_is_checked_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms, "CHECK_EVERY", 0.01)
    clock = ManualClock(100.0)
    rung = asyncio.Event()
    alarm = Alarm(clock, rung.set)
    alarm.set(110.0)
    await asyncio.sleep(0.05)
    assert not rung.is_set()
    clock.advance(10.0)
    async with asyncio.timeout(10.0):
        await rung.wait()
    alarm.end()


def _files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_interrupt_in_an_alarm_stops_no_other_alarm() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    loop = asyncio.new_event_loop()
    rung: list[str] = []
    made: list[Alarm] = []

    async def begin() -> None:
        clock = SystemClock()
        made.extend(Alarm(clock, call) for call in (interrupt, lambda: rung.append("other")))
        now = clock.now()
        made[0].set(now)
        made[1].set(now + 1e-9)
        await asyncio.sleep(60.0)

    async def go_on() -> None:
        later = Alarm(SystemClock(), lambda: rung.append("later"))
        later.set(SystemClock().now() + 0.01)
        while len(rung) < 2:
            await asyncio.sleep(0.01)
        for one in (*made, later):
            one.end()

    beginning = loop.create_task(begin())
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(beginning)
    loop.run_until_complete(asyncio.wait_for(go_on(), 60.0))
    assert rung == ["other", "later"]
    beginning.cancel()
    loop.run_until_complete(asyncio.wait({beginning}))
    loop.close()
