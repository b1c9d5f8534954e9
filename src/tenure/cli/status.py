"""``tenure status``: who leads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tenure.cli.examples import Command
from tenure.cli.exits import Exit
from tenure.cli.group import complete, connect_to_look, json_option, on_option
from tenure.cli.output import NOBODY, pairs, record, say_json, say_table, seconds

if TYPE_CHECKING:
    from tenure import Leader


@click.command("status", cls=Command)
@click.argument("name", required=False)
@on_option
@json_option
def command(name: str | None, url: str, as_json: bool) -> int:
    """Show who leads NAME, or every name of the store.

    Ends with 0 if somebody leads, and with 3 if nobody does (any of the names, if all are shown).
    """
    leaders = complete(_look(name, url))
    if as_json:
        records = [record(each, leader) for each, leader in leaders.items()]
        say_json(records if name is None else records[0])
    elif leaders:
        rows = [_row(each, leader) for each, leader in leaders.items()]
        say_table(("NAME", "LEADER", "TOKEN", "LEASE LEFT", "METADATA"), rows)
    return Exit.DONE if any(leaders.values()) else Exit.VACANT


async def _look(name: str | None, url: str) -> dict[str, Leader | None]:
    async with connect_to_look(url) as backend:
        if name is None:
            return await backend.leaders()
        return {name: await backend.election(name).leader()}


def _row(name: str, leader: Leader | None) -> tuple[str, ...]:
    if leader is None:
        return (name, NOBODY, "", "", "")
    return (name, leader.holder, str(leader.token), seconds(leader.remaining), pairs(leader.metadata))
