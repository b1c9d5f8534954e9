"""The states of other processes on Linux, and stopping one where it holds no lock."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from tests.durations import wait_until

STOPPED = frozenset("TZX")
"""The states of a process of which no thread runs, see :func:`states_of`."""
PARENT, GROUP = 1, 2
"""The numbers of fields in /proc/PID/stat, counted from the state."""


def states_of(pid: int) -> set[str]:
    """Return the states that the threads of a process are in: T is stopped, Z and X have ended."""
    found = set()
    with suppress(OSError):  # it has ended meanwhile
        for path in Path(f"/proc/{pid}/task").glob("[0-9]*/stat"):
            with suppress(OSError):  # this thread has
                found.add(path.read_text().rpartition(")")[2].split()[0])
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended, and is a zombie, does not."""
    return not states_of(pid) <= set("ZX")


def children_of(pid: int) -> list[int]:
    """Return the processes that this one has started or adopted, and that are not reaped."""
    return _with_field(PARENT, pid)


def members_of(group: int) -> list[int]:
    """Return the processes of a process group that are not reaped."""
    return _with_field(GROUP, group)


def is_group_alive(group: int) -> bool:
    """Return whether a process of the group runs; to find the others than its leader, all processes are looked at."""
    return is_alive(group) or any(map(is_alive, members_of(group)))


def _with_field(field: int, value: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[field]) == value:
            found.append(int(path.parent.name))
    return found


def stop(pid: int, file: Path) -> None:
    """Stop a process, but not in the middle of a commit to the SQLite *file*, which would block all other processes."""

    def is_stopped() -> bool:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: states_of(pid) <= STOPPED)  # each thread stops when it next leaves the kernel
        try:
            with closing(sqlite3.connect(file, isolation_level=None, timeout=0.1)) as connection:
                connection.execute("BEGIN IMMEDIATE")
            return True
        except sqlite3.OperationalError:
            os.kill(pid, signal.SIGCONT)
            return False

    wait_until(is_stopped)


def send_signal_to(pid: int, number: signal.Signals) -> None:
    """Send a signal, and return when it is no longer pending: two pending signals of one kind are one."""

    def is_pending() -> bool:
        with suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith(("SigPnd:", "ShdPnd:")) and int(line.split()[1], 16) & (1 << (number - 1)):
                    return True
        return False

    os.kill(pid, number)
    wait_until(lambda: not is_pending())
