"""Clients whose pauses between attempts are wrong, found by counting their connections in an outage."""

from __future__ import annotations

from types import ModuleType

import pytest

from tenure._backends.nats import standing as nats_standing
from tenure._backends.postgres import connections as postgres_connections
from tenure._backends.postgres import wake as postgres_wake
from tenure._backends.rabbitmq import subscription as rabbitmq_subscription
from tenure._backends.servicebus import feed as servicebus_feed
from tenure._backends.servicebus import sessions as servicebus_sessions
from tenure._backends.zookeeper import driver as zookeeper_driver
from tenure._runtime import shared_hints
from tenure._runtime.backoff import LONGEST, Backoff
from tenure.testing.faultproxy import FaultProxy
from tests.conformance.test_outages import (
    ON_A_THREAD,
    PAUSING,
    STORES,
    Outage,
    Pauses,
    connections_in,
    least,
    most,
    pauses,
    pauses_begin_anew,
    refusing,
)

USERS = [
    ("Etcd", shared_hints),
    ("Etcd, three members", shared_hints),
    ("Kubernetes", shared_hints),
    ("Nats", shared_hints),
    ("Nats, queues", nats_standing),
    ("Postgres", postgres_wake),
    ("Postgres", postgres_connections),
    ("Postgres, queues", postgres_wake),
    ("Rabbit, queues", rabbitmq_subscription),
    ("Redis", shared_hints),
    ("Redis, queues", shared_hints),
    ("ServiceBus, queues", servicebus_feed),
    ("ServiceBus, sessions", servicebus_sessions),
]
"""Who pauses, in which module."""

# Redis' driver that is cancelled just when its connection stands leaves it to be collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

__all__ = ["pauses", "refusing"]  # fixtures


@pytest.mark.parametrize("which", STORES)
@pytest.mark.asyncio
async def test_a_planted_bug_of_pauses_that_do_not_grow_is_found(
    which: str, refusing: set[FaultProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "next", lambda backoff, at_most=0.0: backoff._first / 2)
    monkeypatch.setattr(zookeeper_driver, "RECONNECT_MAX", zookeeper_driver.RECONNECT_FIRST)
    outage = Outage(0.0, 7.0, times=1) if which.startswith(ON_A_THREAD) else Outage(0.0, 60.0, times=4)
    enough = most(which, outage.lasts)
    found, _ = await connections_in(which, refusing, outage, enough)
    assert found > enough


@pytest.mark.parametrize("which", PAUSING)
@pytest.mark.asyncio
async def test_a_planted_bug_of_pauses_that_are_too_long_is_found(
    which: str, refusing: set[FaultProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "next", lambda backoff, at_most=0.0: 10 * LONGEST)
    outage = Outage.of(which)
    found, _ = await connections_in(which, refusing, outage)
    assert found < least(outage)


@pytest.mark.parametrize(("which", "module"), USERS)
@pytest.mark.asyncio
async def test_a_planted_bug_of_pauses_that_stay_long_is_found(
    which: str, module: ModuleType, refusing: set[FaultProxy], pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NeverAnew(Backoff):
        def reset(self) -> None:
            pauses.told.add(self)

    monkeypatch.setattr(module, "Backoff", NeverAnew)
    assert not await pauses_begin_anew(which, refusing, pauses, NeverAnew)


def test_every_store_has_a_planted_bug_of_pauses() -> None:
    assert {which for which, _ in USERS} == PAUSING.keys()
