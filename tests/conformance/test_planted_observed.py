"""The suites must find bugs in stores whose clients observe the end of a lease: so they must observe in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

import pytest

from tenure._backends.kubernetes import records
from tenure._backends.nats import lease_records
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer
from tenure.testing.conformance import FaultyLeaseStore, LeaseFaultSuite, LeaseHarness, LeaseStoreSuite
from tests.conformance.observed_memory import ObservedMemoryLeases, Record
from tests.conformance.planted import failing_tests
from tests.conformance.test_observed import ObservedHarness
from tests.stores.kubernetes.test_suites import KubernetesHarness
from tests.stores.nats.test_lease_suites import NatsHarness


class RenewalShortens(ObservedMemoryLeases):
    def _ttl_of_renewal(self, ttl: float, left: float) -> float:
        return ttl


class RenewalOfManyShortens(ObservedMemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        self._count = len(grants)
        return await super().renew(grants, ttl)

    def _ttl_of_renewal(self, ttl: float, left: float) -> float:
        return ttl if self._count > 1 else max(ttl, left)

    _count = 0


class AskingAgainShortens(ObservedMemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        self._shortens = True
        try:
            return await super().acquire(name, holder, ttl, metadata)
        finally:
            self._shortens = False

    def _ttl_of_renewal(self, ttl: float, left: float) -> float:
        return ttl if self._shortens else max(ttl, left)

    _shortens = False


class RenewalWithoutEffect(ObservedMemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        kept = dict(self.records.kept)
        answers = await super().renew(grants, ttl)
        self.records.kept |= kept
        return answers


class AskingAgainWithoutEffect(ObservedMemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        record = self.records.kept.get(name)
        answer = await super().acquire(name, holder, ttl, metadata)
        if record is not None and isinstance(answer, Granted) and answer.grant.token == record.token:
            self.records.kept[name] = record
        return answer


class OldGrantsExtendTheNext(ObservedMemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        for grant in grants:
            record = self.records.kept.get(grant.name)
            if record is not None and record.holder == grant.holder:
                self._renewed(grant.name, record, ttl)
        return await super().renew(grants, ttl)


class OneThatIsCutOffCostsTheOthers(FaultyLeaseStore):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        if not self._cut_off:
            return await super().renew(grants, ttl)
        return [NoAnswer("cut off") if grant.name in self._cut_off else Granted(grant) for grant in grants]


class LooksAreRenewals(ObservedMemoryLeases):
    def _read(self, name: str) -> Record | None:
        self.seen.pop(name, None)
        return super()._read(name)


class EarlyExpiry(ObservedMemoryLeases):
    def _left(self, name: str, record: Record) -> float:
        return super()._left(name, record) - 0.3 * record.ttl


class FollowsNothing(ObservedMemoryLeases):
    def _told(self, name: str) -> None:
        pass


class FollowsWhatItKnows(ObservedMemoryLeases):
    def _told(self, name: str) -> None:
        if name in self.seen:
            super()._told(name)


class FollowedLeasesEndEarly(ObservedMemoryLeases):
    def _told(self, name: str) -> None:
        before = self.seen.get(name)
        super()._told(name)
        if before is not None and self.seen[name] != before:  # as if it had been renewed when the last look was
            self.seen[name] = self.seen[name][0], before[1]


SHORTENS = "test_a_renewal_never_shortens_a_lease"
SHORTENS_LATE = "test_a_late_extension_does_not_shorten_a_lease"

PLANTED: dict[type[ObservedMemoryLeases] | type[FaultyLeaseStore], tuple[str, ...]] = {
    RenewalShortens: (SHORTENS, SHORTENS_LATE),
    RenewalOfManyShortens: (SHORTENS,),
    AskingAgainShortens: (SHORTENS, SHORTENS_LATE),
    RenewalWithoutEffect: ("test_renewal_extends", "test_renew_can_be_repeated"),
    AskingAgainWithoutEffect: ("test_acquiring_again_extends",),
    OldGrantsExtendTheNext: ("test_an_old_grant_of_the_same_holder_does_not_extend_its_new_one",),
    OneThatIsCutOffCostsTheOthers: ("test_one_unreachable_grant_costs_the_others_nothing",),
    LooksAreRenewals: ("test_a_lease_ends_by_itself_and_not_before",),
    FollowsNothing: ("test_a_followed_renewal_counts_from_when_it_was_told",),
    FollowsWhatItKnows: ("test_what_is_followed_need_not_be_known_before",),
    FollowedLeasesEndEarly: ("test_what_is_followed_ends_no_sooner",),
    EarlyExpiry: ("test_a_lease_ends_by_itself_and_not_before",),
}
"""Planted bugs, each with the tests that must find it."""


def findings(plant: type[ObservedMemoryLeases] | type[FaultyLeaseStore]) -> set[str]:
    """Run the suites against *plant*, and return the tests that fail."""

    class Planted(ObservedHarness):
        async def open(self) -> FaultyLeaseStore:
            if issubclass(plant, FaultyLeaseStore):
                return plant(ObservedMemoryLeases(self._clock, self._records))
            return FaultyLeaseStore(plant(self._clock, self._records))

    return failing_tests(Planted, LeaseStoreSuite, LeaseFaultSuite)


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_of_what_is_observed_is_found(
    plant: type[ObservedMemoryLeases] | type[FaultyLeaseStore],
) -> None:
    assert findings(plant) >= set(PLANTED[plant])


def test_without_a_plant_nothing_is_found() -> None:
    assert findings(ObservedMemoryLeases) == set()


def kubernetes_renews_for_less(patch: pytest.MonkeyPatch) -> type[LeaseHarness]:
    real = records.renewed

    def renewed(lease: records.Json, ttl: float, *, left: float, now: datetime) -> records.Json:
        return real(lease, ttl, left=0.0, now=now)

    patch.setattr("tenure._backends.kubernetes.leases.renewed", renewed)
    return KubernetesHarness


def nats_renews_for_less(patch: pytest.MonkeyPatch) -> type[LeaseHarness]:
    real = lease_records.renewed

    def renewed(record: lease_records.Record, ttl: float, *, left: float, stamp: str) -> lease_records.Record:
        return real(record, ttl, left=0.0, stamp=stamp)

    patch.setattr("tenure._backends.nats.leases.renewed", renewed)
    return NatsHarness


@pytest.mark.parametrize("plant", [kubernetes_renews_for_less, nats_renews_for_less])
def test_a_planted_bug_of_a_real_client_that_observes_is_found(
    plant: Callable[[pytest.MonkeyPatch], type[LeaseHarness]], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = plant(monkeypatch)
    assert failing_tests(harness, LeaseStoreSuite, is_meant=SHORTENS.__eq__, in_real_time=True) == {SHORTENS}
