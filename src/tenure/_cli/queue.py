"""``tenure queue``: how many messages a queue holds, and in which state. Its other commands: ``queue_commands``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from tenure._cli.completion import queue_names
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import Branching, complete, connect_existing, duration, json_option, never_used, on_option
from tenure._cli.output import count_cells, print_json, print_table
from tenure._cli.queue_commands import delete, peek, purge
from tenure._cli.queue_declare import declare, pause, print_settings, resume, settings_record
from tenure._cli.retrying import wait_option

if TYPE_CHECKING:
    from tenure import Backend, Stats

COLUMNS = ("QUEUE", "READY", "LOCKED", "DELAYED", "DEFERRED", "DEAD", "OLDEST")

EVERY, EVERY_LEAST = 2.0, 0.01
"""Seconds between two counts: by default, and at least."""


@click.command("queue", cls=Branching, branches=(declare, pause, resume, peek, purge, delete))
@click.argument("name", required=False, shell_complete=queue_names)
@on_option
@json_option
@click.option("--watch", is_flag=True, help="Repeat until interrupted (Ctrl-C).")
@click.option("--every", type=duration, metavar="S", help="With --watch: time between counts. [default: 2]")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="With --watch: end after N counts.")
@wait_option
def command(
    name: str | None,
    url: str,
    as_json: bool,
    watch: bool,
    every: float | None,
    count: int | None,
    wait: float | None,
) -> int:
    """Count the messages of the queue NAME, and show its settings; or count those of every queue of the store.

    READY messages can be received now, LOCKED ones are with a consumer, DELAYED ones wait for their time, DEFERRED ones
    were set aside, DEAD ones are dead letters. OLDEST is the age of the oldest ready message, and shows whether the
    queue is paused.

    With --watch, a terminal shows a live table until Ctrl-C, with dead letters in red; otherwise, a line is printed for
    each queue and count. If the store does not answer, it is asked again: at the start for --wait, later for ever.

    Ends with 3 if there is no queue NAME; with --watch, prints a warning and goes on. A NAME that equals one of the
    commands below is given after --: tenure queue -- NAME.
    """
    if not watch and any(option is not None for option in (every, count, wait)):
        raise click.UsageError("--every, --count and --wait need --watch")
    if every is None:
        every = EVERY
    if every < EVERY_LEAST:
        raise click.UsageError(f"--every {every:g} is too short; give at least {EVERY_LEAST:g} s")
    with suppress(KeyboardInterrupt):  # the usual end
        complete(_watch(name, url, as_json, every, count, wait) if watch else _look(name, url, as_json))
    return Exit.DONE


async def _look(name: str | None, url: str, as_json: bool) -> None:
    async with connect_existing(url) as backend:
        found = await _stats(backend, name)
        if unused := await _unused(backend, name, found):
            raise Failure(Exit.VACANT, unused)
        settings = await backend.queue(name).settings() if name is not None else None
    if as_json:
        records: list[dict[str, object]] = [
            {"queue": each, **dataclasses.asdict(stats)} for each, stats in found.items()
        ]
        print_json(records if settings is None else {**records[0], "settings": settings_record(settings)})
    elif found:
        print_table(COLUMNS, [(each, *count_cells(stats)) for each, stats in found.items()], numbers=COLUMNS[1:])
        if settings is not None:
            print_settings(settings)


async def _watch(
    name: str | None, url: str, as_json: bool, every: float, count: int | None, wait: float | None
) -> None:
    from tenure._cli.queue_watch import watch

    async with connect_existing(url) as backend:
        await watch(
            lambda: _stats(backend, name),
            lambda found: _unused(backend, name, found),
            source=str(backend.url),
            every=every,
            count=count,
            wait=wait,
            as_json=as_json,
        )


async def _unused(backend: Backend, name: str | None, found: Mapping[str, Stats]) -> str:
    from tenure import Stats

    return await never_used(backend, name) if name is not None and found[name] == Stats() else ""


async def _stats(backend: Backend, name: str | None) -> dict[str, Stats]:
    names = await backend.queues() if name is None else [name]
    return {each: await backend.queue(each).stats() for each in names}
