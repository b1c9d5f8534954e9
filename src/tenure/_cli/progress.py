"""The progress of a command, as a bar on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from rich.progress import TaskID


class Progress(Protocol):
    """Receives the numbers of sent messages and bytes."""

    is_shown: bool

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def skip(self, size: int) -> None:
        """Note that *size* bytes of the input were skipped."""

    def sent(self, count: int, size: int) -> None:
        """Note that *count* messages, *size* bytes of the input, were sent."""


class NoProgress:
    """Shows nothing."""

    is_shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def skip(self, size: int) -> None:
        """Note nothing."""

    def sent(self, count: int, size: int) -> None:
        """Note nothing."""


class Bar:
    """Draws how much of an input was sent, on stderr.

    Args:
        what: The name of the activity.
        size: The bytes of the input; None if unknown, as for a pipe.
    """

    is_shown = True

    def __init__(self, what: str, size: int | None) -> None:
        from rich import progress
        from rich.console import Console

        columns = [
            progress.TextColumn("{task.description}", markup=False),
            *([progress.BarColumn(), progress.TaskProgressColumn()] if size else []),
            progress.TextColumn("{task.fields[count]:,} sent", markup=False),
            progress.TextColumn("{task.fields[rate]}", markup=False),
            progress.TimeRemainingColumn(elapsed_when_finished=True) if size else progress.TimeElapsedColumn(),
        ]
        self._bar = progress.Progress(*columns, console=Console(file=sys.stderr), redirect_stdout=False)
        self._size = size
        self._count = 0
        self._task: TaskID = self._bar.add_task(what, total=size or None, count=0, rate="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None and self._size:
            self._bar.update(self._task, completed=self._size)  # line ends were counted as one byte each
        self._bar.stop()

    def skip(self, size: int) -> None:
        """Note that *size* bytes of the input were skipped."""
        self._bar.advance(self._task, size)

    def sent(self, count: int, size: int) -> None:
        """Note that *count* messages, *size* bytes of the input, were sent."""
        self._count += count
        elapsed = self._bar.tasks[self._task].elapsed
        rate = f"{self._count / elapsed:,.0f}/s" if elapsed else ""
        self._bar.update(self._task, advance=size, count=self._count, rate=rate)
