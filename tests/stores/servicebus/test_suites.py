"""Queues on Service Bus under the suites, on a look-alike with a moved clock."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cached_property
from typing import Any, ClassVar

import pytest
from proton import char, decimal32, timestamp, ulong

from tenure._backends import servicebus
from tenure._backends.servicebus import QUEUE_TRAITS
from tenure._backends.servicebus.codec import Encoded
from tenure._backends.servicebus.looking import looked_at
from tenure._backends.servicebus.message_format import DEATH, DELIVERIES, DESCRIPTION, HISTORY, REASON
from tenure._backends.servicebus.names import Path, entity_of
from tenure._queue.broker import Broker
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.verdicts import DeadLetter
from tenure._url import Url
from tenure.testing._conformance.queues.steps import receive, settle
from tenure.testing.conformance import (
    BrokerCapacitySuite,
    BrokerFaultSuite,
    BrokerSuite,
    ConsumerSuite,
    Deviation,
    FaultyBroker,
    GiveUp,
    LiveMessagesSuite,
    LockExpirySuite,
    QueueHarness,
    ShortUseSuite,
    StoredAgainSuite,
)
from tenure.testing.faultproxy import FaultProxy, Kill, kill
from tests.durations import until
from tests.servers import ServiceBus, private, shared
from tests.servers.servicebus import NAMESPACE
from tests.stores.servicebus.opened import MovedClock, inside, look_shortly
from tests.stores.servicebus.raw import message


class Proxied:
    """Proxies to the look-alike, which can be cut; and the backend that uses them."""

    def __init__(self, server: ServiceBus, clock: MovedClock) -> None:
        self._clock = clock
        self.amqp, self.admin = FaultProxy("127.0.0.1", server.port), FaultProxy("127.0.0.1", server.admin_port)

    async def open(self) -> Broker:
        for proxy in (self.amqp, self.admin):
            await proxy.__aenter__()
        url = f"servicebus://127.0.0.1:{self.amqp.port}?emulator=yes&admin_port={self.admin.port}&create=yes&timeout=8"
        self.backend = servicebus.open(Url.parse(url), clock=self._clock)
        return self.backend.broker

    @asynccontextmanager
    async def cut(self) -> AsyncIterator[None]:
        for proxy in (self.amqp, self.admin):
            proxy.reset()
            proxy.refuse()
        try:
            yield
        finally:
            for proxy in (self.amqp, self.admin):
                proxy.heal()

    async def close(self) -> None:
        await self.backend.close()
        for proxy in (self.amqp, self.admin):
            await proxy.__aexit__(None, None, None)


MESSAGES: dict[str, tuple[dict[Any, Any], list[Any] | None]] = {
    "a history of another form": ({HISTORY: '[[Infinity,0,"x",null]]'}, None),
    "a deep history": ({HISTORY: "[" * 20_000}, None),
    "a history that is no text": ({HISTORY: [1, {"x": 2}]}, None),
    "a huge count": ({DELIVERIES: 2**62}, None),
    "a count as text": ({DELIVERIES: "many"}, None),
    "an odd death": ({DEATH: '[1e999, -1, "x"]', REASON: 7, DESCRIPTION: [1]}, None),
    "values of other types": ({"c": char("x"), "d": decimal32(5), "l": [1, None], "t": timestamp(2**62)}, None),
    "names of other types": ({"x" * 300: 1, "\u202e": "y"}, None),
    "a user": ({}, ["id", b"\xffuser"]),
    "an id of another type": ({}, [ulong(2**64 - 1)]),
}
"""What another program may write beside a body, by what that is: application properties and properties."""


class ServiceBusHarness(QueueHarness):
    traits = QUEUE_TRAITS
    keeps_whole_history = False
    lock_in_rounds = 60.0  # each session has a connection of its own: a busy machine opens them in over ten seconds
    deviations = (
        Deviation(
            "a delay and a redrive send a copy",
            "the service can't delay a message that it has, and moves none back, so it is sent again",
            ("sequence",),
            r"^first .*with delay$|^redriven",
        ),
        Deviation(
            "a delayed message of a session waits in this process",
            "a copy would come after the others of its session",
            ("place",),
            r"^in a session .*with delay$",
        ),
        Deviation(
            "the last delivery can't be deferred",
            "the service counts a deferral, and moves a message to the dead letters when its last delivery is counted",
            ("place", "answer"),
            r"most \d: defer$",
        ),
        Deviation(
            "a deferred message that is given back counts",
            "it is settled by its lock token, and for that the service has no verdict that takes the delivery back",
            ("place", "count", "history"),
            r"^deferred .*give back$",
        ),
        Deviation(
            "the moment at which a lock's end lets a message die is not known",
            "the service moves it, and notes no moment with it; no client is asked then",
            ("dead_at", "times"),
            r"(most \d|lowered to \d|expires under the lock): .*(lock ends|release)$|^dead lock ends,",
        ),
        Deviation(
            "a dead letter that the service has moved counts each look at it whose lock ends",
            "the service counts on among the dead letters, and has noted no count when it moved it",
            ("count", "received count", "description", "history", "error"),
            r"^dead (lock ends|wait),",
        ),
        Deviation(
            "no delay for dead letters",
            "the service takes no message for the dead letters, so no scheduled copy either",
            ("due",),
            r"^dead .* with delay$",
        ),
    )
    foreign = tuple(MESSAGES)
    edits = ("delete", "forget")
    forwards = True
    lock = 30.0  # that of a queue that is created without settings
    uses = 30
    backlog = 300
    faults = frozenset({"lose_answer", "cut", "late", "kill"})
    copies_after_kill: ClassVar[Mapping[str, int]] = {"redrive": 5}  # see docs/servicebus.md
    any_client_settles = False

    async def start(self) -> None:
        self._clock = MovedClock()
        self._ways: dict[Broker, Proxied] = {}
        self._patch = pytest.MonkeyPatch()
        look_shortly(self._patch)

    @cached_property
    def _server(self) -> ServiceBus:
        return shared(ServiceBus)

    async def left_behind(self) -> dict[str, int]:
        return {"links": int(await asyncio.to_thread(self._server.control, "links"))}

    async def write_foreign(self, queue: str, how: str) -> None:
        broker = next(iter(self._ways.values())).backend.broker
        home = queue.removesuffix(DEAD_SUFFIX)
        await broker.settings(home)  # it creates the queue
        raw = message(f"foreign: {how}".encode(), *MESSAGES[how])
        await inside(broker, broker._sending.send(home, [Encoded(raw)]))
        if queue != home:

            async def is_dead() -> bool:  # one with a huge count dies by itself
                await settle(broker, await receive(broker, home, self), DeadLetter("theirs"))
                return not (await broker.stats(home)).ready

            await until(is_dead)

    async def edit(self, queue: str, how: str) -> None:
        broker = next(iter(self._ways.values())).backend.broker
        path = Path(entity_of(queue))
        if how == "delete":
            await inside(broker, broker.administration.delete(path))
        else:
            await inside(broker, broker.administration.update(path, lambda _: {"user_metadata": ""}))

    async def forward(self, source: str, target: str) -> None:
        broker = next(iter(self._ways.values())).backend.broker
        home = source.removesuffix(DEAD_SUFFIX)

        async def forward() -> None:
            path = await broker._places.existing(source)
            [(_, found)] = [one async for one in looked_at(broker._namespace, path, home)]
            application = {str(name): each for name, each in found.application.items()}
            await broker._sending.send(target, [Encoded(message(found.data[0], application, [found.properties[0]]))])

        await inside(broker, forward())

    async def open(self) -> Broker:
        way = Proxied(self._server, self._clock)
        broker = FaultyBroker.around(await way.open())
        self._ways[broker] = way
        return broker

    async def close(self) -> None:
        await asyncio.gather(*(way.close() for way in self._ways.values()))
        self._ways.clear()
        self._patch.undo()

    async def pass_time(self, seconds: float) -> None:
        await asyncio.to_thread(self._server.turn, seconds)
        self._clock.by += seconds

    def lose_answer(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        assert isinstance(broker, FaultyBroker)
        return broker.lose_answer()

    def kill(self, broker: Broker, after: int) -> Kill:
        way = self._ways[broker]
        return kill(way.amqp, way.admin, after=after)

    def cut(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        return self._ways[broker].cut()

    def late(self, broker: Broker) -> AbstractAsyncContextManager[GiveUp]:
        # A connection carries the requests of a queue one after the other: one that is held would hold up the others.
        assert isinstance(broker, FaultyBroker)
        return broker.late()


class TestServiceBusQueues(BrokerSuite):
    harness = ServiceBusHarness


class TestServiceBusLiveMessages(LiveMessagesSuite):
    harness = ServiceBusHarness


class TestServiceBusLocks(LockExpirySuite):
    harness = ServiceBusHarness


class TestServiceBusConsumers(ConsumerSuite):
    harness = ServiceBusHarness


class TestServiceBusShortUse(ShortUseSuite):
    harness = ServiceBusHarness


class TestServiceBusStoredAgain(StoredAgainSuite):
    harness = ServiceBusHarness


class TestServiceBusQueueFaults(BrokerFaultSuite):
    harness = ServiceBusHarness


class PrivateHarness(ServiceBusHarness):
    """A server of its own, which may be disturbed; only a client starts it, as most tests need other faults."""

    @cached_property
    def _server(self) -> ServiceBus:
        return private(ServiceBus)

    async def close(self) -> None:
        await super().close()
        if "_server" in vars(self):
            await asyncio.to_thread(self._server.close)


class DisturbedHarness(PrivateHarness):
    """With a server that is killed, and rights that are revoked for a while."""

    faults = frozenset({"restart", "away"})

    async def restart(self) -> None:
        await asyncio.gather(*(way.close() for way in self._ways.values()))
        self._ways.clear()
        await asyncio.to_thread(self._server.kill)
        await asyncio.to_thread(self._server.start)

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self._server.control, "revoke", "1")
        try:
            yield
        finally:
            await asyncio.to_thread(self._server.control, "revoke", "0")


class TestServiceBusDisturbed(BrokerFaultSuite):
    harness = DisturbedHarness


class StrainedHarness(PrivateHarness):
    faults = frozenset({"full", "slow"})
    drains_when_full = False  # to abandon with a delay, or to redrive, is to send a copy

    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self._server.control, "full", "1")
        try:
            yield
        finally:
            await asyncio.to_thread(self._server.control, "full", "0")

    @asynccontextmanager
    async def slow(self, broker: Broker, round_trip: float) -> AsyncIterator[None]:
        way = self._ways[broker]
        for proxy in (way.amqp, way.admin):
            proxy.delay(round_trip / 2)
        try:
            yield
        finally:
            for proxy in (way.amqp, way.admin):
                proxy.delay(0.0)

    async def reset(self, broker: Broker) -> None:
        self._ways[broker].amqp.reset()
        self._ways[broker].admin.reset()


class TestServiceBusStrain(BrokerCapacitySuite):
    harness = StrainedHarness


if os.environ.get(NAMESPACE):

    class RealHarness(QueueHarness):
        """A real namespace, or the official emulator. Time is real there, so this takes hours."""

        traits = QUEUE_TRAITS
        deviations = ServiceBusHarness.deviations
        lock = 30.0
        backlog = 300
        faults = frozenset({"lose_answer"})

        async def start(self) -> None:
            self._opened: list[servicebus.ServiceBusBackend] = []

        async def open(self) -> Broker:
            backend = servicebus.open(Url.parse(f"servicebus:?connection_string_env={NAMESPACE}&create=yes"))
            self._opened.append(backend)
            return FaultyBroker.around(backend.broker)

        async def close(self) -> None:
            await asyncio.gather(*(backend.close() for backend in self._opened))

        def lose_answer(self, broker: Broker) -> AbstractAsyncContextManager[None]:
            assert isinstance(broker, FaultyBroker)
            return broker.lose_answer()

    @pytest.mark.timeout(3_600)
    class TestServiceBusForReal(BrokerSuite, LiveMessagesSuite, LockExpirySuite, BrokerFaultSuite):
        harness = RealHarness
