"""Members that share partitions, simulated from many seeds; and bugs planted in their machine, all found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tenure._lease import HeldBy, Vacant
from tenure._partitions.machine import Ask, Effect, Give, Leave, PartitionMachine, View
from tests.sim.partitions import QUIET, Draw, Fleet

SEEDS = 100

SOON = 1.0
"""The seconds within which a clean leave hands over where hints exist, and a join is served."""


def first_finding(make_machine: type[PartitionMachine] = PartitionMachine, seeds: int = SEEDS) -> str:
    """Return what is wrong in the first run in which anything is, or in a quiet fleet; empty if in none."""
    for scenario in SCENARIOS:
        try:
            scenario(make_machine)
        except AssertionError as error:
            return f"{scenario.__name__}: {error!r:.200}"
    for seed in range(seeds):
        fleet = Fleet(seed, make_machine)
        if found := fleet.run():
            return f"seed {seed}, {fleet.drawn}: {found[0]}"
    return ""


def test_no_partition_has_two_owners_and_all_are_in_balance_at_last() -> None:
    assert first_finding() == ""


def test_the_runs_see_what_can_go_wrong() -> None:
    """The seeds bring enough of everything: else the test above would prove little."""
    drawn = [Fleet(seed).drawn for seed in range(SEEDS)]
    for what in ("joins", "leaves", "kills", "pauses", "outages", "requests"):
        assert sum(getattr(one, what) for one in drawn) > SEEDS / 2
    assert sum(one.loss > 0.1 for one in drawn) > SEEDS / 5
    assert sum(not one.hints for one in drawn) > SEEDS / 5
    assert sum(one.members > one.partitions for one in drawn) > SEEDS / 10


# --- a quiet fleet, in which one thing happens ---


def quiet(
    make_machine: type[PartitionMachine] = PartitionMachine,
    drawn: Draw = QUIET,
    weights: Sequence[int] = (),
    seed: int = 7,
) -> Fleet:
    """Return a fleet in balance, with no fault."""
    fleet = Fleet(seed, make_machine, drawn)
    for number in range(drawn.members):
        fleet.join(weights[number] if weights else None)
    fleet.until_balanced(2 * drawn.ttl)
    assert fleet.is_balanced, (fleet.owned, fleet.wanted)
    fleet.until(fleet.now + 2 * drawn.ttl)
    fleet.begun.clear()
    return fleet


def a_join_moves_the_share_of_the_newcomer(make_machine: type[PartitionMachine]) -> None:
    for hints in (True, False):
        fleet = quiet(make_machine, replace(QUIET, hints=hints))
        newcomer = fleet.join()
        took = fleet.until_balanced(30.0)
        fleet.until(fleet.now + 60.0)
        assert [number for _, _, number in fleet.begun] == [newcomer.number] * 4  # of 16, and of 4 members
        grace = 0.8 * fleet.timing.grace
        assert took < (SOON + grace if hints else 1.2 * fleet.timing.renew_every + SOON + grace)
        assert fleet.is_balanced


def a_leave_moves_what_the_leaver_had(make_machine: type[PartitionMachine]) -> None:
    for seed in range(6):
        fleet = quiet(make_machine, replace(QUIET, partitions=40), seed=seed)
        leaver = fleet.members[seed % 3]
        had = {work.partition for work in leaver.running}
        fleet.leave(leaver)
        took = fleet.until_balanced(30.0)
        assert took < SOON + 0.8 * fleet.timing.grace
        fleet.until(fleet.now + 60.0)
        assert Counter(partition for _, partition, _ in fleet.begun) == Counter(had)
        assert fleet.is_balanced


def a_crash_moves_what_the_dead_had(make_machine: type[PartitionMachine]) -> None:
    for seed in range(6):
        fleet = quiet(make_machine, replace(QUIET, hints=seed % 2 == 0), seed=seed)
        dead = fleet.members[seed % 3]
        had, requests = {work.partition for work in dead.running}, Counter(fleet.store.requests)
        fleet.kill(dead)
        took = fleet.until_balanced(60.0)
        assert took <= fleet.timing.ttl + fleet.timing.retry_every
        fleet.until(fleet.now + 60.0)
        assert Counter(partition for _, partition, _ in fleet.begun) == Counter(had)
        assert (fleet.store.requests - requests)["acquire"] == len(had)  # no two asked for the same one
        assert fleet.is_balanced


def members_that_start_together_are_soon_in_balance(make_machine: type[PartitionMachine]) -> None:
    fleet = Fleet(3, make_machine, replace(QUIET, partitions=64))
    for _ in range(8):
        fleet.join()
    assert fleet.until_balanced(30.0) < 2 * fleet.timing.renew_every
    harmonic = sum(1 / number for number in range(1, 9))
    assert len(fleet.begun) <= 64 * harmonic  # as many as if they had come one after the other
    fleet.until(fleet.now + 60.0)
    assert fleet.is_balanced


def shares_follow_weights(make_machine: type[PartitionMachine]) -> None:
    fleet = quiet(make_machine, weights=(1, 2, 1))
    assert list(fleet.owned.values()) == [4, 8, 4]


def a_member_too_many_stands_by(make_machine: type[PartitionMachine]) -> None:
    fleet = quiet(make_machine, replace(QUIET, partitions=2))
    requests = Counter(fleet.store.requests)
    fleet.until(fleet.now + 60.0)
    assert (fleet.store.requests - requests)["look"] <= 3 * 60 / (0.8 * fleet.timing.renew_every) + 3
    owner = next(member for member in fleet.members if member.running)
    fleet.kill(owner)
    assert fleet.until_balanced(60.0) <= fleet.timing.ttl + fleet.timing.retry_every
    assert [len(member.running) for member in fleet.living] == [1, 1]


def a_request_of_an_operator_restarts_the_work(make_machine: type[PartitionMachine]) -> None:
    fleet = quiet(make_machine)
    fleet.store.ask(fleet.now, "orders.partition-3")
    fleet.until(fleet.now + 60.0)
    assert [partition for _, partition, _ in fleet.begun] == ["partition-3"]
    assert fleet.is_balanced


def work_that_ends_begins_anew_after_a_while(make_machine: type[PartitionMachine]) -> None:
    fleet = quiet(make_machine)
    ended_at, work = fleet.now, fleet.members[0].running[0]
    fleet.end_work(work)
    fleet.until(fleet.now + 60.0)
    [(began_at, partition, number)] = fleet.begun
    assert (partition, number) == (work.partition, 0)
    assert 0.9 * fleet.timing.retry_every < began_at - ended_at < 2 * fleet.timing.retry_every
    assert fleet.is_balanced


def a_member_that_lost_its_slot_gets_another_one(make_machine: type[PartitionMachine]) -> None:
    fleet = quiet(make_machine)
    member = fleet.members[0]
    assert member.slot is not None
    fleet.store.leases[member.slot.machine.name].ends_at = 0.0
    fleet.until(fleet.now + 60.0)
    assert member.machine.member is not None
    assert fleet.is_balanced


def rest_costs_nothing_but_renewals_and_looks(make_machine: type[PartitionMachine]) -> None:
    fleet = quiet(make_machine)
    requests = Counter(fleet.store.requests)
    fleet.until(fleet.now + 300.0)
    asked = fleet.store.requests - requests
    assert set(asked) == {"look", "renew"}
    assert asked["look"] <= 3 * 300.0 / (0.8 * fleet.timing.renew_every) + 3


SCENARIOS: list[Callable[[type[PartitionMachine]], None]] = [
    a_join_moves_the_share_of_the_newcomer,
    a_leave_moves_what_the_leaver_had,
    a_crash_moves_what_the_dead_had,
    members_that_start_together_are_soon_in_balance,
    shares_follow_weights,
    a_member_too_many_stands_by,
    a_request_of_an_operator_restarts_the_work,
    work_that_ends_begins_anew_after_a_while,
    a_member_that_lost_its_slot_gets_another_one,
    rest_costs_nothing_but_renewals_and_looks,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: str(scenario.__name__))
def test_in_a_quiet_fleet(scenario: Callable[[type[PartitionMachine]], None]) -> None:
    scenario(PartitionMachine)


# --- planted bugs ---


class NeverGives(PartitionMachine):
    def _give(self, view: View, surplus: int) -> list[Effect]:
        return []


class GivesOneTooMany(PartitionMachine):
    def _give(self, view: View, surplus: int) -> list[Effect]:
        return super()._give(view, surplus + 1)


class HeedsNobody(PartitionMachine):
    def _heed(
        self, view: View, owned: dict[str, int], wanted: dict[str, int], began: float, now: float
    ) -> list[Effect]:
        return []


class NeverAsks(PartitionMachine):
    """Waits until others notice by themselves."""

    def _take(self, view: View, owned: dict[str, int], wanted: dict[str, int], now: float) -> list[Effect]:
        return [one for one in super()._take(view, owned, wanted, now) if not isinstance(one, Ask)]


class ClaimsAllThatIsVacant(PartitionMachine):
    def _take(self, view: View, owned: dict[str, int], wanted: dict[str, int], now: float) -> list[Effect]:
        return super()._take(view, owned, {**wanted, self.identity: len(self.layout.partitions)}, now)


class CountsTheDead(PartitionMachine):
    """Keeps every member that it ever saw."""

    def _seen(self, found: Sequence[HeldBy | Vacant]) -> View:
        view, old = super()._seen(found), self.view
        seen = {one.identity for one in view.members}
        kept = tuple(one for one in old.members if one.identity not in seen) if old else ()
        return replace(view, members=kept + view.members)


class TakesTurnsByName(PartitionMachine):
    """Gives what can't be divided to the member whose name comes last, not to the oldest: a newcomer moves others'."""

    def _seen(self, found: Sequence[HeldBy | Vacant]) -> View:
        view = super()._seen(found)
        members = sorted(view.members, key=lambda one: one.identity, reverse=True)
        return replace(view, members=tuple(replace(one, order=place) for place, one in enumerate(members)))


class IgnoresHints(PartitionMachine):
    def hinted(self, now: float) -> None:
        return


class LooksAllTheTime(PartitionMachine):
    def _plan_look(self, remaining: float, now: float) -> None:
        self._look_by(now + self.timing.retry_every / 4)


class NeverLooksAgain(PartitionMachine):
    def look_failed(self, now: float) -> None:
        self._is_looking = False


class KeepsItsSlot(PartitionMachine):
    """Releases its slot after all else: the others wait for what it gives, and don't know."""

    def leave(self, now: float) -> list[Effect]:
        return [one for one in super().leave(now) if not isinstance(one, Leave)]


