"""The guard of a command by itself, at moments that ``tenure lead`` can't be made to meet: just too late, just gone."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tenure._cli import guard
from tenure._cli.child import Child

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="needs signals and /proc")]

HERE = Path(__file__).parent
PATIENCE = 60.0
FAR = 1000.0


class Ward:
    """A guard, and our ends of its two pipes."""

    def __init__(
        self,
        *command: str,
        ahead: float = FAR,
        grace: float = 1.0,
        before: bytes | None = b"",
        code: Sequence[str] = (guard.__file__,),
    ) -> None:
        listens, self.control = os.pipe()
        self.report, says = os.pipe()
        if before is None:
            self.hang_up()
        else:
            self.say(before)  # it is in the pipe when the guard first looks
        times = (repr(guard.now() + ahead), repr(grace))
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", *code, str(listens), str(says), *times, *command],
            pass_fds=(listens, says),
            start_new_session=True,
        )
        os.close(listens)
        os.close(says)

    def say(self, lines: bytes) -> None:
        os.write(self.control, lines)

    def hang_up(self) -> None:
        os.close(self.control)
        self.control = -1

    def wait_for_command(self) -> int:
        return int(os.read(self.report, 100).split()[1])

    def close(self) -> str:
        """Return the last line of the report."""
        with os.fdopen(self.report) as report:
            said = report.read()
        assert self.process.wait(PATIENCE) == 0
        if self.control >= 0:
            os.close(self.control)
        self.said = said.splitlines()
        return self.said[-1]


@pytest.mark.parametrize(
    ("ahead", "before"),
    [
        (-1.0, b""),  # the term was lost between the election and the start
        (0.5, b""),  # no more time is left than the command is given to stop
        (FAR, b"deadline 1.0\n"),  # lost while the guard was starting
        (FAR, b"stop\n"),
        (FAR, b"kill\n"),
        (FAR, b"signal 15\n"),
        (FAR, None),  # tenure is gone
    ],
)
def test_too_late_to_start(tmp_path: Path, ahead: float, before: bytes | None) -> None:
    mark = tmp_path / "ran"
    ward = Ward("touch", str(mark), ahead=ahead, before=before)
    assert ward.close() == "late 0"
    assert ward.said == ["late 0"]  # not even a process was made
    assert not mark.exists()


SUSPENDED = """
import os, time
read, slept = time.clock_gettime, {slept!r}
time.clock_gettime = lambda of: read(of) + (os.path.exists(slept) and of == time.CLOCK_BOOTTIME and {seconds!r})
with open({guard!r}) as text:
    exec(compile(text.read(), {guard!r}, "exec"))
"""
"""A guard, on a machine that sleeps for so many seconds when the file is there: no wait ends sooner for that."""


def test_after_a_suspend_a_command_is_stopped_at_once(tmp_path: Path) -> None:
    slept, began = tmp_path / "slept", tmp_path / "began"
    guarded = SUSPENDED.format(slept=str(slept), seconds=FAR, guard=guard.__file__)
    ward = Ward("sh", "-c", f": > '{began}'; exec sleep 1000", code=("-c", guarded))
    until(began.exists)  # before that, it would be too late to start
    slept.touch()
    assert ward.process.wait(PATIENCE) == 0
    assert ward.close() == "lost 143"


HELD = """
import os, time
guard = os.getpid()
time.clock_gettime = lambda _: float(open({clock!r}).read()) if os.getpid() == guard else {in_child!r}
with open({guard!r}) as text:
    exec(compile(text.read(), {guard!r}, "exec"))
