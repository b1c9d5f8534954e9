"""Leases on three servers of NATS, under the suites: each client uses another one first, and reaches all.

``TENURE_LONG=1`` runs the tests that take long, too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tenure._backends.nats.leases import SERIALIZABLE
from tenure.testing.conformance import LeaseFaultSuite, LeaseStoreSuite
from tests.conformance.members import without_long
from tests.servers import NatsCluster, shared
from tests.stores.nats.test_lease_suites import NatsHarness

STREAM = "KV_tenure-leases"


class NatsClusterHarness(NatsHarness):
    options = "&replicas=3"

    async def start(self) -> None:
        self._cluster = shared(NatsCluster)
        self._server = self._cluster.nodes[0]
        if self._cluster.version < SERIALIZABLE:
            pytest.skip("tenure leads on no replicas of this version; see tests/stores/nats/test_leases.py")
        await asyncio.to_thread(self._cluster.start)  # until all of them get streams
        self._ports = deque(node.port for node in self._cluster.nodes)
        self.begin()


class ChangedNatsClusterHarness(NatsClusterHarness):
    """Its leader is killed, or stopped with another server; leases outlast that."""

    ttl = 60.0
    patience = 2.0
    faults = frozenset({"restart", "away"})

    async def restart(self) -> None:
        """Kill the leader of the stream; when another server leads, restart it from its files."""
        while self._backends:
            await self._backends.pop().close()
        await asyncio.to_thread(self._replace_leader)

    def _replace_leader(self) -> None:
        killed = self._cluster.leader(STREAM)
        killed.kill()
        try:
            self._cluster.leader(STREAM)
        finally:
            self._cluster.start()
            self._cluster.until_led()

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Stop the leader of the stream and another server: without a majority, nobody can answer."""
        leader = await asyncio.to_thread(self._cluster.leader, STREAM)
        other = next(node for node in self._cluster.nodes if node is not leader)
        for node in (leader, other):
            node.pause()
        self._clock.turn_loop()
        try:
            async with self._clock.hurried():
                yield
        finally:
            for node in (leader, other):
                node.resume()
            await asyncio.to_thread(self._cluster.until_led)


@without_long
class TestNatsClusterLeases(LeaseStoreSuite):
    harness = NatsClusterHarness


@without_long
class TestNatsClusterLeaseFaults(LeaseFaultSuite):
    harness = NatsClusterHarness


@without_long
class TestNatsClusterChanged(LeaseFaultSuite):
    harness = ChangedNatsClusterHarness
