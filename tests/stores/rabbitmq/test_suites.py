"""Queues in RabbitMQ, under the suites, and with faults.

A delivery is locked by this process's clock, which stands still but for the time that a test lets pass. Delays and the
expiry of messages are the server's: for a test that has begun one, the server's clocks are turned, too.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime
from typing import Any, ClassVar, cast

import pika
import pytest

from tenure._backends import rabbitmq
from tenure._backends.rabbitmq.held_channels import HeldChannels
from tenure._backends.rabbitmq.names import amqp_name, dead_letters_name
from tenure._backends.rabbitmq.queue import QUEUE_TRAITS
from tenure._backends.rabbitmq.receiving import AT_ONCE, UNITS_MAX
from tenure._queue.broker import Broker
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import Abandon
from tenure._url import Url
from tenure.testing import ManualClock
from tenure.testing._conformance.queues.steps import place
from tenure.testing.conformance import (
    BrokerFaultSuite,
    BrokerSuite,
    ConsumerSuite,
    FaultyBroker,
    GiveUp,
    LiveMessagesSuite,
    LockExpirySuite,
    QueueHarness,
    ShortUseSuite,
    StoredAgainSuite,
)
from tenure.testing.faultproxy import Begin, Direction, FaultProxy, Kill, hold, kill
from tests.clocks import ring_alarms
from tests.durations import ANSWERED_WITHIN, until
from tests.servers import RabbitMQ, shared
from tests.servers.turned_process import CAN_TURN
from tests.stores.rabbitmq.opened import ended_locks

HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"


class NotingBroker(FaultyBroker):
    """Calls *note* before a request that gives the server something to do at a time."""

    def __init__(self, broker: Broker, note: Callable[[], None]) -> None:
        super().__init__(broker)
        self._note = note

    async def _ask(self, request: Any, *args: Any, **options: Any) -> Any:
        values = [one for argument in args if isinstance(argument, Sequence) for one in argument]
        if any(map(_is_timed, values)):
            self._note()
        return await super()._ask(request, *args, **options)


def _is_timed(value: object) -> bool:
    match value:
        case Outgoing(delay=delay, at=at, expires_in=expires_in):
            return bool(delay) or at is not None or expires_in is not None
        case (_, Abandon(delay=delay)):  # a settlement
            return bool(delay)
    return False


MESSAGES: dict[str, dict[str, Any]] = {
    "a huge count": {"headers": {"x-tenure-deliveries": 10**12}},
    "the last count": {"headers": {"x-tenure-deliveries": 2**63 - 1}},
    "a count as text": {"headers": {"x-tenure-deliveries": "many"}},
    "a history of another form": {"headers": {"x-tenure-history": '[[1e999,0,"x",null]]'}},
    "a deep history": {"headers": {"x-tenure-history": "[" * 5_000}},
    "a history that is no text": {"headers": {"x-tenure-history": [1, {"x": 2}]}},
    "an odd death": {"headers": {"x-tenure-reason": "x", "x-tenure-died-at": -1, "x-tenure-error": "{"}},
    "deaths that are no list": {"headers": {"x-death": 5}},
    "deaths of another form": {"headers": {"x-death": [7, {"queue": 5, "reason": [], "time": "now"}]}},
    "a sequence at its end": {"headers": {"x-tenure-sequence": 2**63 - 1, "x-tenure-sent-at": 2**63 - 1}},
    "an end that is never": {"headers": {"x-tenure-expires-at": 2**63 - 1}},
    "a large number": {"headers": {"x": 2**63 - 1}},
    "a late time": {"headers": {"x": datetime(9999, 12, 31, tzinfo=UTC)}},
    "a time in microseconds": {"timestamp": int(time.time() * 1e6)},
    "bytes": {"headers": {"x": b"\xff", "y": [[[1, {"z": None}]]]}},
    "a long time to live": {"expiration": "4294967295"},
    "long texts": {"message_id": "x" * 255, "reply_to": "y" * 255, "correlation_id": "z" * 255},
    "a content type": {"content_type": "\ud7ff/\u202e"},
    "a priority": {"priority": 255},
}
"""What another program may write beside a body, by what that is."""


class RabbitQueueHarness(QueueHarness):
    traits = QUEUE_TRAITS
    keeps_whole_history = False
    foreign = tuple(MESSAGES)
    edits = ("delete", "forget")
    spare = UNITS_MAX
    forwards = True
    counts_bytes = True
    lock = 12.8 if CAN_TURN else 3.0  # a delay of so many steps is one stage, see tenure._backends.rabbitmq.delays
    lock_in_rounds = 51.2 if CAN_TURN else None
    uses = 60
    backlog = 300
    any_client_settles = False
    long = 3.0 if CAN_TURN else 2.0
    is_exact = True
    options: ClassVar[Sequence[tuple[str, str]]] = ()
    """The server's options; other options start another server."""

    async def start(self) -> None:
        self._server = shared(RabbitMQ, options=tuple(self.options))
        self._proxies: dict[int, FaultProxy] = {}
        self._backends: list[rabbitmq.RabbitBackend] = []
        self._silent: set[rabbitmq.RabbitBackend] = set()  # their answers are held back
        self._clock = ManualClock()
        self._patch = pytest.MonkeyPatch()
        self._turned = 0.0  # the wall clock of this process, beyond the server's, which earlier tests have turned, too
        true_time, true_time_ns = time.time, time.time_ns
        self._patch.setattr(time, "time", lambda: true_time() + self._ahead)
        self._patch.setattr(time, "time_ns", lambda: true_time_ns() + int(self._ahead * 1e9))
        self._is_server_timing = False

    @property
    def _ahead(self) -> float:
        return self._server.ahead + self._turned

    async def standing(self, broker: Broker, queue: str) -> None:
        """Of a queue that is deleted while a consumer is begun, the server may not tell that consumer."""

        def found() -> list[HeldChannels]:
            subscriptions = [backend.broker._subscriptions.get(queue) for backend in self._backends]
            return [one.channels for one in subscriptions if one is not None and one.channels and one.standing]

        await until(found)
        await asyncio.gather(*[channels.stand() for channels in found()])

    async def left_behind(self) -> dict[str, int]:
        lists = {
            "connections": "rabbit_networking:connections()",
            "channels": "rabbit_channel:list()",
            "consumers": 'rabbit_amqqueue:consumers_all(<<"/">>)',
            "queues": 'rabbit_amqqueue:list(<<"/">>)',
            "exchanges": 'rabbit_exchange:list(<<"/">>)',
        }
        counted = ", ".join(f"length({one})" for one in lists.values())
        answer = await asyncio.to_thread(self._server.evaluate, f"{{{counted}}}")
        return dict(zip(lists, map(int, re.findall(r"\d+", answer)), strict=True))

    async def write_foreign(self, queue: str, how: str) -> None:
        home = queue.removesuffix(DEAD_SUFFIX)
        await self._backends[0].broker.declare(home, {})
        await place(self._backends[0].broker, self, queue, f"foreign: {how}".encode())  # so that the queue is there
        name = amqp_name(home) if queue == home else dead_letters_name(home)

        def publish() -> None:
            client = pika.BlockingConnection(pika.URLParameters(self._server.address))
            properties = pika.BasicProperties(delivery_mode=2, **MESSAGES[how])
            channel = client.channel()
            channel.confirm_delivery()
            channel.basic_publish("", name, f"foreign: {how}".encode(), properties)
            client.close()

        await asyncio.to_thread(publish)

    async def edit(self, queue: str, how: str) -> None:
        def delete() -> None:
            client = pika.BlockingConnection(pika.URLParameters(self._server.address))
            client.channel().queue_delete(amqp_name(queue))
            client.close()

        if how == "delete":
            await asyncio.to_thread(delete)
        else:
            broker = self._backends[0].broker
            await broker._client.run(lambda: broker._records.change(lambda records: records.pop(queue, None)))

    async def forward(self, source: str, target: str) -> None:
        def forward() -> bool:
            client = pika.BlockingConnection(pika.URLParameters(self._server.address))
            channel = client.channel()
            found, properties, body = channel.basic_get(amqp_name(source), auto_ack=True)
            if found is not None:
                channel.confirm_delivery()
                channel.basic_publish("", amqp_name(target), body, properties)
            client.close()
            return found is not None

        await until(lambda: asyncio.to_thread(forward))

    async def open(self) -> Broker:
        proxy = await FaultProxy("127.0.0.1", self._server.port).__aenter__()
        url = Url.parse(f"amqp://{proxy.host}:{proxy.port}/?timeout={ANSWERED_WITHIN}&heartbeat=600")
        backend = rabbitmq.open(url, clock=self._clock)
        self._backends.append(backend)
        broker = cast(Broker, NotingBroker(backend.broker, self._note_timed))
        self._proxies[id(broker)] = proxy
        return broker

    async def close(self) -> None:
        self._patch.undo()
        await self._close_clients()

    async def _close_clients(self) -> None:
        while self._backends:
            await self._backends.pop().close()
        for proxy in self._proxies.values():
            await proxy.__aexit__(None, None, None)
        self._proxies.clear()

    def _of(self, broker: Broker) -> rabbitmq.RabbitBackend:
        return next(one for one in self._backends if one.broker is cast(FaultyBroker, broker)._wrapped)

    def _note_timed(self) -> None:
        self._is_server_timing = True

    async def pass_time(self, seconds: float) -> None:
        """Turn this process's clocks, and the server's, too, if it measures any time in this test."""
        if not self._is_server_timing:
            self._turned += seconds
        elif CAN_TURN:
            await asyncio.to_thread(self._server.turn, seconds)
        else:
            await asyncio.sleep(seconds)
        self._clock.advance(seconds)
        ring_alarms(self._clock)
        for backend in self._backends:
            if backend not in self._silent:
                await ended_locks(backend)


