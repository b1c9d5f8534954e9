"""Partitions on each store of leases, with links that work one way.

RabbitMQ and Service Bus have no leases. Of clusters, only Redis keeps the leases of a group apart: it has the suite in
tests/stores/redis.
"""

from __future__ import annotations

from tenure._backends import azure_storage
from tenure._election.store import LeaseStore
from tenure._url import Url
from tenure.testing.conformance import PartitionSuite
from tests.conformance.test_observed import ObservedHarness
from tests.conformance.test_queued import QueuedHarness
from tests.stores.azure_storage.test_suites import AzureHarness
from tests.stores.etcd.test_suites import EtcdHarness
from tests.stores.kubernetes.test_suites import KubernetesHarness
from tests.stores.memory.test_suites import MemoryHarness
from tests.stores.nats.test_lease_suites import NatsHarness
from tests.stores.peers.test_suites import PeersHarness
from tests.stores.postgres.test_suites import PostgresHarness
from tests.stores.redis.test_suites import RedisHarness
from tests.stores.sqlite.test_lease_suites import SqliteHarness
from tests.stores.zookeeper.test_suites import ZooKeeperHarness


class TestMemoryPartitions(PartitionSuite):
    harness = MemoryHarness


class TestQueuedPartitions(PartitionSuite):
    harness = QueuedHarness


class TestObservedPartitions(PartitionSuite):
    harness = ObservedHarness


class TestSqlitePartitions(PartitionSuite):
    harness = SqliteHarness


class TestPostgresPartitions(PartitionSuite):
    harness = PostgresHarness


class TestRedisPartitions(PartitionSuite):
    harness = RedisHarness


class TestNatsPartitions(PartitionSuite):
    harness = NatsHarness


class TestEtcdPartitions(PartitionSuite):
    harness = EtcdHarness


class TestZooKeeperPartitions(PartitionSuite):
    harness = ZooKeeperHarness


class TestKubernetesPartitions(PartitionSuite):
    harness = KubernetesHarness


class DirectAzure(AzureHarness):
    """Without proxies, which take time for each of many requests: the suite makes the links work one way itself."""

    faults = frozenset()

    async def start(self) -> None:
        await super().start()
        self._backends: list[azure_storage.AzureBackend] = []

    async def open(self) -> LeaseStore:
        blob, queue = self._ports
        self._backends.append(azure_storage.open(Url.parse(f"azurite://127.0.0.1:{blob}?queue_port={queue}&timeout=8")))
        return self._backends[-1].leases

    async def close(self) -> None:
        for backend in self._backends:
            await backend.close()
        await super().close()


class TestAzurePartitions(PartitionSuite):
    harness = DirectAzure


class TestPeersPartitions(PartitionSuite):
    harness = PeersHarness
