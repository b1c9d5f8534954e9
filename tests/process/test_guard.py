"""The guard of a command alone, at moments that a test can't produce with ``tenure lead``."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tenure._cli import guard
from tenure._cli.child import Child
from tests.durations import PATIENCE, wait_until

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="needs signals and /proc")]

HERE = Path(__file__).parent
FAR = 1000.0


class GuardProcess:
    """A guard, and this end of its two pipes."""

    def __init__(
        self,
        *command: str,
        ahead: float = FAR,
        grace: float = 1.0,
        before: bytes | None = b"",
        code: Sequence[str] = (guard.__file__,),
    ) -> None:
        control, self.control = os.pipe()
        self._report, report = os.pipe()
        if before is None:
            self.hang_up()
        else:
            self.write(before)  # it is in the pipe before the guard first reads
        times = (repr(guard.now() + ahead), repr(grace))
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", *code, str(control), str(report), *times, *command],
            pass_fds=(control, report),
            start_new_session=True,
        )
        os.close(control)
        os.close(report)

    def write(self, lines: bytes) -> None:
        os.write(self.control, lines)

    def hang_up(self) -> None:
        os.close(self.control)
        self.control = -1

    def wait_for_command(self) -> int:
        return int(os.read(self._report, 100).split()[1])

    def close(self) -> str:
        """Return the last line of the report."""
        with os.fdopen(self._report) as file:
            self.report = file.read().splitlines()
        assert self.process.wait(PATIENCE) == 0
        if self.control >= 0:
            os.close(self.control)
        return self.report[-1]


@pytest.mark.parametrize(
    ("ahead", "before"),
    [
        (-1.0, b""),  # the term was lost between the election and the start
        (0.5, b""),  # only the time to stop the command is left
        (FAR, b"deadline 1.0\n"),  # lost while the guard was starting
        (FAR, b"stop\n"),
        (FAR, b"kill\n"),
        (FAR, b"signal 15\n"),
        (FAR, None),  # tenure has ended
    ],
)
def test_too_late_to_start(tmp_path: Path, ahead: float, before: bytes | None) -> None:
    mark = tmp_path / "ran"
    started = GuardProcess("touch", str(mark), ahead=ahead, before=before)
    assert started.close() == "late 0"
    assert started.report == ["late 0"]  # no process was made
    assert not mark.exists()


SUSPENDED = """
import os, time
read, slept = time.clock_gettime, {slept!r}
time.clock_gettime = lambda of: read(of) + (os.path.exists(slept) and of == time.CLOCK_BOOTTIME and {seconds!r})
with open({guard!r}) as text:
    exec(compile(text.read(), {guard!r}, "exec"))
"""
"""A guard on a machine that is suspended for so many seconds when the file exists; waits don't get shorter."""


def test_after_a_suspend_a_command_is_stopped_at_once(tmp_path: Path) -> None:
    slept, began = tmp_path / "slept", tmp_path / "began"
    guarded = SUSPENDED.format(slept=str(slept), seconds=FAR, guard=guard.__file__)
    started = GuardProcess("sh", "-c", f": > '{began}'; exec sleep 1000", code=("-c", guarded))
    wait_until(began.exists)  # before that, it would be too late to start
    slept.touch()
    assert started.process.wait(PATIENCE) == 0
    assert started.close() == "lost 143"


HELD = """
import os, time
guard = os.getpid()
time.clock_gettime = lambda _: float(open({clock!r}).read()) if os.getpid() == guard else {in_child!r}
with open({guard!r}) as text:
    exec(compile(text.read(), {guard!r}, "exec"))
"""
"""A guard whose clock is read from a file; the process that becomes the command has another time."""


