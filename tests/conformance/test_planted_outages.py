"""Clients whose pauses between attempts are wrong, found by counting their connections in an outage."""

from __future__ import annotations

import pytest

from tenure._backends.zookeeper import driver as zookeeper_driver
from tenure._runtime.backoff import Backoff
from tenure.testing.faultproxy import FaultProxy
from tests.conformance.test_outages import (
    CONNECTED_AGAIN,
    ON_A_THREAD,
    STORES,
    Outage,
    connections_in,
    most,
    refusing,
    tries_soon_again,
)

__all__ = ["refusing"]  # a fixture


@pytest.mark.parametrize("which", STORES)
@pytest.mark.asyncio
async def test_a_planted_bug_is_found(which: str, refusing: set[FaultProxy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pauses stay as short as the first."""
    monkeypatch.setattr(Backoff, "next", lambda backoff, at_most=0.0: backoff._first / 2)
    monkeypatch.setattr(zookeeper_driver, "RECONNECT_MAX", zookeeper_driver.RECONNECT_FIRST)
    outage = Outage(0.0, 7.0, times=1) if which.startswith(ON_A_THREAD) else Outage(0.0, 60.0, times=4)
    enough = most(which, outage.lasts)
    found, _ = await connections_in(which, refusing, outage, enough)
    assert found > enough


OURS = [which for which in CONNECTED_AGAIN if not which.startswith("ZooKeeper")]
"""Stores whose pauses are ours; kazoo ends its own."""


@pytest.mark.parametrize("which", OURS)
@pytest.mark.asyncio
async def test_a_bug_planted_in_the_next_outage_is_found(
    which: str, refusing: set[FaultProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pauses begin as long as those of the last outage have ended."""
    monkeypatch.setattr(Backoff, "reset", lambda backoff: None)
    monkeypatch.setattr("random.uniform", lambda least, most: most)
    assert not await tries_soon_again(which, refusing)
