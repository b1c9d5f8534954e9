"""``tenure watch``: every change of leader, as it happens."""

from __future__ import annotations

from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

import click

from tenure.cli.examples import Command
from tenure.cli.exits import Exit
from tenure.cli.group import complete, connect_to_look, json_option, on_option
from tenure.cli.output import NOBODY, clean, pairs, record, say, say_json, timestamp

if TYPE_CHECKING:
    from tenure import Leader


@click.command("watch", cls=Command)
@click.argument("name")
@on_option
@json_option
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N lines.")
def command(name: str, url: str, as_json: bool, count: int | None) -> int:
    """Show who leads NAME now, and then each change, a line each, with the time it was seen.

    Goes on until it is interrupted (Ctrl-C), and then ends with 0. With --json, each line is one object.
    """
    with suppress(KeyboardInterrupt):  # that is how it is meant to end
        complete(_watch(name, url, as_json, count))
    return Exit.DONE


async def _watch(name: str, url: str, as_json: bool, count: int | None) -> None:
    async with connect_to_look(url) as backend:
        election = backend.election(name)
        await election.leader()  # a store that can't be reached is an error now; later, watching goes on
        seen = 0
        async with aclosing(election.observe()) as changes:
            async for leader in changes:
                _tell(name, leader, as_json)
                seen += 1
                if seen == count:
                    return


def _tell(name: str, leader: Leader | None, as_json: bool) -> None:
    if as_json:
        say_json({"at": timestamp(), **record(name, leader)}, lines=True)
    elif leader is None:
        say(f"{timestamp()}  {NOBODY}")
    else:
        say(f"{timestamp()}  {clean(leader.holder)}  token {leader.token}  {clean(pairs(leader.metadata))}".rstrip())
