"""The suite of partitions must find a half-cut member that works on beside others, or keeps them waiting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tenure._election.handle import CandidateHandle
from tenure._election.machine import Machine
from tenure._lease import HeldBy, Vacant
from tenure._partitions.machine import Effect, PartitionMachine, View
from tenure._partitions.plan import SLOT
from tenure.testing.conformance import PartitionSuite
from tests.conformance.planted import failing_tests
from tests.stores.memory.test_suites import MemoryHarness

CANCEL_AT = Machine._cancel_at
SEEN, JOIN, TICK = PartitionMachine._seen, PartitionMachine._join, PartitionMachine.tick


def never_for_work(machine: Machine, term: Any) -> float:
    return CANCEL_AT(machine, term) if f".{SLOT}" in machine.name else math.inf


def never_for_slots(machine: Machine, term: Any) -> float:
    return math.inf if f".{SLOT}" in machine.name else CANCEL_AT(machine, term)


def with_the_dead(machine: PartitionMachine, found: Sequence[HeldBy | Vacant]) -> View:
    view, old = SEEN(machine, found), machine.view
    seen = {one.identity for one in view.members}
    kept = tuple(one for one in old.members if one.identity not in seen) if old else ()
    return replace(view, members=kept + view.members)


def joining_unseen(machine: PartitionMachine, now: float) -> list[Effect]:
    """Claim a slot by what was seen last, whether or not that was long ago."""
    effects = TICK(machine, now)
    if effects and machine.view is not None and machine._slot is None and now >= machine._join_at:
        effects += JOIN(machine, machine.view)
    return effects


def joining_once(machine: PartitionMachine, view: View) -> list[Effect]:
    return JOIN(machine, view) if machine._order is None else []


PLANTS: dict[str, tuple[type, str, Any]] = {
    "work goes on beyond its lease": (Machine, "_cancel_at", never_for_work),
    "work is not told of the end of its term": (CandidateHandle, "cancel_work", lambda *_: None),
    "a membership is kept beyond its lease": (Machine, "_cancel_at", never_for_slots),
    "a member counts those that are dead": (PartitionMachine, "_seen", with_the_dead),
    "a member joins again without a look": (PartitionMachine, "tick", joining_unseen),
    "a member joins only once": (PartitionMachine, "_join", joining_once),
    "a member whose look failed never looks again": (PartitionMachine, "look_failed", lambda machine, now: None),
}


def findings() -> set[str]:
    return failing_tests(MemoryHarness, PartitionSuite)


def test_without_a_plant_nothing_is_found() -> None:
    assert findings() == set()


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTS[plant])
    assert findings()
