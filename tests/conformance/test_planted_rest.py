"""The suite of rest must find whom a timer moves, and who waits for hints that never come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import ClassVar

import pytest

from tenure._backends.memory import MemoryLeases
from tenure._election.store import Hint, LeaseStore, LeaseTraits
from tenure.testing.conformance import FaultyLeaseStore, LeaseRestSuite
from tests.conformance.planted import failing_tests
from tests.stores.memory.test_suites import MemoryHarness

WITH, WITHOUT = "test_with_hints_nobody_asks_before_it_is_due", "test_without_hints_only_those_who_wait_ask"


class SaysSo(FaultyLeaseStore):
    """Its hints are absent."""

    async def hints(self, name: str) -> AsyncIterator[Hint]:
        yield "absent"
        await asyncio.Event().wait()


class HasNone(FaultyLeaseStore):
    """By its traits, it never gives hints."""

    @property
    def traits(self) -> LeaseTraits:
        return replace(super().traits, hints=False)


class HintlessMemory(MemoryHarness):
    """A store in memory with hints, and others on the same without."""

    hintless = ("says so", "has none")
    with_hints: ClassVar[type[FaultyLeaseStore]] = FaultyLeaseStore
    without: ClassVar[type[FaultyLeaseStore]] = SaysSo

    async def open(self) -> FaultyLeaseStore:
        return self.with_hints(MemoryLeases(self._clock, self._memory))

    async def open_without_hints(self, how: str) -> LeaseStore:
        kind = self.without if how == "says so" else HasNone
        return kind(MemoryLeases(self._clock, self._memory))


class ATimerStandsIn(FaultyLeaseStore):
    """Whoever waits for hints is notified every two seconds."""

    async def hints(self, name: str) -> AsyncIterator[Hint]:
        while True:
            yield None
            await asyncio.sleep(2.0)


class ATimerStandsInAfterASecond(FaultyLeaseStore):
    """It says that hints are absent, and then a timer says that they come."""

    async def hints(self, name: str) -> AsyncIterator[Hint]:
        while True:
            yield "absent"
            await asyncio.sleep(1.5)
            yield None


class SaysNothing(FaultyLeaseStore):
    """Its hints are absent, and nobody is told."""

    async def hints(self, name: str) -> AsyncIterator[Hint]:
        for _ in await asyncio.Event().wait(), ():
            yield None


def findings(**stores: type[FaultyLeaseStore]) -> set[str]:
    return failing_tests(type("Planted", (HintlessMemory,), stores), LeaseRestSuite)


def test_without_a_planted_bug_nothing_is_found() -> None:
    assert findings() == set()


@pytest.mark.parametrize("planted", [ATimerStandsIn, ATimerStandsInAfterASecond, SaysNothing])
def test_a_planted_bug_without_hints_is_found(planted: type[FaultyLeaseStore]) -> None:
    assert findings(without=planted) == {WITHOUT}


@pytest.mark.parametrize("planted", [ATimerStandsIn])
def test_a_planted_bug_beside_hints_is_found(planted: type[FaultyLeaseStore]) -> None:
    assert findings(with_hints=planted) == {WITH}
