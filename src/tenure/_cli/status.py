"""``tenure status``: show the leaders, or the status of this machine's own candidates."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from tenure._cli.completion import election_names
from tenure._cli.examples import Command
from tenure._cli.exits import Exit
from tenure._cli.group import complete, connect_existing, json_option, on_option, seconds_option, socket_option
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
    from tenure import Leader, PartitionGroup

WAIT = 1.0
"""Seconds that the processes of this machine have for their answers."""

UNUSED_DAYS = 7
"""A name that has had no leader for longer is shown only with --all."""


@click.command("status", cls=Command)
@click.argument("name", required=False, shell_complete=election_names)
@click.option(
    "--me",
    is_flag=True,
    is_eager=True,
    help="Ask the `tenure lead NAME` of this machine, and not the store: is it live?",
)
@click.option("--ready", is_flag=True, help="With --me: is it also ready to lead?")
@seconds_option("--wait", f"With --me: time to wait for the answer. [default: {WAIT:g}]")
@socket_option
@on_option
@json_option
@click.option("--all", "every", is_flag=True, help=f"Show also names without a leader for {UNUSED_DAYS} days.")
@click.pass_context
def command(
    ctx: click.Context,
    name: str | None,
    url: str,
    as_json: bool,
    every: bool,
    me: bool,
    ready: bool,
    wait: float | None,
    socket_dir: str | None,
) -> int:
    """Show the leader of NAME, or of every name of the store.

    Names that have had no leader for 7 days are not shown, and their number is printed on stderr. With --json, all are
    shown, and vacant_for is the least number of seconds without a leader. A name stays listed if the store does not
    know since when it has had no leader. The names of groups that share partitions are not shown, unless one is given:
    see tenure partitions.

    Ends with 0 if there is a leader, and with 3 if not (if all are shown: if no name has a leader).

    With --me, it asks no store, but each running `tenure lead NAME` of this user on this machine (in this container):
    for the probes of an orchestrator. Without NAME, it asks those of every name. All must pass; to ask only one, give
    each a --socket-dir of its own.

    A process is live if it answers, and its command does not run beyond its term. That depends neither on the store nor
    on being the leader, since a restart would improve neither. It is ready (--ready) if it is live, and leads in a
    trusted term, or stands by, and the store answered within the last ttl and two --retry-every.

    With --me, ends with 0 if all pass, with 1 if one is not live or not ready, with 3 if none runs here, and with 69 if
    one does not answer in time, because it is stopped or blocked.
    """
    if me:
        _refuse_with_me(ctx, every)
        from tenure._cli.me import show  # imports socket

        return show(name, socket_dir, WAIT if wait is None else wait, ready=ready, as_json=as_json)
    _refuse_without_me(ctx)
    if every and name is not None:
        raise click.UsageError("--all lists all names; give either NAME or --all")
    leaders, vacancies, groups = complete(_look(name, url))
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
    if groups:
        notice(f"{groups:,} group{'s' if groups > 1 else ''} of partitions not shown; see: tenure partitions")
    return _code(leaders)


def _refuse_with_me(ctx: click.Context, every: bool) -> None:
    if every:
        raise click.UsageError("--all lists the names of a store, and --me asks none; give one of them")
    if ctx.get_parameter_source("url") == click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--me asks processes of this machine, and no store; leave out --on")


def _refuse_without_me(ctx: click.Context) -> None:
    for option, parameter in (("--ready", "ready"), ("--wait", "wait"), ("--socket-dir", "socket_dir")):
        if ctx.get_parameter_source(parameter) == click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option} is about the processes of this machine; add --me")


async def _look(name: str | None, url: str) -> tuple[Mapping[str, Leader | None], Mapping[str, float | None], int]:
    """Return the leader of each name, and for how long the others have had none; and how many groups are left out."""
    from tenure._overview import apart

    async with connect_existing(url) as backend:
        leaders: Mapping[str, Leader | None]
        groups: Sequence[PartitionGroup] = ()
        if name is not None:
            leaders = {name: await backend.election(name).leader()}
        else:
            leaders, groups = apart(await backend.leaders())
        vacant = [each for each, leader in leaders.items() if leader is None]
        return leaders, await backend.vacancies(*vacant) if vacant else {}, len(groups)


def _code(leaders: Mapping[str, Leader | None]) -> int:
    return Exit.DONE if any(leaders.values()) else Exit.VACANT


def _is_unused(vacant_for: float | None) -> bool:
    return vacant_for is not None and vacant_for > UNUSED_DAYS * 86_400


def _row(name: str, leader: Leader | None) -> tuple[str | Cell, ...]:
    if leader is None:
        return (name, Cell(NO_LEADER, ALARM), "", "", "")
    holder = short(leader.holder) if sys.stdout.isatty() else leader.holder
    return (name, Cell(holder, LEADING), str(leader.token), seconds(leader.remaining), pairs(leader.metadata))
