"""Queues in RabbitMQ, under the suites, in real time and with faults: a delivery is locked by this process's clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar

from tenure._backends import rabbitmq
from tenure._backends.rabbitmq.queue import QUEUE_TRAITS
from tenure._queue.broker import Broker
from tenure._url import Url
from tenure.testing.conformance import (
    BrokerFaultSuite,
    BrokerSuite,
    ConsumerSuite,
    FaultyBroker,
    GiveUp,
    LiveMessagesSuite,
    LockExpirySuite,
    QueueHarness,
)
from tenure.testing.faultproxy import FaultProxy
from tests.servers import RabbitMQ, shared

PATIENCE = 8.0  # seconds; the clients' timeout; no request here stays unanswered


class RabbitQueueHarness(QueueHarness):
    traits = QUEUE_TRAITS
    counts_bytes = True
    lock = 3.0
    backlog = 300
    any_client_settles = False
    long = 5.0
    options: ClassVar[Sequence[tuple[str, str]]] = ()
    """The server's options; other options start another server."""

    async def start(self) -> None:
        self._server = shared(RabbitMQ, options=tuple(self.options))
        self._proxies: dict[int, FaultProxy] = {}
        self._backends: list[rabbitmq.RabbitBackend] = []

    async def open(self) -> Broker:
        proxy = await FaultProxy("127.0.0.1", self._server.port).__aenter__()
        backend = rabbitmq.open(Url.parse(f"amqp://{proxy.host}:{proxy.port}/?timeout={PATIENCE}"))
        self._backends.append(backend)
        broker = FaultyBroker.around(backend.broker)
        self._proxies[id(broker)] = proxy
        return broker

    async def close(self) -> None:
        while self._backends:
            await self._backends.pop().close()
        for proxy in self._proxies.values():
            await proxy.__aexit__(None, None, None)
        self._proxies.clear()


class FaultyRabbitHarness(RabbitQueueHarness):
    """With faults of the connection, of rights, and of the server."""

    options = (("loopback_users", "none"),)  # as by default; but no other test uses such a server: it is killed
    faults = frozenset({"lose_answer", "cut", "late", "away", "restart"})

    def lose_answer(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        assert isinstance(broker, FaultyBroker)
        return broker.lose_answer()

    @asynccontextmanager
    async def cut(self, broker: Broker) -> AsyncIterator[None]:
        proxy = self._proxies[id(broker)]
        proxy.reset()
        proxy.refuse()
        try:
            yield
        finally:
            proxy.heal()

    def late(self, broker: Broker) -> AbstractAsyncContextManager[GiveUp]:
        # Held back before it is sent: on one connection, no request can overtake another.
        assert isinstance(broker, FaultyBroker)
        return broker.late()

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Take away access to the virtual host, and close the connections: they remember their rights."""
        await asyncio.to_thread(self._server.ctl, "clear_permissions", "guest")
        await asyncio.to_thread(self._server.ctl, "close_all_connections", "revoked by the test")
        try:
            yield
        finally:
            await asyncio.to_thread(self._server.ctl, "set_permissions", "guest", ".*", ".*", ".*")

    async def restart(self) -> None:
        """Kill the server, and start it again with its data."""
        await self.close()
        # RabbitMQ notes within half a second which quorum queues it has: a kill before that loses a new one.
        await asyncio.sleep(1.0)
        self._server.kill()
        self._server.start()


class TestRabbitQueues(BrokerSuite):
    harness = RabbitQueueHarness


class TestRabbitLiveMessages(LiveMessagesSuite):
    harness = RabbitQueueHarness


class TestRabbitLocks(LockExpirySuite):
    harness = RabbitQueueHarness


class TestRabbitConsumers(ConsumerSuite):
    harness = RabbitQueueHarness


class TestRabbitQueueFaults(BrokerFaultSuite):
    harness = FaultyRabbitHarness
