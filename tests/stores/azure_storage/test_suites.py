"""Leases and queues in Azure Storage, under the suites, on an Azurite with a moved clock."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import ClassVar, cast

import pytest
from azure.storage.blob.aio import BlobLeaseClient, BlobServiceClient
from azure.storage.queue.aio import QueueServiceClient

from tenure._backends import azure_storage
from tenure._backends.azure_storage import leases, settling
from tenure._backends.azure_storage.names import POISON_SUFFIX, blob_of, queue_of
from tenure._backends.azure_storage.queue import QUEUE_TRAITS
from tenure._election.store import LeaseStore
from tenure._queue.broker import Broker
from tenure._queue.checks import DEAD_SUFFIX
from tenure._runtime.clock import Clock
from tenure._url import Url
from tenure.testing._conformance.queues.steps import place
from tenure.testing.conformance import (
    BrokerFaultSuite,
    BrokerSuite,
    ConsumerSuite,
    FaultyBroker,
    FaultyLeaseStore,
    GiveUp,
    LeaseFaultSuite,
    LeaseHarness,
    LeaseStoreSuite,
    LiveMessagesSuite,
    LockExpirySuite,
    QueueHarness,
    ShortUseSuite,
    StoredAgainSuite,
)
from tenure.testing.faultproxy import Begin, Direction, FaultProxy, Kill, hold, kill, late
from tests.servers import Azurite, shared
from tests.servers.gate import HttpGate, Refusal


class MovedClock:
    """This process's clock, moved together with the server's."""

    def __init__(self) -> None:
        self.by = 0.0

    def now(self) -> float:
        return time.monotonic() + self.by


class Proxied:
    """A proxy to Azurite, which can be cut; and the backend that uses it."""

    def __init__(self, blob_port: int, queue_port: int) -> None:
        self.proxies = FaultProxy("127.0.0.1", blob_port), FaultProxy("127.0.0.1", queue_port)

    async def open(self, clock: Clock | None = None) -> azure_storage.AzureBackend:
        blob, queue = [await proxy.__aenter__() for proxy in self.proxies]
        url = f"azurite://127.0.0.1:{blob.port}?queue_port={queue.port}&timeout=8"
        self.backend = azure_storage.open(Url.parse(url), clock=clock)
        return self.backend

    @asynccontextmanager
    async def cut(self) -> AsyncIterator[None]:
        for proxy in self.proxies:
            proxy.reset()
            proxy.refuse()
        try:
            yield
        finally:
            for proxy in self.proxies:
                proxy.heal()

    @asynccontextmanager
    async def stall(self) -> AsyncIterator[None]:
        """Pass nothing on; inside the block, clients have a short timeout."""
        account = self.backend._account
        patient, account.options = account.options, replace(account.options, timeout=0.5)
        for proxy in self.proxies:
            proxy.stall()
        try:
            yield
        finally:
            for proxy in self.proxies:
                proxy.heal()
            account.options = patient

    async def close(self) -> None:
        await self.backend.close()
        for proxy in self.proxies:
            await proxy.__aexit__(None, None, None)


LEASE_EDITS: dict[str, dict[str, str]] = {
    "metadata that is no JSON": {"tenure_metadata": "{"},
    "metadata of other types": {"tenure_metadata": '{"x": [1]}'},
    "deep metadata": {"tenure_metadata": "[" * 4_000},
    "the last token": {"tenure_token": str(2**63 - 1)},
    "a token as text": {"tenure_token": "new"},
    "a token of many digits": {"tenure_token": "9" * 5_000},
    "an odd holder": {"tenure_holder": "%ff%00"},
    "odd fields": {"tenure_ttl": "long", "tenure_resign": "yes", "tenure_until": "1e300"},
}
"""What an administrator may set in the metadata of a lease's blob, by what that is."""

TEXTS = {
    "a deep record": "eA==." + '{"history": ' + "[" * 5_000,
    "a huge count": 'eA==.{"reason": "x", "deliveries": 1000000000000}',
    "a huge uncounted": 'eA==.{"uncounted": 1000000000000}',
    "endless numbers": 'eA==.{"enqueued_at": 1e999, "ttl": NaN, "sequence": Infinity}',
    "a late time": 'eA==.{"enqueued_at": 249999999999, "dead_at": 249999999999}',
    "a forged sequence": 'eA==.{"sequence": 7, "id": "forged"}',
    "the same forged sequence": 'eQ==.{"sequence": 7, "id": "forged"}',
    "headers of other types": 'eA==.{"headers": {"x": [1], "y": null, "tenure-z": 1}}',
    "a history of other types": 'eA==.{"history": [[1], 7, {"number": -1, "at": 0, "outcome": "x", "error": null}]}',
    "a mark of ours": 'eA==.{"moving": true, "reason": "forged"}',
    "plain text": "a < b & c: \u202e",
    "no text": "",
}
"""What another program may write into a queue, by what that is."""


