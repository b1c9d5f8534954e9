"""Leases in an ensemble of three ZooKeeper, under the suites: clients are connected to different servers.

``TENURE_LONG=1`` runs the tests that take long, too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tenure.testing.conformance import LeaseFaultSuite, LeaseQueueSuite
from tests.conformance.members import without_long
from tests.servers import ZooKeeperEnsemble, shared
from tests.stores.zookeeper import test_suites as alone
from tests.stores.zookeeper.test_suites import TICK, FaultyHarness, RestartedHarness, ZooKeeperHarness


class EnsembleHarness(ZooKeeperHarness):
    async def start(self) -> None:
        self._ensemble = self._turned = shared(ZooKeeperEnsemble, tick=TICK)
        self._server = self._ensemble.nodes[0]
        self._ports = deque(node.port for node in self._ensemble.nodes)
        self._clock.turn_loop()


class FaultyEnsembleHarness(EnsembleHarness, FaultyHarness):
    """Three servers need more time to open a session; three requests in a row are given up before a lease has ended."""

    ttl = 20.0
    patience = 1.2


class ChangedEnsembleHarness(EnsembleHarness, RestartedHarness):
    """Its leader is killed, or its followers are stopped; leases outlast that."""

    patience = 2.0

    async def restart(self) -> None:
        """Kill the leader; when another server leads, restart it from its files."""
        await asyncio.to_thread(self._replace_leader)

    def _replace_leader(self) -> None:
        killed = self._ensemble.leader
        killed.kill()
        try:
            self._ensemble.until_well()
        finally:
            self._ensemble.start()

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Stop the followers: without a majority, no server answers."""
        followers = await asyncio.to_thread(lambda: self._ensemble.followers)
        for node in followers:
            node.pause()
        try:
            async with self._clock.hurried():
                yield
        finally:
            for node in followers:
                node.resume()
            await asyncio.to_thread(self._ensemble.until_well)


@without_long
class TestZooKeeperEnsembleLeases(alone.TestZooKeeperLeases):
    harness = EnsembleHarness


@without_long
class TestZooKeeperEnsembleWaiting(LeaseQueueSuite):
    harness = FaultyEnsembleHarness


@without_long
class TestZooKeeperEnsembleLeaseFaults(LeaseFaultSuite):
    harness = FaultyEnsembleHarness


@without_long
class TestZooKeeperEnsembleChanged(LeaseFaultSuite):
    harness = ChangedEnsembleHarness
