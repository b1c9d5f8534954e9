"""A live display on the terminal's alternate screen, drawn at each change; the terminal is restored at the end."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import IO, Self, TextIO

import click
from rich.console import Console, Group
from rich.control import Control
from rich.screen import Screen
from rich.text import Text

from tenure._cli.exits import Exit
from tenure._cli.output import ALARM, timestamp
from tenure._cli.retrying import report_outage
from tenure._one_line import one_line

TROUBLE_LINES = 4

Render = Callable[[int, int | None], Sequence[Text]]
"""Returns the lines for so many columns and lines; without a number of lines, all lines."""


def can_be_live(console: Console | None = None) -> bool:
    """Whether the console (by default standard output) is a terminal on which this process may draw."""
    console = console or Console(file=sys.stdout)
    if not console.file.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    return console.is_terminal and _is_in_foreground(console.file)


def _is_in_foreground(file: IO[str]) -> bool:
    """Whether this process runs in the foreground; in the background, only lines are printed."""
    if sys.platform == "win32":
        return True
    try:
        return os.tcgetpgrp(file.fileno()) == os.getpgrp()
    except OSError:  # not the terminal of our session
        return True


class Canvas:
    """The terminal's alternate screen, from the first drawing to the end; the last frame stays on the normal screen.

    What this process writes to standard error meanwhile, if that is a terminal, is shown after it.
    """

    def __init__(self, render: Render, console: Console | None = None) -> None:
        self._render = render
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._errors: TextIO | None = None  # the real standard error, while it is buffered
        self.is_open: bool = False

    def draw(self) -> None:
        """Draw the present state."""
        if not self.is_open:
            self._enter()
        self._console.control(Control.home())
        self._console.print(Screen(Group(*self._lines(self._console.height))), end="")

    def leave(self) -> None:
        """Show the normal screen again, with the whole last frame."""
        if self.is_open:
            self._go_back()
            self._console.print(Group(*self._lines(None)))

    def stop(self) -> None:
        """Stop this process, as Ctrl-Z does, until it is in the foreground again."""
        if was_open := self.is_open:
            self._go_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        while was_open and not _is_in_foreground(self._console.file):
            os.kill(os.getpid(), signal.SIGSTOP)
        if was_open:
            self.draw()

    def _lines(self, height: int | None) -> Sequence[Text]:
        width = self._console.width
        lines = self._render(width, height)
        for line in lines:
            line.truncate(width, overflow="crop")
        return lines

    def _enter(self) -> None:
        self.is_open = True
        if sys.stderr.isatty():
            self._errors, sys.stderr = sys.stderr, io.StringIO()
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)

    def _go_back(self) -> None:
        self.is_open = False
        self._console.show_cursor(True)
        self._console.set_alt_screen(False)
        if self._errors is not None:
            buffer, sys.stderr, self._errors = sys.stderr, self._errors, None
            assert isinstance(buffer, io.StringIO)
            sys.stderr.write(buffer.getvalue())


class LiveScreen:
    """A canvas for a command that watches a store, for the length of the block.

    It is drawn again when the size of the terminal changes. SIGTERM and SIGHUP leave the block, and then end the
    command. While Ctrl-Z stops the process, the normal screen is shown.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._canvas = Canvas(self._lines)
        self._signal = 0  # the one that has ended the block
        self.trouble = ""
        """Why the store does not answer, and since when."""

    async def __aenter__(self) -> Self:
        if sys.platform != "win32":
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None

            def end(number: int) -> None:
                self._signal = number
                task.cancel()

            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    loop.add_signal_handler(number, end, number)
            loop.add_signal_handler(signal.SIGWINCH, self._draw_again)
            if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:  # a shell without job control
                loop.add_signal_handler(signal.SIGTSTP, self._canvas.stop)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if sys.platform != "win32":
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
                loop.remove_signal_handler(number)
            loop.add_signal_handler(signal.SIGWINCH, lambda: None)  # as it was: see `complete`
        self._canvas.leave()
        if self._signal and kind is asyncio.CancelledError:
            raise click.exceptions.Exit(Exit.SIGNAL + self._signal)

    def draw(self) -> None:
        """Draw the present state."""
        self._canvas.draw()

    def outage(self, trouble: str) -> None:
        """Show that the store does not answer, or that it answers again."""
        if not self._canvas.is_open:
            report_outage(trouble)
            return
        self.trouble = f"no answer since {timestamp()}: {trouble}" if trouble else ""
        self.draw()

    def _lines(self, width: int, height: int | None) -> list[Text]:
        lines = textwrap.wrap(one_line(self.trouble), max(10, width))[:TROUBLE_LINES]
        room = None if height is None else max(0, height - len(lines))
        return [*(Text(line, ALARM) for line in lines), *self._render(width, room)]

    def _draw_again(self) -> None:
        if self._canvas.is_open:
            self.draw()
