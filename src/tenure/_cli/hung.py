"""Where a process hangs: it writes the stacks of its threads to stderr when a signal comes, whatever its loop does.

The signal is handled in C, by faulthandler: also while one call holds the interpreter, as a regular expression may.
"""

from __future__ import annotations

import asyncio.subprocess
import faulthandler
import signal
import sys
from contextlib import suppress

STDERR = 2
"""Its descriptor: what sys.stderr is may be replaced by the service."""

STACK_SIGNAL: int | None = signal.SIGRTMAX - 1 if sys.platform == "linux" else None
"""A signal that has no other meaning; without one, no stack is shown."""


def show_stack_on_signal() -> None:
    """Let this process write its stacks to stderr whenever the signal comes."""
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, file=STDERR, all_threads=True)


def show_stack_of(process: asyncio.subprocess.Process) -> None:
    """Let *process*, which has called :func:`show_stack_on_signal`, write its stacks; if it is stopped, it can't."""
    if STACK_SIGNAL is not None:
        with suppress(ProcessLookupError):
            process.send_signal(STACK_SIGNAL)
