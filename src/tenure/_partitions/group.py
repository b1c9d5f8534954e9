"""``PartitionGroup`` and ``PartitionMember``: a group that shares partitions, as the leases of a store show it.

No group has a record of its own. It is known by its slots, and its members by what they have written into them; so
whatever lists the leases of a store can show its groups, without taking part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tenure._frozen import FrozenDict
from tenure._lease import NO_METADATA, Leader, Metadata
from tenure._partitions.plan import (
    OWN,
    PARTITIONS_MAX,
    SLOT,
    Layout,
    Member,
    identity_of,
    member_of,
    numbered_partitions,
    shares,
)

_SLOT = re.compile(rf"(?P<group>.+)\.{re.escape(SLOT)}(?P<number>0|[1-9][0-9]{{0,8}})", re.DOTALL)

_HOLDER = re.compile(r".+-[0-9a-f]{16}-[0-9a-f]{32}(#[0-9]+)?", re.DOTALL)
"""Holders of the leases of a group: they have two random parts, those of elections one."""

_NUMBERED = re.compile(r"partition-(0|[1-9][0-9]*)")

_COUNT = re.compile(r"([1-9][0-9]{0,8})( [0-9a-f]{8})?")
"""The text of a layout; the second part is there if the partitions have names."""

_DIGITS = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True)
class PartitionMember:
    """A process that takes part in a group.

    Attributes:
        identity: Its label and a random part. The holders of all its leases begin with it.
        weight: The weight of its share.
        share: How many partitions it is to own while the members stay the same.
        owned: The partitions that it owns, in natural order.
        metadata: The text that it gives about itself.
    """

    identity: str
    weight: int = 1
    share: int = 0
    owned: tuple[str, ...] = ()
    metadata: Metadata = field(default_factory=lambda: NO_METADATA, hash=False)


@dataclass(frozen=True, slots=True)
class PartitionGroup:
    """The partitions of a group with their owners, and its members, at one moment.

    Attributes:
        name: The name that :meth:`tenure.Backend.partitions` was given.
        owners: The owner of each partition, in natural order; None if it has none. An owner may be no member any more,
            until its lease has run out.
        members: The members, those that joined first before the others.
        leases: The names of all leases of the group, also of those that say which members there are.
    """

    name: str
    owners: Mapping[str, Leader | None] = field(hash=False)
    members: tuple[PartitionMember, ...] = ()
    leases: tuple[str, ...] = ()

    @staticmethod
    def all_in(leaders: Mapping[str, Leader | None]) -> list[PartitionGroup]:
        """Return the groups among all names of a store, sorted by name.

        A group is known once a member has joined it, and stays known. Numbered partitions are known from the members,
        also those that were never owned, and an election whose name begins as theirs is never taken for one. Named
        partitions can't be told from such elections: all names ``GROUP.…`` count as partitions then.

        Args:
            leaders: What :meth:`tenure.Backend.leaders` returns.

        Example::

            for group in PartitionGroup.all_in(await backend.leaders()):
                print(group.name, len(group.members), "members,", len(group.vacant), "partitions without an owner")
        """
        slots = _slots_in(leaders)
        others: dict[str, list[str]] = {name: [] for name in slots}
        for lease in leaders:
            name = lease.rpartition(".")[0]
            if name in slots and lease not in slots[name].values():
                others[name].append(lease)
        known = [name for name in sorted(slots) if others[name] or any(leaders[slot] for slot in slots[name].values())]
        return [_group(name, slots[name], others[name], leaders) for name in known]

    @property
    def vacant(self) -> tuple[str, ...]:
        """The partitions without an owner, in natural order."""
        return tuple(name for name, owner in self.owners.items() if owner is None)

    @property
    def balanced(self) -> bool:
        """Whether there are members, and each owns its share; else partitions move, or will be claimed soon."""
        return bool(self.members) and all(len(one.owned) == one.share for one in self.members)


def _slots_in(leaders: Mapping[str, Leader | None]) -> dict[str, dict[int, str]]:
    """Return the leases that are slots, by the name of their group, and by their number."""
    found: dict[str, dict[int, str]] = {}
    for lease, leader in leaders.items():
        slot = _SLOT.fullmatch(lease)
        if slot is not None and (leader is None or _HOLDER.fullmatch(leader.holder)):  # else it is an election
            found.setdefault(slot["group"], {})[int(slot["number"])] = lease
    return found


def _group(
    name: str, slots: Mapping[int, str], others: Iterable[str], leaders: Mapping[str, Leader | None]
) -> PartitionGroup:
    members, metadata = _members(slots, leaders)
    first = _COUNT.fullmatch(members[0].layout) if members else None
    count = int(first[1]) if first is not None else 0
    is_numbered = first is not None and first[2] is None and count <= PARTITIONS_MAX
    parts = [lease.removeprefix(f"{name}.") for lease in others]
    numbered = [part for part in parts if _NUMBERED.fullmatch(part)]
    former: list[str] = []
    if is_numbered:
        partitions = list(numbered_partitions(count))
        known = set(partitions)  # of more partitions that the group once had, leases remain; an owner is worth a look
        former = [part for part in numbered if part not in known and leaders[f"{name}.{part}"] is None]
    else:
        # Without members nothing says whether they have names: only numbers, unless there are none.
        partitions = sorted(numbered if numbered and not members else parts, key=_natural)
    layout = Layout(name, tuple(partitions))
    owners = {one: leaders.get(layout.lease_of(one)) for one in partitions}
    owned: dict[str, list[str]] = {}
    for partition, owner in owners.items():
        if owner is not None:
            owned.setdefault(identity_of(owner.holder), []).append(partition)
    share = shares(members, count or len(partitions))
    return PartitionGroup(
        name,
        FrozenDict(owners),
        tuple(
            PartitionMember(
                one.identity,
                one.weight,
                share[one.identity],
                tuple(owned.get(one.identity, ())),
                metadata[one.identity],
            )
            for one in members
        ),
        (*map(layout.lease_of, (*partitions, *former)), *slots.values()),
    )


def _members(
    slots: Mapping[int, str], leaders: Mapping[str, Leader | None]
) -> tuple[list[Member], dict[str, Metadata]]:
    """Return the members that hold *slots*, the oldest first; and by identity, what they say about themselves."""
    found: dict[str, Member] = {}
    metadata: dict[str, Metadata] = {}
    for number, lease in sorted(slots.items()):
        if (leader := leaders[lease]) is None:
            continue
        member = member_of(number, leader)
        if member.layout:  # else it has not written it yet
            found[member.identity] = member  # one that has lost its slot, and has another one, is seen in both
            given = {key: text for key, text in leader.metadata.items() if not key.startswith(OWN)}
            metadata[member.identity] = FrozenDict(given)
    return sorted(found.values(), key=lambda one: one.seniority), metadata


def _natural(name: str) -> tuple[list[str | int], str]:
    """Return what sorts names so that partition-2 is before partition-10."""
    return [int(part) if place % 2 else part for place, part in enumerate(_DIGITS.split(name))], name