"""
"""A guard on a clock that shows what is in a file, and in the process that becomes the command a moment of its own."""


class Clock:
    """What the guard takes for the time."""

    def __init__(self, path: Path, now: float, in_child: float) -> None:
        self._path = path
        self.code = ("-c", HELD.format(clock=str(path), in_child=in_child, guard=guard.__file__))
        self.show(now)

    def show(self, now: float) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(repr(now))
        new.rename(self._path)


def test_a_command_gets_term_and_kill_at_their_times_and_not_before(tmp_path: Path) -> None:
    deadline, grace = guard.now() + FAR, 2.0
    clock = Clock(tmp_path / "clock", deadline - FAR, deadline - FAR)
    script = f"""
        trap ': > {tmp_path}/told' TERM; trap ': > {tmp_path}/usr1' USR1; trap ': > {tmp_path}/usr2' USR2
        : > {tmp_path}/ready; while :; do sleep 0.01; done
    """
    ward = Ward("sh", "-c", script, ahead=FAR, grace=grace, code=clock.code, before=f"deadline {deadline!r}\n".encode())

    def look_at(now: float) -> None:
        """Let the guard look at the clock, and do what is due."""
        clock.show(now)
        for name in ("usr1", "usr2"):  # when it has passed on the second, it has done all that was due at the first
            ward.say(f"signal {getattr(signal, 'SIG' + name.upper()).value}\n".encode())
            until((tmp_path / name).exists)
            (tmp_path / name).unlink()

    until((tmp_path / "ready").exists)
    look_at(deadline - grace - 0.001)
    assert not (tmp_path / "told").exists()
    look_at(deadline - grace)
    until((tmp_path / "told").exists)
    look_at(deadline - grace * guard.KILL_SHARE - 0.001)
    clock.show(deadline - grace * guard.KILL_SHARE)
    ward.say(b"signal 10\n")  # look again
    assert ward.process.wait(PATIENCE / 10) == 0
    assert ward.close() == "lost 137"


def test_a_command_is_not_run_if_its_time_is_over_when_its_process_is_made(tmp_path: Path) -> None:
    start, mark = guard.now(), tmp_path / "ran"
    for left, last in ((1.0, "late 0"), (1.001, "ended 0")):
        clock = Clock(tmp_path / "clock", start, start + FAR - left)
        before = f"deadline {start + FAR!r}\n".encode()
        ward = Ward("touch", str(mark), ahead=FAR, before=before, code=clock.code)
        assert ward.close() == last
        assert mark.exists() == (last == "ended 0")


def test_a_renewal_saves_a_command_that_was_not_told_to_stop() -> None:
    ward = Ward("sh", "-c", "sleep 1; exit 9", ahead=1.5, before=f"deadline {guard.now() + FAR!r}\n".encode())
    assert ward.close() == "ended 9"


def test_a_renewal_does_not_save_a_command_that_was_told_to_stop(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ward = Ward("sh", "-c", f"trap '' TERM; : > {ready}; sleep 1000")
    until(ready.exists)
    soon, late = guard.now() + 1.0, guard.now() + FAR
    ward.say(f"deadline {soon!r}\nstop\ndeadline {late!r}\n".encode())
    assert ward.close() == "lost 137"


def test_the_code_of_a_command_that_was_told_to_stop(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ward = Ward("sh", "-c", f"trap 'exit 3' TERM; : > {ready}; while :; do sleep 0.01; done")
    until(ready.exists)
    ward.say(b"stop\n")
    assert ward.close() == "lost 3"


@pytest.mark.parametrize("period", ["0.001", "0.005"])
def test_no_process_is_left_of_a_command_that_keeps_forking(tmp_path: Path, period: str) -> None:
    beats = tmp_path / "beats"
    ward = Ward(sys.executable, "-I", "-S", str(HERE / "relay.py"), period, str(beats))
    assert ward.close() == "ended 0"  # that of the first generation, which has ended at once
    with beats.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while one of them lives
        assert len(file.readlines()) > 1


async def test_an_ended_command_is_let_go_of() -> None:
    child = Child.start(["true"], os.environ, guard.now() + FAR, 1.0)
    assert (await child.outcome).code == 0
    child.trust(guard.now() + 2 * FAR)  # news of its term that come too late
    ref = weakref.ref(child)
    del child
    await asyncio.sleep(0)  # the last task of it ends
    gc.collect()
    assert ref() is None


def test_half_a_line_waits_for_its_other_half() -> None:
    ward = Ward("sleep", "1000")
    ward.wait_for_command()
    ward.say(b"deadline 1000000000.0\nsig")
    ward.say(b"nal 10\n")
    assert ward.close() == "ended 138"


def test_the_command_has_none_of_our_files_and_the_usual_signals(tmp_path: Path) -> None:
    script = (
        "import os, signal; print(sorted(os.listdir('/proc/self/fd'))[:3]); print(len(os.listdir('/proc/self/fd')))"
    )
    out = tmp_path / "out"
    ward = Ward(
        "sh", "-c", f'{sys.executable} -c "{script}" > {out}; grep -E "Sig(Blk|Ign)" /proc/self/status >> {out}'
    )
    assert ward.close() == "ended 0"
    files, count, blocked, ignored = out.read_text().splitlines()
    assert files == "['0', '1', '2']"
    assert count == "4"  # and the one that lists them
    assert int(blocked.split()[1], 16) == 0
    # The C library ignores its own two, 32 and 33, in whatever it spawns: make, for one, hands them down to us.
    assert int(ignored.split()[1], 16) & ~(0b11 << 31) == 0


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.01)
