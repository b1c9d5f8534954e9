"""The suites of faults must find stores that do harm with a request that was given up and is carried out late."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tenure._backends.memory import MemoryBroker, MemoryLeases
from tenure._backends.memory.messages import StoredMessage, Subqueue
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, Released
from tenure._queue.delivery_ends import Cause
from tenure._queue.message import Delivery, SessionLock
from tenure.testing.conformance import BrokerFaultSuite, LeaseFaultSuite, LeaseHarness, QueueHarness
from tests.conformance.planted import calls, failing_tests, leases_with, queues_with
from tests.conformance.test_planted_queue import (
    AdvancesWhateverIsKept,
    ComparesSequenceOnly,
    LimitsNothing,
    SendsSlotsBeforeItCompares,
)

# --- leases ---


class LateRenewalShortens(MemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        answers = await super().renew(grants, ttl)
        for answer in answers:
            if isinstance(answer, Granted):
                self._memory.claims[answer.grant.name].expires_at = self._clock.now() + ttl
        return answers


class AskingAgainShortens(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        answer = await super().acquire(name, holder, ttl, metadata)
        if isinstance(answer, Granted):
            self._memory.claims[name].expires_at = self._clock.now() + ttl
        return answer


class LateRenewalTakesTheNextTerm(MemoryLeases):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost]:
        for grant in grants:
            claim = self._memory.claims[grant.name]
            if claim.holder is not None:
                claim.holder, claim.token = grant.holder, grant.token
        return await super().renew(grants, ttl)


class LateAcquisitionTakesTheNextTerm(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        claim = self._memory.claims.get(name)
        if claim and claim.holder != holder and claim.token == 2:  # the name was free before it
            claim.holder = None
        return await super().acquire(name, holder, ttl, metadata)


class LateAcquisitionBringsTheOldTokenBack(MemoryLeases):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        claim = self._memory.claims.get(name)
        if claim and claim.holder is None:
            claim.token = 0
        return await super().acquire(name, holder, ttl, metadata)


class LateReleaseEndsTheNextTerm(MemoryLeases):
    async def release(self, grant: Grant) -> Released | Lost:
        claim = self._memory.claims[grant.name]
        if claim.holder == grant.holder:
            claim.holder = None
        return await super().release(grant)


LEASES: list[tuple[type[MemoryLeases], str]] = [
    (LateRenewalShortens, "test_a_late_extension_does_not_shorten_a_lease"),
    (AskingAgainShortens, "test_a_late_extension_does_not_shorten_a_lease"),
    (LateRenewalTakesTheNextTerm, "test_a_late_renewal_does_not_touch_the_next_term"),
    (LateAcquisitionTakesTheNextTerm, "test_a_late_acquisition_is_refused_beside_another_leader"),
    (LateAcquisitionBringsTheOldTokenBack, "test_a_late_acquisition_of_a_free_name_expires"),
    (LateReleaseEndsTheNextTerm, "test_a_late_release_does_not_end_the_next_term"),
]


@pytest.mark.parametrize(("plant", "test"), LEASES)
def test_harm_of_a_late_request_to_a_lease_is_found(plant: type[MemoryLeases], test: str) -> None:
    assert test in late_findings(LeaseFaultSuite, leases_with(plant))


# --- locks, schedules ---


class LateRenewalShortensLocks(MemoryBroker):
    def _renew(self, one: Delivery | SessionLock, until: float, now: float) -> float | None:
        end = super()._renew(one, until, now)
        if end is None:
            return None
        if isinstance(one, Delivery):
            found = self._locked(one, now)
            assert found is not None
            found[1].locked_until = until
        else:
            session = self._session(one, now)
            assert session is not None
            session.locked_until = until
            for message in session.locked.values():
                message.locked_until = until
        return until


class LateClaimsDie(MemoryBroker):
    def _lock_expired(self, subqueue: Subqueue, message: StoredMessage, now: float) -> None:
        self._dead_letter(subqueue, message, Cause("max_deliveries", ""), now)


QUEUES: list[tuple[type[MemoryBroker], str]] = [
    (LateRenewalShortensLocks, "test_a_late_renewal_does_not_shorten_a_lock"),
    (ComparesSequenceOnly, "test_a_late_verdict_touches_no_newer_lock"),
    (LateClaimsDie, "test_the_messages_of_a_late_claim_come_again"),
    (AdvancesWhateverIsKept, "test_a_late_request_does_not_send_what_another_has_sent"),
    (SendsSlotsBeforeItCompares, "test_a_late_request_does_not_send_what_another_has_sent"),
    (LimitsNothing, "test_a_late_claim_exceeds_no_limit"),
]


@pytest.mark.parametrize(("plant", "test"), QUEUES)
def test_harm_of_a_late_request_to_a_queue_is_found(plant: type[MemoryBroker], test: str) -> None:
    assert test in late_findings(BrokerFaultSuite, queues_with(plant))


def test_every_test_of_late_requests_finds_a_plant() -> None:
    late = {name for suite in (LeaseFaultSuite, BrokerFaultSuite) for name, _ in calls(suite) if "_a_late_" in name}
    assert late == {test for _, test in (*LEASES, *QUEUES)}


def late_findings(suite: type, make_harness: Callable[[], LeaseHarness | QueueHarness]) -> set[str]:
    """Run the tests of *suite* about requests that are carried out late, and return those that fail."""
    return failing_tests(make_harness, suite, is_meant=lambda name: "_a_late_" in name)
