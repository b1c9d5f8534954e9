"""The suite of stores with a queue must find bugs that are planted; each of its tests finds one."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

import pytest

from tenure._lease import NO_METADATA, Granted, HeldBy, Metadata, Vacant
from tenure._runtime.clock import Clock
from tenure._runtime.notifier import Notifier
from tenure.errors import Unavailable
from tenure.testing.conformance import FaultyLeaseStore, LeaseQueueSuite, LeaseStoreSuite
from tests.conformance.planted import calls, failing_tests
from tests.conformance.queued_memory import Place, QueuedMemoryLeases, Queues
from tests.conformance.test_queued import QueuedHarness


class LastComeFirstServed(QueuedMemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        answer = await super().acquire(name, holder, ttl, metadata)
        self._line(name)[1:] = sorted(self._line(name)[1:], key=lambda place: -place.token)
        return answer


class AskingAgainGoesToTheEnd(QueuedMemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        if (place := self._place_of(name, holder)) and place is not self._line(name)[0]:
            self._end(name, place)
        return await super().acquire(name, holder, ttl, metadata)


class ATurnBeginsWhenItIsTaken(QueuedMemoryLeases):
    """The first in the queue has the name only when it asks."""

    async def inspect(self, name: str) -> HeldBy | Vacant:
        seen = await super().inspect(name)
        is_told = isinstance(seen, HeldBy) and (name, seen.token) in self.queues.told
        return seen if is_told else Vacant(name, self.queues.newest.get(name, 0))


class ATermIsReadOnce(QueuedMemoryLeases):
    """A process shows a term to its end as it saw it first."""

    def __init__(self, clock: Clock | None = None, queues: Queues | None = None) -> None:
        super().__init__(clock, queues)
        self._read: dict[tuple[str, int], HeldBy] = {}

    async def inspect(self, name: str) -> HeldBy | Vacant:
        seen = await super().inspect(name)
        return self._read.setdefault((name, seen.token), seen) if isinstance(seen, HeldBy) else seen


class ANewerRequestEndsTheOneBefore(QueuedMemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        self.newest_request = request = object()
        await asyncio.sleep(0)
        if self.newest_request is not request:
            raise Unavailable("a newer request has begun")
        return await super().acquire(name, holder, ttl, metadata)


class WithdrawalDoesNothing(QueuedMemoryLeases):
    async def withdraw(self, name: str, holder: str) -> None:
        pass


class WithdrawalEndsNoClaim(QueuedMemoryLeases):
    async def withdraw(self, name: str, holder: str) -> None:
        line = self._line(name)
        if line and line[0].holder != holder:
            await super().withdraw(name, holder)


class WithdrawalEndsEveryPlace(QueuedMemoryLeases):
    async def withdraw(self, name: str, holder: str) -> None:
        for each in list(self.queues.places):
            await super().withdraw(each, holder)


class WithdrawalEndsTheFirstPlace(QueuedMemoryLeases):
    async def withdraw(self, name: str, holder: str) -> None:
        if line := self._line(name):
            await super().withdraw(name, line[0].holder)


class WithdrawalComparesTheLabel(QueuedMemoryLeases):
    async def withdraw(self, name: str, holder: str) -> None:
        for place in list(self._line(name)):
            if place.holder.partition("#")[0] == holder.partition("#")[0]:
                await super().withdraw(name, place.holder)


class WithdrawalNeedsAPlace(QueuedMemoryLeases):
    async def withdraw(self, name: str, holder: str) -> None:
        if self._place_of(name, holder) is None:
            raise Unavailable("there is no such place")
        await super().withdraw(name, holder)


class WithdrawalMakesTheNameKnown(QueuedMemoryLeases):
    async def withdraw(self, name: str, holder: str) -> None:
        self.queues.newest.setdefault(name, 0)
        await super().withdraw(name, holder)


class WithdrawalOfAnyName(QueuedMemoryLeases):
    async def withdraw(self, name: str, holder: str) -> None:
        if name in self.queues.places:
            await super().withdraw(name, holder or "nobody")


class WithdrawalDoesNotWaitForTheRequest(QueuedMemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        if name in self.queues.places:
            for _ in range(4):
                await asyncio.sleep(0)
        return await super().acquire(name, holder, ttl, metadata)


class ACancelledRequestGoesOn(WithdrawalDoesNotWaitForTheRequest):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        return await asyncio.shield(asyncio.ensure_future(super().acquire(name, holder, ttl, metadata)))


class WithdrawalGivesNoHint(QueuedMemoryLeases):
    async def withdraw(self, name: str, holder: str) -> None:
        notifier, self.queues.notifier = self.queues.notifier, Notifier()
        try:
            await super().withdraw(name, holder)
        finally:
            self.queues.notifier = notifier


class PlacesNeverEnd(QueuedMemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        answer = await super().acquire(name, holder, ttl, metadata)
        if isinstance(answer, HeldBy) and (place := self._place_of(name, holder)):
            place.ends_at = math.inf
        return answer


class PlacesEndWithTheirProcess(QueuedMemoryLeases):
    """Every request of a process extends all its places and claims, as it extends its session."""

    def _keep(self, place: Place, ttl: float) -> None:
        for line in self.queues.places.values():
            for each in line:
                if each.holder.partition("#")[0] == place.holder.partition("#")[0]:
                    super()._keep(each, ttl)


class AskingAgainDoesNotKeepAPlace(QueuedMemoryLeases):
    def _keep(self, place: Place, ttl: float) -> None:
        if any(line and line[0] is place for line in self.queues.places.values()):
            super()._keep(place, ttl)


class OnePlaceInEachProcess(QueuedMemoryLeases):
    def _place_of(self, name: str, holder: str) -> Place | None:
        label = holder.partition("#")[0]
        return next((place for place in self._line(name) if place.holder.partition("#")[0] == label), None)


class EachRequestHasAPlace(QueuedMemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        answer = await super().acquire(name, holder, ttl, metadata)
        if isinstance(answer, HeldBy):
            self.queues.revision += 1
            self._line(name).append(Place(holder, self.queues.revision, self._ends_at(ttl), metadata))
        return answer


class AllAreAskedToResign(QueuedMemoryLeases):
    async def ask_to_resign(self, name: str) -> bool:
        for place in self._line(name):
            place.resign_asked = True
        return await super().ask_to_resign(name)


class IgnoresACutAtWithdrawal(FaultyLeaseStore):
    async def withdraw(self, name: str, holder: str) -> None:
        with suppress(Unavailable):
            await super().withdraw(name, holder)


PLANTED: dict[type[QueuedMemoryLeases] | type[FaultyLeaseStore], tuple[str, ...]] = {
    LastComeFirstServed: ("test_the_first_to_ask_is_the_first_to_be_granted",),
    AskingAgainGoesToTheEnd: ("test_the_first_to_ask_is_the_first_to_be_granted",),
    ATurnBeginsWhenItIsTaken: ("test_a_holder_whose_turn_comes_has_the_name_before_it_asks",),
    ATermIsReadOnce: ("test_metadata_of_a_holder_whose_turn_came_are_shown_once_it_has_asked",),
    ANewerRequestEndsTheOneBefore: ("test_asking_again_beside_the_request_takes_nothing_from_it",),
    WithdrawalDoesNothing: (
        "test_a_holder_that_withdrew_is_passed_over",
        "test_a_holder_that_withdrew_may_ask_again_at_the_end_of_the_queue",
        "test_withdraw_can_be_repeated",
    ),
    WithdrawalEndsNoClaim: ("test_withdrawing_frees_what_was_granted_meanwhile",),
    WithdrawalEndsEveryPlace: ("test_the_same_holder_waits_for_each_name_apart",),
    WithdrawalEndsTheFirstPlace: ("test_withdrawing_without_a_place_does_nothing",),
    WithdrawalComparesTheLabel: (
        "test_two_holders_of_one_process_have_two_places",
        "test_a_late_withdrawal_does_not_touch_the_next_holder",
    ),
    WithdrawalNeedsAPlace: ("test_withdrawing_without_a_place_does_nothing", "test_withdraw_can_be_repeated"),
    WithdrawalMakesTheNameKnown: ("test_withdrawing_without_a_place_does_nothing",),
    WithdrawalOfAnyName: ("test_an_invalid_name_is_not_withdrawn",),
    WithdrawalDoesNotWaitForTheRequest: ("test_withdrawing_beside_the_request_leaves_no_place",),
    ACancelledRequestGoesOn: ("test_a_cancelled_request_or_withdrawal_leaves_no_place",),
    WithdrawalGivesNoHint: ("test_the_next_in_the_queue_gets_a_hint",),
    PlacesNeverEnd: (
        "test_a_place_ends_unless_its_holder_asks_again",
        "test_a_turn_that_nobody_takes_ends",
        "test_a_late_request_leaves_a_place_for_a_while_at_most",
    ),
    PlacesEndWithTheirProcess: ("test_a_lease_that_is_not_renewed_ends_beside_others_of_its_process",),
    AskingAgainDoesNotKeepAPlace: ("test_a_place_ends_unless_its_holder_asks_again",),
    OnePlaceInEachProcess: ("test_two_holders_of_one_process_have_two_places",),
    EachRequestHasAPlace: ("test_a_place_whose_answer_was_lost_is_kept",),
    AllAreAskedToResign: ("test_a_request_to_resign_is_for_the_leader_only",),
    IgnoresACutAtWithdrawal: ("test_withdrawing_without_a_connection_is_reported_in_time",),
}
"""Planted bugs, each with tests that find it."""


def findings(plant: type[QueuedMemoryLeases] | type[FaultyLeaseStore]) -> set[str]:
    """Run the suites against *plant*, and return the tests that fail."""

    class Planted(QueuedHarness):
        async def open(self) -> FaultyLeaseStore:
            if issubclass(plant, FaultyLeaseStore):
                return plant(QueuedMemoryLeases(self._clock, self._queues))
            return FaultyLeaseStore(plant(self._clock, self._queues))

    return failing_tests(Planted, LeaseStoreSuite, LeaseQueueSuite)


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_of_a_queue_is_found(plant: type[QueuedMemoryLeases] | type[FaultyLeaseStore]) -> None:
    assert findings(plant) >= set(PLANTED[plant])


def test_without_a_plant_nothing_is_found() -> None:
    assert findings(QueuedMemoryLeases) == set()


def test_every_test_of_queues_finds_a_plant() -> None:
    assert {name for name, _ in calls(LeaseQueueSuite)} <= {test for tests in PLANTED.values() for test in tests}
