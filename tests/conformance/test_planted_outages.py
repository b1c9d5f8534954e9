"""Clients whose pauses between attempts are wrong, found by counting their connections in an outage."""

from __future__ import annotations

import pytest

from tenure._backends.zookeeper import driver as zookeeper_driver
from tenure._runtime.backoff import Backoff
from tenure.testing.faultproxy import FaultProxy
from tests.conformance.test_outages import (
    LASTS,
    ON_A_THREAD,
    PAUSING,
    STORES,
    Outage,
    Pauses,
    begin_anew,
    connections_in,
    most,
    pauses,
    refusing,
)

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
async def test_a_planted_bug_of_pauses_that_stay_long_is_found(
    which: str, refusing: set[FaultProxy], pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "reset", lambda backoff: None)
    assert not await begin_anew(which, refusing, pauses, 2 * LASTS)
