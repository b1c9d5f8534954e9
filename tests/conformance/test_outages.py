"""What an outage costs: how often the client of each store tries to connect while its server is cut off.

Who listens for hints gets them back by itself, and tries until then: on, and rarely. tests/application counts the
requests of what asks above the stores.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from tenure._backends.servicebus import feed
from tenure._backends.zookeeper import driver as zookeeper_driver
from tenure._runtime.backoff import Backoff
from tenure.testing._conformance.counted_hints import counted
from tenure.testing.faultproxy import FaultProxy
from tests.clocks import TurnedClock
from tests.conformance.test_kinds import WHERE
from tests.stores.etcd.test_cluster_suites import ClusterHarness
from tests.stores.etcd.test_suites import EtcdHarness
from tests.stores.kubernetes.test_suites import KubernetesHarness
from tests.stores.nats.test_lease_suites import NatsHarness
from tests.stores.nats.test_queue_suites import NatsQueueHarness
from tests.stores.postgres.test_suites import SeveredHarness, SeveredQueueHarness
from tests.stores.rabbitmq.test_suites import FaultyRabbitHarness
from tests.stores.redis.test_suites import RedisHarness, RedisQueueHarness
from tests.stores.servicebus.test_suites import ServiceBusHarness
from tests.stores.zookeeper.test_ensemble_suites import FaultyEnsembleHarness
from tests.stores.zookeeper.test_suites import FaultyHarness

TIMEOUT = 5.0
"""What clients have by default, in seconds; one that waits for less tries more often."""


class ZooKeeperHarness(FaultyHarness):
    patience = TIMEOUT


class EnsembleHarness(FaultyEnsembleHarness):
    patience = TIMEOUT


class Outage(NamedTuple):
    """How an outage passes, in seconds."""

    begins: float
    """In this time, the pauses grow."""
    lasts: float
    """In this time, attempts are counted."""
    times: int
    """How much faster than usual the clock runs."""


OUTAGE = Outage(20.0, 60.0, times=20)
TRUE_OUTAGE = Outage(5.0, 7.0, times=1)

STORES: dict[str, type[Any]] = {
    "Etcd": EtcdHarness,
    "Etcd, three members": ClusterHarness,
    "Kubernetes": KubernetesHarness,
    "Nats": NatsHarness,
    "Nats, queues": NatsQueueHarness,
    "Postgres": SeveredHarness,
    "Postgres, queues": SeveredQueueHarness,
    "Rabbit, queues": FaultyRabbitHarness,
    "Redis": RedisHarness,
    "Redis, queues": RedisQueueHarness,
    "ServiceBus, queues": ServiceBusHarness,
    "ZooKeeper": ZooKeeperHarness,
    "ZooKeeper, three members": EnsembleHarness,
}
WITHOUT_A_LINK = {"Memory", "Observed", "Queued", "Sqlite"}
WITHOUT_HINTS = {"Azure"}
ON_A_THREAD = ("ServiceBus", "ZooKeeper")
"""Stores whose clients connect on a thread of their own, by the true time."""

CONNECTIONS = {"ZooKeeper": 2}
"""How many connections a client has to a server, if not one: ZooKeeper has a session for leases and one for reading."""
EVERY_MIN = 1.0
"""Seconds between two attempts to make a connection, once there was no answer for a while: at least, on average."""


def most(which: str, seconds: float) -> float:
    """Return how many attempts to reach a server are right in so many seconds."""
    return (seconds / EVERY_MIN + 1) * CONNECTIONS.get(which.partition(",")[0], 1)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> set[FaultProxy]:
    """Return the proxies that are told to refuse connections from now on."""
    found: set[FaultProxy] = set()
    refuse = FaultProxy.refuse

    def note(proxy: FaultProxy) -> None:
        found.add(proxy)
        refuse(proxy)

    monkeypatch.setattr(FaultProxy, "refuse", note)
    return found


@asynccontextmanager
async def cut_off(which: str) -> AsyncIterator[None]:
    """Let a client that listens for hints be cut off from its store."""
    harness = STORES[which]()
    await harness.start()
    try:
        client = await harness.open()
        async with counted(client.hints("outage")) as hints:
            await hints.no_more()
            async with harness.cut(client):
                yield
    finally:
        await harness.close()


async def attempts(which: str, refusing: set[FaultProxy]) -> tuple[float, float]:
    """Return how often a client that is cut off tries to reach each server, and in how many seconds of its clock."""
    clock = TurnedClock()
    clock.turn_loop()
    outage = TRUE_OUTAGE if which.startswith(ON_A_THREAD) else OUTAGE
    now = asyncio.get_running_loop().time
    async with cut_off(which), clock.hurried(outage.times):
        await asyncio.sleep(outage.begins)
        began, before = now(), sum(proxy.refused for proxy in refusing)
        await asyncio.sleep(outage.lasts)
        found = sum(proxy.refused for proxy in refusing) - before
        passed = now() - began
    return found / len(refusing), passed


@pytest.mark.parametrize("which", STORES)
@pytest.mark.asyncio
async def test_who_is_cut_off_tries_rarely_and_on(which: str, refusing: set[FaultProxy]) -> None:
    found, seconds = await attempts(which, refusing)
    assert 0 < found <= most(which, seconds)


def test_every_store_with_hints_is_tried() -> None:
    assert {which.partition(",")[0] for which in STORES} == WHERE.keys() - WITHOUT_A_LINK - WITHOUT_HINTS


def never_pauses_longer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Backoff, "next", lambda backoff, at_most=0.0: backoff._first / 2)
    patch.setattr(feed, "REOPEN", 0.1)
    patch.setattr(zookeeper_driver, "RECONNECT_MAX", zookeeper_driver.RECONNECT_FIRST)


@pytest.mark.parametrize("which", STORES)
@pytest.mark.asyncio
async def test_a_planted_bug_is_found(which: str, refusing: set[FaultProxy], monkeypatch: pytest.MonkeyPatch) -> None:
    never_pauses_longer(monkeypatch)
    found, seconds = await attempts(which, refusing)
    assert found > most(which, seconds)
