"""Fleets that run a schedule, simulated from many seeds; and bugs planted in the machine and the store, all found.

``make test`` runs the first seeds with one plan, ``make full`` those that come after them, and plans that change.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from tenure._schedule.machine import LOOK_EVERY, Advance, Look, ScheduleMachine, Wait
from tenure._schedule.plan import Plan, Record
from tests.sim.schedules import Fleet, Store

FEW = range(38)
"""The seeds of a short campaign."""

SEEDS = 150


def first_finding(
    make_store: Callable[[], Store] = Store,
    make_machine: Callable[[str, Plan, random.Random], ScheduleMachine] = ScheduleMachine,
    *,
    one_plan: bool = True,
    clock_steps: bool = False,
    is_stopped: bool = False,
    seeds: Iterable[int] = range(SEEDS),
) -> str:
    """Return what is wrong in the first run in which anything is; empty if in none."""
    for seed in seeds:
        run = Fleet(seed, make_store, make_machine, one_plan, clock_steps, is_stopped)
        if found := run.run():
            return f"seed {seed}, {run.drawn}: {found[0]}"
    return ""


def test_each_slot_is_sent_once_in_a_few_runs() -> None:
    assert first_finding(seeds=FEW) == ""


def test_each_slot_is_sent_once() -> None:
    assert first_finding(seeds=range(FEW.stop, FEW.stop + SEEDS)) == ""


def test_each_slot_is_sent_once_while_the_plan_changes() -> None:
    assert first_finding(one_plan=False) == ""


def test_no_slot_is_sent_twice_when_the_clock_of_the_store_is_set() -> None:
    assert first_finding(clock_steps=True) == ""


def test_the_first_slot_after_a_pause_is_sent_in_time() -> None:
    assert first_finding(is_stopped=True, seeds=FEW) == ""


def test_the_runs_see_what_can_go_wrong() -> None:
    """The seeds bring enough of everything: else the tests above would prove little."""
    runs = [Fleet(seed) for seed in range(SEEDS)]
    for run in runs:
        assert run.run() == []
    assert sum(len(run.store.sent) for run in runs) > 5_000
    for missed in ("skip", "once", "all"):
        assert sum(run.drawn.plans[0].missed == missed for run in runs) > SEEDS / 5
    assert sum(run.drawn.loss > 0 for run in runs) > SEEDS / 3
    assert sum(run.drawn.kills for run in runs) > SEEDS * 3


# --- planted bugs ---


class ComparesNothing(Store):
    def advance(self, asked: Advance, now: float) -> tuple[bool, str | None, float]:
        return super().advance(asked._replace(expected=self.record), now)


class SendsEarly(Store):
    def advance(self, asked: Advance, now: float) -> tuple[bool, str | None, float]:
        return super().advance(asked._replace(not_before=0.0), now)


class BeginsAnew(ScheduleMachine):
    """Takes every schedule for a new one when it begins."""

    def _see(self, text: str | None, store_now: float, asked_at: float, now: float) -> None:
        is_first = self._look_at < 0
        super()._see(text, store_now, asked_at, now)
        if is_first and self.record is not None:
            self.record = replace(self.record, settled_until=store_now)


class WritesItsPlanAgain(ScheduleMachine):
    """Writes its own plan whenever another is kept: two programs take turns."""

    def _see(self, text: str | None, store_now: float, asked_at: float, now: float) -> None:
        super()._see(text, store_now, asked_at, now)
        self._is_written = self.record is not None and self.record.plan == self._plan


class NeverWritesItsPlan(ScheduleMachine):
    def _see(self, text: str | None, store_now: float, asked_at: float, now: float) -> None:
        super()._see(text, store_now, asked_at, now)
        self._is_written = self._is_written or self.record is not None


class WaitsForTheNextSlotOnly(ScheduleMachine):
    """Does not settle what is due already, as one does that computes the next slot from now."""

    def next(self, now: float) -> Wait | Look | Advance:
        step = super().next(now)
        if isinstance(step, Advance) and step.not_before and now + self._offset - step.not_before > 2.0:
            assert self.record is not None
            new = replace(self.record, settled_until=step.not_before)
            return self._ask(step._replace(slots=(), record=new.encoded()))
        return step


class SendsAllThatIsDue(ScheduleMachine):
    def _due(self, record: Record, slots: object, store_now: float) -> Advance | None:
        due = super()._due(record, slots, store_now)  # type: ignore[arg-type]
        return None if due is None else due._replace(slots=due.slots * 2)


class TrustsItsOwnClock(ScheduleMachine):
    """Takes the first answer for the store's clock for ever, and a wrong one."""

    def _see(self, text: str | None, store_now: float, asked_at: float, now: float) -> None:
        super()._see(text, store_now, asked_at, now)
        self._offset += 20.0

    def _due(self, record: Record, slots: object, store_now: float) -> Advance | None:
        due = super()._due(record, slots, store_now)  # type: ignore[arg-type]
        return None if due is None else due._replace(not_before=0.0)


class NeverLooksAgain(ScheduleMachine):
    def unanswered(self, now: float) -> None:
        self._retry_at = float("inf")


class HearsOfNoEnd(ScheduleMachine):
    """Looks at a paused schedule as rarely as at any other one."""

    def _see(self, text: str | None, store_now: float, asked_at: float, now: float) -> None:
        super()._see(text, store_now, asked_at, now)
        self._look_at = now + LOOK_EVERY


class SendsWhilePaused(ScheduleMachine):
    def _see(self, text: str | None, store_now: float, asked_at: float, now: float) -> None:
        super()._see(text, store_now, asked_at, now)
        if self.record is not None:
            self.record = replace(self.record, paused=False)


@pytest.mark.parametrize("store", [ComparesNothing, SendsEarly])
def test_a_bug_in_the_store_is_found(store: type[Store]) -> None:
    assert first_finding(store)


@pytest.mark.parametrize(
    "machine",
    [
        BeginsAnew,
        WaitsForTheNextSlotOnly,
        SendsAllThatIsDue,
        TrustsItsOwnClock,
        NeverLooksAgain,
    ],
)
def test_a_bug_in_the_machine_is_found(machine: type[ScheduleMachine]) -> None:
    assert first_finding(make_machine=machine)


@pytest.mark.parametrize("machine", [WritesItsPlanAgain, NeverWritesItsPlan])
def test_a_bug_about_plans_is_found(machine: type[ScheduleMachine]) -> None:
    assert first_finding(make_machine=machine, one_plan=False)


@pytest.mark.parametrize("machine", [HearsOfNoEnd, SendsWhilePaused])
def test_a_bug_about_pauses_is_found(machine: type[ScheduleMachine]) -> None:
    assert first_finding(make_machine=machine, is_stopped=True)