class FaultyRabbitHarness(RabbitQueueHarness):
    """With faults of the connection, of rights, and of the server."""

    options = (("loopback_users", "none"),)  # as by default; but no other test uses such a server: it is killed
    faults = frozenset({"lose_answer", "cut", "late", "hold", "away", "restart", "kill"})
    copies_after_kill: ClassVar[Mapping[str, int]] = {
        "give back": AT_ONCE,
        "abandon": 5,
        "dead-letter": 5,
        "redrive": 5,
    }  # see docs/rabbitmq.md

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

    def kill(self, broker: Broker, after: int) -> Kill:
        return kill(self._proxies[id(broker)], after=after)

    def late(self, broker: Broker) -> AbstractAsyncContextManager[GiveUp]:
        # Held back before it is sent: on one connection, no request can overtake another.
        assert isinstance(broker, FaultyBroker)
        return broker.late()

    @asynccontextmanager
    async def hold(self, broker: Broker, direction: Direction = "down") -> AsyncIterator[Begin]:
        self._silent.add(self._of(broker))
        try:
            async with hold(self._proxies[id(broker)], direction=direction, is_noise=HEARTBEAT.__eq__) as begin:
                yield begin
        finally:
            self._silent.clear()

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Take away access to the virtual host, and close the connections: they remember their rights."""
        await asyncio.to_thread(self._server.forbid, "guest")
        await asyncio.to_thread(self._server.close_connections, "revoked by the test")
        try:
            yield
        finally:
            await asyncio.to_thread(self._server.permit, "guest")

    async def restart(self) -> None:
        """Kill the server, and start it again with its data."""
        await self._close_clients()
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


class TestRabbitShortUse(ShortUseSuite):
    harness = RabbitQueueHarness


class TestRabbitStoredAgain(StoredAgainSuite):
    harness = RabbitQueueHarness


# A client that is killed closes none of its sockets.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
class TestRabbitQueueFaults(BrokerFaultSuite):
    harness = FaultyRabbitHarness
