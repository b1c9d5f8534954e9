"""The suites must find who takes again and again what it never learns of, while its answers are lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tenure._backends.memory import MemoryBroker
from tenure._election.machine import Machine
from tenure._queue.broker import QueueTraits
from tenure._queue.claiming import ClaimTimes
from tenure._queue.pump import Pump
from tenure._queue.session_pump import SessionPump
from tenure.testing._conformance.leases.one_way import OneWayTests as LeaseTests
from tenure.testing._conformance.queues.one_way import OneWayTests as QueueTests
from tests.conformance.planted import failing_tests, queues_with
from tests.stores.memory.test_suites import MemoryHarness

LEASES: dict[str, tuple[type, str, Any]] = {
    "a candidate asks for the name again": (Machine, "_may_ask", lambda machine: True),
    "a term outlives its trust": (Machine, "_cancel_at", lambda machine, term: float("inf")),
}
QUEUES: dict[str, tuple[type, str, Any]] = {
    "a consumer claims without a look": (ClaimTimes, "_looks_first", lambda times, now: False),
    "a claim is asked for no more": (Pump, "_retry_in", lambda pump, misses: float("inf")),
    "a session is asked for no more": (SessionPump, "_retry_in", lambda pump, misses: float("inf")),
}


class TellsNoHoldings(MemoryBroker):
    """A broker without connections, which can't be asked which queues hold messages."""

    @property
    def traits(self) -> QueueTraits:
        return replace(super().traits, surveys=False, connects=False)


def findings_of_leases() -> set[str]:
    return failing_tests(MemoryHarness, LeaseTests)


def findings_of_queues(broker: type[MemoryBroker]) -> set[str]:
    return failing_tests(queues_with(broker), QueueTests)


def test_without_a_plant_nothing_is_found() -> None:
    assert findings_of_leases() == findings_of_queues(MemoryBroker) == findings_of_queues(TellsNoHoldings) == set()


@pytest.mark.parametrize("plant", LEASES)
def test_a_planted_bug_of_elections_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*LEASES[plant])
    assert findings_of_leases()


@pytest.mark.parametrize("plant", QUEUES)
def test_a_planted_bug_of_queues_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*QUEUES[plant])
    assert findings_of_queues(MemoryBroker)
    assert findings_of_queues(TellsNoHoldings)
