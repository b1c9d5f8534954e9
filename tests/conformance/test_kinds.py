"""Which kinds of fault are tried on which store, and why some are not: each kind stands, or its reason does."""

from __future__ import annotations

from types import ModuleType
from typing import get_args

import pytest

from tenure.testing import conformance
from tenure.testing._conformance.harness import Fault
from tenure.testing._conformance.leases.steps import LeaseSuite
from tenure.testing._conformance.queues.steps import QueueSuite
from tests.conformance import (
    test_azure,
    test_cost,
    test_memory,
    test_peers,
    test_postgres,
    test_redis,
    test_redis_cluster,
    test_sqlite,
    test_sqlite_queue,
    test_strain,
)

WHERE: dict[str, tuple[ModuleType, ...]] = {
    "Memory": (test_memory, test_cost),
    "Sqlite": (test_sqlite, test_sqlite_queue, test_cost, test_strain),
    "Postgres": (test_postgres, test_cost, test_strain),
    "Redis": (test_redis, test_redis_cluster, test_cost, test_strain),
    "Azure": (test_azure, test_cost, test_strain),
}
CALLED = {"Redis": ("Redis", "Cluster")}

LEASE_KINDS = frozenset(get_args(Fault)) - {"slow"}
"""What a link that is slow does is tried with messages, of which there are many."""
QUEUE_KINDS = frozenset(get_args(Fault)) - {"cut_one"}
"""One of several queues that can't be asked about is tried in tests/backends, on Redis Cluster and Azure."""

NOT_ON = {
    "Memory": {
        "away": "nothing of it lies outside of the process",
        "restart": "it ends with the process",
        "full": "it is as large as the process may be",
        "slow": "there is no link",
    },
    "Sqlite": {
        "cut_one": "one file holds all leases",
        "slow": "there is no link",
    },
    "Azure": {
        "restart": "nobody restarts the service; that Azurite was killed is tried in tests/process",
        "full": "nobody can fill it",
    },
}

SUITES = frozenset(name for name in conformance.__all__ if name.endswith("Suite"))
NO_SUITE = {
    "Memory": {"LeaseCapacitySuite": "neither full nor slow", "BrokerCapacitySuite": "neither full nor slow"},
    "Azure": {"LeaseCapacitySuite": "never full"},
}


def classes_before(store: str) -> list[type[LeaseSuite | QueueSuite]]:
    """Return the classes that put a harness of *store* before a suite."""
    names = CALLED.get(store, (store,))
    return [
        one
        for module in WHERE[store]
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, LeaseSuite | QueueSuite) and "harness" in vars(one)
        if any(f"Test{name}" in one.__name__ for name in names)
    ]


@pytest.mark.parametrize("store", WHERE)
def test_each_kind_of_fault_is_tried_or_can_not_be(store: str) -> None:
    for suite, kinds in ((LeaseSuite, LEASE_KINDS), (QueueSuite, QUEUE_KINDS)):
        made: set[str] = set()
        for one in classes_before(store):
            if issubclass(one, suite):
                made |= one.harness.faults
        assert made == kinds - NOT_ON.get(store, {}).keys(), suite


@pytest.mark.parametrize("store", WHERE)
def test_each_suite_stands_before_each_store(store: str) -> None:
    passed = {base.__name__ for one in classes_before(store) for base in one.__mro__} & SUITES
    assert passed == SUITES - NO_SUITE.get(store, {}).keys()


@pytest.mark.parametrize("store", WHERE)
def test_each_store_counts_what_its_questions_cost(store: str) -> None:
    counting = {one for one in classes_before(store) if one.harness.scale is not None}
    assert {base.__name__ for one in counting for base in one.__mro__} >= {"LeaseCostSuite", "BrokerCostSuite"}


def test_peers_meet_what_a_fleet_can_meet() -> None:
    # A fleet has no store that could be full, away or restarted: tests/sim/peers does worse to its members, and
    # tests/process/test_peers_cut.py cuts real ones off.
    assert test_peers.PeersHarness.faults == {"lose_answer", "late"}
