"""The suites of faults must find clients that count from a slow answer what began with the request for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from tenure._backends.azure_storage.queue import AzureBroker
from tenure._backends.etcd.leases import EtcdLeases
from tenure._backends.kubernetes.leases import KubernetesLeases
from tenure._backends.memory import MemoryBroker, MemoryLeases
from tenure._backends.nats.leases import NatsLeases
from tenure._backends.nats.queue import NatsBroker
from tenure._backends.nats.settling import Settling
from tenure._backends.rabbitmq.queue import RabbitBroker
from tenure._backends.zookeeper.leases import ZooKeeperLeases
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Lost, Metadata, NoAnswer, Vacant
from tenure._queue.broker import Broker, Claim
from tenure._queue.message import SessionLock
from tenure._queue.verdicts import SETTLED, Renewed
from tenure._runtime.clock import Clock
from tenure.testing._conformance.leases.slow_answers import SlowAnswerTests as SlowLeaseTests
from tenure.testing._conformance.queues.slow_answers import SlowAnswerTests as SlowQueueTests
from tenure.testing.conformance import FaultyBroker, FaultyLeaseStore, LeaseHarness, QueueHarness
from tests.conformance.observed_memory import ObservedMemoryLeases
from tests.conformance.planted import calls, failing_tests, leases_with, queues_with
from tests.conformance.test_observed import ObservedHarness
from tests.conformance.test_planted_queue import ComparesSequenceOnly
from tests.servers import Azurite, Etcd, Nats, RabbitMQ, ZooKeeper
from tests.servers.sharing import Startable, require
from tests.stores.azure_storage.test_suites import AzureQueueHarness
from tests.stores.etcd.test_suites import EtcdHarness
from tests.stores.kubernetes.test_suites import KubernetesHarness
from tests.stores.memory.test_suites import MemoryQueueHarness
from tests.stores.nats.test_lease_suites import NatsHarness
from tests.stores.nats.test_queue_suites import NatsQueueHarness
from tests.stores.rabbitmq.test_suites import FaultyRabbitHarness
from tests.stores.zookeeper.test_suites import HeldHarness

# --- locks, in memory ---


class ReceivesFromTheAnswer(FaultyBroker):
    async def _ask(self, request: Any, *args: Any, **options: Any) -> Any:
        answer = await super()._ask(request, *args, **options)
        if isinstance(answer, Claim) and request.__name__ in ("receive", "receive_deferred"):
            await self._wrapped.renew(answer.deliveries, args[2])
        return answer


class RenewsFromTheAnswer(FaultyBroker):
    async def _ask(self, request: Any, *args: Any, **options: Any) -> Any:
        answer = await super()._ask(request, *args, **options)
        if request.__name__ == "renew":
            await self._wrapped.renew(*args)
        return answer


class AcceptsFromTheAnswer(FaultyBroker):
    async def _ask(self, request: Any, *args: Any, **options: Any) -> Any:
        answer = await super()._ask(request, *args, **options)
        if isinstance(answer, SessionLock):
            await self._wrapped.renew([answer], args[2])
        return answer


class ShowsFromTheAnswer(FaultyBroker):
    """Shows the end of a lock as if it began with the answer."""

    async def _ask(self, request: Any, *args: Any, **options: Any) -> Any:
        clock = cast(MemoryBroker, self._wrapped)._clock
        asked_at = clock.now()
        answer = await super()._ask(request, *args, **options)
        passed = clock.now() - asked_at
        if isinstance(answer, Claim):
            later = [one._replace(locked_until=one.locked_until + passed) for one in answer.deliveries]
            return answer._replace(deliveries=later)
        if request.__name__ == "renew":
            return [Renewed(one.locked_until + passed) if isinstance(one, Renewed) else one for one in answer]
        return answer


class SettlesWithTheAnswer(FaultyBroker):
    """Carries a verdict out when its answer is due, and takes it for settled then."""

    async def _ask(self, request: Any, *args: Any, **options: Any) -> Any:
        if request.__name__ != "settle":
            return await super()._ask(request, *args, **options)
        await self._pass("down")
        await super()._ask(request, *args, **options)
        return [SETTLED]


A_LOCK = "test_a_lock_does_not_begin_with_a_slow_answer"
A_DEFERRED_LOCK = "test_a_lock_of_a_deferred_message_does_not_begin_with_a_slow_answer"
A_RENEWED_LOCK = "test_a_renewed_lock_does_not_begin_with_a_slow_answer"
A_LATER_RENEWAL = "test_a_renewal_answered_after_the_first_end_is_true"
A_SESSION = "test_a_session_does_not_begin_with_a_slow_answer"
A_LATER_ANSWER = "test_a_verdict_answered_after_the_end_is_true"
A_LATE_RENEWAL = "test_a_renewal_that_arrives_after_the_end_does_not_stand"
A_LATE_VERDICT = "test_a_verdict_that_arrives_after_the_end_does_not_stand"

QUEUES: list[tuple[type[FaultyBroker] | type[MemoryBroker], set[str]]] = [
    (ReceivesFromTheAnswer, {A_LOCK, A_DEFERRED_LOCK}),
    (RenewsFromTheAnswer, {A_RENEWED_LOCK, A_LATER_RENEWAL, A_SESSION}),
    (AcceptsFromTheAnswer, {A_SESSION}),
    (ShowsFromTheAnswer, {A_LOCK, A_DEFERRED_LOCK, A_RENEWED_LOCK}),
    (SettlesWithTheAnswer, {A_LATER_ANSWER}),
    (ComparesSequenceOnly, {A_LATE_VERDICT, A_LATE_RENEWAL}),
]


@pytest.mark.parametrize(("plant", "tests"), QUEUES)
def test_a_planted_bug_of_a_slow_answer_about_a_lock_is_found(
    plant: type[FaultyBroker] | type[MemoryBroker], tests: set[str]
) -> None:
    class Planted(MemoryQueueHarness):
        async def open(self) -> Broker:
            assert issubclass(plant, FaultyBroker)
            return plant.around(MemoryBroker(self._clock, self._memory))

    harness = Planted if issubclass(plant, FaultyBroker) else queues_with(plant)
    assert failing_tests(harness, SlowQueueTests) >= tests


# --- leases, in memory ---


class LeadsFromTheAnswer(FaultyLeaseStore):
    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        answer = await super().acquire(name, holder, ttl, metadata)
        if isinstance(answer, Granted):
            await self.store.renew([answer.grant], ttl)
        return answer


class ExtendsFromTheAnswer(FaultyLeaseStore):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        answers = await super().renew(grants, ttl)
        await self.store.renew(grants, ttl)
        return answers


class RenewsTheNextTerm(FaultyLeaseStore):
    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        await super().renew(grants, ttl)
        return [Granted(grant) for grant in grants]


class ObservesFromTheQuestion(FaultyLeaseStore):
    async def inspect(self, name: str) -> HeldBy | Vacant:
        store = cast(ObservedMemoryLeases, self.store)
        asked_at, before = store.clock.now(), store.seen.get(name)
        answer = await super().inspect(name)
        if store.seen[name] != before:
            store.seen[name] = store.seen[name][0], asked_at
        return answer


class ObservedPlant(ObservedHarness):
    async def open(self) -> FaultyLeaseStore:
        return ObservesFromTheQuestion(ObservedMemoryLeases(self._clock, self._records))


A_LEASE = "test_a_lease_does_not_begin_with_a_slow_answer"
A_RENEWED_LEASE = "test_a_renewed_lease_does_not_begin_with_a_slow_answer"
ANOTHERS = "test_what_another_holds_does_not_begin_with_a_slow_question"

LEASES: list[tuple[type[FaultyLeaseStore], str]] = [
    (LeadsFromTheAnswer, A_LEASE),
    (ExtendsFromTheAnswer, A_RENEWED_LEASE),
    (ObservesFromTheQuestion, ANOTHERS),
    (RenewsTheNextTerm, A_LATE_RENEWAL),
]


@pytest.mark.parametrize(("plant", "test"), LEASES)
def test_a_planted_bug_of_a_slow_answer_about_a_lease_is_found(plant: type[FaultyLeaseStore], test: str) -> None:
    harness = ObservedPlant if plant is ObservesFromTheQuestion else leases_with(plant)
    assert test in failing_tests(harness, SlowLeaseTests)


def test_without_a_plant_nothing_is_found() -> None:
    assert failing_tests(MemoryQueueHarness, SlowQueueTests) == set()
    assert failing_tests(leases_with(MemoryLeases), SlowLeaseTests) == set()
    assert failing_tests(ObservedHarness, SlowLeaseTests) == set()


def test_every_test_of_slow_answers_finds_a_plant() -> None:
    found = {test for _, tests in QUEUES for test in tests} | {test for _, test in LEASES}
    assert {name for suite in (SlowQueueTests, SlowLeaseTests) for name, _ in calls(suite)} == found


# --- real clients ---

Plant = Callable[[pytest.MonkeyPatch], None]


def after(patch: pytest.MonkeyPatch, owner: type, verb: str, then: Callable[..., object]) -> None:
    """Let *then* know each answer of a verb, with the client and its arguments."""
    real = getattr(owner, verb)

    async def asked(self: Any, *args: Any, **options: Any) -> Any:
        answer = await real(self, *args, **options)
        then(self, answer, *args)
        return answer

    patch.setattr(owner, verb, asked)


def believes(broker: Any, deliveries: Sequence[Any], lock: float, clock: Clock) -> None:
    """Count the locks of *deliveries* that a client holds from now."""
    for one in deliveries:
        if held := broker._receipts.known(one):
            held.ends_at = clock.now() + lock


def nats_receives(patch: pytest.MonkeyPatch) -> None:
    after(
        patch,
        NatsBroker,
        "receive",
        lambda self, claim, queue, limit, lock: believes(self, claim.deliveries, lock, self._local),
    )


def nats_renews(patch: pytest.MonkeyPatch) -> None:
    after(
        patch,
        NatsBroker,
        "renew",
        lambda self, answers, held, lock: believes(self, held, lock, self._local),
    )


def nats_takes_any_renewal(patch: pytest.MonkeyPatch) -> None:
    real = Settling._renew_by_server

    async def renew(self: Any, connection: Any, held: Any, asked_at: float, lock: float) -> None:
        await real(self, connection, held, asked_at, lock)
        for one in held:
            one.ends_at = asked_at + lock

    patch.setattr(Settling, "_renew_by_server", renew)


def nats_takes_any_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    real = Settling._acknowledge

    async def acknowledge(self: Any, connection: Any, held: Any) -> Any:
        return [(one, SETTLED) for one, _ in await real(self, connection, held)]

    patch.setattr(Settling, "_acknowledge", acknowledge)


def azure_receives(patch: pytest.MonkeyPatch) -> None:
    after(
        patch,
        AzureBroker,
        "receive",
        lambda self, claim, queue, limit, lock: believes(self, claim.deliveries, lock, self._clock.local),
    )


def azure_renews(patch: pytest.MonkeyPatch) -> None:
    after(
        patch,
        AzureBroker,
        "renew",
        lambda self, answers, held, lock: believes(self, held, lock, self._clock.local),
    )


def rabbit_receives(patch: pytest.MonkeyPatch) -> None:
    after(
        patch,
        RabbitBroker,
        "receive",
        lambda self, claim, queue, limit, lock: believes(self, claim.deliveries, lock, self._clock),
    )


def rabbit_renews(patch: pytest.MonkeyPatch) -> None:
    after(
        patch,
        RabbitBroker,
        "renew",
        lambda self, answers, held, lock: believes(self, held, lock, self._clock),
    )


SERVERS: dict[type[QueueHarness | LeaseHarness], type[Startable]] = {
    NatsQueueHarness: Nats,
    AzureQueueHarness: Azurite,
    FaultyRabbitHarness: RabbitMQ,
    EtcdHarness: Etcd,
    HeldHarness: ZooKeeper,
    NatsHarness: Nats,
}

REAL_QUEUES: list[tuple[Plant, type[QueueHarness], str]] = [
    (nats_receives, NatsQueueHarness, A_LOCK),
    (nats_renews, NatsQueueHarness, A_RENEWED_LOCK),
    (nats_takes_any_renewal, NatsQueueHarness, A_LATE_RENEWAL),
    (nats_takes_any_acknowledgement, NatsQueueHarness, A_LATE_VERDICT),
    (azure_receives, AzureQueueHarness, A_LOCK),
    (azure_renews, AzureQueueHarness, A_RENEWED_LOCK),
    (rabbit_receives, FaultyRabbitHarness, A_LOCK),
    (rabbit_renews, FaultyRabbitHarness, A_RENEWED_LOCK),
]


def finds(
    test: str, suite: type, harness: type[QueueHarness | LeaseHarness], plant: Plant, patch: pytest.MonkeyPatch
) -> bool:
    """Return whether *test* fails by an assertion: not because there is no server, or a plant no longer fits."""
    if harness in SERVERS:
        require(SERVERS[harness])
    plant(patch)
    return failing_tests(harness, suite, failures=(AssertionError,), is_meant=test.__eq__, in_real_time=True) == {test}


@pytest.mark.parametrize(("plant", "harness", "test"), REAL_QUEUES)
def test_a_planted_bug_of_a_real_client_about_a_lock_is_found(
    plant: Plant, harness: type[QueueHarness], test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert finds(test, SlowQueueTests, harness, plant, monkeypatch)


def etcd_leads(patch: pytest.MonkeyPatch) -> None:
    def keep(self: Any, answer: Any, name: str, holder: str, ttl: float, *_: Any) -> None:
        if (place := self._sessions.find(name, holder)) is not None:
            place.answered(self._clock.now(), ttl)

    after(patch, EtcdLeases, "acquire", keep)


def etcd_renews(patch: pytest.MonkeyPatch) -> None:
    def keep(self: Any, answers: Any, grants: Sequence[Grant], ttl: float) -> None:
        for place in map(self._place_of, grants):
            if place is not None:
                place.answered(self._clock.now(), ttl)

    after(patch, EtcdLeases, "renew", keep)


def zookeeper_leads(patch: pytest.MonkeyPatch) -> None:
    def keep(self: Any, answer: Any, name: str, holder: str, ttl: float, *_: Any) -> None:
        if (place := self._places.find(name, holder)) is not None:
            self._places.keep(place, self._clock.now() + ttl)

    after(patch, ZooKeeperLeases, "acquire", keep)


def zookeeper_renews(patch: pytest.MonkeyPatch) -> None:
    def keep(self: Any, answers: Any, grants: Sequence[Grant], ttl: float) -> None:
        for place in map(self._claimed, grants):
            if place is not None:
                self._places.keep(place, self._clock.now() + ttl)

    after(patch, ZooKeeperLeases, "renew", keep)


def observes_from_the_question(owner: type[KubernetesLeases | NatsLeases]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        real = owner.inspect

        async def inspect(self: Any, name: str) -> Any:
            asked_at = self._observed.now
            answer = await real(self, name)
            seen = self._observed.find(name)
            seen.since = min(seen.since, asked_at)
            return answer

        patch.setattr(owner, "inspect", inspect)

    return plant


kubernetes_observes = observes_from_the_question(KubernetesLeases)
nats_observes = observes_from_the_question(NatsLeases)

REAL_LEASES: list[tuple[Plant, type[LeaseHarness], str]] = [
    (etcd_leads, EtcdHarness, A_LEASE),
    (etcd_renews, EtcdHarness, A_RENEWED_LEASE),
    (zookeeper_leads, HeldHarness, A_LEASE),
    (zookeeper_renews, HeldHarness, A_RENEWED_LEASE),
    (kubernetes_observes, KubernetesHarness, ANOTHERS),
    (nats_observes, NatsHarness, ANOTHERS),
]


@pytest.mark.parametrize(("plant", "harness", "test"), REAL_LEASES)
def test_a_planted_bug_of_a_real_client_about_a_lease_is_found(
    plant: Plant, harness: type[LeaseHarness], test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert finds(test, SlowLeaseTests, harness, plant, monkeypatch)
