"""``tenure queue``: how many messages a queue holds, and in which state; and the deletion of a queue."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from tenure.cli.examples import Command
from tenure.cli.exits import Exit, Failure
from tenure.cli.group import complete, connect_to_look, duration, json_option, never_used, on_option
from tenure.cli.output import ALARM, Cell, clean, say, say_json, say_table, seconds
from tenure.cli.patience import wait_option

if TYPE_CHECKING:
    from tenure import Backend, Stats

COLUMNS = ("QUEUE", "READY", "LOCKED", "DELAYED", "DEFERRED", "DEAD", "OLDEST")

EVERY, EVERY_LEAST = 2.0, 0.01
"""Seconds between two looks: usually, and at least."""


@click.command("queue", cls=Command)
@click.argument("name", required=False)
@on_option
@json_option
@click.option("--watch", is_flag=True, help="Go on until interrupted (Ctrl-C).")
@click.option("--every", type=duration, metavar="S", help="With --watch: how often. [default: 2]")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="With --watch: end after N looks.")
@wait_option
@click.option("--delete", is_flag=True, help="Delete the queue NAME, if there are no messages or dead letters in it.")
@click.option("--force", is_flag=True, help="With --delete: also with what is in it.")
def command(
    name: str | None,
    url: str,
    as_json: bool,
    watch: bool,
    every: float | None,
    count: int | None,
    wait: float | None,
    delete: bool,
    force: bool,
) -> int:
    """Count the messages of the queue NAME, or of every queue of the store; or delete a queue.

    READY can be received now, LOCKED are with a consumer, DELAYED wait for their time, DEFERRED were put aside, DEAD
    could not be handled. OLDEST is how long ago the oldest ready one was sent.

    With --watch, a terminal shows a live table until Ctrl-C, with dead letters in red; elsewhere, a line is written
    for each queue and look. A store that does not answer is asked again: at the start for --wait, later for ever.

    Ends with 3 if nobody has ever used a queue NAME. --watch says so, and waits for it. --delete ends with 1 if there
    are messages or dead letters in the queue: then nothing has changed.
    """
    if delete:
        if name is None or watch:
            raise click.UsageError("--delete deletes one queue; give its NAME, and no --watch")
        return complete(_delete(name, url, as_json, force=force))
    if force:
        raise click.UsageError("--force says how to delete; give --delete, too")
    if not watch and any(option is not None for option in (every, count, wait)):
        raise click.UsageError("--every, --count and --wait tell how to watch; give --watch, too")
    if every is None:
        every = EVERY
    if every < EVERY_LEAST:
        raise click.UsageError(f"--every {every:g} would only keep the store busy; give at least {EVERY_LEAST:g} s")
    with suppress(KeyboardInterrupt):  # that is how watching is meant to end
        complete(_watch(name, url, as_json, every, count, wait) if watch else _look(name, url, as_json))
    return Exit.DONE


async def _look(name: str | None, url: str, as_json: bool) -> None:
    async with connect_to_look(url) as backend:
        found = await _stats(backend, name)
        if unused := await _unused(backend, name, found):
            raise Failure(Exit.VACANT, unused)
    if as_json:
        records = [{"queue": each, **dataclasses.asdict(stats)} for each, stats in found.items()]
        say_json(records if name is None else records[0])
    elif found:
        say_table(COLUMNS, [(each, *numbers(stats)) for each, stats in found.items()])


async def _watch(
    name: str | None, url: str, as_json: bool, every: float, count: int | None, wait: float | None
) -> None:
    from tenure.cli.queue_watch import watch

    async with connect_to_look(url) as backend:
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


async def _delete(name: str, url: str, as_json: bool, *, force: bool) -> int:
    from tenure import QueueNotEmpty

    async with connect_to_look(url) as backend:
        if unused := await never_used(backend, name):
            raise Failure(Exit.VACANT, unused)
        try:
            held = await backend.queue(name).delete(force=force)
        except QueueNotEmpty as error:
            raise Failure(Exit.BROKEN, f"{error} (--force)") from error
    if as_json:
        say_json({"queue": name, "deleted": dataclasses.asdict(held)})
    else:
        say(f"deleted {clean(name)}; it held {_in_words(held)}")
    return Exit.DONE


def _in_words(stats: Stats) -> str:
    counts = {state: getattr(stats, state) for state in ("ready", "locked", "delayed", "deferred", "dead")}
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "nothing"


async def _stats(backend: Backend, name: str | None) -> dict[str, Stats]:
    names = await backend.queues() if name is None else [name]
    return {each: await backend.queue(each).stats() for each in names}


def numbers(stats: Stats) -> tuple[str | Cell, ...]:
    """Return the counts of a queue, and the age of its oldest ready message, for people."""
    counts = (stats.ready, stats.locked, stats.delayed, stats.deferred)
    dead = Cell(str(stats.dead), ALARM if stats.dead else "")
    return (*map(str, counts), dead, seconds(stats.oldest_age) if stats.ready else "")
