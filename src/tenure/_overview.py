"""The elections, queues and schedules of a store at one moment, and how the queues have changed since."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tenure import Backend, Leader, ScheduleStatus, Stats
from tenure.errors import ConfigError

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
    for first in range(0, len(names), AT_ONCE):
        some = names[first : first + AT_ONCE]
        found = await asyncio.gather(*(backend.queue(name).stats() for name in some))
        queues.update(zip(some, found, strict=True))
    return Overview(leaders, queues, await backend.schedules())


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
