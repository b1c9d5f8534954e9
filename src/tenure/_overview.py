"""The elections, partitions, queues and schedules of a store at one moment, and how queues have changed since."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from tenure import Backend, Leader, PartitionGroup, ScheduleStatus, Stats
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")

SAMPLES = 60
"""How many samples of a queue are kept."""

AT_ONCE = 16
"""How many queues are counted at once."""


@dataclass(frozen=True, slots=True)
class Overview:
    """What a store has now. None: it has no such things at all."""

    leaders: Mapping[str, Leader | None] | None
    queues: Mapping[str, Stats] | None
    schedules: list[ScheduleStatus]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Why a queue, or its schedules, could not be read, by its name; what could be read of it is there."""
    elections: Mapping[str, Leader | None] | None = field(init=False)
    """The leaders of the names that are of no group."""
    groups: Sequence[PartitionGroup] = field(init=False)

    def __post_init__(self) -> None:
        elections, groups = (None, []) if self.leaders is None else apart(self.leaders)
        object.__setattr__(self, "elections", elections)
        object.__setattr__(self, "groups", groups)


def apart(leaders: Mapping[str, Leader | None]) -> tuple[dict[str, Leader | None], list[PartitionGroup]]:
    """Return the elections among all names of a store, and the groups that share partitions."""
    groups = PartitionGroup.all_in(leaders)
    of_groups = {lease for one in groups for lease in one.leases}
    return {name: leader for name, leader in leaders.items() if name not in of_groups}, groups


def other_owners(group: PartitionGroup) -> dict[str, list[str]]:
    """Return the partitions whose owners are no members of *group* any more, by the identity of the owner."""
    members = {partition for one in group.members for partition in one.owned}
    found: dict[str, list[str]] = {}
    for partition, owner in group.owners.items():
        if owner is not None and partition not in members:
            found.setdefault(owner.holder.rpartition("-")[0], []).append(partition)
    return found


def state_of(group: PartitionGroup) -> str:
    """Say in a word or two whether the partitions of *group* are where they belong."""
    return "balanced" if group.balanced else "moving" if group.members else "no members"


_NUMBERED = re.compile(r"partition-(\d{1,9})", re.ASCII)


def in_ranges(partitions: Sequence[str]) -> str:
    """Write partitions in a few words: numbered ones, in their order, as ``0-3, 7``; others as their names."""
    numbers = [int(found[1]) for one in partitions if (found := _NUMBERED.fullmatch(one))]
    if len(numbers) < len(partitions):
        return ", ".join(partitions)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


async def look(backend: Backend) -> Overview:
    """Ask for everything; a store that has only elections, or only queues, has the rest missing.

    Raises:
        Unavailable: It did not answer.
        ConfigError: It can't be used.
    """
    leaders: Mapping[str, Leader | None] | None
    try:
        leaders = await backend.leaders()
    except ConfigError:
        leaders = None
    try:
        names = await backend.queues()
    except ConfigError:
        if leaders is None:
            raise
        return Overview(leaders, None, [])
    queues: dict[str, Stats] = {}
    schedules: list[ScheduleStatus] = []
    unreadable: dict[str, str] = {}

    async def look_at(name: str) -> tuple[Stats | TenureError, list[ScheduleStatus] | TenureError]:
        queue = backend.queue(name)
        return await asyncio.gather(_found(queue.stats()), _found(queue.schedules.list()))

    for first in range(0, len(names), AT_ONCE):
        some = names[first : first + AT_ONCE]
        for name, (stats, planned) in zip(some, await asyncio.gather(*map(look_at, some)), strict=True):
            reasons: list[str] = []
            if isinstance(stats, TenureError):
                reasons.append(str(stats))
            else:
                queues[name] = stats
            if isinstance(planned, TenureError):
                reasons.append(f"its schedules: {planned}")
            else:
                schedules += planned
            if reasons:
                unreadable[name] = "; ".join(reasons)
    return Overview(leaders, queues, schedules, unreadable)


async def _found(asked: Awaitable[T]) -> T | TenureError:
    """Return what was found; or why one thing can't be read, while the store answers: the others are worth a look."""
    try:
        return await asked
    except Unavailable:
        raise
    except TenureError as error:
        return error


class _Sample(NamedTuple):
    at: float
    backlog: int


@dataclass(slots=True)
class History:
    """The newest samples of each queue, and since when each leader is seen. Times by a clock that never goes back."""

    _samples: dict[str, deque[_Sample]] = field(default_factory=dict)
    _terms: dict[str, tuple[int, float]] = field(default_factory=dict)

    def note(self, found: Overview, now: float) -> None:
        """Add a sample of each queue; forget those that are gone."""
        queues = found.queues or {}
        for name, stats in queues.items():
            samples = self._samples.setdefault(name, deque(maxlen=SAMPLES))
            samples.append(_Sample(now, stats.ready + stats.locked))
        for gone in set(self._samples) - set(queues):
            del self._samples[gone]
        for name, leader in (found.leaders or {}).items():
            if leader is None:
                self._terms.pop(name, None)
            elif name not in self._terms or self._terms[name][0] != leader.token:
                self._terms[name] = leader.token, now

    def backlogs(self, queue: str) -> list[int]:
        """Return the samples of ready and locked messages, the newest last."""
        return [sample.backlog for sample in self._samples.get(queue, ())]

    def change(self, queue: str) -> float | None:
        """Return by how many messages a second the backlog has changed, over all samples; None if that is unknown."""
        samples = list(self._samples.get(queue, ()))
        if len(samples) < 2 or samples[-1].at <= samples[0].at:
            return None
        return (samples[-1].backlog - samples[0].backlog) / (samples[-1].at - samples[0].at)

    def led_for(self, name: str, now: float) -> float | None:
        """Return for how many seconds the present term has been seen; None if nobody leads."""
        known = self._terms.get(name)
        return None if known is None else now - known[1]
