"""The progress of ``tenure work --until-empty``, as a bar in the last line of the terminal.

That line is outside the scrolling region of the screen. So the output of commands goes above it, byte for byte, without
being copied, and stays on a terminal if it was on one.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import tenure
from tenure._cli.output import seconds

if TYPE_CHECKING:
    from tenure._cli.delivery_counter import DeliveryCounter

DRAW_EVERY = 0.25
"""Seconds from one drawing to the next."""

COUNT_EVERY = 4
"""Drawings from one count of the queue to the next."""

ROWS_LEAST, COLUMNS_LEAST = 5, 40


def has_room() -> bool:
    """Return whether there is a terminal for a bar."""
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return False
    return sys.stderr.encoding.lower().startswith("utf") and _size() >= (COLUMNS_LEAST, ROWS_LEAST)


def _size() -> tuple[int, int]:
    try:
        return os.get_terminal_size(sys.stderr.fileno())
    except OSError:
        return 0, 0


class StatusLine:
    """The last line of the terminal of stderr."""

    def __init__(self) -> None:
        self._size = (0, 0)  # of the terminal with the reserved line; zero if none is reserved

    @property
    def width(self) -> int:
        """The columns for a text."""
        return self._size[0] - 1

    def open(self) -> None:
        """Reserve the line. The cursor stays where it is, or one line above if it was in the last."""
        self._size = columns, rows = _size()
        if rows < ROWS_LEAST or columns < COLUMNS_LEAST:
            self._size = (0, 0)
            return
        # To set the region that scrolls sends the cursor home: hence to save it (7) and to restore it (8).
        _write(f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A")

    def fit(self) -> None:
        """Reserve the line again if the terminal's size has changed."""
        if _size() != self._size:
            self.close()
            self.open()

    def draw(self, text: str) -> None:
        """Show *text*, which has no more than ``width`` columns."""
        if self._size[1]:
            _write(f"\x1b7\x1b[{self._size[1]};1H\x1b[0m\x1b[2K{text}\x1b8")

    def close(self) -> None:
        """Release the line."""
        if self._size[1]:
            _write(f"\x1b7\x1b[r\x1b[{self._size[1]};1H\x1b[0m\x1b[2K\x1b8")
        self._size = (0, 0)


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # the terminal is closed
        sys.stderr.write(text)  # in one write: the output of other processes comes before or after it
        sys.stderr.flush()


@contextmanager
def shown(queue: tenure.Queue, counter: DeliveryCounter) -> Iterator[None]:
    """Show, during the block, how much of *queue* is done. While Ctrl-Z stops the process, the line is released."""
    loop = asyncio.get_running_loop()
    status_line = StatusLine()

    def pause() -> None:
        status_line.close()
        os.kill(os.getpid(), signal.SIGSTOP)
        status_line.open()

    status_line.open()
    loop.add_signal_handler(signal.SIGTSTP, pause)
    drawing = loop.create_task(_draw(status_line, queue, counter))
    try:
        yield
    finally:
        drawing.cancel()
        loop.remove_signal_handler(signal.SIGTSTP)
        status_line.close()


def _done(counter: DeliveryCounter) -> int:
    return counter.done + counter.dead


async def _draw(status_line: StatusLine, queue: tenure.Queue, counter: DeliveryCounter) -> None:
    from rich import progress
    from rich.console import Console

    loop = asyncio.get_running_loop()
    bar = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[failed]}", markup=False),
        progress.TextColumn("{task.fields[wait]}", markup=False),
        console=Console(file=io.StringIO(), force_terminal=True),
        auto_refresh=False,
        expand=True,
    )
    task = bar.add_task(queue.name, total=None, failed="", wait="")
    began_at = loop.time()
    total: int | None = None
    turn = 0
    while True:
        if turn % COUNT_EVERY == 0:
            with suppress(tenure.TenureError):  # the consumer says it, and goes on
                stats = await queue.stats()
                total = _done(counter) + stats.ready + stats.locked  # others may send, and take, some as well
        turn += 1
        done = _done(counter)
        status_line.fit()
        if status_line.width > 0:
            failed = f"{counter.failed:,} failed" if counter.failed else ""
            wait = ""
            if done and total is not None and total > done:
                wait = f"{seconds((total - done) * (loop.time() - began_at) / done)} left"
            bar.update(task, completed=done, total=total, failed=failed, wait=wait)
            bar.console.width = status_line.width
            with bar.console.capture() as captured:
                bar.console.print(bar.get_renderable(), end="", crop=True)
            status_line.draw(captured.get().splitlines()[0])
        await asyncio.sleep(DRAW_EVERY)
