"""The leash: a pipe from the parent, on standard input. When it breaks, this process ends, however its parent died.

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
    if sys.platform == "linux":
        _tie()

    def watch() -> None:
        while os.read(0, 1024):  # not sys.stdin: a thread that is blocked in it disturbs the interpreter's end
            if on_stop is not None:
                on_stop()
        os._exit(EXIT_ALONE)

    threading.Thread(target=watch, name="leash", daemon=True).start()


def _tie() -> None:
    """Let the system end us with our parent, too: a process that is stopped watches nothing."""
    with suppress(ImportError, OSError, AttributeError):  # a Python without ctypes, a C library without prctl
        import ctypes

        ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL), *map(ctypes.c_ulong, (0, 0, 0)))  # PR_SET_PDEATHSIG