class Clock:
    """The guard's time."""

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
        trap ': > {tmp_path}/term' TERM; trap ': > {tmp_path}/usr1' USR1; trap ': > {tmp_path}/usr2' USR2
        : > {tmp_path}/ready; while :; do sleep 0.01; done
    """
    started = GuardProcess(
        "sh", "-c", script, ahead=FAR, grace=grace, code=clock.code, before=f"deadline {deadline!r}\n".encode()
    )

    def look_at(now: float) -> None:
        """Let the guard read the clock, and do what is due."""
        clock.show(now)
        for name in ("usr1", "usr2"):  # with the second, everything that was due at the first is done
            started.write(f"signal {getattr(signal, 'SIG' + name.upper()).value}\n".encode())
            wait_until((tmp_path / name).exists)
            (tmp_path / name).unlink()

    wait_until((tmp_path / "ready").exists)
    look_at(deadline - grace - 0.001)
    assert not (tmp_path / "term").exists()
    look_at(deadline - grace)
    wait_until((tmp_path / "term").exists)
    look_at(deadline - grace * guard.KILL_SHARE - 0.001)
    clock.show(deadline - grace * guard.KILL_SHARE)
    with suppress(BrokenPipeError):  # it has read the clock by itself, and has ended
        started.write(b"signal 10\n")  # read the clock again
    assert started.process.wait(PATIENCE) == 0
    assert started.close() == "lost 137"


def test_a_command_is_not_run_if_its_time_is_over_when_its_process_is_made(tmp_path: Path) -> None:
    start, mark = guard.now(), tmp_path / "ran"
    for left, last in ((1.0, "late 0"), (1.001, "ended 0")):
        clock = Clock(tmp_path / "clock", start, start + FAR - left)
        before = f"deadline {start + FAR!r}\n".encode()
        started = GuardProcess("touch", str(mark), ahead=FAR, before=before, code=clock.code)
        assert started.close() == last
        assert mark.exists() == (last == "ended 0")


def test_a_renewal_keeps_a_command_that_is_not_being_stopped() -> None:
    started = GuardProcess(
        "sh", "-c", "sleep 1; exit 9", ahead=1.5, before=f"deadline {guard.now() + FAR!r}\n".encode()
    )
    assert started.close() == "ended 9"


def test_a_renewal_does_not_keep_a_command_that_is_being_stopped(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    started = GuardProcess("sh", "-c", f"trap '' TERM; : > {ready}; sleep 1000")
    wait_until(ready.exists)
    soon, late = guard.now() + 1.0, guard.now() + FAR
    started.write(f"deadline {soon!r}\nstop\ndeadline {late!r}\n".encode())
    assert started.close() == "lost 137"


def test_the_exit_code_of_a_stopped_command(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    started = GuardProcess("sh", "-c", f"trap 'exit 3' TERM; : > {ready}; while :; do sleep 0.01; done")
    wait_until(ready.exists)
    started.write(b"stop\n")
    assert started.close() == "lost 3"


@pytest.mark.parametrize("period", ["0.001", "0.005"])
def test_no_process_is_left_of_a_command_that_keeps_forking(tmp_path: Path, period: str) -> None:
    beats = tmp_path / "beats"
    started = GuardProcess(sys.executable, "-I", "-S", str(HERE / "forking_command.py"), period, str(beats))
    assert started.close() == "ended 0"  # that of the first generation, which has ended at once
    with beats.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while one of them is alive
        assert len(file.readlines()) > 1


async def test_an_ended_command_keeps_no_resources() -> None:
    child = Child.start(["true"], os.environ, guard.now() + FAR, 1.0)
    assert (await child.outcome).code == 0
    child.trust(guard.now() + 2 * FAR)  # a renewal that comes too late
    ref = weakref.ref(child)
    del child
    await asyncio.sleep(0)  # its last task ends
    gc.collect()
    assert ref() is None


def test_an_incomplete_line_waits_for_its_end() -> None:
    started = GuardProcess("sleep", "1000")
    started.wait_for_command()
    started.write(b"deadline 1000000000.0\nsig")
    started.write(b"nal 10\n")
    assert started.close() == "ended 138"


ODD = b"\xff\n\ndeadline\ndeadline nan\ndeadline soon\nsignal 0\nsignal 999\nsignal x\nother 1\nstop now please\n"


def test_lines_that_are_no_orders_leave_the_command_and_its_deadline(tmp_path: Path) -> None:
    began = tmp_path / "began"
    started = GuardProcess("sh", "-c", f": > '{began}'; exec sleep 1000", before=ODD)
    wait_until(began.exists)
    started.write(ODD + b"deadline 1.0\n")
    assert started.close() == "lost 143"


def test_the_command_has_none_of_the_parents_files_and_the_usual_signals(tmp_path: Path) -> None:
    script = (
        "import os, signal; print(sorted(os.listdir('/proc/self/fd'))[:3]); print(len(os.listdir('/proc/self/fd')))"
    )
    out = tmp_path / "out"
    started = GuardProcess(
        "sh", "-c", f'{sys.executable} -c "{script}" > {out}; grep -E "Sig(Blk|Ign)" /proc/self/status >> {out}'
    )
    assert started.close() == "ended 0"
    files, count, blocked, ignored = out.read_text().splitlines()
    assert files == "['0', '1', '2']"
    assert count == "4"  # and the one that lists them
    assert int(blocked.split()[1], 16) == 0
    # The C library ignores 32 and 33 in the processes that it spawns; make passes that on.
    assert int(ignored.split()[1], 16) & ~(0b11 << 31) == 0
