"""``tenure watch``: each change of leader as a row of a live table, as a line, or as JSON."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AsyncExitStack, aclosing
from typing import Protocol

from rich.text import Text

from tenure import Election, Leader
from tenure._cli.live import LiveScreen, can_be_live
from tenure._cli.output import (
    ALARM,
    LEADING,
    NO_LEADER,
    QUIET,
    TITLE,
    Cell,
    pairs,
    print_json,
    print_line,
    record,
    seconds,
    short,
    timestamp,
)
from tenure._cli.retrying import Retrying, report_outage
from tenure._cli.tables import Column, laid_out
from tenure._one_line import one_line

COLUMNS = (
    Column("TIME"),
    Column("LEADER", is_cut=True),
    Column("TOKEN", numbers=True),
    Column("METADATA", is_cut=True),
)

ASK_EVERY = 1.0
"""Seconds between two requests for the remaining time of the lease; they also show whether the store answers."""

CHANGES_MAX = 10_000
"""Changes kept, to be shown on a larger terminal and at the end."""


class _View(Protocol):
    def change(self, leader: Leader | None) -> None: ...

    def refresh(self, leader: Leader | None) -> None: ...

    def outage(self, trouble: str) -> None: ...


async def watch(election: Election, *, source: str, count: int | None, wait: float | None, as_json: bool) -> None:
    """Show each change of leader, until there were *count*.

    Args:
        election: The election to watch.
        source: The store, as shown to people.
        count: Return after this many changes, the first leader included; None: never.
        wait: See :class:`tenure._cli.retrying.Retrying`.
        as_json: Whether to write JSON.
    """
    async with AsyncExitStack() as stack:
        view: _View
        if as_json or not can_be_live():
            view = _Lines(election.name, as_json)
        else:
            view = _Table(election.name, source)
            await stack.enter_async_context(view.screen)
        retrying = Retrying(wait, view.outage)
        await retrying.ask(election.leader)
        tasks = {
            asyncio.create_task(_follow(election, view, count)),
            asyncio.create_task(_look(election, view, retrying)),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _follow(election: Election, view: _View, count: int | None) -> None:
    seen = 0
    async with aclosing(election.observe()) as changes:
        async for leader in changes:
            view.change(leader)
            seen += 1
            if seen == count:
                return


async def _look(election: Election, view: _View, retrying: Retrying) -> None:
    while True:
        view.refresh(await retrying.ask(election.leader))
        await asyncio.sleep(ASK_EVERY)


class _Lines:
    """A line for each change."""

    def __init__(self, name: str, as_json: bool) -> None:
        self._name = name
        self._as_json = as_json

    def change(self, leader: Leader | None) -> None:
        if self._as_json:
            print_json({"at": timestamp(), **record(self._name, leader)}, lines=True)
        elif leader is None:
            print_line(f"{timestamp()}  {NO_LEADER}")
        else:
            metadata = one_line(pairs(leader.metadata))
            print_line(f"{timestamp()}  {one_line(leader.holder)}  token {leader.token}  {metadata}".rstrip())

    def refresh(self, leader: Leader | None) -> None:
        pass  # only changes are shown

    def outage(self, trouble: str) -> None:
        report_outage(trouble)


class _Table:
    """A live table of the changes, the newest last: green for the present leader, red while there is none."""

    def __init__(self, name: str, source: str) -> None:
        self.screen = LiveScreen(self._render)
        self._name = name
        self._source = source
        self._changes: deque[tuple[str, Leader | None]] = deque(maxlen=CHANGES_MAX)
        self._at = ""
        self._present: Leader | None = None

    def change(self, leader: Leader | None) -> None:
        at = timestamp()
        self._changes.append((at, leader))
        self._at, self._present = at, leader
        self.screen.draw()

    def refresh(self, leader: Leader | None) -> None:
        if self._changes and leader == self._changes[-1][1]:  # otherwise it is a change that is shown in a moment
            self._at, self._present = timestamp(), leader
            self.screen.draw()

    def outage(self, trouble: str) -> None:
        self.screen.outage(trouble)

    def _render(self, width: int, height: int | None) -> list[Text]:
        head = [
            Text.assemble(("tenure watch", TITLE), f"  {one_line(self._name)}", (f"  {one_line(self._source)}", QUIET)),
            Text.assemble(f"{self._at}  ", self._state()),
            Text(),
        ]
        shown = list(self._changes)
        if height is not None:
            room = max(1, height - len(head) - 1)
            shown = shown[-room:]
        last = len(shown) - 1
        is_sure = not self.screen.trouble
        rows = [_row(at, leader, is_sure and place == last) for place, (at, leader) in enumerate(shown)]
        return [*head, *laid_out(COLUMNS, rows, width)]

    def _state(self) -> tuple[str, str]:
        leader = "" if self._present is None else one_line(short(self._present.holder))
        if self.screen.trouble:
            return f"{leader or 'no candidate'} led when the store last answered", ""
        if self._present is None:
            return "no leader", ALARM
        left = "" if self._present.remaining is None else f", lease left {seconds(self._present.remaining)}"
        return f"{leader} leads{left}", LEADING


def _row(at: str, leader: Leader | None, is_present: bool) -> tuple[str | Cell, ...]:
    if leader is None:
        return (at, Cell(NO_LEADER, ALARM if is_present else ""), "", "")
    holder = Cell(short(leader.holder), LEADING if is_present else "")
    return (at, holder, str(leader.token), pairs(leader.metadata))
