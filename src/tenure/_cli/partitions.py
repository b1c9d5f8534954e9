"""``tenure partitions``: list the groups that share partitions, or show one with its members and owners."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from tenure._cli.completion import group_names
from tenure._cli.examples import Command
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import complete, connect_existing, json_option, on_option
from tenure._cli.output import ALARM, LEADING, NO_LEADER, Cell, pairs, print_json, print_table, short_identity
from tenure.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tenure import PartitionGroup

NAMED_MAX = 10
"""How many groups an error names."""


@click.command("partitions", cls=Command)
@click.argument("name", required=False, shell_complete=group_names)
@on_option
@json_option
def command(name: str | None, url: str, as_json: bool) -> int:
    """List the groups that share partitions, or show the group NAME: its members, and which partitions each one owns.

    A group is balanced if each member owns its share; else partitions move, or are claimed within a moment. Partitions
    without an owner are red. An owner is no member any more if it has left or was cut off, and its leases have not run
    out yet.

    A group is listed once a process has joined it, and stays. Numbered partitions are known from its members; named
    ones, and those of a group without members, once they were owned. To move a partition: tenure resign
    NAME.partition-3.

    Ends with 3 if there is no group NAME.
    """
    groups = complete(_look(url))
    if name is None:
        _print_groups(groups, as_json)
    else:
        _print_group(_called(name, groups), as_json)
    return Exit.DONE


async def _look(url: str) -> list[PartitionGroup]:
    from tenure import PartitionGroup

    async with connect_existing(url) as backend:
        return PartitionGroup.all_in(await backend.leaders())


def _called(name: str, groups: Sequence[PartitionGroup]) -> PartitionGroup:
    for one in groups:
        if one.name == name:
            return one
    known = [one.name for one in groups]
    hint = nearest(name, known)
    if len(known) > NAMED_MAX:
        hint += "; list the groups with: tenure partitions"
    elif known:
        hint += f"; its groups are: {', '.join(known)}"
    else:
        hint = "; it has none: a program makes one with backend.partitions(…)"
    raise Failure(Exit.VACANT, f"there is no group {name!r} on this store{hint}")


def _print_groups(groups: Sequence[PartitionGroup], as_json: bool) -> None:
    if as_json:
        print_json([summary(one) for one in groups])
    elif groups:
        titles = ("GROUP", "PARTITIONS", "OWNED", "MEMBERS", "BALANCED")
        print_table(titles, [_row(one) for one in groups], numbers=("PARTITIONS", "OWNED", "MEMBERS"))


def _row(one: PartitionGroup) -> tuple[str | Cell, ...]:
    owned = Cell(str(len(one.owners) - len(one.vacant)), ALARM if one.vacant else "")
    return (one.name, str(len(one.owners)), owned, str(len(one.members)), "yes" if one.balanced else "no")


def summary(one: PartitionGroup) -> dict[str, Any]:
    """Return a group in numbers, for programs."""
    return {
        "name": one.name,
        "partitions": len(one.owners),
        "owned": len(one.owners) - len(one.vacant),
        "members": len(one.members),
        "balanced": one.balanced,
    }


def _print_group(group: PartitionGroup, as_json: bool) -> None:
    if as_json:
        print_json(_fields(group))
        return
    from tenure._overview import in_ranges, other_owners

    def shown(identity: str) -> str:
        return short_identity(identity) if sys.stdout.isatty() else identity

    rows: list[tuple[str | Cell, ...]] = [
        (
            Cell(shown(one.identity), LEADING),
            str(one.weight),
            f"{len(one.owned)} of {one.share}",
            in_ranges(one.owned),
            pairs(one.metadata),
        )
        for one in group.members
    ]
    for identity, owned in other_owners(group).items():
        rows.append((shown(identity), "", f"{len(owned)}, no member", in_ranges(owned), ""))
    if group.vacant:
        rows.append((Cell(NO_LEADER, ALARM), "", str(len(group.vacant)), in_ranges(group.vacant), ""))
    print_table(("MEMBER", "WEIGHT", "OWNED", "PARTITIONS", "METADATA"), rows, numbers=("WEIGHT",))


def _fields(group: PartitionGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "balanced": group.balanced,
        "members": [
            {
                "identity": one.identity,
                "weight": one.weight,
                "share": one.share,
                "owned": list(one.owned),
                "metadata": dict(one.metadata),
            }
            for one in group.members
        ],
        "partitions": [
            {
                "partition": partition,
                "owner": owner.holder if owner else None,
                "token": owner.token if owner else None,
                "remaining": owner.remaining if owner else None,
            }
            for partition, owner in group.owners.items()
        ],
    }
