"""The suites must find clients that are told nothing any more once their connection was cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tenure._backends.memory import MemoryBroker, MemoryLeases
from tenure._queue.broker import Broker
from tenure.testing.conformance import BrokerFaultSuite, FaultyBroker, FaultyLeaseStore, LeaseFaultSuite
from tests.conformance.planted import failing_tests
from tests.stores.memory.test_suites import MemoryHarness, MemoryQueueHarness

TESTS = ("test_every_change_gives_a_hint_again_after_a_cut", "test_every_message_gives_a_hint_again_after_a_cut")

HINTS_LEFT = {"believes it is still told": 0, "is told that it is connected, and nothing after": 1}
"""How many hints a client with each bug gets after its connection was cut."""

PLANTED = [f"a client of {kind} {plant}" for kind in ("leases", "queues") for plant in HINTS_LEFT]


class _Told:
    """Whether a connection was cut, and what its client is told after that."""

    left: int
    was_cut = False

    @asynccontextmanager
    async def cut(self) -> AsyncIterator[None]:
        self.was_cut = True
        async with super().cut():  # type: ignore[misc]
            yield

    async def hints(self, name: str) -> AsyncIterator[None]:
        left = self.left
        async for _ in self._hints_of(name):
            left -= self.was_cut
            if left < 0:
                await asyncio.Event().wait()
            yield

    def _hints_of(self, name: str) -> AsyncIterator[object]:
        raise NotImplementedError


class ToldLeases(_Told, FaultyLeaseStore):
    def _hints_of(self, name: str) -> AsyncIterator[object]:
        return self.store.hints(name)


class ToldBroker(_Told, FaultyBroker):
    def _hints_of(self, name: str) -> AsyncIterator[object]:
        return self._wrapped.hints(name)


def findings(kind: str, hints_left: int) -> set[str]:
    """Run the test on clients that get so few hints after a cut; return it if it fails."""

    class PlantedLeases(MemoryHarness):
        async def open(self) -> FaultyLeaseStore:
            store = ToldLeases(MemoryLeases(self._clock, self._memory))
            store.left = hints_left
            return store

    class PlantedQueues(MemoryQueueHarness):
        async def open(self) -> Broker:
            broker: Any = ToldBroker(MemoryBroker(self._clock, self._memory))
            broker.left = hints_left
            return broker  # type: ignore[no-any-return]

    if kind == "leases":
        return failing_tests(PlantedLeases, LeaseFaultSuite, is_meant=TESTS.__contains__)
    return failing_tests(PlantedQueues, BrokerFaultSuite, is_meant=TESTS.__contains__)


@pytest.mark.parametrize("kind", ["leases", "queues"])
def test_without_a_plant_nothing_is_found(kind: str) -> None:
    assert findings(kind, 1_000) == set()


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found(plant: str) -> None:
    kind, _, bug = plant.removeprefix("a client of ").partition(" ")
    assert findings(kind, HINTS_LEFT[bug])
