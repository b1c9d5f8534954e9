"""Commands that print a credential: run beside the loop, within a time limit, without a shell and a terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from tenure._one_line import one_line
from tenure._redaction import redacted
from tenure._secret import Secret, hide
from tenure.errors import ConfigError, Unavailable

SAID_MAX = 300
"""Characters of its last line of errors that are shown."""
ENDS_WITHIN = 1.0
"""Seconds for which the end of one that was killed is waited for."""
OUTPUT_MAX = 2**20
"""Bytes that it may write: some times as many as a token has."""


async def output_of(
    argv: Sequence[str],
    name: str,
    *,
    within: float,
    env: Mapping[str, str] | None = None,
    install: str = "",
    remedy: str = "log in with it, then tenure tries again",
) -> bytes:
    """Return what a command writes to its standard output, which is in no message.

    Args:
        argv: The command and its arguments.
        name: What messages call it.
        within: The seconds that it may take.
        env: Its environment; this process's if None.
        install: What to do if it can't be run.
        remedy: What to do if it fails.

    Raises:
        ConfigError: It can't be run, or writes without end.
        Unavailable: It fails, or takes longer; then it is killed, with all that it has started.
    """
    pipe = asyncio.subprocess.PIPE
    starting = asyncio.create_task(
        # In a session of its own: it has no terminal, and a group that can be killed with all that it has started.
        asyncio.create_subprocess_exec(
            *argv, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        )
    )
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:  # not passed on: asyncio would wait for all that the command has started
        with suppress(OSError, ValueError):
            await _end(await starting)
        raise
    except (OSError, ValueError) as error:  # a ValueError: an argument or a variable that no command can have
        raise ConfigError(
            f"{name} can't be run: {getattr(error, 'strerror', None) or error}{'; ' + install if install else ''}"
        ) from None  # the cause quotes the command, which may be the secret itself
    is_over = False
    try:
        async with asyncio.timeout(within):
            assert process.stdout is not None, "it has a pipe"
            assert process.stderr is not None, "it has a pipe"
            written, errors = await asyncio.gather(_read(process.stdout, name), _read(process.stderr, name))
            await process.wait()
        is_over = True
    except TimeoutError:
        raise Unavailable(f"{name} took over {within:g} s") from None
    finally:
        if not is_over:
            await _end(process)
    if process.returncode:
        printed = Secret(written.decode(errors="replace").strip())
        hide(printed)
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        said = f": {redacted(one_line(last[0]))[:SAID_MAX]}" if last else ""
        raise Unavailable(f"{name} ended with status {process.returncode}{said}; {remedy}")
    return written


async def _read(stream: asyncio.StreamReader, name: str) -> bytes:
    written = bytearray()
    while chunk := await stream.read(2**16):
        written += chunk
        if len(written) > OUTPUT_MAX:
            raise ConfigError(f"{name} wrote more than {OUTPUT_MAX:,} bytes, and must print nothing but a credential")
    return bytes(written)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a command with all that it has started: one of them may hold its output open after its end."""
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
    for number in (1, 2):  # their end is not noticed while nobody reads
        pipe = process._transport.get_pipe_transport(number)  # type: ignore[attr-defined]  # no public name
        if pipe is not None:
            pipe.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(ENDS_WITHIN):
            await process.wait()
