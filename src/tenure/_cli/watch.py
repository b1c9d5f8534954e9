"""``tenure watch``: every change of leader, as it happens."""

from __future__ import annotations

from contextlib import suppress

import click

from tenure._cli.completion import election_names
from tenure._cli.examples import Command
from tenure._cli.exits import Exit
from tenure._cli.group import complete, connect_existing, json_option, on_option
from tenure._cli.retrying import wait_option


@click.command("watch", cls=Command)
@click.argument("name", shell_complete=election_names)
@on_option
@json_option
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N lines, the first included.")
@wait_option
def command(name: str, url: str, as_json: bool, count: int | None, wait: float | None) -> int:
    """Show the leader of NAME, and then each change, a line each, with the time at which it was seen.

    A terminal shows a live table, with the present leader in green, and holders without most of their random part.
    With --json, each line is one object. If the store does not answer, the request is repeated, at the start for
    --wait, later for ever, and a warning is printed on stderr.

    Runs until it is interrupted (Ctrl-C), and then ends with 0.
    """
    with suppress(KeyboardInterrupt):  # the usual end
        complete(_watch(name, url, as_json, count, wait))
    return Exit.DONE


async def _watch(name: str, url: str, as_json: bool, count: int | None, wait: float | None) -> None:
    from tenure._cli.leader_watch import watch

    async with connect_existing(url) as backend:
        await watch(backend.election(name), source=str(backend.url), count=count, wait=wait, as_json=as_json)
