"""What is asked at rest, on each store: with hints, and in each condition in which none come."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest
from redis import asyncio as aioredis

from tenure._backends import kubernetes, nats, redis
from tenure._election.store import LeaseStore
from tenure._url import Url
from tenure.testing.conformance import LeaseRestSuite
from tests.conformance.test_observed import ObservedHarness
from tests.conformance.test_queued import QueuedHarness
from tests.servers import Kubernetes, Nats, patient, private
from tests.stores.azure_storage.test_suites import AzureHarness
from tests.stores.etcd.test_suites import EtcdHarness
from tests.stores.kubernetes.test_suites import KubernetesHarness
from tests.stores.memory.test_suites import MemoryHarness
from tests.stores.nats.test_lease_suites import NatsHarness
from tests.stores.peers.test_suites import TRAITS, PeersHarness
from tests.stores.postgres.test_suites import PostgresHarness
from tests.stores.redis.test_suites import RedisHarness
from tests.stores.sqlite.test_lease_suites import SqliteHarness
from tests.stores.zookeeper.test_suites import ZooKeeperHarness

PASSWORD = "s3cret"


class Hintless:
    """Opens further backends, and servers on which a user lacks a right, for its harness."""

    async def start(self) -> None:
        self._more: list[Any] = []
        self._servers = ExitStack()
        self._patch = pytest.MonkeyPatch()
        await super().start()  # type: ignore[misc]

    async def close(self) -> None:
        for backend in self._more:
            await backend.close()
        await asyncio.to_thread(self._servers.close)
        self._patch.undo()
        await super().close()  # type: ignore[misc]

    def opened(self, backend: Any) -> LeaseStore:
        """Return the leases of *backend*, which is closed at the end."""
        self._more.append(backend)
        leases: LeaseStore = backend.leases
        return leases

    async def serve(self, server: Any) -> Any:
        """Return a *server* of this test."""
        return await asyncio.to_thread(self._servers.enter_context, server)


# --- inside the process ---


class TestMemoryLeaseRest(LeaseRestSuite):
    harness = MemoryHarness


class TestQueuedLeaseRest(LeaseRestSuite):
    harness = QueuedHarness


class TestObservedLeaseRest(LeaseRestSuite):
    harness = ObservedHarness


# --- without the right to watch or subscribe ---


class HintlessKubernetes(Hintless, KubernetesHarness):
    hintless = ("no right to watch", "beyond the number of watches")
    _double: Kubernetes | None = None

    async def open_without_hints(self, how: str) -> LeaseStore:
        if self._double is None:
            self._double = await self.serve(private(Kubernetes))
        double, options = self._double, ""
        if how == "no right to watch":
            await asyncio.to_thread(double.set, roles=[{"verbs": ["get", "create", "update", "list"]}])
        else:
            await asyncio.to_thread(double.set, roles=None)
            options = "&watches=3"
        return self.opened(kubernetes.open(Url.parse(patient(f"{double.url}{options}"))))


class TestKubernetesLeaseRest(LeaseRestSuite):
    harness = HintlessKubernetes


class HintlessRedis(Hintless, RedisHarness):
    hintless = ("no right to subscribe",)

    async def open_without_hints(self, how: str) -> LeaseStore:
        rights = ["~*", "+@all", "resetchannels"]
        async with aioredis.Redis.from_url(self._server.url) as client:
            await client.execute_command("ACL", "SETUSER", "mute", "on", f">{PASSWORD}", *rights)  # type: ignore[no-untyped-call]
        url = self._server.url.replace("redis://", f"redis://mute:{PASSWORD}@")
        return self.opened(redis.open(Url.parse(patient(url))))


class TestRedisLeaseRest(LeaseRestSuite):
    harness = HintlessRedis


class HintlessNats(Hintless, NatsHarness):
    hintless = ("a bucket that republishes nothing", "no right to subscribe")
    _guarded: Nats | None = None

    async def open_without_hints(self, how: str) -> LeaseStore:
        if how == "no right to subscribe":
            if self._guarded is None:
                users = {"mute": (PASSWORD, {"subscribe": {"deny": "tenure-leases.>"}})}
                self._guarded = await self.serve(private(Nats, password=PASSWORD, users=users))
            return self.opened(nats.open(Url.parse(patient(self._guarded.url_as(f"mute:{PASSWORD}@")))))
        backend = nats.open(Url.parse(patient(self._server.url_as("", f"prefix={self._foreign}"))))
        client = backend._client
        config = {"name": f"KV_{self._foreign}-leases", "subjects": [f"$KV.{self._foreign}-leases.>"]}
        path = f"STREAM.CREATE.KV_{self._foreign}-leases"
        await client.run(lambda connection: client.call(connection, path, {**config, "max_msgs_per_subject": 1}))
        return self.opened(backend)

    async def start(self) -> None:
        await super().start()
        self._foreign = f"foreign-{secrets.token_hex(4)}"


class TestNatsLeaseRest(LeaseRestSuite):
    harness = HintlessNats


class TestEtcdLeaseRest(LeaseRestSuite):
    harness = EtcdHarness  # who may read and write a name may also watch it


# --- where this process does not listen, or can't ---


class HintlessPostgres(PostgresHarness):
    hintless: ClassVar[tuple[str, ...]] = ("listen=false",)

    async def open_without_hints(self, how: str) -> LeaseStore:
        return (await self._setup.open("?listen=false")).leases


class TestPostgresLeaseRest(LeaseRestSuite):
    harness = HintlessPostgres


class HintlessSqlite(SqliteHarness):
    hintless = ("no socket can be made",)

    async def open_without_hints(self, how: str) -> LeaseStore:
        self._file.with_name(f"{self._file.name}.wake").write_text("in the way")
        return await self.open()


class TestSqliteLeaseRest(LeaseRestSuite):
    harness = HintlessSqlite


# --- which never give hints, or always ---


class HintlessAzure(AzureHarness):
    long_ttl = 60.0
    hintless = ("the service gives none",)

    async def open_without_hints(self, how: str) -> LeaseStore:
        return await self.open()


class TestAzureLeaseRest(LeaseRestSuite):
    harness = HintlessAzure


class LongPeers(PeersHarness):
    long_ttl = TRAITS.ttl_max


class TestPeersLeaseRest(LeaseRestSuite):
    harness = LongPeers


class LongZooKeeper(ZooKeeperHarness):
    long_ttl = 40.0  # of a server whose sessions last up to 60 s


class TestZooKeeperLeaseRest(LeaseRestSuite):
    harness = LongZooKeeper
