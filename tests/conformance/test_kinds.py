"""The kinds of fault that are tried on each store, and the reasons why others are not."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import get_args

import pytest

pytest.importorskip("proton")  # the look-alike of Service Bus speaks by it

from tenure.testing import conformance
from tenure.testing._conformance.harness import Fault
from tenure.testing._conformance.leases.steps import LeaseSuite
from tenure.testing._conformance.queues.steps import QueueSuite
from tests.conformance import test_cost, test_observed, test_partitions, test_queued, test_rest, test_strain
from tests.stores.azure_storage import test_suites as azure
from tests.stores.etcd import test_cluster_suites as etcd_cluster
from tests.stores.etcd import test_suites as etcd
from tests.stores.kubernetes import test_suites as kubernetes
from tests.stores.memory import test_suites as memory
from tests.stores.nats import test_cluster_lease_suites as nats_cluster
from tests.stores.nats import test_lease_suites as nats_leases
from tests.stores.nats import test_queue_suites as nats_queues
from tests.stores.peers import test_suites as peers
from tests.stores.postgres import test_suites as postgres
from tests.stores.rabbitmq import test_suites as rabbitmq
from tests.stores.redis import test_cluster_suites as redis_cluster
from tests.stores.redis import test_suites as redis
from tests.stores.servicebus import test_slow_answers as servicebus_slow
from tests.stores.servicebus import test_suites as servicebus
from tests.stores.sqlite import test_lease_suites as sqlite_leases
from tests.stores.sqlite import test_queue_suites as sqlite_queues
from tests.stores.zookeeper import test_ensemble_suites as zookeeper_ensemble
from tests.stores.zookeeper import test_suites as zookeeper

WHERE: dict[str, tuple[ModuleType, ...]] = {
    "Memory": (memory, test_cost, test_partitions, test_rest),
    "Sqlite": (sqlite_leases, sqlite_queues, test_cost, test_partitions, test_rest, test_strain),
    "Postgres": (postgres, test_cost, test_partitions, test_rest, test_strain),
    "Redis": (redis, redis_cluster, test_cost, test_partitions, test_rest, test_strain),
    "Azure": (azure, test_cost, test_partitions, test_rest, test_strain),
    "ServiceBus": (servicebus, servicebus_slow),
    "Rabbit": (rabbitmq, test_cost, test_strain),
    "Kubernetes": (kubernetes, test_partitions, test_rest),
    "Queued": (test_queued, test_partitions, test_rest),
    "Observed": (test_observed, test_partitions, test_rest),
    "Etcd": (etcd, etcd_cluster, test_partitions, test_rest),
    "ZooKeeper": (zookeeper, zookeeper_ensemble, test_partitions, test_rest),
    "Nats": (nats_leases, nats_cluster, nats_queues, test_partitions, test_rest),
}
LEASES_ONLY = frozenset({"Etcd", "Kubernetes", "Observed", "Queued", "ZooKeeper"})
"""Stores without queues of messages."""
QUEUES_ONLY = frozenset({"Rabbit", "ServiceBus"})
"""Stores without elections."""
CALLED = {"Redis": ("Redis", "Cluster")}

LEASE_KINDS = frozenset(get_args(Fault)) - {"slow", "kill"}
"""A slow link is tried with messages, of which there are many; a kill with what takes several steps."""
QUEUE_KINDS = frozenset(get_args(Fault)) - {"cut_one"}
"""The failure of one of several queues is tried in tests/stores, on Redis Cluster and Azure."""

NOT_ON = {
    "Memory": {
        "away": "it is inside the process",
        "restart": "it ends with the process",
        "full": "its limit is the process's memory",
        "slow": "there is no link",
    },
    "Sqlite": {
        "cut_one": "one file holds all leases",
        "kill": "each verb is one transaction; its processes are killed in tests/process",
        "slow": "there is no link",
    },
    "Etcd": {
        "cut_one": "each member has all leases",
        "full": "it accepts no new leader then, whatever the name: tried in tests/stores",
    },
    "Queued": {
        "away": "it is inside the process",
        "restart": "it ends with the process",
        "full": "its limit is the process's memory",
    },
    "Observed": {
        "away": "it is inside the process",
        "restart": "it ends with the process",
        "full": "its limit is the process's memory",
    },
    "Kubernetes": {
        "full": "a full etcd refuses every write of its API server, renewals too: tests/stores/etcd has that",
    },
    "ZooKeeper": {
        "cut_one": "one connection carries all requests",
        "full": "a client can't fill it",
    },
    "Azure": {
        "restart": "a client can't restart the service; a killed Azurite is tried in tests/process",
        "full": "a client can't fill it",
    },
}

NOT_ON_LEASES = {
    "Nats": {
        "full": "it refuses every write then, renewals too: tried in tests/stores",
    },
}
"""The same for leases alone."""

SUITES = frozenset(name for name in conformance.__all__ if name.endswith("Suite"))
NO_SUITE = {
    "Memory": {"LeaseCapacitySuite": "neither full nor slow", "BrokerCapacitySuite": "neither full nor slow"},
    "Azure": {"LeaseCapacitySuite": "never full"},
    "ServiceBus": {"BrokerCostSuite": "what a request costs the service can't be seen, and the look-alike is not it"},
    "Kubernetes": {"LeaseCapacitySuite": "when it is full, it refuses renewals, too"},
    "Etcd": {"LeaseCapacitySuite": "it accepts no new leader when it is full"},
    "Nats": {"LeaseCapacitySuite": "when it is full, it refuses renewals, too"},
    "ZooKeeper": {"LeaseCapacitySuite": "never full"},
    "Queued": {"LeaseCapacitySuite": "never full", "LeaseCostSuite": "its cost is of no interest: only tests use it"},
    "Observed": {"LeaseCapacitySuite": "never full", "LeaseCostSuite": "its cost is of no interest: only tests use it"},
}


def classes_before(store: str) -> list[type[LeaseSuite | QueueSuite]]:
    """Return the classes that run a suite on a harness of *store*."""
    names = CALLED.get(store, (store,))
    return [
        one
        for module in WHERE[store]
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, LeaseSuite | QueueSuite) and "harness" in vars(one)
        if any(f"Test{name}" in one.__name__ for name in names)
    ]


def suites_of(store: str) -> set[str]:
    """Return the suites that *store* has to pass."""
    of_leases = {name for name in SUITES if issubclass(getattr(conformance, name), LeaseSuite)}
    is_queued = any(one.harness.traits.queued for one in classes_before(store) if issubclass(one, LeaseSuite))
    due = of_leases if store in LEASES_ONLY else set(SUITES)
    if store in QUEUES_ONLY:
        due -= of_leases
    return due - NO_SUITE.get(store, {}).keys() - (set() if is_queued else {"LeaseQueueSuite"})


def suites_passed(classes: Iterable[type]) -> set[str]:
    """Return the suites that *classes* run."""
    return {base.__name__ for one in classes for base in one.__mro__} & SUITES


@pytest.mark.parametrize("store", WHERE)
def test_each_kind_of_fault_is_tried_or_can_not_be(store: str) -> None:
    for suite, kinds in ((LeaseSuite, LEASE_KINDS), (QueueSuite, QUEUE_KINDS)):
        if store in (LEASES_ONLY if suite is QueueSuite else QUEUES_ONLY):
            continue
        made: set[str] = set()
        for one in classes_before(store):
            if issubclass(one, suite):
                made |= one.harness.faults
        reasons = NOT_ON.get(store, {}) | (NOT_ON_LEASES.get(store, {}) if suite is LeaseSuite else {})
        assert made == kinds - reasons.keys(), suite


@pytest.mark.parametrize("store", WHERE)
def test_each_suite_runs_on_each_store(store: str) -> None:
    assert suites_passed(classes_before(store)) == suites_of(store)


@pytest.mark.parametrize("store", WHERE)
def test_each_store_counts_the_cost_of_its_requests(store: str) -> None:
    counting = suites_passed(one for one in classes_before(store) if one.harness.scale is not None)
    assert counting >= suites_of(store) & {"LeaseCostSuite", "BrokerCostSuite"}


ALWAYS_HINTS = {
    "Memory": "nothing can be in the way; tests/application/test_rest.py puts something there",
    "Queued": "nothing can be in the way",
    "Observed": "nothing can be in the way",
    "Etcd": "who may read a name may watch it",
    "ZooKeeper": "who may read a node may watch it",
}
"""Stores whose hints come whenever requests are answered, and why."""


@pytest.mark.parametrize("store", sorted(WHERE.keys() - QUEUES_ONLY))
def test_rest_without_hints_is_tried_or_can_not_be(store: str) -> None:
    conditions = {how for one in classes_before(store) if issubclass(one, LeaseSuite) for how in one.harness.hintless}
    assert bool(conditions) != (store in ALWAYS_HINTS)


NOBODY_ELSE_WRITES = frozenset({"Memory", "Observed", "Queued"})
"""Stores inside the process."""


@pytest.mark.parametrize("store", WHERE)
def test_what_others_may_write_is_tried_on_each_store(store: str) -> None:
    for suite in (LeaseSuite, QueueSuite):
        classes = [one for one in classes_before(store) if issubclass(one, suite)]
        if classes and store not in NOBODY_ELSE_WRITES:
            assert max(len(one.harness.foreign) for one in classes) >= 7, suite


@pytest.mark.parametrize("store", WHERE)
def test_what_administrators_may_remove_is_tried_on_each_store(store: str) -> None:
    classes = [one for one in classes_before(store) if issubclass(one, QueueSuite)]
    if classes and store not in NOBODY_ELSE_WRITES:
        assert {"delete", "forget"} <= {how for one in classes for how in one.harness.edits}


@pytest.mark.parametrize("store", ["Nats", "Rabbit", "ServiceBus"])
def test_what_others_pass_on_is_tried_where_notes_are_headers(store: str) -> None:
    classes = [one for one in classes_before(store) if issubclass(one, QueueSuite)]
    assert any(one.harness.forwards for one in classes)


def test_peers_have_the_faults_of_a_fleet() -> None:
    # A fleet has no store that could be full, away or restarted: tests/sim/peers has faults of its members, and
    # tests/stores/peers/test_cut.py cuts real ones off.
    assert peers.PeersHarness.faults == {"lose_answer", "late"}


def test_partitions_are_tried_on_a_fleet() -> None:
    assert test_partitions.TestPeersPartitions.harness is peers.PeersHarness
