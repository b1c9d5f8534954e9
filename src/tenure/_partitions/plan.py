"""The partitions of a group, the names of their leases, and the share of each member. Plain values and sums.

- Each partition is a lease. Each process that takes part holds one more lease, a *slot*, so that the members are known.
- The share of a member follows from the members alone, not from what they own at the moment. So all members that see
  the same members agree, and while no member comes or goes, nothing moves. The oldest members get what can't be
  divided; so a newcomer takes its own share and nothing else moves, and what a leaver had is all that moves when it
  leaves.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from functools import partial

from tenure._foreign import digits, read_or
from tenure._lease import HeldBy, Leader
from tenure._queue.identity import numbered_partition
from tenure.errors import ConfigError

PARTITIONS_MAX = 10_000
"""The most partitions of a group: each look of a member reads a row for each."""

WEIGHT_MAX = 1_000

SLOT = "member-"
"""The name of a slot in its group begins so; it ends with its number."""

NUMBER_MAX = 10**9 - 1
"""The highest number in the metadata of a slot that is read."""

LAYOUT_MAX = 40
"""The most characters of a layout that are read: those of others differ from ours, however long they are."""

OWN = "tenure-"
"""Keys in metadata that begin so are tenure's own."""

ORDER, WEIGHT, LAYOUT = f"{OWN}order", f"{OWN}weight", f"{OWN}partitions"
"""Keys in the metadata of a slot: the member's place in the order of joining, its weight, and its partitions."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The partitions of the group *name*, in the order that all members share."""

    name: str
    partitions: tuple[str, ...]

    @property
    def prefix(self) -> str:
        """The begin of the names of all leases of the group."""
        return f"{self.name}."

    def lease_of(self, partition: str) -> str:
        """Return the name of the lease of a partition."""
        return f"{self.prefix}{partition}"

    def slot(self, number: int) -> str:
        """Return the name of the lease of a slot."""
        return f"{self.prefix}{SLOT}{number}"

    @property
    def text(self) -> str:
        """What a member writes into its slot, so that another one with other partitions is noticed."""
        count = len(self.partitions)
        if self.partitions == numbered_partitions(count):
            return str(count)
        return f"{count} {zlib.crc32(chr(0).join(self.partitions).encode()):08x}"


def checked_partitions(partitions: int | Iterable[str]) -> tuple[str, ...]:
    """Return the names of partitions, of which a number gives ``"partition-0"`` and so on.

    Raises:
        ConfigError: There are none, or too many; or a name is no text, or is given twice.
    """
    if isinstance(partitions, bool) or not isinstance(partitions, int):
        return _checked_names(partitions)
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise ConfigError(f"partitions must be from 1 to {PARTITIONS_MAX:,}, not {partitions:,}")
    return numbered_partitions(partitions)


def numbered_partitions(count: int) -> tuple[str, ...]:
    """Return the names of partitions that have a number only."""
    return tuple(map(numbered_partition, range(count)))


def _checked_names(partitions: object) -> tuple[str, ...]:
    if isinstance(partitions, (str, bytes)) or not isinstance(partitions, Iterable):
        raise ConfigError(f"partitions must be a number or names, such as 64 or ['eu', 'us'], not {partitions!r:.80}")
    if isinstance(partitions, Set):
        raise ConfigError("partitions must be in an order that all members share, and a set has none; try sorted(…)")
    names = tuple(partitions)
    if not 1 <= len(names) <= PARTITIONS_MAX:
        raise ConfigError(f"there must be 1 to {PARTITIONS_MAX:,} partitions, not {len(names):,}")
    for one in names:
        if not isinstance(one, str) or not one:
            raise ConfigError(f"the name of a partition must be text of at least one character, not {one!r:.80}")
        if one.startswith(SLOT) or "." in one:  # else two groups could have one lease, or a slot be a partition
            raise ConfigError(
                f"the name of a partition must not begin with {SLOT!r} and must have no dot, as {one!r:.80} does"
            )
    if len(set(names)) < len(names):
        twice = next(one for number, one in enumerate(names) if one in names[:number])
        raise ConfigError(f"the partition {twice!r} is named twice; each needs a name of its own")
    return names


@dataclass(frozen=True, slots=True)
class Member:
    """A process that takes part: it holds a slot."""

    slot: int
    identity: str
    order: int
    """Its place in the order of joining; of two with the same, the lower slot is first."""
    weight: int = 1
    layout: str = ""
    is_timed: bool = field(default=True, compare=False)
    """Whether the store knows how long its lease lasts; if not, it may be dead."""

    @property
    def seniority(self) -> tuple[int, int]:
        """Sorts members, the oldest first."""
        return self.order, self.slot


def member_of(slot: int, held: HeldBy | Leader) -> Member:
    """Return the member that holds a slot."""
    order, weight = (_number(held.metadata.get(key)) for key in (ORDER, WEIGHT))
    weight, is_timed = min(max(weight, 1), WEIGHT_MAX), held.remaining is not None
    layout = held.metadata.get(LAYOUT, "")[:LAYOUT_MAX]
    return Member(slot, identity_of(held.holder), order, weight, layout, is_timed)


def identity_of(holder: str) -> str:
    """Return the identity of the member that holds a lease: what stands before the random part of its holder."""
    return holder.rpartition("-")[0]


def _number(text: str | None) -> int:
    """Return a number in metadata, which another program may have written."""
    return read_or(partial(digits, most=NUMBER_MAX), text, 0)


def shares(members: Iterable[Member], partitions: int) -> dict[str, int]:
    """Return how many partitions each member is to own, by its identity.

    They are by weight, rounded down; the oldest members own one more each, until all partitions have an owner.
    """
    oldest_first = sorted(members, key=lambda one: one.seniority)
    weight = sum(one.weight for one in oldest_first)
    found = {one.identity: partitions * one.weight // weight for one in oldest_first}
    left = partitions - sum(found.values())
    for one in oldest_first[:left]:
        found[one.identity] += 1
    return found
