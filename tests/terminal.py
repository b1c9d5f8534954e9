"""A command on a terminal of its own, of a chosen size: its output, and typed input."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from tests.durations import wait_until
from tests.process_states import states_of

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
HOME = "\x1b[H"

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """``python -m tenure.cli`` with *arguments*, on a terminal of so many columns and lines; use it in a block."""

    def __init__(
        self,
        *arguments: str,
        width: int = 80,
        height: int = 24,
        environment: Mapping[str, str] | None = None,
        in_background: bool = False,
    ) -> None:
        self._own, self._command = pty.openpty()
        self.resize(width, height, notify=False)
        self.modes: list[Any] = termios.tcgetattr(self._command)
        self._shown = bytearray()
        env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
        shell = ["sh", "-c", 'set -m; "$@" & wait', "sh"] if in_background else []
        self.process = subprocess.Popen(
            [*shell, sys.executable, "-m", "tenure.cli", *arguments],
            stdin=self._command,
            stdout=self._command,
            stderr=self._command,
            env={**env, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **(environment or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.send_signal(signal.SIGCONT)
        self.process.wait()
        os.close(self._command)
        self._reader.join()
        os.close(self._own)

    # --- input ---

    def type(self, keys: bytes) -> None:
        """Type *keys*; ``b"\\x03"`` is Ctrl-C, ``b"\\x1a"`` Ctrl-Z."""
        os.write(self._own, keys)

    def resize(self, width: int, height: int, *, notify: bool = True) -> None:
        """Give the terminal another size."""
        self._width, self._height = width, height
        fcntl.ioctl(self._command, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        if notify:
            self.process.send_signal(signal.SIGWINCH)

    def wait(self) -> int:
        """Wait for the command's end; return its exit code once all of its output has been read."""
        wait_until(lambda: self.process.poll() is not None, lambda: f"it goes on:\n{self.raw}")
        size = -1
        while size != len(self._shown):
            size = len(self._shown)
            self._reader.join(0.05)
        assert self.process.returncode is not None
        return self.process.returncode

    def until_shown(self, *texts: str) -> str:
        """Wait until a whole picture has all *texts*, apart from colours; return it, with its colours."""
        found: list[str] = []

        def is_shown() -> bool:
            found[:] = [picture for picture in self._pictures() if all(text in plain(picture) for text in texts)][-1:]
            return bool(found)

        wait_until(is_shown, lambda: f"{texts} not in:\n{self.raw[-4_000:]}")
        return found[0]

    def until_gone(self, text: str) -> None:
        """Wait until the newest picture does not hold *text*."""
        wait_until(lambda: text not in plain(self._pictures()[-1]), lambda: f"{text} still in:\n{self.raw[-4_000:]}")

    def until_stopped(self) -> None:
        """Wait until the command was stopped."""
        wait_until(lambda: states_of(self.process.pid) <= set("T"), lambda: "it runs")

    # --- output ---

    @property
    def raw(self) -> str:
        """Everything that the terminal was sent."""
        return self._shown.decode(errors="replace").replace("\r\n", "\n")

    @property
    def after(self) -> str:
        """The output on the usual screen after the alternate one was left."""
        return plain(self.raw.rpartition(LEAVE)[2])

    def is_as_before(self) -> bool:
        """Whether the usual screen is shown, with a cursor, and the terminal modes are as before."""
        shown = [(self.raw.count(on), self.raw.count(off)) for on, off in ((ENTER, LEAVE), (HIDE, SHOW))]
        return termios.tcgetattr(self._command) == self.modes and all(one == other for one, other in shown)

    def _pictures(self) -> list[str]:
        """Return the pictures of the present size that are complete."""
        drawn = [each.partition(SHOW)[0] for each in self.raw.split(HOME)[1:]]
        lines = [plain(each).split("\n") for each in drawn]
        return [
            each
            for each, shown in zip(drawn, lines, strict=True)
            if len(shown) == self._height and len(shown[-1]) >= self._width
        ]

    def _read(self) -> None:
        with suppress(OSError):  # the end of a terminal is an error
            while more := os.read(self._own, 65_536):
                self._shown += more


def plain(text: str) -> str:
    """Return *text* without escape sequences."""
    return _ESCAPE.sub("", text)


def lines_of(picture: str) -> Sequence[str]:
    """Return the lines of a picture, without colours and the empty ones at its end."""
    return [line.rstrip() for line in plain(picture).rstrip().split("\n")]
