"""``tenure send --lines``: sends each line of an input as it comes, and reports what was sent if that ends early.

Rules:

- Lines are numbered over the whole input, from 1, as ``sed -n 601p`` counts them; ``--skip`` omits the first ones.
- However it ends, it says how many lines were sent, and with which ``--skip`` to continue.
- The answer to a request that was sent is waited for, for a moment even after an interrupt: knowing it is worth the
  delay.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tenure
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import connect, exit_of
from tenure._cli.output import end_line, notice, warn
from tenure.errors import ConfigError, MessageRefused, TenureError

if TYPE_CHECKING:
    from tenure._cli.progress import Progress

BATCH = 500
"""Messages in one request, at most."""

CHUNK = 65_536
"""Bytes that are read from the input at once, at most."""

PATIENCE = 1.0
"""Seconds to wait, after an interrupt, for the answer to a request that was sent before."""

Tell = Callable[[int, list[str]], None]
"""Called with the number of the first line of a request, and the ids of all its lines."""


@dataclass(frozen=True, slots=True)
class LineOptions:
    """How to send the lines.

    Args:
        queue: The name of the queue.
        options: The fields of each message beside its body.
        skip: The number of first lines to omit.
        id_prefix: The id of line 17 is this with ``-17``, so that it is kept once.
    """

    queue: str
    options: dict[str, Any]
    skip: int = 0
    id_prefix: str | None = None

    def message(self, number: int, line: bytes) -> tenure.Outgoing:
        """Return the message that line *number* is."""
        if self.id_prefix is None:
            return tenure.Outgoing(line, **self.options)
        return tenure.Outgoing(line, id=f"{self.id_prefix}-{number}", **self.options)


@dataclass(slots=True)
class LineCounts:
    """The lines that were skipped and sent so far."""

    wanted: LineOptions
    skipped: int = 0
    sent: int = 0
    asked: int = 0
    """Lines whose request has no answer yet."""

    @property
    def here(self) -> int:
        """The number of the last line that was skipped or sent."""
        return self.skipped + self.sent

    def __str__(self) -> str:
        here = self.here
        sent = f"{self.sent:,} sent"
        if not self.asked:
            return f"{sent}; continue with --skip {max(here, self.wanted.skip)}"
        unknown = f"line {here + 1}" if self.asked == 1 else f"lines {here + 1} to {here + self.asked}"
        sent = f"{sent}; {unknown} may have been sent or not"
        if self.wanted.id_prefix is not None:
            return f"{sent}: continue with --skip {here} and the same --id-prefix, which keeps each line once"
        return f"{sent}: --skip {here} may send some twice, --skip {here + self.asked} may omit some"

    def refused(self, reason: str) -> str:
        """Say that the next line was refused."""
        here = self.here
        return (
            f"{self.sent:,} sent; line {here + 1} refused: {reason}; correct it and continue with --skip {here}, "
            f"or omit it with --skip {here + 1}"
        )


async def send_lines(url: str, wanted: LineOptions, source: Source, tell: Tell, progress: Progress) -> int:
    """Send each line as it comes; return the exit code.

    Raises:
        Failure: It ended before the input did. The message says how many were sent.
    """
    received = _cancel_on_sigterm()
    counts = LineCounts(wanted)
    try:
        async with connect(url) as backend:
            queue = backend.queue(wanted.queue)
            if wanted.id_prefix is not None and queue.traits.dedupe == "impossible":
                raise ConfigError("--id-prefix needs a store that remembers ids, and this one does not; omit it")
            sender = _Sender(queue, counts, tell, progress)
            try:
                with progress:
                    async for lines in _batches(source.read):
                        await sender.send(lines)
            except asyncio.CancelledError:  # reported before the store is closed, which may take a while
                return _interrupted(counts, received, progress)
    except asyncio.CancelledError:
        return _interrupted(counts, received, progress)
    except _Unreadable as error:
        raise Failure(Exit.CONFIG, f"the input can't be read: {error}; {counts}") from error
    if counts.skipped < wanted.skip:
        warn(f"nothing was sent: --skip {wanted.skip} skips all of the input's {counts.skipped:,} lines")
    return Exit.DONE


def _interrupted(counts: LineCounts, received: list[int], progress: Progress) -> int:
    if not received and not progress.is_shown:
        end_line()  # of the terminal's ^C
    notice(f"interrupted; {counts}")
    return Exit.SIGNAL + (received[0] if received else signal.SIGINT)


def _cancel_on_sigterm() -> list[int]:
    """Let SIGTERM cancel this task, as an interrupt does; return a list that gets the signal."""
    received: list[int] = []
    task = asyncio.current_task()
    assert task is not None

    def end() -> None:
        received.append(signal.SIGTERM)
        task.cancel()

    with suppress(NotImplementedError, RuntimeError):  # on Windows; in a thread, which gets no signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    return received


class _Sender:
    """Sends the lines of an input in batches."""

    def __init__(self, queue: tenure.Queue, counts: LineCounts, tell: Tell, progress: Progress) -> None:
        self._queue = queue
        self._counts = counts
        self._tell = tell
        self._progress = progress

    async def send(self, lines: list[bytes]) -> None:
        """Send *lines*, the next of the input."""
        counts = self._counts
        left_out = min(len(lines), counts.wanted.skip - counts.skipped)
        counts.skipped += left_out
        self._progress.skip(sum(len(line) + 1 for line in lines[:left_out]))
        for first in range(left_out, len(lines), BATCH):
            await self._step(lines[first : first + BATCH])

    async def _step(self, lines: Sequence[bytes]) -> None:
        counts = self._counts
        first = counts.here + 1
        messages = [counts.wanted.message(number, line) for number, line in enumerate(lines, first)]
        try:
            ids = await self._answer(messages)
            self._tell(first, ids)
        except MessageRefused as refused:  # none of them was sent
            if refused.index:
                await self._step(lines[: refused.index])
            raise Failure(Exit.CONFIG, counts.refused(refused.reason)) from refused
        except (TenureError, OSError) as error:  # OSError: the ids can't be written
            code, message = exit_of(error)
            raise Failure(code, f"{message}; {counts}") from error

    async def _answer(self, messages: Sequence[tenure.Outgoing]) -> list[str]:
        """Send *messages* in one request; if cancelled, wait briefly for its answer."""
        counts = self._counts
        counts.asked = len(messages)
        asking = asyncio.ensure_future(self._queue.send_batch(messages))
        try:
            await asyncio.shield(asking)
        except ConfigError:
            counts.asked = 0
            raise
        except asyncio.CancelledError:
            await asyncio.wait([asking], timeout=PATIENCE)
            if not asking.done() or asking.cancelled():
                asking.cancel()
            elif (error := asking.exception()) is None:
                self._tell(counts.here + 1, self._count(messages, asking.result()))
            elif isinstance(error, ConfigError):
                counts.asked = 0
            raise
        return self._count(messages, asking.result())

    def _count(self, messages: Sequence[tenure.Outgoing], ids: list[str]) -> list[str]:
        self._counts.sent += len(ids)
        self._counts.asked = 0
        self._progress.sent(len(ids), sum(len(one.body) + 1 for one in messages))
        return ids


# --- the input ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """An input that is read in chunks.

    Args:
        read: Returns the next bytes, as soon as there are some; empty at the end.
        size: The number of bytes, if it is known.
        is_typed: Whether it is a terminal.
    """

    read: Callable[[], Awaitable[bytes]]
    size: int | None = None
    is_typed: bool = False


def given(body: bytes) -> Source:
    """Return a source that is *body*."""
    left = [body]

    async def read() -> bytes:
        return left.pop() if left else b""

    return Source(read, len(body))


def opened(number: int) -> Source:
    """Return a source that reads the file descriptor *number*."""
    size = None
    with suppress(OSError):
        status = os.fstat(number)
        if stat.S_ISREG(status.st_mode):
            size = status.st_size - os.lseek(number, 0, os.SEEK_CUR)
    return Source(lambda: _in_thread(lambda: os.read(number, CHUNK)), size, os.isatty(number))


def standard_input() -> Source:
    """Return a source that reads the standard input."""
    try:
        number = sys.stdin.fileno()
    except OSError:  # it stands for another stream
        return Source(lambda: _in_thread(lambda: sys.stdin.buffer.read(CHUNK)))
    return opened(number)  # not from the buffer, whose lock a daemon must not hold at the program's end


async def _batches(read: Callable[[], Awaitable[bytes]]) -> AsyncIterator[list[bytes]]:
    """Yield the lines that have come, as soon as one has."""
    rest = bytearray()
    while chunk := await _next(read):
        rest += chunk
        if b"\n" in chunk:
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            yield [line.removesuffix(b"\r") for line in lines]
    if rest:
        yield [bytes(rest.removesuffix(b"\r"))]


async def _next(read: Callable[[], Awaitable[bytes]]) -> bytes:
    try:
        return await read()
    except OSError as error:
        raise _Unreadable(error.strerror or str(error)) from error


class _Unreadable(Exception):
    """Say why the input can't be read."""


async def _in_thread(read: Callable[[], bytes]) -> bytes:
    """Return the result of *read*, called in a daemon thread, so that an interrupt ends the program at once."""
    loop = asyncio.get_running_loop()
    coming: asyncio.Future[bytes] = loop.create_future()

    def tell(chunk: bytes, error: Exception | None) -> None:
        if coming.done():
            return
        if error is None:
            coming.set_result(chunk)
        else:
            coming.set_exception(error)

    def wait() -> None:
        chunk, failure = b"", None
        try:
            chunk = read()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(tell, chunk, failure)

    threading.Thread(target=wait, name="tenure-send-input", daemon=True).start()
    return await coming
