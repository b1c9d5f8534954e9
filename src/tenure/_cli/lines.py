"""``tenure send --lines``: sends each line of an input as it comes, and reports what was sent if that ends early.

Rules:

- Lines are numbered over the whole input, from 1, as ``sed -n 601p`` counts them; ``--skip`` omits the first ones.
- However the command ends, it reports how many lines were sent, and the ``--skip`` to continue with.
- It waits for the answer to a request that was sent, for a moment even after an interrupt: otherwise it could not
  report whether those lines were sent.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tenure
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import connect, exit_of
from tenure._cli.input import Source, Unreadable
from tenure._cli.output import end_line, notice, warn
from tenure.errors import ConfigError, MessageRefused, TenureError

if TYPE_CHECKING:
    from tenure._cli.progress import Progress

BATCH = 500
"""Messages in one request, at most."""

ANSWER_WITHIN = 1.0
"""Seconds to wait, after an interrupt, for the answer to a request that was sent before."""

OnSent = Callable[[int, list[str]], None]
"""Called with the number of the first line of a request, and the ids of all its lines."""


@dataclass(frozen=True, slots=True)
class LineOptions:
    """The options of sending lines.

    Args:
        queue: The name of the queue.
        options: The fields of each message beside its body.
        skip: The number of first lines to omit.
        id_prefix: The id of line 17 is this with ``-17``, so that the store keeps it once.
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

    options: LineOptions
    skipped: int = 0
    sent: int = 0
    unanswered: int = 0
    """Lines whose request has no answer yet."""

    @property
    def last_line(self) -> int:
        """The number of the last line that was skipped or sent."""
        return self.skipped + self.sent

    def __str__(self) -> str:
        last = self.last_line
        sent = f"{self.sent:,} sent"
        if not self.unanswered:
            return f"{sent}; continue with --skip {max(last, self.options.skip)}"
        until = last + self.unanswered
        unknown = f"line {until}" if self.unanswered == 1 else f"lines {last + 1} to {until}"
        sent = f"{sent}; {unknown} may have been sent or not"
        if self.options.id_prefix is not None:
            return f"{sent}: continue with --skip {last} and the same --id-prefix, which keeps each line once"
        return f"{sent}: --skip {last} may send some twice, --skip {until} may omit some"

    def refused(self, reason: str) -> str:
        """Return an error text: the next line was refused."""
        last = self.last_line
        return (
            f"{self.sent:,} sent; line {last + 1} refused: {reason}; correct it and continue with --skip {last}, "
            f"or omit it with --skip {last + 1}"
        )


async def send_lines(url: str, options: LineOptions, source: Source, on_sent: OnSent, progress: Progress) -> int:
    """Send each line as it comes; return the exit code.

    Raises:
        Failure: Not all lines were sent. The message says how many were.
    """
    received = _cancel_on_sigterm()
    counts = LineCounts(options)
    try:
        async with connect(url) as backend:
            queue = backend.queue(options.queue)
            if options.id_prefix is not None and queue.traits.dedupe == "impossible":
                raise ConfigError("--id-prefix needs a store that remembers ids, and this one does not; omit it")
            sender = _Sender(queue, counts, on_sent, progress)
            try:
                with progress:
                    async for lines in _batches(source):
                        await sender.send(lines)
            except asyncio.CancelledError:  # reported before the store is closed, which may take a while
                return _interrupted(counts, received, progress)
    except asyncio.CancelledError:
        return _interrupted(counts, received, progress)
    except Unreadable as error:
        raise Failure(Exit.CONFIG, f"{error}; {counts}") from error
    if counts.skipped < options.skip:
        warn(f"nothing was sent: --skip {options.skip} skips all of the input's {counts.skipped:,} lines")
    return Exit.DONE


def _interrupted(counts: LineCounts, received: list[int], progress: Progress) -> int:
    if not received and not progress.is_shown:
        end_line()  # the one with the terminal's ^C
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

    def __init__(self, queue: tenure.Queue, counts: LineCounts, on_sent: OnSent, progress: Progress) -> None:
        self._queue = queue
        self._counts = counts
        self._on_sent = on_sent
        self._progress = progress

    async def send(self, lines: list[bytes]) -> None:
        """Send *lines*, the next of the input."""
        counts = self._counts
        left_out = min(len(lines), counts.options.skip - counts.skipped)
        counts.skipped += left_out
        self._progress.skip(sum(len(line) + 1 for line in lines[:left_out]))
        for first in range(left_out, len(lines), BATCH):
            await self._step(lines[first : first + BATCH])

    async def _step(self, lines: Sequence[bytes]) -> None:
        counts = self._counts
        first = counts.last_line + 1
        messages = [counts.options.message(number, line) for number, line in enumerate(lines, first)]
        try:
            ids = await self._answer(messages)
            self._on_sent(first, ids)
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
        counts.unanswered = len(messages)
        request = asyncio.ensure_future(self._queue.send_batch(messages))
        try:
            await asyncio.shield(request)
        except ConfigError:
            counts.unanswered = 0
            raise
        except asyncio.CancelledError:
            await asyncio.wait([request], timeout=ANSWER_WITHIN)
            if not request.done() or request.cancelled():
                request.cancel()
            elif (error := request.exception()) is None:
                self._on_sent(counts.last_line + 1, self._count(messages, request.result()))
            elif isinstance(error, ConfigError):
                counts.unanswered = 0
            raise
        return self._count(messages, request.result())

    def _count(self, messages: Sequence[tenure.Outgoing], ids: list[str]) -> list[str]:
        self._counts.sent += len(ids)
        self._counts.unanswered = 0
        self._progress.sent(len(ids), sum(len(one.body) + 1 for one in messages))
        return ids


async def _batches(source: Source) -> AsyncIterator[list[bytes]]:
    """Yield the lines that were read, as soon as there is one."""
    rest = bytearray()
    while chunk := await source.read():
        rest += chunk
        if b"\n" in chunk:
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            yield [line.removesuffix(b"\r") for line in lines]
    if rest:
        yield [bytes(rest.removesuffix(b"\r"))]
