"""What ``tenure send`` reads: an argument, a file or the standard input.

The event loop never waits for a read: an interrupt ends the command at once, also if it comes just before the read.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CHUNK = 65_536
"""Bytes that are read from the input at once, at most."""


class Unreadable(Exception):
    """The input can't be read; the message says which, and the reason."""


@dataclass(frozen=True, slots=True)
class Source:
    """An input that is read in chunks.

    Args:
        read: Returns the next bytes, as soon as there are some; empty at the end. Raises ``Unreadable``.
        size: The number of bytes, if it is known.
        is_typed: Whether it is a terminal, or may be one.
    """

    read: Callable[[], Awaitable[bytes]]
    size: int | None = None
    is_typed: bool = False

    async def read_all(self) -> bytes:
        """Return all that is left of it."""
        chunks: list[bytes] = []
        while chunk := await self.read():
            chunks.append(chunk)
        return b"".join(chunks)


def body_source(body: bytes) -> Source:
    """Return a source that consists of *body*."""
    left = [body]

    async def read() -> bytes:
        return left.pop() if left else b""

    return Source(read, len(body))


def file_source(file: Path) -> Source:
    """Return a source that reads *file*. The first read opens it: a named pipe waits for its writer then."""
    opened: list[int] = []

    def read() -> bytes:
        if not opened:
            opened.append(os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0)))
        if not (chunk := os.read(opened[0], CHUNK)):
            os.close(opened[0])
        return chunk

    size, is_device = None, False
    with suppress(OSError):
        status = file.stat()
        is_device = stat.S_ISCHR(status.st_mode)
        size = status.st_size if stat.S_ISREG(status.st_mode) else None
    return Source(lambda: _in_thread(read, str(file)), size, is_device)


def standard_input() -> Source:
    """Return a source that reads the standard input."""
    name = "the standard input"
    try:
        number = sys.stdin.fileno()
    except (OSError, AttributeError):  # replaced by a stream without a descriptor
        return Source(lambda: _in_thread(lambda: sys.stdin.buffer.read(CHUNK), name))
    size = None
    with suppress(OSError):
        status = os.fstat(number)
        if stat.S_ISREG(status.st_mode):
            size = status.st_size - os.lseek(number, 0, os.SEEK_CUR)
    # Not from the buffer, whose lock a daemon must not hold at the program's end.
    return Source(lambda: _in_thread(lambda: os.read(number, CHUNK), name), size, os.isatty(number))


async def _in_thread(read: Callable[[], bytes], name: str) -> bytes:
    """Return the result of *read*, called in a daemon thread, so that an interrupt ends the program at once."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[bytes] = loop.create_future()

    def finish(chunk: bytes, error: Exception | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(chunk)
        else:
            result.set_exception(error)

    def wait() -> None:
        chunk, failure = b"", None
        try:
            chunk = read()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed: no task waits any more
            loop.call_soon_threadsafe(finish, chunk, failure)

    try:
        threading.Thread(target=wait, name="tenure-send-input", daemon=True).start()
        return await result
    except (OSError, RuntimeError) as error:  # the latter: the system gives no thread
        raise Unreadable(f"{name} can't be read: {getattr(error, 'strerror', None) or error}") from error
