"""The stderr of ``tenure work``: the output of its commands, copied as it comes, and its own lines between.

Rules:

- The output of a command is read at once, unless much of it could not be written yet: then the command blocks, as it
  would if it wrote to our stderr itself.
- The event loop never waits for the reader of our stderr: a thread writes there, in order.
- Memory is bounded: by the output kept of each command, by the output that waits to be written, and by one pipe's
  content for each command that has ended meanwhile. Our own lines beyond a limit are dropped and counted.
- A process that keeps a command's stderr open after its end is still copied; nothing waits for it.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

KEPT = 16_384
"""Bytes that are kept of the end of a command's output: as many as a dead letter takes."""

CHUNK = 65_536
"""Bytes to read at once: the capacity of a pipe."""

READS = 16
"""Reads of a pipe after its command has ended, at most: another process may go on writing."""

AHEAD = 4 * CHUNK
"""Bytes that may wait to be written; beyond that, commands block."""

LINES_AHEAD = 1_000
"""Lines of our own that may wait to be written."""

_Chunk = tuple[bytes, Callable[[], None]]
"""The bytes to write, and the callback for the thread afterwards."""


class Stderr:
    """Our stderr, written by a thread. Used on the event loop on which it was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._chunks: SimpleQueue[_Chunk] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0  # bytes of commands that are not written yet
        self._lines = 0  # lines of our own that are not written yet
        self._left_out = 0  # and those dropped
        self._lock = threading.Lock()  # of these two, and of starting the thread
        self._reading: set[CommandStderr] = set()
        self._has_room = asyncio.Event()
        self._has_room.set()
        try:
            self._ours: int | None = sys.stderr.fileno()
        except (AttributeError, OSError, ValueError):  # there is none, it is closed, or it is not a file
            self._ours = None

    async def has_room(self) -> None:
        """Wait until more may be written."""
        await self._has_room.wait()

    async def written(self, within: float) -> None:
        """Wait until the output so far is written, or for so many seconds."""
        if self._thread is None:
            return
        written = self._loop.create_future()
        self._put(b"", lambda: self._on_loop(_settle, written))
        await asyncio.wait([written], timeout=within)

    def write_lines(self, text: str) -> bool:
        """Write our own lines, after the output that waits already. Any thread may call it.

        Returns:
            Whether there is a stderr that a thread can write to.
        """
        if self._ours is None:
            return False
        with self._lock:
            if self._lines >= LINES_AHEAD:
                self._left_out += 1
                return True
            self._lines += 1
        self._put(_encoded(text), self._line_written)
        return True

    def _line_written(self) -> None:
        with self._lock:
            self._lines -= 1
            left_out, self._left_out = self._left_out, 0
            self._lines += bool(left_out)
        if left_out:
            text = f"tenure: warning: {left_out} lines dropped here: stderr was not read fast enough\n"
            self._put(_encoded(text), self._line_written)

    def open(self) -> CommandStderr:
        """Return a stderr for a command.

        Raises:
            OSError: The system could not open a pipe.
        """
        return CommandStderr(self)

    def _copy(self, chunk: bytes) -> None:
        if self._ours is None:
            return
        self._waiting += len(chunk)
        if self._waiting > AHEAD and self._has_room.is_set():
            self._has_room.clear()
            for one in self._reading:
                self._loop.remove_reader(one.pipe)
        self._put(chunk, lambda: self._on_loop(self._on_written, len(chunk)))

    def _put(self, chunk: bytes, written: Callable[[], None]) -> None:
        """Let the thread write *chunk*, and call *written* there afterwards."""
        self._chunks.put((chunk, written))
        with self._lock:
            if self._thread is None and self._ours is not None:
                # A daemon: the end of the program does not wait for the reader of our stderr.
                thread = threading.Thread(target=self._write_all, args=(self._ours,), name="tenure-stderr", daemon=True)
                with suppress(RuntimeError):  # no thread could be started: the next chunk tries again
                    thread.start()
                    self._thread = thread

    def _write_all(self, ours: int) -> None:
        """Write chunk after chunk, however long each takes. Run in the thread."""
        while True:
            chunk, written = self._chunks.get()
            left = memoryview(chunk)
            try:
                while left:
                    try:
                        left = left[os.write(ours, left) :]
                    except BlockingIOError:  # another process may have made its other end non-blocking
                        select.select([], [ours], [])
            except OSError:
                pass  # the reader has ended; the command runs on
            written()

    def _on_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _on_written(self, count: int) -> None:
        self._waiting -= count
        if self._waiting <= AHEAD and not self._has_room.is_set():
            self._has_room.set()
            for one in self._reading:
                self._listen(one)

    def _listen(self, one: CommandStderr) -> None:
        self._loop.add_reader(one.pipe, one.read)

    def _add(self, one: CommandStderr) -> None:
        self._reading.add(one)
        if self._has_room.is_set():
            self._listen(one)

    def _remove(self, one: CommandStderr) -> None:
        self._reading.discard(one)
        self._loop.remove_reader(one.pipe)


def _settle(written: asyncio.Future[None]) -> None:
    if not written.done():
        written.set_result(None)


def _encoded(text: str) -> bytes:
    return text.encode(sys.stderr.encoding or "utf-8", sys.stderr.errors or "backslashreplace")


class CommandStderr:
    """The stderr of one command.

    Attributes:
        pipe: The end that we read.
        writing: The end that the command writes to; closed by :meth:`started`.
    """

    def __init__(self, stderr: Stderr) -> None:
        self._stderr = stderr
        self.pipe, self.writing = os.pipe()
        os.set_blocking(self.pipe, False)
        self._kept: deque[bytes] = deque()
        self._length = 0
        self._is_keeping = True
        self._is_open = True
        self._is_started = False
        stderr._add(self)

    def started(self) -> None:
        """Close our copy of the writing end: the command has inherited it, or never will."""
        if not self._is_started:
            self._is_started = True
            os.close(self.writing)

    def read(self) -> bool:
        """Read the available bytes; return whether there were any."""
        if not self._is_open:
            return False
        try:
            chunk = os.read(self.pipe, CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self._is_open = False
            self._stderr._remove(self)
            os.close(self.pipe)
            return False
        if self._is_keeping:
            self._keep(chunk)
        self._stderr._copy(chunk)
        return True

    def _keep(self, chunk: bytes) -> None:
        self._kept.append(chunk[-KEPT:])
        self._length += len(self._kept[-1])
        while self._length - len(self._kept[0]) >= KEPT:
            self._length -= len(self._kept.popleft())

    def end(self) -> str:
        """Return the end of the output of the ended command. Later output of other processes is only copied."""
        for _ in range(READS):
            if not self.read():
                break
        self._is_keeping = False
        text = b"".join(self._kept)[-KEPT:].decode("utf-8", "backslashreplace")
        self._kept.clear()
        return text
