"""Single answers to the machine of a schedule; whole fleets are in tests/sim/test_schedules.py."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tenure._schedule.machine import EARLY_MIN, LOOK_EVERY, WITHHELD_EVERY, Advance, Look, ScheduleMachine, Wait
from tenure._schedule.plan import Plan, Record

PLAN = Plan(10.0)
STORE = 1.7e9  # the store's clock, when the local one is 0; a slot


def machine_that_knows(record: Record, plan: Plan = PLAN, now: float = 0.0) -> ScheduleMachine:
    machine = ScheduleMachine("tidy", plan, random.Random(1))
    machine.looked(record.encoded(), STORE + now, now, now)
    return machine


def test_a_slot_is_asked_for_when_it_is_due_by_the_clock_of_the_store() -> None:
    machine = machine_that_knows(Record(PLAN, STORE))
    step = machine.next(0.0)
    assert isinstance(step, Wait)
    assert step.until == pytest.approx(10.0, abs=0.01)
    due = machine.next(step.until)
    assert isinstance(due, Advance)
    assert (due.slots, due.not_before) == ((STORE + 10,), STORE + 10)


def next_look(machine: ScheduleMachine, now: float) -> float:
    """Return when the machine looks; it asks for nothing else before."""
    while isinstance(step := machine.next(now), Wait):
        assert step.until > now
        now = step.until
    assert isinstance(step, Look)
    return now


def test_after_the_clock_of_the_store_was_set_back_it_looks_when_the_next_slot_would_be_due() -> None:
    machine = machine_that_knows(Record(PLAN, STORE))
    due = machine.next(10.5)
    assert isinstance(due, Advance)
    machine.advanced(False, due.expected, STORE - 3_600, 10.5, 10.5)
    assert machine.behind == pytest.approx(3_600)
    assert next_look(machine, 10.5) == pytest.approx(20.5, abs=0.01)


@pytest.mark.parametrize(
    ("every", "looks_at"),
    [(10.0, 10.0), (0.2, WITHHELD_EVERY), (1e6, LOOK_EVERY)],
    ids=["now and then", "often", "rarely"],
)
def test_a_paused_one_looks_when_the_next_slot_would_be_due(every: float, looks_at: float) -> None:
    plan = Plan(every)
    machine = machine_that_knows(Record(plan, STORE, paused=True), plan)
    assert 0.9 * looks_at <= next_look(machine, 0.0) <= looks_at + 0.01


def test_a_store_whose_clock_is_a_moment_behind_delays_no_slot() -> None:
    """As after a failover, or where the process that wrote the plan took the store's clock to be later."""
    plan = Plan(0.2)
    machine = machine_that_knows(Record(plan, STORE + 0.05), plan)
    step = machine.next(0.0)
    assert isinstance(step, Wait)
    assert step.until == pytest.approx(0.2, abs=0.01)
    due = machine.next(step.until)
    assert isinstance(due, Advance)
    assert due.slots == (STORE + 0.2,)


def test_the_first_slot_after_a_pause_is_sent_in_time() -> None:
    paused = Record(PLAN, STORE, paused=True)
    machine = machine_that_knows(paused)
    for at in (10.01, 20.01):
        assert next_look(machine, 0.0) == pytest.approx(at, abs=0.01)
        machine.looked(paused.encoded(), STORE + at, at, at)
    resumed = replace(paused, paused=False, settled_until=STORE + 23.0)
    at = next_look(machine, 20.01)
    machine.looked(resumed.encoded(), STORE + at, at, at)
    step = machine.next(at)
    assert isinstance(step, Advance)
    assert step.slots == (STORE + 30,)
    assert at == pytest.approx(30.0, abs=0.01)


def test_one_that_is_resumed_meanwhile_goes_on() -> None:
    machine = machine_that_knows(Record(PLAN, STORE))
    due = machine.next(10.5)
    assert isinstance(due, Advance)
    machine.advanced(False, due.expected, STORE - 3_600, 10.5, 10.5)
    resumed = replace(Record(PLAN, STORE), settled_until=STORE - 3_540)
    machine.looked(resumed.encoded(), STORE - 3_540, 70.5, 70.5)
    step = machine.next(70.5)
    assert isinstance(step, Wait)
    assert isinstance(machine.next(step.until), Advance)
    assert step.until <= 81.0


def test_a_request_that_came_a_little_early_is_repeated_a_little_later() -> None:
    machine = machine_that_knows(Record(PLAN, STORE))
    due = machine.next(10.5)
    assert isinstance(due, Advance)
    machine.advanced(False, due.expected, STORE + 9.999, 10.5, 10.5)
    step = machine.next(10.5)
    assert isinstance(step, Wait)
    assert step.until == pytest.approx(10.5 + EARLY_MIN)
    assert isinstance(machine.next(step.until), Advance)


def test_a_plan_whose_time_zone_is_missing_here_is_replaced_by_that_of_this_program() -> None:
    machine = machine_that_knows(Record(Plan("0 3 * * *", "Mars/Base"), STORE - 5))
    assert "no time zone 'Mars/Base'" in machine.problem
    step = machine.next(0.0)
    assert isinstance(step, Advance)
    assert (step.slots, Record.decoded(step.record, "tidy")) == ((), Record(PLAN, STORE))


def test_a_record_that_can_not_be_read_is_left_alone_until_it_is_gone() -> None:
    machine = ScheduleMachine("tidy", PLAN, random.Random(1))
    machine.looked('{"format":2}', STORE, 0.0, 0.0)
    assert "can't read" in machine.problem
    assert isinstance(machine.next(0.0), Wait)
    assert isinstance(machine.next(LOOK_EVERY), Look)
    machine.looked(None, STORE, 60.0, 60.0)
    assert machine.problem == ""
    assert isinstance(machine.next(60.0), Advance)
