"""``tenure queue --watch``: the counts of queues again and again, as a live table or as lines."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from rich.text import Text

from tenure import Stats
from tenure._cli.live import LiveScreen, can_be_live
from tenure._cli.output import (
    QUIET,
    TITLE,
    Cell,
    count_cells,
    ellipsis,
    print_json,
    print_line,
    seconds,
    timestamp,
    warn,
)
from tenure._cli.retrying import Retrying, report_outage
from tenure._cli.tables import Column, cut, laid_out
from tenure._one_line import one_line

COLUMNS = (
    Column("QUEUE", is_cut=True),
    *(Column(state, numbers=True) for state in ("READY", "LOCKED", "DELAYED", "DEFERRED", "DEAD", "OLDEST")),
)
NUMBER = 8
"""Characters of a column in plain lines, so that the lines of different counts are aligned."""

Found = Mapping[str, Stats]


class _View(Protocol):
    def show(self, found: Found) -> None: ...

    def note(self, text: str) -> None: ...

    def outage(self, trouble: str) -> None: ...


async def watch(
    look: Callable[[], Awaitable[Found]],
    unused: Callable[[Found], Awaitable[str]],
    *,
    source: str,
    every: float,
    count: int | None,
    wait: float | None,
    as_json: bool,
) -> None:
    """Count repeatedly; if the store does not answer, it is asked again.

    Args:
        look: Counts the queues.
        unused: Returns an error text if the queue asked for doesn't exist; otherwise an empty text.
        source: The store, as shown to people.
        every: Seconds between two counts.
        count: Return after this many counts; None: never.
        wait: See :class:`tenure._cli.retrying.Retrying`.
        as_json: Whether to write JSON.
    """
    async with AsyncExitStack() as stack:
        view: _View
        if as_json or not can_be_live():
            view = _JsonLines() if as_json else _Lines()
        else:
            view = _Table(source, every)
            await stack.enter_async_context(view.screen)
        retrying = Retrying(wait, view.outage)
        counted = 0
        while True:
            found = await retrying.ask(look)
            if counted == 0 and (text := await retrying.ask(lambda found=found: unused(found))):  # type: ignore[misc]
                view.note(text)
            view.show(found)
            counted += 1
            if counted == count:
                return
            await asyncio.sleep(every)


class _JsonLines:
    """A JSON object for each count."""

    def show(self, found: Found) -> None:
        records = [{"queue": each, **dataclasses.asdict(stats)} for each, stats in found.items()]
        print_json({"at": timestamp(), "queues": records}, lines=True)

    def note(self, text: str) -> None:
        warn(text)

    def outage(self, trouble: str) -> None:
        report_outage(trouble)


class _Lines:
    """A line for each queue and count, below one line of titles."""

    def __init__(self) -> None:
        self._has_titles = False
        self._name_width = len(COLUMNS[0].title)

    def show(self, found: Found) -> None:
        at = timestamp()
        rows = [(one_line(each), *map(_plain, count_cells(stats))) for each, stats in found.items()]
        self._name_width = max(self._name_width, *(len(row[0]) for row in rows), 0)
        if not self._has_titles:
            self._has_titles = True
            self._print_line("TIME", [column.title for column in COLUMNS], len(at))
        for row in rows:
            self._print_line(at, row, len(at))

    def note(self, text: str) -> None:
        warn(text)

    def outage(self, trouble: str) -> None:
        report_outage(trouble)

    def _print_line(self, at: str, cells: Sequence[str], width: int) -> None:
        name, *counts = cells
        text = "  ".join(each.rjust(NUMBER) for each in counts)
        print_line(f"{at.ljust(width)}  {name.ljust(self._name_width)}  {text}".rstrip())


class _Table:
    """A live table, with dead letters in red."""

    def __init__(self, source: str, every: float) -> None:
        self.screen = LiveScreen(self._render)
        self._source = source
        self._every = every
        self._found: Found = {}
        self._note = ""
        self._at = ""

    def show(self, found: Found) -> None:
        self._found, self._at = found, timestamp()
        if any(stats != Stats() for stats in found.values()):
            self._note = ""
        self.screen.draw()

    def note(self, text: str) -> None:
        self._note = text

    def outage(self, trouble: str) -> None:
        self.screen.outage(trouble)

    def _render(self, width: int, height: int | None) -> list[Text]:
        head = [
            Text.assemble(("tenure queue --watch", TITLE), (f"  every {seconds(self._every)}  {self._source}", QUIET)),
            Text(self._at),
            *([Text(cut(one_line(self._note), width))] if self._note else []),
            Text(),
        ]
        room = (
            None if height is None else max(1, height - len(head) - 2)
        )  # the titles, and the line about further queues
        shown = fitting(self._found, room)
        rows = [(name, *count_cells(stats)) for name, stats in shown.items()]
        table = laid_out(COLUMNS, rows, width) if self._found else [Text("there are no queues on this store")]
        left_out = len(self._found) - len(shown)
        foot = [Text(f"{ellipsis()} {left_out:,} more: tenure queue", QUIET)] if left_out else []
        return [*head, *table, *foot]


def _plain(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def fitting(found: Found, room: int | None) -> Found:
    """Return at most *room* queues: first those with dead letters, and those that are not empty."""
    if room is None or len(found) <= room:
        return found
    ranked = sorted(found, key=lambda name: (not found[name].dead, found[name] == Stats()))
    kept = set(ranked[:room])
    return {name: stats for name, stats in found.items() if name in kept}
