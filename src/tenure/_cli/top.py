"""``tenure top``: the elections, partitions, queues and schedules of a store, live."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import click

from tenure._cli.examples import Command
from tenure._cli.exits import Exit
from tenure._cli.group import complete, connect_existing, duration, json_option, on_option
from tenure._cli.output import (
    ALARM,
    LEADING,
    NO_LEADER,
    QUIET,
    TITLE,
    Cell,
    count_cells,
    ellipsis,
    print_json,
    print_line,
    record,
    seconds,
    short,
    timestamp,
)
from tenure._cli.partitions import summary
from tenure._cli.retrying import Retrying, report_outage, wait_option

if TYPE_CHECKING:
    from rich.text import Text

    from tenure._cli.tables import Column, Row
    from tenure._overview import History, Overview

EVERY, EVERY_LEAST = 2.0, 0.1
"""Seconds between two looks: by default, and at least."""

GRAPH = 20
"""Characters of the graph of a queue."""

BARS, BARS_ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"


@click.command("top", cls=Command)
@on_option
@json_option
@click.option(
    "--every", type=duration, default=f"{EVERY:g}", show_default=True, metavar="S", help="Time between looks."
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N looks.")
@wait_option
def command(url: str, as_json: bool, every: float, count: int | None, wait: float | None) -> int:
    """Show the elections, partitions, queues and schedules of a store, live, until Ctrl-C.

    SINCE is for how long this command has seen the term. A group of partitions is moving while a member owns more or
    less than its share. CHANGE/S is by how much the backlog (READY and LOCKED) has
    grown or fallen in a second, over the time of its graph. Dead letters, vacant names and paused schedules are red.

    Without a terminal, each look is printed below the one before; with --json, as one line. If the store does not
    answer, it is asked again: at the start for --wait, later for ever.
    """
    if every < EVERY_LEAST:
        raise click.UsageError(f"--every {every:g} is too short; give at least {EVERY_LEAST:g} s")
    with suppress(KeyboardInterrupt):  # the usual end
        complete(_watch(url, as_json, every, count, wait))
    return Exit.DONE


async def _watch(url: str, as_json: bool, every: float, count: int | None, wait: float | None) -> None:
    from tenure._cli.live import can_be_live
    from tenure._overview import History, look

    history = History()
    async with connect_existing(url) as backend, AsyncExitStack() as stack:
        view: _Screen | _Lines | _JsonLines
        if as_json:
            view = _JsonLines()
        elif can_be_live():
            view = _Screen(str(backend.url), every, history)
            await stack.enter_async_context(view.screen)
        else:
            view = _Lines(history)
        retrying = Retrying(wait, view.outage)
        looked = 0
        while True:
            found = await retrying.ask(lambda: look(backend))
            history.note(found, time.monotonic())
            view.show(found)
            looked += 1
            if looked == count:
                return
            await asyncio.sleep(every)


class _JsonLines:
    """A JSON object for each look."""

    def show(self, found: Overview) -> None:
        elections = [record(name, leader) for name, leader in (found.elections or {}).items()]
        groups = [summary(one) for one in found.groups]
        queues = [{"queue": name, **dataclasses.asdict(stats)} for name, stats in (found.queues or {}).items()]
        schedules: list[dict[str, Any]] = [dataclasses.asdict(one) for one in found.schedules]
        for one in schedules:
            for moment in ("last", "next"):
                one[moment] = None if one[moment] is None else timestamp(one[moment])
        print_json(
            {
                "at": timestamp(),
                "elections": elections,
                "partitions": groups,
                "queues": queues,
                "schedules": schedules,
                "unreadable": dict(found.unreadable),
            },
            lines=True,
        )

    def outage(self, trouble: str) -> None:
        report_outage(trouble)


class _Lines:
    """The same tables as on a terminal, one below the other, in plain text."""

    def __init__(self, history: History) -> None:
        self._history = history

    def show(self, found: Overview) -> None:
        print_line(timestamp())
        for line in sections(found, self._history, time.monotonic(), time.time(), 10_000, None):
            print_line(line.plain.rstrip())
        print_line("")

    def outage(self, trouble: str) -> None:
        report_outage(trouble)


class _Screen:
    """A live screen."""

    def __init__(self, source: str, every: float, history: History) -> None:
        from tenure._cli.live import LiveScreen

        self.screen = LiveScreen(self._render)
        self._source = source
        self._every = every
        self._history = history
        self._found: Overview | None = None
        self._at = ""

    def show(self, found: Overview) -> None:
        self._found, self._at = found, timestamp(timespec="seconds")
        self.screen.draw()

    def outage(self, trouble: str) -> None:
        self.screen.outage(trouble)

    def _render(self, width: int, height: int | None) -> Sequence[Text]:
        from rich.text import Text

        title = Text.assemble(
            ("tenure top", TITLE), (f"  every {seconds(self._every)}  {self._source}  {self._at}", QUIET)
        )
        if self._found is None:
            return [title]
        room = None if height is None else max(0, height - 2)
        now, wall = time.monotonic(), time.time()
        return [title, Text(), *sections(self._found, self._history, now, wall, width, room)]


def sections(found: Overview, history: History, now: float, wall: float, width: int, height: int | None) -> list[Text]:
    """Return the tables of an overview, in so many columns and lines; each gets a share of the lines.

    *now* is by the clock of *history*; *wall* in Unix seconds.
    """
    from rich.text import Text

    from tenure._cli.tables import Column, laid_out

    tables: list[tuple[str, list[Column], list[Row]]] = []
    if found.elections is not None:
        columns = [
            Column("ELECTION", is_cut=True),
            Column("LEADER", is_cut=True),
            Column("TERM", numbers=True),
            Column("LEASE LEFT", numbers=True),
            Column("SINCE", numbers=True),
        ]
        tables.append(("election", columns, _elections(found, history, now)))
    if found.groups:
        columns = [
            Column("PARTITIONS OF", is_cut=True),
            Column("MEMBERS", numbers=True),
            Column("OWNED", numbers=True),
            Column("STATE"),
        ]
        tables.append(("group", columns, _groups(found)))
    if found.queues is not None:
        titles = ("READY", "LOCKED", "DELAYED", "DEFERRED", "DEAD", "OLDEST", "CHANGE/S")
        columns = [Column("QUEUE", is_cut=True), *(Column(one, numbers=True) for one in titles), Column("BACKLOG")]
        tables.append(("queue", columns, _queues(found, history)))
    if found.schedules:
        columns = [
            Column("SCHEDULE", is_cut=True),
            Column("QUEUE", is_cut=True),
            Column("EVERY", is_cut=True),
            Column("LAST", numbers=True),
            Column("NEXT", numbers=True),
        ]
        tables.append(("schedule", columns, _schedules(found, wall)))
    if found.unreadable:
        columns = [Column("UNREADABLE", is_cut=True), Column("WHY", is_cut=True)]
        tables.append(("unreadable", columns, [(name, Cell(why, ALARM)) for name, why in found.unreadable.items()]))
    rooms = shares([len(rows) for _, _, rows in tables], height)
    lines: list[Text] = []
    for (kind, columns, rows), room in zip(tables, rooms, strict=True):
        if lines:
            lines.append(Text())
        shown = rows[:room]
        lines += laid_out(columns, shown, width) if rows else [Text(f"no {kind} yet", QUIET)]
        if len(shown) < len(rows):
            lines.append(Text(f"{ellipsis()} {len(rows) - len(shown):,} more: {_LISTS[kind]}", QUIET))
    return lines


_LISTS = {
    "election": "tenure status",
    "group": "tenure partitions",
    "queue": "tenure queue",
    "schedule": "tenure schedule",
    "unreadable": "tenure queue NAME",
}


def shares(wanted: Sequence[int], height: int | None) -> list[int]:
    """Return how many rows each table may have, so that all fit into *height* lines.

    A table needs a line for its titles, one between it and the next, and one that tells how many rows are left out.
    Rows that one table doesn't need go to the others.
    """
    if height is None:
        return list(wanted)
    room = max(0, height - len(wanted) * 3)
    given = [0] * len(wanted)
    while room > 0 and (open_ := [place for place, count in enumerate(wanted) if given[place] < count]):
        for place in open_:
            if room > 0:
                given[place] += 1
                room -= 1
    return given


def _elections(found: Overview, history: History, now: float) -> list[Row]:
    rows: list[Row] = []
    for name, leader in sorted((found.elections or {}).items(), key=lambda one: (one[1] is not None, one[0])):
        if leader is None:
            rows.append((name, Cell(NO_LEADER, ALARM), "", "", ""))
            continue
        since = history.led_for(name, now)
        left = "" if leader.remaining is None else seconds(leader.remaining)
        rows.append(
            (name, Cell(short(leader.holder), LEADING), str(leader.token), left, "" if since is None else _rough(since))
        )
    return rows


def _groups(found: Overview) -> list[Row]:
    from tenure._overview import state_of

    rows: list[Row] = []
    for one in sorted(found.groups, key=lambda each: (not each.vacant, each.balanced, each.name)):
        owned = f"{len(one.owners) - len(one.vacant)} of {len(one.owners)}"
        alarm = ALARM if one.vacant else ""
        rows.append((one.name, str(len(one.members)), Cell(owned, alarm), Cell(state_of(one), alarm)))
    return rows


def _queues(found: Overview, history: History) -> list[Row]:
    queues = found.queues or {}
    ranked = sorted(queues, key=lambda name: (-queues[name].dead, -queues[name].ready - queues[name].locked, name))
    rows: list[Row] = []
    for name in ranked:
        change = history.change(name)
        shown = "" if change is None or abs(change) < 0.05 else f"{change:+,.1f}"
        rows.append((name, *count_cells(queues[name]), shown, graph(history.backlogs(name))))
    return rows


def _schedules(found: Overview, wall: float) -> list[Row]:
    rows: list[Row] = []
    for one in sorted(found.schedules, key=lambda each: (each.next is None, each.next or 0.0, each.name)):
        every = one.every if isinstance(one.every, str) else f"{one.every:.15g} s"
        last = "" if one.last is None else f"{_rough(max(0.0, wall - one.last))} ago"
        following: str | Cell
        if one.problem or one.paused:
            following = Cell("paused" if one.paused else "unknown", ALARM)
        elif one.next is None:
            following = ""
        elif one.next <= wall - LATE:
            following = Cell(f"{_rough(wall - one.next)} late", ALARM)
        else:
            following = f"in {_rough(max(0.0, one.next - wall))}"
        rows.append((one.name, one.queue, every, last, following))
    return rows


LATE = 5.0
"""Seconds after which a slot that was not sent counts as late here."""


def _rough(duration_: float) -> str:
    """Write a duration in its largest unit."""
    for unit, size in (("d", 86_400.0), ("h", 3_600.0), ("m", 60.0)):
        if duration_ >= size * 2:
            return f"{duration_ / size:.0f} {unit}"
    return f"{duration_:.0f} s"


def graph(values: Sequence[int], width: int = GRAPH) -> str:
    """Return the newest *values* as bars, the highest of them as high as a line."""
    newest = values[-width:]
    top = max(newest, default=0)
    bars = BARS if ellipsis() == "…" else BARS_ASCII
    if top == 0:
        return bars[0] * len(newest)
    return "".join(bars[-(-value * (len(bars) - 1) // top)] for value in newest)
