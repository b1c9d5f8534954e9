"""A watch on the parent: a pipe on standard input. When it breaks, this process ends, however its parent died.

The first line says what to do: the URL in it may have a password, and a command line can be read by everybody.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

EXIT_ALONE = 3
"""With which code a process ends whose parent is gone."""


def orders() -> bytes:
    """Read the first line. Nothing beyond it is taken from the pipe."""
    line = b""
    while not line.endswith(b"\n"):
        letter = os.read(0, 1)
        if not letter:
            os._exit(EXIT_ALONE)
        line += letter
    return line


def wear(on_stop: Callable[[], object] | None = None) -> None:
    """Watch standard input from a thread: a line calls *on_stop*, its end ends the process at once."""

    def watch() -> None:
        while os.read(0, 1024):  # not sys.stdin: a thread that is blocked in it disturbs the interpreter's end
            if on_stop is not None:
                on_stop()
        os._exit(EXIT_ALONE)

    threading.Thread(target=watch, name="parent_watch", daemon=True).start()


def tie() -> None:
    """Let the system end this process with its parent, too: one that is stopped watches nothing.

    Called in the child before it becomes another program, so that there is no moment without it.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, *_arguments)


_PR_SET_PDEATHSIG = 1
_prctl: Callable[..., object] | None = None
_arguments: tuple[object, ...] = ()
if sys.platform == "linux":
    # Loaded here and not in tie(): between fork and exec, nothing may be imported.
    with suppress(ImportError, OSError, AttributeError):  # a Python without ctypes, a C library without prctl
        import ctypes

        _prctl = ctypes.CDLL(None).prctl
        _arguments = tuple(map(ctypes.c_ulong, (signal.SIGKILL, 0, 0, 0)))
