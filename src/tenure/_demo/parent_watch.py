"""Watches the parent by a pipe on standard input: when it breaks, this process ends, however its parent died.

The first line has the settings: their URL may have a password, and every user can read a command line.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

EXIT_ORPHANED = 3
"""The exit code of a process whose parent has died."""


def read_first_line() -> bytes:
    """Read the first line, and nothing beyond it."""
    line = b""
    while not line.endswith(b"\n"):
        letter = os.read(0, 1)
        if not letter:
            os._exit(EXIT_ORPHANED)
        line += letter
    return line


def watch_parent(on_stop: Callable[[], object] | None = None) -> None:
    """Watch standard input from a thread: a line calls *on_stop*, its end ends the process at once."""

    def watch() -> None:
        while os.read(0, 1024):  # not sys.stdin: a thread blocked in it disturbs the end of the interpreter
            if on_stop is not None:
                on_stop()
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="parent_watch", daemon=True).start()


def die_with_parent() -> None:
    """Let the system end this process with its parent, too, as a stopped process can't watch.

    Called in the child between fork and exec, so that there is no gap.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, *_arguments)


_PR_SET_PDEATHSIG = 1
_prctl: Callable[..., object] | None = None
_arguments: tuple[object, ...] = ()
if sys.platform == "linux":
    # Loaded here and not in die_with_parent(): between fork and exec, nothing may be imported.
    with suppress(ImportError, OSError, AttributeError):  # a Python without ctypes, a C library without prctl
        import ctypes

        _prctl = ctypes.CDLL(None).prctl
        _arguments = tuple(map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0)))
