"""Queues on three servers of NATS, under the suites: each client uses another one, and each queue is kept on all.

``TENURE_LONG=1`` runs the suites whose tests mostly wait for the ends of locks, or have little to do with servers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from tenure._backends.nats.client import Client
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.errors import NO_PEERS, Refusal
from tenure._backends.nats.places import SERIALIZABLE
from tenure._queue.broker import Broker
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, LAPSED, Settled, Settlement
from tenure.errors import Unavailable
from tenure.testing.conformance import (
    BrokerFaultSuite,
    BrokerSuite,
    ConsumerSuite,
    FaultyBroker,
    LiveMessagesSuite,
    LockExpirySuite,
    QueueHarness,
)
from tests.long import LONG
from tests.servers import NatsCluster, shared
from tests.servers.turned_process import CAN_TURN
from tests.stores.nats.test_queue_suites import PATIENCE, NatsQueueHarness, Way


class NatsClusterQueueHarness(NatsQueueHarness):
    lock = 15.0 if CAN_TURN else 3.0  # clocks of a cluster are turned in steps
    lock_in_rounds = 30.0 if CAN_TURN else None
    faults = NatsQueueHarness.faults - {"hold", "kill"}  # so short a lock may be over on a busy machine; each is real
    backlog = 60  # of which each message is written several times, one after another
    foreign = ()  # one server shows it
    forwards = False  # so does it that
    patience: ClassVar[float] = PATIENCE

    async def start(self) -> None:
        self._cluster = self._turned = shared(NatsCluster)
        if self._cluster.version < SERIALIZABLE:
            pytest.skip("tenure makes no queue with replicas on this version; see tests/stores/nats/test_queues.py")
        # One that was slow to report is taken for offline until its next report, and gets no stream.
        await asyncio.to_thread(self._cluster.start)
        self._ports = deque(node.port for node in self._cluster.nodes)
        self.begin()

    @property
    def ahead(self) -> float:
        return self._cluster.nodes[0].ahead

    async def open(self) -> Broker:
        way = Way(self._ports[0], self.login, self._clock, f"?timeout={self.patience}&replicas=3")
        self._ports.rotate()  # the next client uses another server
        broker = FaultyBroker.around(await way.open())
        self._ways[broker] = way
        return broker


class DeepNatsClusterQueueHarness(NatsClusterQueueHarness):
    """Its backlog is larger than a page of a purge, so that others come between two pages."""

    backlog = 1_500


class KilledNatsClusterQueueHarness(NatsClusterQueueHarness):
    """One server after another is killed."""

    faults = frozenset({"restart"})
    lock = 15.0 if CAN_TURN else 4.0  # a delay of some of them outlasts a restart

    async def restart(self) -> None:
        """Kill the server that the newest client uses, and restart it when the others have a leader."""
        await self.leave()
        await asyncio.to_thread(self._replace, self._ports[-1])

    def _replace(self, port: int) -> None:
        killed = next(node for node in self._cluster.nodes if node.port == port)
        killed.kill()
        try:
            self._cluster.leader()
        finally:
            self._cluster.start()
            self._cluster.until_led()


class PausedNatsClusterQueueHarness(NatsClusterQueueHarness):
    """All servers are stopped; locks outlast that."""

    faults = frozenset({"away"})
    lock = 60.0
    patience = 1.0

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        for node in self._cluster.nodes:
            node.pause()
        try:
            async with self._clock.hurried():
                yield
        finally:
            for node in self._cluster.nodes:
                node.resume()
            await asyncio.to_thread(self._cluster.until_led)


class TestNatsClusterQueues(BrokerSuite):
    harness = NatsClusterQueueHarness

    async def test_a_claim_finds_what_another_server_has_acknowledged(self, harness: QueueHarness, name: str) -> None:
        brokers = [await harness.open() for _ in range(3)]
        for number in range(60):
            sender, receiver = brokers[number % 3], brokers[(number + 1) % 3]
            await sender.send(name, [Outgoing(b"%d" % number), Outgoing(b"more")])
            claim = await receiver.receive(name, 10, harness.lock)
            assert [one.body for one in claim.deliveries] == [b"%d" % number, b"more"]
            answers = await receiver.settle([Settlement(one, COMPLETE) for one in claim.deliveries])
            assert answers == [Settled()] * 2

    async def test_ids_sent_at_the_same_time_are_kept_once(self, harness: QueueHarness, name: str) -> None:
        brokers = [await harness.open() for _ in range(3)]
        await brokers[0].declare(name, {"lock": harness.lock})
        for number in range(20):
            same = [Outgoing(b"a", id=f"{number}-{which}") for which in range(5)]
            await asyncio.gather(*(one.send(name, same) for one in brokers))
        assert (await brokers[0].stats(name)).ready == 100

    async def test_a_claim_that_gets_no_answer_finds_that_the_queue_was_deleted(
        self, harness: QueueHarness, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(b"a")])
        await broker.receive(name, 1, harness.lock)
        await other.delete(name, force=True)
        publish, lost = Connection.publish, list[str]()

        async def lose(connection: Connection, subject: str, body: bytes = b"", **more: Any) -> None:
            if not lost and f"$JS.API.CONSUMER.MSG.NEXT.tenure_{name}." in subject:
                lost.append(subject)  # the server that gets it has just deleted the consumer
            else:
                await publish(connection, subject, body, **more)

        monkeypatch.setattr(Connection, "publish", lose)
        assert list((await broker.receive(name, 1, harness.lock)).deliveries) == []
        assert lost

    @pytest.mark.parametrize("becomes", ["lost", "late"])
    async def test_what_is_sent_past_the_deletion_of_its_queue_is_sent_again(
        self, harness: QueueHarness, name: str, becomes: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(b"first")])
        await other.delete(name, force=True)
        publish, past = Connection.publish, list[str]()

        async def lose(connection: Connection, subject: str, body: bytes = b"", **more: Any) -> None:
            if body == b"second":
                past.append(subject)
                if len(past) == 1:  # the server that gets it sends it to the one that has just deleted the stream
                    return
                if becomes == "late" and len(past) == 2:  # there is a new one when it arrives
                    await publish(connection, subject, body)
            await publish(connection, subject, body, **more)

        monkeypatch.setattr(Connection, "publish", lose)
        ids = await broker.send(name, [Outgoing(b"second")])
        assert len(past) > 1
        assert len(set(past)) == 1
        claim = await other.receive(name, 2, harness.lock)
        assert [one.body for one in claim.deliveries] == [b"second"]
        assert [one.id for one in claim.deliveries] == ids

    async def test_a_verdict_past_the_deletion_of_its_queue_comes_too_late(
        self, harness: QueueHarness, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broker, other = await harness.open(), await harness.open()
        await broker.send(name, [Outgoing(b"a"), Outgoing(b"b")])
        held = (await broker.receive(name, 2, harness.lock)).deliveries
        await other.delete(name, force=True)
        publish, lost = Connection.publish, list[str]()

        async def lose(connection: Connection, subject: str, body: bytes = b"", **more: Any) -> None:
            if subject.startswith("$JS.ACK."):
                lost.append(subject)
            else:
                await publish(connection, subject, body, **more)

        monkeypatch.setattr(Connection, "publish", lose)
        assert list(await broker.settle([Settlement(one, COMPLETE) for one in held])) == [LAPSED] * 2
        assert lost

    async def test_a_queue_is_made_when_each_server_is_heard_of_again(
        self, harness: QueueHarness, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broker = await harness.open()
        call, refused = Client.call, list[str]()

        async def refuse(client: Client, connection: Connection, path: str, *given: Any, **more: Any) -> Any:
            if path.startswith("STREAM.CREATE.") and len(refused) < 3:
                refused.append(path)
                raise Refusal(NO_PEERS, "no suitable peers for placement")
            return await call(client, connection, path, *given, **more)

        monkeypatch.setattr(Client, "call", refuse)
        await broker.send(name, [Outgoing(b"a")])
        assert len(refused) == 3
        refused.clear()
        monkeypatch.setattr(Client, "pauses", lambda *_, **__: iter(()))
        with pytest.raises(Unavailable, match="too few servers at present"):
            await broker.send(f"{name}-other", [Outgoing(b"a")])


class TestNatsClusterQueueFaults(BrokerFaultSuite):
    harness = NatsClusterQueueHarness


class TestNatsClusterQueuesKilled(BrokerFaultSuite):
    harness = KilledNatsClusterQueueHarness


class TestNatsClusterQueuesPaused(BrokerFaultSuite):
    harness = PausedNatsClusterQueueHarness
    # What is sent to a server that is stopped is stored when it goes on.
    test_the_store_is_used_again_when_it_is_back = None  # type: ignore[assignment]


long_only = pytest.mark.skipif(not LONG, reason="it takes long: set TENURE_LONG=1")


@long_only
class TestNatsClusterLiveMessages(LiveMessagesSuite):
    harness = DeepNatsClusterQueueHarness


@long_only
class TestNatsClusterLocks(LockExpirySuite):
    harness = DeepNatsClusterQueueHarness


@long_only
class TestNatsClusterConsumers(ConsumerSuite):
    harness = NatsClusterQueueHarness
