"""``tenure status``: show the leaders."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from tenure._cli.completion import election_names
from tenure._cli.examples import Command
from tenure._cli.exits import Exit
from tenure._cli.group import complete, connect_existing, json_option, on_option
from tenure._cli.output import (
    ALARM,
    LEADING,
    NO_LEADER,
    Cell,
    notice,
    pairs,
    print_json,
    print_table,
    record,
    seconds,
    short,
)

if TYPE_CHECKING:
    from tenure import Leader

UNUSED_DAYS = 7
"""A name that has had no leader for longer is shown only with --all."""


@click.command("status", cls=Command)
@click.argument("name", required=False, shell_complete=election_names)
@on_option
@json_option
@click.option("--all", "every", is_flag=True, help=f"Show also names without a leader for {UNUSED_DAYS} days.")
def command(name: str | None, url: str, as_json: bool, every: bool) -> int:
    """Show the leader of NAME, or of every name of the store.

    Names that have had no leader for 7 days are not shown, and their number is printed on stderr. With --json, all are
    shown, and vacant_for is the least number of seconds without a leader. A name stays listed if the store does not
    know since when it has had no leader.

    Ends with 0 if there is a leader, and with 3 if not (if all are shown: if no name has a leader).
    """
    if every and name is not None:
        raise click.UsageError("--all lists all names; give either NAME or --all")
    leaders, vacancies = complete(_look(name, url))
    if as_json:
        records = [{**record(each, leader), "vacant_for": vacancies.get(each)} for each, leader in leaders.items()]
        print_json(records if name is None else records[0])
        return _code(leaders)
    hidden = set() if every or name is not None else {each for each in vacancies if _is_unused(vacancies[each])}
    rows = [_row(each, leader) for each, leader in leaders.items() if each not in hidden]
    if rows:
        print_table(
            ("NAME", "LEADER", "TOKEN", "LEASE LEFT", "METADATA"), rows, numbers=("TOKEN",), whole=("LEASE LEFT",)
        )
    if hidden:
        names = f"{len(hidden):,} name{'s' if len(hidden) > 1 else ''}"
        notice(f"{names} without a leader for {UNUSED_DAYS} days not shown; add --all to see them")
    return _code(leaders)


async def _look(name: str | None, url: str) -> tuple[Mapping[str, Leader | None], Mapping[str, float | None]]:
    """Return the leader of each name, and for how long the others have had none."""
    async with connect_existing(url) as backend:
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
        return (name, Cell(NO_LEADER, ALARM), "", "", "")
    holder = short(leader.holder) if sys.stdout.isatty() else leader.holder
    return (name, Cell(holder, LEADING), str(leader.token), seconds(leader.remaining), pairs(leader.metadata))
