"""Partitions on stores in which the end of a lease is observed, in virtual time: a dead member is followed soon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from tenure._election.driver import Driver
from tenure._election.store import FollowedLeaseStore
from tenure._partitions.partitions import Partitions
from tenure._partitions.plan import Layout, checked_partitions
from tenure._runtime.renewal_thread import RenewalThread
from tenure._timing import Timing
from tenure.testing.loop import run
from tests.application.test_elector import FaultyStore
from tests.application.test_partitions import PartitionSetup, owning
from tests.conformance.observed_memory import ObservedMemoryLeases, Records
from tests.conformance.test_planted_observed import FollowsNothing

TIMING = Timing(ttl=45.0)
IN_TIME = TIMING.ttl + TIMING.retry_every
MEMBERS = 3


class ObservingStore(FaultyStore):
    """A connection that can be cut, and follows renewals until it is."""

    def follow_renewals(self, prefix: str) -> AsyncIterator[object]:
        return cast(FollowedLeaseStore, self.inner).follow_renewals(prefix)


class ObservedSetup(PartitionSetup):
    """Members that each observe one store in memory."""

    def __init__(self, kind: type[ObservedMemoryLeases]) -> None:
        super().__init__()
        self._kind = kind
        self._records = Records()

    def connect(self) -> tuple[FaultyStore, Driver]:
        store = ObservingStore(self._kind(self.clock, self._records))
        driver = Driver(store, self.clock)
        self._drivers.append(driver)
        return store, driver

    def member(self) -> tuple[FaultyStore, Partitions]:
        store, driver = self.connect()
        layout = Layout("orders", checked_partitions(12))
        return store, Partitions(
            layout, TIMING, driver=driver, renewal_thread=RenewalThread.here(), options={}, weight=1, on_event=None
        )

    async def close(self) -> None:
        await super().close()
        self._records.close()


def followed_after(kind: type[ObservedMemoryLeases], seed: int) -> float:
    """Return after how many seconds the partitions of a member that has died are owned by others."""

    async def die() -> float:
        setup = ObservedSetup(kind)
        try:
            members = [setup.member() for _ in range(MEMBERS)]
            for _, one in members:
                setup.run(one)
            dead, living = members[0], [one for _, one in members[1:]]
            await owning(4, 4, 4, of=[one for _, one in members])
            await asyncio.sleep(3 * TIMING.ttl + seed)
            dead[0].cut, died_at = True, setup.loop.time()
            await owning(6, 6, of=living, within=3 * TIMING.ttl)
            return setup.loop.time() - died_at
        finally:
            await setup.close()

    return run(die(), seed=seed, limit=10_000)


@pytest.mark.parametrize("seed", range(5))
def test_a_dead_member_is_followed_within_a_ttl_and_a_retry(seed: int) -> None:
    assert followed_after(ObservedMemoryLeases, seed) <= IN_TIME


def test_a_planted_member_that_follows_nothing_is_found() -> None:
    assert any(followed_after(FollowsNothing, seed) > IN_TIME for seed in (2, 3, 4))
