"""Leases in a cluster of three etcd, under the suites: each client asks another member first, and reaches all.

``TENURE_LONG=1`` runs the tests that take long, too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tenure.testing.conformance import LeaseFaultSuite, LeaseQueueSuite, LeaseStoreSuite
from tests.conformance.members import without_long
from tests.servers import EtcdCluster, shared
from tests.stores.etcd.test_suites import EtcdHarness


class ClusterHarness(EtcdHarness):
    async def start(self) -> None:
        self._cluster = self._turned = shared(EtcdCluster)
        self._server = self._cluster.nodes[0]
        await asyncio.to_thread(self._server.end_leases)
        self._ports = deque(node.port for node in self._cluster.nodes)
        self._clock.turn_loop()


class ChangedClusterHarness(ClusterHarness):
    """Its leader is killed, or its followers are stopped; leases outlast that."""

    ttl = 20.0
    patience = 2.0
    faults = frozenset({"restart", "away"})

    async def restart(self) -> None:
        """Kill the leader; when another member leads, restart it from its files."""
        await asyncio.to_thread(self._replace_leader)

    def _replace_leader(self) -> None:
        killed = self._cluster.leader()
        killed.kill()
        try:
            self._cluster.leader()
        finally:
            killed.start()

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Stop the followers: without a majority, no member can answer."""
        followers = await asyncio.to_thread(self._cluster.followers)
        for node in followers:
            node.pause()
        try:
            async with self._clock.hurried():
                yield
        finally:
            for node in followers:
                node.resume()
            for node in self._cluster.nodes:
                await asyncio.to_thread(node.until_ready)


@without_long
class TestEtcdClusterLeases(LeaseStoreSuite):
    harness = ClusterHarness


@without_long
class TestEtcdClusterWaiting(LeaseQueueSuite):
    harness = ClusterHarness


@without_long
class TestEtcdClusterLeaseFaults(LeaseFaultSuite):
    harness = ClusterHarness


@without_long
class TestEtcdClusterChanged(LeaseFaultSuite):
    harness = ChangedClusterHarness
