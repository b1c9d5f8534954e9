"""``tenure queue``: how many messages a queue holds, and in which state; and the deletion of a queue."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from tenure.cli.examples import Command
from tenure.cli.exits import Exit, Failure
from tenure.cli.group import complete, connect_to_look, duration, json_option, never_used, on_option
from tenure.cli.output import clean, say, say_json, say_table, seconds, timestamp, warn

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
@click.option("--delete", is_flag=True, help="Delete the queue NAME, if there are no messages or dead letters in it.")
@click.option("--force", is_flag=True, help="With --delete: also with what is in it.")
def command(
    name: str | None,
    url: str,
    as_json: bool,
    watch: bool,
    every: float | None,
    count: int | None,
    delete: bool,
    force: bool,
) -> int:
    """Count the messages of the queue NAME, or of every queue of the store; or delete a queue.

    READY can be received now, LOCKED are with a consumer, DELAYED wait for their time, DEFERRED were put aside, DEAD
    could not be handled. OLDEST is how long ago the oldest ready one was sent.

    Ends with 3 if nobody has ever used a queue NAME. --watch says so, and waits for it. --delete ends with 1 if there
    are messages or dead letters in the queue: then nothing has changed.
    """
    if delete:
        if name is None or watch:
            raise click.UsageError("--delete deletes one queue; give its NAME, and no --watch")
        return complete(_delete(name, url, as_json, force=force))
    if force:
        raise click.UsageError("--force says how to delete; give --delete, too")
    if not watch and (every is not None or count is not None):
        raise click.UsageError("--every and --count tell how to watch; give --watch, too")
    if every is None:
        every = EVERY
    if every < EVERY_LEAST:
        raise click.UsageError(f"--every {every:g} would only keep the store busy; give at least {EVERY_LEAST:g} s")
    with suppress(KeyboardInterrupt):  # that is how watching is meant to end
        complete(_look(name, url, as_json, every if watch else None, count))
    return Exit.DONE


async def _look(name: str | None, url: str, as_json: bool, every: float | None, count: int | None) -> None:
    from tenure import Stats

    looks = 0
    async with connect_to_look(url) as backend:
        while True:
            found = await _stats(backend, name)
            if name is not None and looks == 0 and found[name] == Stats():
                unused = await never_used(backend, name)
                if unused and every is None:
                    raise Failure(Exit.VACANT, unused)
                if unused:
                    warn(unused)
            _show(found, as_json, alone=name is not None, watching=every is not None, first=looks == 0)
            looks += 1
            if every is None or looks == count:
                return
            await asyncio.sleep(every)


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


def _show(found: dict[str, Stats], as_json: bool, *, alone: bool, watching: bool, first: bool) -> None:
    if as_json:
        records = [{"queue": each, **dataclasses.asdict(stats)} for each, stats in found.items()]
        if watching:
            say_json({"at": timestamp(), "queues": records}, lines=True)
        else:
            say_json(records[0] if alone else records)
    elif found:
        say_table(COLUMNS, [_row(each, stats) for each, stats in found.items()], titles=first)


def _row(name: str, stats: Stats) -> tuple[str, ...]:
    counts = (stats.ready, stats.locked, stats.delayed, stats.deferred, stats.dead)
    return (name, *map(str, counts), seconds(stats.oldest_age) if stats.ready else "")