class KeepsItsPartitions(PartitionMachine):
    def leave(self, now: float) -> list[Effect]:
        return [one for one in super().leave(now) if not isinstance(one, Give)]


class DoesNotJoinAgain(PartitionMachine):
    def slot_ended(self, now: float) -> None:
        super().slot_ended(now)
        self._slot = -1


class ClaimsWithoutASlot(PartitionMachine):
    """Counts itself among the members before it is one."""

    def _balance(self, view: View, began: float, now: float) -> list[Effect]:
        if self.identity not in {one.identity for one in view.members} and view.members:
            view = replace(view, members=(*view.members, replace(view.members[0], identity=self.identity, order=0)))
        return super()._balance(view, began, now)

    def looked(self, found: Sequence[HeldBy | Vacant], now: float) -> list[Effect]:
        effects = super().looked(found, now)
        if not self._is_joined and self.view is not None and not self.is_leaving and not self._held:
            effects += self._balance(self.view, now, now)
        return effects


class ClaimsAtOnceAgain(PartitionMachine):
    """Claims a partition again at once whose work has ended by itself."""

    def ended(self, partition: str, now: float) -> list[Effect]:
        effects = super().ended(partition, now)
        self._not_before.clear()
        return effects


@pytest.mark.parametrize(
    "machine",
    [
        NeverGives,
        GivesOneTooMany,
        HeedsNobody,
        NeverAsks,
        ClaimsAllThatIsVacant,
        CountsTheDead,
        TakesTurnsByName,
        IgnoresHints,
        LooksAllTheTime,
        NeverLooksAgain,
        KeepsItsSlot,
        KeepsItsPartitions,
        DoesNotJoinAgain,
        ClaimsWithoutASlot,
        ClaimsAtOnceAgain,
    ],
)
def test_a_planted_bug_is_found(machine: type[PartitionMachine]) -> None:
    assert first_finding(machine)
