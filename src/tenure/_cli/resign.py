"""``tenure resign``: ask the present leader to step down."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

import click

from tenure._cli.completion import election_names
from tenure._cli.examples import Command
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import complete, connect_existing, duration, json_option, on_option
from tenure._cli.output import print_json, print_line, record, seconds
from tenure._one_line import one_line

if TYPE_CHECKING:
    from tenure import Election, Leader


@click.command("resign", cls=Command)
@click.argument("name", shell_complete=election_names)
@on_option
@json_option
@click.option("--wait", type=duration, metavar="S", help="Wait up to this long until that leader has stepped down.")
def command(name: str, url: str, as_json: bool, wait: float | None) -> int:
    """Ask the present leader of NAME, on any machine, to step down. Its work is stopped; other candidates go first.

    Ends with 0 once the leader is asked (with --wait: once it has stepped down), with 1 if the leader is another
    program that reads no such requests, with 3 if there is no leader, and with 75 if it has not stepped down in time.
    """
    before, after, changed = complete(_resign(name, url, wait))
    if as_json:
        print_json({"name": name, "asked": before.holder, "changed": changed, "now": after and record(name, after)})
    elif not changed:
        print_line(f"asked {one_line(before.holder)} (token {before.token}) to step down from {one_line(name)!r}")
    else:
        successor = f"{one_line(after.holder)} (token {after.token}) leads now" if after else "there is no leader now"
        print_line(
            f"{one_line(before.holder)} (token {before.token}) has stepped down from {one_line(name)!r}; {successor}"
        )
    return Exit.DONE


async def _resign(name: str, url: str, wait: float | None) -> tuple[Leader, Leader | None, bool]:
    import asyncio

    async with connect_existing(url) as backend:
        election = backend.election(name)
        before = await _ask(election)
        if wait is None:
            return before, before, False
        try:
            async with asyncio.timeout(wait):
                return before, await _successor(election, before), True
        except TimeoutError:
            raise Failure(
                Exit.NOT_YET,
                f"{before.holder} was asked to step down from {name!r}, and has not done so within {seconds(wait)}; "
                "its work may take longer to stop. Check with: tenure status",
            ) from None


async def _ask(election: Election) -> Leader:
    """Ask the present leader to step down, and return it."""
    leader = await election.leader()
    while leader is not None and not await election.ask_to_resign():
        before, leader = leader, await election.leader()
        if leader == before:
            raise Failure(
                Exit.BROKEN,
                f"{leader.holder} (token {leader.token}) leads {election.name!r}, and can't be asked to step down: it "
                "is another program than tenure, and reads no such requests; stop it by its own means",
            )
    if leader is None:
        raise Failure(Exit.VACANT, f"{election.name!r} has no leader, so there is none to ask")
    return leader


async def _successor(election: Election, before: Leader) -> Leader | None:
    async with aclosing(election.observe()) as changes:
        async for leader in changes:
            if leader is None or leader.token != before.token:
                return leader
    return None
