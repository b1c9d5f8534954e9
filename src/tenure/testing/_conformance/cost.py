"""What a question costs a store, at two depths: it must not grow with what it leaves alone.

No time is measured. A harness counts what its store does: rows visited, commands, steps, requests.
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
"""By which factor a cost may differ between the two depths; ten times as much waits at the second."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How a harness counts, and what it counts as the same.

    Args:
        unit: What is counted, for a message.
        shallow: How much waits at the first depth.
        deep: How much waits at the second.
        few: The same as *shallow*, of what takes a question each to set up (sessions, queues, names of leases).
        several: The same as *deep*, for such.
        flood: More messages than the store deals with in one question when time has come for all of them.
        noise: By how many units two measurements may differ without a meaning. Less than what *several* rows cost.
        times: How often to ask, where the first may clear away what setting up has left behind.
        step: How many units one question may cost while time has come for a *flood*; the next question does the rest.
            None if the store does it all at once.
        rounds: Questions that go through a round of what there is, whatever they mean of it, and what a round costs.
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
        """Return the answer to *ask*, and how many units of work the storage has done for it."""
        ...


@dataclass(slots=True)
class Meter:
    """Asks, and notes what each question has cost at each depth: the least of it, as the first may have to clear away
    what was left behind while this depth was set up."""

    harness: Counting
    scale: Scale
    figures: dict[str, dict[int, int]] = field(default_factory=dict)
    depth: int = 0

    @classmethod
    def of(cls, harness: Counting, *, in_steps: bool = False) -> Meter:
        """Return one for *harness*; skip the test if it can't count, or takes no steps and is to."""
        if harness.scale is None:
            pytest.skip("this harness can't count what its store does")
        if in_steps and harness.scale.step is None:
            pytest.skip("this store does at once whatever time brings")
        return cls(harness, harness.scale)

    def depths(self) -> Iterator[int]:
        """Yield the two depths, and note costs for each while it is at hand."""
        return self._each(self.scale.shallow, self.scale.deep)

    def small_depths(self) -> Iterator[int]:
        """Do the same for what takes a question each to set up."""
        return self._each(self.scale.few, self.scale.several)

    def _each(self, *depths: int) -> Iterator[int]:
        for depth in depths:
            self.depth = depth
            yield depth

    async def ask(self, question: str, verb: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what *verb* answers, and note its cost under *question*."""
        answer, cost = await self.harness.work_of(partial(verb, *args, **kwargs))
        self.note(question, cost)
        return answer

    def note(self, question: str, cost: int) -> None:
        """Note what *question* has cost."""
        costs = self.figures.setdefault(question, {})
        costs[self.depth] = min(cost, costs.get(self.depth, cost))

    def require_flat(self) -> None:
        """Fail if a question cost more at the second depth than at the first."""
        grown = []
        for question, costs in self.figures.items():
            (few, first), (many, second) = sorted(costs.items())
            if second > max(first * GROWTH + self.scale.noise, self.scale.rounds.get(question, 0)):
                grown.append(f"{question}: {first:,} {self.scale.unit} beside {few:,}, {second:,} beside {many:,}")
        assert not grown, f"grows with what it leaves alone: {'; '.join(grown)}"

    async def ask_step(self, question: str, verb: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what *verb* answers; fail if it cost more than one step may."""
        assert self.scale.step is not None
        answer, cost = await self.harness.work_of(partial(verb, *args, **kwargs))
        assert cost <= self.scale.step, f"{question}: {cost:,} {self.scale.unit}, and a step has {self.scale.step:,}"
        return answer
