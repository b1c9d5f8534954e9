"""The stderr of ``tenure work``: what its commands write there, copied as it comes, and the lines of its own between.

House rules:

- The output of a command is read at once, unless much of it could not be passed on yet: then the command waits, as it
  would for the reader of our stderr if it wrote there itself.
- The event loop never waits for the reader of our stderr: a thread writes there, and what waits is in order.
- Memory is bounded: by what is kept of each command, by what may wait to be written, and by one pipe's content for each
  command that has ended meanwhile. Lines of our own that find too many waiting are left out and counted.
- A process that holds the stderr of a command beyond the command's end is copied on; nothing waits for it.
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
"""Bytes that are kept of the end of what a command writes: as much as a dead letter takes."""

CHUNK = 65_536
"""Bytes to read at once: what a pipe holds."""

READS = 16
"""How often a pipe is read, at most, once its command has ended: somebody else may go on writing."""

AHEAD = 4 * CHUNK
"""Bytes that may wait to be written; then commands wait, too."""

LINES_AHEAD = 1_000
"""Lines of our own that may wait to be written."""

_Chunk = tuple[bytes, Callable[[], None]]
"""What is to be written, and what is called in the thread afterwards."""


class Stderr:
    """Our stderr, written to by a thread. It belongs to the event loop that it was made on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._chunks: SimpleQueue[_Chunk] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0  # bytes of commands that are not written yet
        self._lines = 0  # lines of our own that are not written yet
        self._left_out = 0  # and those that found too many waiting
        self._lock = threading.Lock()  # of these two, and of starting the thread
        self._reading: set[CommandStderr] = set()
        self._has_room = asyncio.Event()
        self._has_room.set()
        try:
            self._ours: int | None = sys.stderr.fileno()
        except (AttributeError, OSError, ValueError):  # there is none, it is closed, or it is no file
            self._ours = None

    async def has_room(self) -> None:
        """Wait until more may be written."""
        await self._has_room.wait()

    async def written(self, within: float) -> None:
        """Wait until what was passed on so far is written, or for so many seconds."""
        if self._thread is None:
            return
        written = self._loop.create_future()
        self._put(b"", lambda: self._on_loop(_settle, written))
        await asyncio.wait([written], timeout=within)

    def tell(self, text: str) -> bool:
        """Write lines of our own, behind what waits already. Callable from any thread.

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
            told = f"tenure: warning: {left_out} lines dropped here: stderr was not read fast enough\n"
            self._put(_encoded(told), self._line_written)

    def open(self) -> CommandStderr:
        """Return a stderr for a command.

        Raises:
            OSError: There is no pipe to be had.
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
        self._put(chunk, lambda: self._on_loop(self._note, len(chunk)))

    def _put(self, chunk: bytes, written: Callable[[], None]) -> None:
        """Let the thread write *chunk*, and call *written* there afterwards."""
        self._chunks.put((chunk, written))
        with self._lock:
            if self._thread is None and self._ours is not None:
                # A daemon: the end of the program does not wait for the reader of our stderr.
                thread = threading.Thread(target=self._write_all, args=(self._ours,), name="tenure-stderr", daemon=True)
                with suppress(RuntimeError):  # the system gives us no thread: the next chunk tries again
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
                    except BlockingIOError:  # its other end may have been made so by another process
                        select.select([], [ours], [])
            except OSError:
                pass  # nobody listens any more; the command is to run all the same
            written()

    def _on_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _note(self, count: int) -> None:
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
        pipe: Where we read.
        writing: What the command is to write to; to be closed by :meth:`started`.
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
        """The command has its end of the pipe, or never will: close ours, unless that was done before."""
        if not self._is_started:
            self._is_started = True
            os.close(self.writing)

    def read(self) -> bool:
        """Take what is there; tell whether there was anything."""
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
        """The command has ended: return the end of what it has written. The output of others is only copied."""
        for _ in range(READS):
            if not self.read():
                break
        self._is_keeping = False
        text = b"".join(self._kept)[-KEPT:].decode("utf-8", "backslashreplace")
        self._kept.clear()
        return text
