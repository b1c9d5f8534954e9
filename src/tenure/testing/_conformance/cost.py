"""The cost of a request at two depths: it must not grow with the data that the request doesn't return.

No time is measured. A harness counts the operations of its store: rows visited, commands, steps, requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, ParamSpec, Protocol, TypeVar

import pytest

P = ParamSpec("P")
T = TypeVar("T")

GROWTH = 1.5
"""The factor by which a cost may differ between the two depths; the second has ten times as much data."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How a harness counts the cost of a request, and which differences are noise.

    Args:
        unit: The name of the counted operation.
        shallow: The amount of data at the first depth.
        deep: The amount of data at the second.
        few: The same as *shallow*, for data that takes one request each to set up (sessions, queues, names of leases).
        several: The same as *deep*, for such data.
        flood: More messages than the store processes in one request when all of them are due.
        noise: The number of units by which two measurements may differ. Less than *several* rows cost.
        times: How often to measure; the first time may include the clean-up after the set-up.
        step: How many units one request may cost while a *flood* is due; the next request does the rest.
            None if the store does it all at once.
        rounds: The requests that scan all data in rounds, with the cost of one round.
    """

    unit: str
    shallow: int = 100
    deep: int = 1_000
    few: int = 10
    several: int = 100
    flood: int = 3_000
    noise: int = 0
    times: int = 1
    step: int | None = None
    rounds: Mapping[str, int] = field(default_factory=dict)


class Counting(Protocol):
    """A harness that counts."""

    scale: ClassVar[Scale | None]

    async def work_of(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        """Return the answer to *ask*, and its cost: the units of work that the storage has done for it."""
        ...


@dataclass(slots=True)
class Meter:
    """Measures requests, and keeps the lowest cost of each at each depth: the first may include the clean-up after the
    set-up of that depth."""

    harness: Counting
    scale: Scale
    figures: dict[str, dict[int, int]] = field(default_factory=dict)
    depth: int = 0

    @classmethod
    def of(cls, harness: Counting, *, in_steps: bool = False) -> Meter:
        """Return a meter for *harness*; skip the test if it can't count, or takes no steps where they are required."""
        if harness.scale is None:
            pytest.skip("this harness can't count what its store does")
        if in_steps and harness.scale.step is None:
            pytest.skip("this store applies everything that is due at once")
        return cls(harness, harness.scale)

    def depths(self) -> Iterator[int]:
        """Yield the two depths; costs are recorded for the one yielded last."""
        return self._each(self.scale.shallow, self.scale.deep)

    def small_depths(self) -> Iterator[int]:
        """Do the same for data that takes one request each to set up."""
        return self._each(self.scale.few, self.scale.several)

    def _each(self, *depths: int) -> Iterator[int]:
        for depth in depths:
            self.depth = depth
            yield depth

    async def ask(self, request: str, verb: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the answer of *verb*, and record its cost under *request*."""
        answer, cost = await self.harness.work_of(partial(verb, *args, **kwargs))
        self.note(request, cost)
        return answer

    def note(self, request: str, cost: int) -> None:
        """Record the *cost* of a request."""
        costs = self.figures.setdefault(request, {})
        costs[self.depth] = min(cost, costs.get(self.depth, cost))

    def require_flat(self) -> None:
        """Fail if a request cost more at the second depth than at the first."""
        grown = []
        for request, costs in self.figures.items():
            (few, first), (many, second) = sorted(costs.items())
            if second > max(first * GROWTH + self.scale.noise, self.scale.rounds.get(request, 0)):
                grown.append(f"{request}: {first:,} {self.scale.unit} beside {few:,}, {second:,} beside {many:,}")
        assert not grown, f"the cost grows with unrelated data: {'; '.join(grown)}"

    async def ask_step(self, request: str, verb: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the answer of *verb*; fail if it cost more than one step may."""
        assert self.scale.step is not None
        answer, cost = await self.harness.work_of(partial(verb, *args, **kwargs))
        assert cost <= self.scale.step, f"{request}: {cost:,} {self.scale.unit}, and a step has {self.scale.step:,}"
        return answer
