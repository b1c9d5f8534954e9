"""Commands that print a credential: run beside the loop, within a time limit, without a shell and a terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from tenure.errors import ConfigError, Unavailable

SAID_MAX = 300
"""Characters of its last line of errors that are shown."""


async def output_of(
    argv: Sequence[str], name: str, *, within: float, env: Mapping[str, str] | None = None, install: str = ""
) -> bytes:
    """Return what a command writes to its standard output, which is in no message.

    Args:
        argv: The command and its arguments.
        name: What messages call it.
        within: The seconds that it may take.
        env: Its environment; this process's if None.
        install: What to do if it can't be run.

    Raises:
        ConfigError: It can't be run.
        Unavailable: It fails, or takes longer; then it is killed, with all that it has started.
    """
    pipe = asyncio.subprocess.PIPE
    try:
        # In a session of its own: it has no terminal, and a group that can be killed with all that it has started.
        process = await asyncio.create_subprocess_exec(
            *argv, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except (OSError, ValueError) as error:  # a ValueError: an argument or a variable that no command can have
        raise ConfigError(
            f"{name} can't be run: {getattr(error, 'strerror', None) or error}{'; ' + install if install else ''}"
        ) from error
    is_over = False
    try:
        async with asyncio.timeout(within):
            written, errors = await process.communicate()
        is_over = True
    except TimeoutError:
        raise Unavailable(f"{name} took over {within:g} s") from None
    finally:
        if not is_over:
            _kill(process)
    if process.returncode:
        said = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise Unavailable(
            f"{name} ended with status {process.returncode}{': ' + said[0][:SAID_MAX] if said else ''}; log in with "
            "it, then tenure tries again"
        )
    return written


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a command with all that it has started: one of them may hold its output open after its end."""
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
