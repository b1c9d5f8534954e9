"""``tenure send --lines``: an input cut into lines, sent as they come, and what stands when that ends early.

House rules:

- Lines are numbered over the whole input, from 1, as ``sed -n 601p`` counts them; ``--skip`` leaves the first ones out.
- However it ends, it says how many lines were sent, and with which ``--skip`` to go on.
- The answer to a question that was asked is waited for, also after an interrupt, if only for a moment: to know is worth
  more than to be gone.
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
from tenure._cli.group import connect, told
from tenure._cli.output import end_line, notice, warn
from tenure.errors import ConfigError, MessageRefused, TenureError

if TYPE_CHECKING:
    from tenure._cli.progress import Progress

BATCH = 500
"""Messages in one step at most."""

CHUNK = 65_536
"""Bytes that are read from the input at once, at most."""

PATIENCE = 1.0
"""Seconds after an interrupt in which to wait for the answer to what was asked before it."""

Tell = Callable[[int, list[str]], None]
"""Called with the number of the first line of a step, and the ids of all."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be done with the lines.

    Args:
        queue: The name of the queue.
        options: What is said of each message beside its body.
        skip: So many of the first lines are left out.
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
class Standing:
    """What has become of the lines so far."""

    wanted: Wanted
    skipped: int = 0
    sent: int = 0
    asked: int = 0
    """So many were asked to be kept, and there is no answer yet."""

    @property
    def here(self) -> int:
        """The number of the last line that was left out or sent."""
        return self.skipped + self.sent

    def __str__(self) -> str:
        here = self.here
        sent = f"{self.sent:,} sent"
        if not self.asked:
            return f"{sent}; go on with --skip {max(here, self.wanted.skip)}"
        unknown = f"line {here + 1}" if self.asked == 1 else f"lines {here + 1} to {here + self.asked}"
        sent = f"{sent}; {unknown} may have been sent or not"
        if self.wanted.id_prefix is not None:
            return f"{sent}: go on with --skip {here} and the same --id-prefix, which keeps each once"
        return f"{sent}: --skip {here} sends again what was, --skip {here + self.asked} leaves out what was not"

    def refused(self, reason: str) -> str:
        """Say that the next line was refused."""
        here = self.here
        return (
            f"{self.sent:,} sent; line {here + 1} refused: {reason}; mend it and go on with --skip {here}, "
            f"or leave it out with --skip {here + 1}"
        )


async def send_lines(url: str, wanted: Wanted, source: Source, tell: Tell, progress: Progress) -> int:
    """Send each line as it comes; return the exit code.

    Raises:
        Failure: It ended before the input did. The message says what stands.
    """
    heard = _hear_sigterm()
    standing = Standing(wanted)
    try:
        async with connect(url) as backend:
            queue = backend.queue(wanted.queue)
            if wanted.id_prefix is not None and queue.traits.dedupe == "impossible":
                raise ConfigError(
                    "--id-prefix is to keep each line once, and this store does not remember ids; leave it out"
                )
            sender = _Sender(queue, standing, tell, progress)
            try:
                with progress:
                    async for lines in _batches(source.read):
                        await sender.send(lines)
            except asyncio.CancelledError:  # said before the store is closed, which may take a while
                return _interrupted(standing, heard, progress)
    except asyncio.CancelledError:
        return _interrupted(standing, heard, progress)
    except _Unreadable as error:
        raise Failure(Exit.CONFIG, f"the input can't be read: {error}; {standing}") from error
    if standing.skipped < wanted.skip:
        warn(f"nothing was sent: --skip {wanted.skip} leaves out all of the input's {standing.skipped:,} lines")
    return Exit.DONE


def _interrupted(standing: Standing, heard: list[int], progress: Progress) -> int:
    if not heard and not progress.is_shown:
        end_line()  # of the terminal's ^C
    notice(f"interrupted; {standing}")
    return Exit.SIGNAL + (heard[0] if heard else signal.SIGINT)


def _hear_sigterm() -> list[int]:
    """Let SIGTERM cancel this task, as an interrupt does; return where it is noted when it does."""
    heard: list[int] = []
    task = asyncio.current_task()
    assert task is not None

    def end() -> None:
        heard.append(signal.SIGTERM)
        task.cancel()

    with suppress(NotImplementedError, RuntimeError):  # on Windows; in a thread, which hears no signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    return heard


class _Sender:
    """Sends the lines of an input in steps."""

    def __init__(self, queue: tenure.Queue, standing: Standing, tell: Tell, progress: Progress) -> None:
        self._queue = queue
        self._standing = standing
        self._tell = tell
        self._progress = progress

    async def send(self, lines: list[bytes]) -> None:
        """Send *lines*, the next of the input."""
        standing = self._standing
        left_out = min(len(lines), standing.wanted.skip - standing.skipped)
        standing.skipped += left_out
        self._progress.skip(sum(len(line) + 1 for line in lines[:left_out]))
        for first in range(left_out, len(lines), BATCH):
            await self._step(lines[first : first + BATCH])

    async def _step(self, lines: Sequence[bytes]) -> None:
        standing = self._standing
        first = standing.here + 1
        messages = [standing.wanted.message(number, line) for number, line in enumerate(lines, first)]
        try:
            ids = await self._answer(messages)
            self._tell(first, ids)
        except MessageRefused as refused:  # none of them was sent
            if refused.index:
                await self._step(lines[: refused.index])
            raise Failure(Exit.CONFIG, standing.refused(refused.reason)) from refused
        except (TenureError, OSError) as error:  # OSError: the ids can't be written
            code, message = told(error)
            raise Failure(code, f"{message}; {standing}") from error

    async def _answer(self, messages: Sequence[tenure.Outgoing]) -> list[str]:
        """Send *messages* in one step; what was asked is seen to its end, if that is soon."""
        standing = self._standing
        standing.asked = len(messages)
        asking = asyncio.ensure_future(self._queue.send_batch(messages))
        try:
            await asyncio.shield(asking)
        except ConfigError:
            standing.asked = 0
            raise
        except asyncio.CancelledError:
            await asyncio.wait([asking], timeout=PATIENCE)
            if not asking.done() or asking.cancelled():
                asking.cancel()
            elif (error := asking.exception()) is None:
                self._tell(standing.here + 1, self._count(messages, asking.result()))
            elif isinstance(error, ConfigError):
                standing.asked = 0
            raise
        return self._count(messages, asking.result())

    def _count(self, messages: Sequence[tenure.Outgoing], ids: list[str]) -> list[str]:
        self._standing.sent += len(ids)
        self._standing.asked = 0
        self._progress.sent(len(ids), sum(len(one.body) + 1 for one in messages))
        return ids


# --- where lines come from ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Source:
    """An input that is read bit by bit.

    Args:
        read: Returns what comes next, as soon as something does; nothing at the end.
        size: How many bytes it will be, if that is known.
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
    """Return what *read* returns; an interrupt ends the program although nothing comes."""
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
