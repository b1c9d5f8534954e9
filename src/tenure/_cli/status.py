"""``tenure status``: who leads."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from tenure._cli.completion import election_names
from tenure._cli.examples import Command
from tenure._cli.exits import Exit
from tenure._cli.group import complete, connect_to_look, json_option, on_option
from tenure._cli.output import ALARM, LEADING, NOBODY, Cell, notice, pairs, record, say_json, say_table, seconds, short

if TYPE_CHECKING:
    from tenure import Leader

UNUSED_DAYS = 7
"""A name that nobody has led for longer is shown only with --all."""


@click.command("status", cls=Command)
@click.argument("name", required=False, shell_complete=election_names)
@on_option
@json_option
@click.option("--all", "every", is_flag=True, help=f"Also the names that nobody has led for {UNUSED_DAYS} days.")
def command(name: str | None, url: str, as_json: bool, every: bool) -> int:
    """Show who leads NAME, or every name of the store.

    Of names that nobody leads, those that nobody has led for long are left out, and counted on stderr; with --json,
    nothing is left out, and vacant_for says for how many seconds at least nobody has led a name. A name stays listed
    where the store does not know since when nobody leads it.

    Ends with 0 if somebody leads, and with 3 if nobody does (any of the names, if all are shown).
    """
    if every and name is not None:
        raise click.UsageError("--all says which names to list; leave out NAME, or --all")
    leaders, vacancies = complete(_look(name, url))
    if as_json:
        records = [{**record(each, leader), "vacant_for": vacancies.get(each)} for each, leader in leaders.items()]
        say_json(records if name is None else records[0])
        return _code(leaders)
    hidden = set() if every or name is not None else {each for each in vacancies if _is_unused(vacancies[each])}
    rows = [_row(each, leader) for each, leader in leaders.items() if each not in hidden]
    if rows:
        say_table(
            ("NAME", "LEADER", "TOKEN", "LEASE LEFT", "METADATA"), rows, numbers=("TOKEN",), whole=("LEASE LEFT",)
        )
    if hidden:
        names = f"{len(hidden):,} name{'s' if len(hidden) > 1 else ''}"
        notice(f"{names} not shown, which nobody has led for {UNUSED_DAYS} days; --all shows all")
    return _code(leaders)


async def _look(name: str | None, url: str) -> tuple[Mapping[str, Leader | None], Mapping[str, float | None]]:
    """Return who leads which name, and since when nobody leads the others."""
    async with connect_to_look(url) as backend:
        leaders: dict[str, Leader | None]
        if name is not None:
            leaders = {name: await backend.election(name).leader()}
        else:
            leaders = await backend.leaders()
        vacant = [each for each, leader in leaders.items() if leader is None]
        return leaders, await backend.vacancies(*vacant) if vacant else {}


def _code(leaders: Mapping[str, Leader | None]) -> int:
    return Exit.DONE if any(leaders.values()) else Exit.VACANT


def _is_unused(vacant_for: float | None) -> bool:
    return vacant_for is not None and vacant_for > UNUSED_DAYS * 86_400


def _row(name: str, leader: Leader | None) -> tuple[str | Cell, ...]:
    if leader is None:
        return (name, Cell(NOBODY, ALARM), "", "", "")
    holder = short(leader.holder) if sys.stdout.isatty() else leader.holder
    return (name, Cell(holder, LEADING), str(leader.token), seconds(leader.remaining), pairs(leader.metadata))
