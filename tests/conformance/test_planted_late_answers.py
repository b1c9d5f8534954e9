"""The suites must find who takes an answer for none that comes late, but in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tenure._election.effects import Answered, Effect, Input
from tenure._election.machine import Machine
from tenure._lease import HeldBy, NoAnswer, Vacant
from tenure._partitions.machine import Effect as PartitionEffect
from tenure._partitions.machine import PartitionMachine
from tenure._queue.effects import Claimed, PumpEffect
from tenure._queue.locks import Locks, _Renewal
from tenure._queue.pump import Pump
from tenure.testing._conformance.leases.one_way import OneWayTests
from tenure.testing._conformance.queues.late_answers import LateAnswerTests
from tenure.testing.conformance import PartitionSuite
from tests.conformance.planted import failing_tests
from tests.stores.memory.test_suites import MemoryHarness, MemoryQueueHarness

LATE = 0.5
"""The share of the pause before a request is repeated after which a planted client takes an answer for none."""
HANDLE, LOOKED = Machine.handle, PartitionMachine.looked
ON_RENEWED, CLAIMED = Locks._on_renewed, Pump._claimed


def handle(machine: Machine, event: Input, now: float) -> list[Effect]:
    term = machine._term
    if isinstance(event, Answered) and term and now - term.asked_at > LATE * machine.timing.retry_every:
        event = replace(event, answer=NoAnswer("late"))
    return HANDLE(machine, event, now)


def looked(machine: PartitionMachine, found: Sequence[HeldBy | Vacant], now: float) -> list[PartitionEffect]:
    if now - machine._looked_at <= LATE * machine.timing.retry_every:
        return LOOKED(machine, found, now)
    machine.look_failed(now)
    return []


def on_renewed(locks: Locks, renewal: _Renewal, answers: Any, now: float, effects: Any) -> None:
    is_late = now - renewal.asked_at > LATE * locks.settings.timing.retry_every
    ON_RENEWED(locks, renewal, NoAnswer("late") if is_late else answers, now, effects)


def claimed(pump: Pump, answer: Claimed, now: float, effects: list[PumpEffect]) -> None:
    if now - pump._claim_asked_at <= LATE * pump.settings.timing.retry_every:
        CLAIMED(pump, answer, now, effects)
    else:
        pump._unanswered(answer.request_id, "late", now, effects)


PLANTS: dict[str, tuple[type, type, type, str, Any]] = {
    "a candidate takes a late renewal for none": (MemoryHarness, OneWayTests, Machine, "handle", handle),
    "a member takes a late renewal for none": (MemoryHarness, PartitionSuite, Machine, "handle", handle),
    "a member takes a late look for none": (MemoryHarness, PartitionSuite, PartitionMachine, "looked", looked),
    "a consumer takes a late claim for none": (MemoryQueueHarness, LateAnswerTests, Pump, "_claimed", claimed),
    "a consumer takes a late renewal for none": (MemoryQueueHarness, LateAnswerTests, Locks, "_on_renewed", on_renewed),
}


def findings(harness: type, suite: type) -> set[str]:
    return failing_tests(harness, suite, is_meant=lambda test: "late" in test or "slow" in test)


@pytest.mark.parametrize(
    ("harness", "suite"),
    [(MemoryHarness, OneWayTests), (MemoryHarness, PartitionSuite), (MemoryQueueHarness, LateAnswerTests)],
)
def test_without_a_plant_nothing_is_found(harness: type, suite: type) -> None:
    assert findings(harness, suite) == set()


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness, suite, *planted = PLANTS[plant]
    monkeypatch.setattr(*planted)
    assert findings(harness, suite)