class AzureHarness(LeaseHarness):
    traits = azure_storage.TRAITS
    foreign = tuple(LEASE_EDITS)
    ttl = 60.0  # the maximum
    faults = frozenset({"lose_answer", "cut", "late", "hold"})

    async def start(self) -> None:
        self._server = shared(Azurite, turnable=True)
        self._ports = self._server.blob.port, self._server.queue.port
        self._ways: list[Proxied] = []
        # On a busy machine, the winner among twenty may write its term so late that it counts as a foreign holder;
        # there are none here.
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(leases, "TERM_CHECKS", (*leases.TERM_CHECKS, 1.0, 2.0, 2.0))

    async def open(self) -> LeaseStore:
        way = Proxied(*self._ports)
        self._ways.append(way)
        return cast(LeaseStore, FaultyLeaseStore((await way.open()).leases))

    async def close(self) -> None:
        self._patch.undo()
        for way in self._ways:
            await way.close()

    async def pass_time(self, seconds: float) -> None:
        self._server.turn(seconds)

    async def write_foreign(self, name: str, how: str) -> None:
        async with BlobServiceClient.from_connection_string(self._server.connection_string) as service:
            blob = service.get_container_client("leases").get_blob_client(blob_of(name))
            found = await blob.get_blob_properties()
            await BlobLeaseClient(blob).break_lease(lease_break_period=0)
            await blob.set_blob_metadata({**found.metadata, **LEASE_EDITS[how]})

    def lose_answer(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        assert isinstance(store, FaultyLeaseStore)
        return store.lose_answer()

    def cut(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        assert isinstance(store, FaultyLeaseStore)
        return next(way for way in self._ways if way.backend.leases is store.store).cut()

    def late(self, store: LeaseStore) -> AbstractAsyncContextManager[GiveUp]:
        assert isinstance(store, FaultyLeaseStore)
        return late(*next(way for way in self._ways if way.backend.leases is store.store).proxies)

    def hold(self, store: LeaseStore, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        assert isinstance(store, FaultyLeaseStore)
        way = next(way for way in self._ways if way.backend.leases is store.store)
        return hold(*way.proxies, direction=direction, decides=_claims)


def _claims(request: bytes) -> bool:
    """Whether it is the last request of an acquisition, under the lease that was taken before; or of a renewal."""
    line, _, headers = request.partition(b"\r\n")
    return line.startswith(b"PUT ") and (b"comp=metadata" in line or b"x-ms-lease-action: renew" in headers)


class TestAzureLeases(LeaseStoreSuite):
    harness = AzureHarness


class TestAzureLeaseFaults(LeaseFaultSuite):
    harness = AzureHarness


class BlackHoleHarness(AzureHarness):
    """Cut off silently: no reset and no answer; requests arrive when the cut ends."""

    faults = frozenset({"lose_answer", "cut"})

    def cut(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        assert isinstance(store, FaultyLeaseStore)
        return next(way for way in self._ways if way.backend.leases is store.store).stall()


class TestAzureLeasesInABlackHole(LeaseFaultSuite):
    harness = BlackHoleHarness


class Gates:
    """A gate before each of Azurite's services."""

    def __init__(self, server: Azurite) -> None:
        self._gates = HttpGate(server.blob.port), HttpGate(server.queue.port)

    async def open(self) -> tuple[int, int]:
        blob, queue = [await gate.__aenter__() for gate in self._gates]
        return blob.port, queue.port

    async def close(self) -> None:
        for gate in self._gates:
            await gate.__aexit__(None, None, None)

    @asynccontextmanager
    async def answering(self, refusal: Refusal) -> AsyncIterator[None]:
        for gate in self._gates:
            gate.refusal = refusal
        try:
            yield
        finally:
            for gate in self._gates:
                gate.heal()

    def without_rights(self) -> AbstractAsyncContextManager[None]:
        return self.answering(lambda line: (403, "AuthorizationPermissionMismatch"))


class GatedHarness(AzureHarness):
    """With revoked rights for a while, and a blob that can't be accessed."""

    faults = frozenset({"away", "cut_one"})

    async def start(self) -> None:
        await super().start()
        self._gates = Gates(self._server)
        self._ports = await self._gates.open()

    async def close(self) -> None:
        await super().close()
        await self._gates.close()

    def away(self) -> AbstractAsyncContextManager[None]:
        return self._gates.without_rights()

    def cut_one(self, store: LeaseStore, name: str) -> AbstractAsyncContextManager[None]:
        return self._gates.answering(lambda line: (503, "ServerBusy") if f"/{blob_of(name)}?" in line else None)


class TestAzureLeasesGated(LeaseFaultSuite):
    harness = GatedHarness


class AzureQueueHarness(QueueHarness):
    traits = QUEUE_TRAITS
    keeps_whole_history = False
    foreign = tuple(TEXTS)
    edits = ("delete", "forget")
    lock = 200.0  # seconds of the server's clock, which also runs by itself; much longer than a test
    uses = 40
    spare = 8  # a request has some tasks of the driver
    receives_in_order = False  # those of one call are sent side by side
    backlog = 50  # each is a request of its own
    faults = frozenset({"lose_answer", "cut", "late", "hold", "kill"})
    copies_after_kill: ClassVar[Mapping[str, int]] = {"redrive": 5}  # see docs/azure.md

    async def start(self) -> None:
        self._server = shared(Azurite, turnable=True)
        self._ports = self._server.blob.port, self._server.queue.port
        self._clock = MovedClock()
        self._ways: dict[Broker, Proxied] = {}
        # On a busy machine one verdict of three may have its answer a second after the others. Longer delays are
        # tested in tests/stores/azure_storage/test_azure.py.
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(settling, "STRAGGLER_WAIT", 20.0)

    async def open(self) -> Broker:
        way = Proxied(*self._ports)
        broker = FaultyBroker.around((await way.open(self._clock)).broker)
        self._ways[broker] = way
        return broker

    async def close(self) -> None:
        self._patch.undo()
        for way in self._ways.values():
            await way.close()

    async def pass_time(self, seconds: float) -> None:
        self._server.turn(seconds)
        self._clock.by += seconds

    async def left_behind(self) -> dict[str, int]:
        async with QueueServiceClient.from_connection_string(self._server.connection_string) as service:
            return {"queues": len([one async for one in service.list_queues()])}

    async def write_foreign(self, queue: str, how: str) -> None:
        home = queue.removesuffix(DEAD_SUFFIX)
        await place(next(iter(self._ways)), self, queue, f"foreign: {how}".encode())  # so that the queue is there
        name = queue_of(home) + (POISON_SUFFIX if queue != home else "")
        async with QueueServiceClient.from_connection_string(self._server.connection_string) as service:
            await service.get_queue_client(name).send_message(TEXTS[how])

    async def edit(self, queue: str, how: str) -> None:
        async with QueueServiceClient.from_connection_string(self._server.connection_string) as service:
            client = service.get_queue_client(queue_of(queue))
            await (client.delete_queue() if how == "delete" else client.set_queue_metadata({}))

    def lose_answer(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        assert isinstance(broker, FaultyBroker)
        return broker.lose_answer()

    def cut(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        return self._ways[broker].cut()

    def kill(self, broker: Broker, after: int) -> Kill:
        return kill(*self._ways[broker].proxies, after=after)

    def late(self, broker: Broker) -> AbstractAsyncContextManager[GiveUp]:
        return late(*self._ways[broker].proxies)

    def hold(self, broker: Broker, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        return hold(*self._ways[broker].proxies, direction=direction)


class TestAzureQueues(BrokerSuite):
    harness = AzureQueueHarness


class TestAzureLiveMessages(LiveMessagesSuite):
    harness = AzureQueueHarness


class TestAzureLocks(LockExpirySuite):
    harness = AzureQueueHarness


class TestAzureConsumers(ConsumerSuite):
    harness = AzureQueueHarness


class TestAzureShortUse(ShortUseSuite):
    harness = AzureQueueHarness


class TestAzureStoredAgain(StoredAgainSuite):
    harness = AzureQueueHarness


class TestAzureQueueFaults(BrokerFaultSuite):
    harness = AzureQueueHarness


class GatedQueueHarness(AzureQueueHarness):
    """With revoked rights for a while."""

    faults = frozenset({"away"})

    async def start(self) -> None:
        await super().start()
        self._gates = Gates(self._server)
        self._ports = await self._gates.open()

    async def close(self) -> None:
        await super().close()
        await self._gates.close()

    def away(self) -> AbstractAsyncContextManager[None]:
        return self._gates.without_rights()


class TestAzureQueuesGated(BrokerFaultSuite):
    harness = GatedQueueHarness
