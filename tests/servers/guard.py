"""Clean up after a test run, also one that was killed: wait for its end, end its servers, remove their folder.

``python guard.py PID FOLDER``: PID is the test run, whose servers have FOLDER in their environment. It is a process of
its own, so that it also runs after a ``kill -9`` of the test run.
"""

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARK = "TENURE_SERVERS"


def main(run: int, folder: str) -> None:
    wait_for_the_end(run)
    # First a signal on which they clean up: PostgreSQL has shared memory outside its folder.
    for number, seconds in ((signal.SIGINT, 2.0), (signal.SIGKILL, 5.0)):
        give_up = time.monotonic() + seconds
        signalled: set[int] = set()
        while (left := servers_of(folder)) and time.monotonic() < give_up:
            for pid in set(left) - signalled:
                with suppress(OSError):
                    os.kill(pid, number)
            signalled |= set(left)
            forget(signalled)
            time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def forget(pids: Iterable[int]) -> None:
    """Remove the shared memory of libfaketime for processes that were killed."""
    for pid in pids:
        for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
            Path("/dev/shm", name).unlink(missing_ok=True)


def wait_for_the_end(run: int) -> None:
    """Block until the pipe from the run is closed or the run is gone: a fork of it may hold the pipe for longer."""
    watched = [sys.stdin.fileno()]
    if hasattr(os, "pidfd_open"):
        try:
            watched.append(os.pidfd_open(run))
        except OSError:
            return
    while True:
        readable, _, _ = select.select(watched, [], [])
        if readable != watched[:1] or not os.read(watched[0], 4_096):
            return


def servers_of(folder: str) -> list[int]:
    """Return the processes that have the mark of this run; none where there is no /proc."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:
            pass
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
