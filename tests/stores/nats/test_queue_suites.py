"""Queues in NATS JetStream, under the suites, on servers whose clocks are turned."""

from __future__ import annotations

import asyncio
import re
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import nats as driver
import pytest
from nats.js.api import StreamConfig
from nats.js.errors import APIError, ServerError

from tenure._backends import nats
from tenure._backends.nats.connection import Connection
from tenure._queue.broker import Broker
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, LAPSED, Abandon, Complete, Lapsed, Settled, Settlement
from tenure._url import Url
from tenure.testing._conformance.queues.steps import place
from tenure.testing.conformance import (
    BrokerCapacitySuite,
    BrokerCostSuite,
    BrokerFaultSuite,
    BrokerSuite,
    ConsumerSuite,
    FaultyBroker,
    GiveUp,
    LiveMessagesSuite,
    LockExpirySuite,
    QueueHarness,
    Scale,
    ShortUseSuite,
    StoredAgainSuite,
)
from tenure.testing.faultproxy import Begin, Direction, FaultProxy, Kill, hold, kill, late
from tests.clocks import TurnedClock
from tests.durations import stretched
from tests.servers import Nats, NatsCluster, shared
from tests.servers.nats import PINGS
from tests.servers.turned_process import CAN_TURN, steps
from tests.stores.nats.raw import api, store
from tests.stores.nats.wall_clock import turn_wall_clock

T = TypeVar("T")

PATIENCE = 8.0  # seconds; the clients' timeout; no request here stays unanswered
USER, PASSWORD = "queues", "s3cret"
EVERYTHING: Mapping[str, object] = {}
SCANS = dict.fromkeys(("peek at a dead letter", "redrive one", "purge one"), 250)
"""Requests that read every dead letter, as they come in the order of their sequences."""


class Way:
    """A client with a proxy of its own, so that faults concern it alone."""

    def __init__(self, port: int, login: str, clock: TurnedClock, options: str = f"?timeout={PATIENCE}") -> None:
        self._clock = clock
        self.proxy = FaultProxy("127.0.0.1", port)
        self._login = login
        self._options = options
        self._left: list[Connection] = []
        self.is_held = False

    async def open(self) -> nats.NatsBroker:
        await self.proxy.__aenter__()
        url = f"nats://{self._login}{self.proxy.host}:{self.proxy.port}/{self._options}"
        self.backend = nats.open(Url.parse(url), clock=self._clock)
        await self.backend.broker.settings("warm")  # connected, so that a fault concerns the test's request
        return self.backend.broker

    async def flush(self) -> None:
        """Wait until the server has read what was published without an answer; not for long, as it may be cut off."""
        if self.is_held:
            return
        for connection in list(self.backend._client._connections.values()):
            with suppress(TimeoutError, driver.errors.Error, OSError):
                async with asyncio.timeout(stretched(0.5)):
                    await connection.flush()

    def leave_connection(self) -> None:
        """Let the next request open a new connection; the present one stays open, with what it still carries."""
        connections = self.backend._client._connections
        self._left += connections.values()
        connections.clear()

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Let the client wait for answers so much longer: its timers follow the clock that is turned."""
        client = self.backend._client
        usual, client.options = client.options, replace(client.options, timeout=client.options.timeout + seconds)
        try:
            yield
        finally:
            client.options = usual

    async def close(self) -> None:
        await self.backend.close()
        for connection in self._left:
            await connection.close()
        await self.proxy.__aexit__(None, None, None)


MESSAGES: dict[str, dict[str, str]] = {
    "a huge count": {"Tenure-State": '{"deliveries": 1000000000000}'},
    "the last count": {"Tenure-State": '{"deliveries": 9223372036854775807, "reason": "x"}'},
    "a count as text": {"Tenure-State": '{"deliveries": "many"}'},
    "a long lock": {"Tenure-State": '{"locked_for": 1e300}'},
    "a lock that is over": {"Tenure-State": '{"locked_for": 0.001, "lock": "x", "deliveries": 1}'},
    "a history of another form": {"Tenure-State": '{"history": [[1e999, 0, "x", null], 7, {"number": -1}]}'},
    "a deep state": {"Tenure-State": "[" * 5_000},
    "a sequence at its end": {"Tenure-State": '{"sequence": 9223372036854775807, "enqueued_at": 1e300}'},
    "deep headers": {"Tenure-Headers": "[" * 5_000},
    "headers of other types": {"Tenure-Headers": '{"x": [1], "y": null, "tenure-z": 1, "n": 9e999}'},
    "odd times": {"Tenure-Due": "nan", "Tenure-Expires-In": "-1"},
    "odd texts": {"Tenure-Id": "7", "Tenure-Reply-To": "$x", "Tenure-Correlation-Id": '"\\ud800"'},
    "no text": {"x": "\udcff"},
}
"""What another program may write beside a body, by what that is."""


class NatsQueueHarness(QueueHarness):
    traits = nats.QUEUE_TRAITS
    keeps_whole_history = False
    foreign = tuple(MESSAGES)
    edits = ("delete", "forget", "delete the consumer")
    forwards = True
    lock = 20.0 if CAN_TURN else 3.0
    lock_in_rounds = 200.0 if CAN_TURN else None
    long = 3.0
    uses = 60
    backlog = 300
    faults = frozenset({"lose_answer", "cut", "late", "hold", "kill"})
    copies_after_kill: ClassVar[Mapping[str, int]] = {"redrive": 1}  # see docs/nats.md
    any_client_settles = False
    server: ClassVar[dict[str, Any]] = {}
    """The server's options; other options start another server."""
    login: ClassVar[str] = ""
    _turned: Nats | NatsCluster

    async def start(self) -> None:
        self._server = self._turned = shared(Nats, is_turned=True, **self.server)
        self.begin()

    def begin(self) -> None:
        self._ways: dict[Broker, Way] = {}
        self._clock = TurnedClock()
        self._clock.turn_loop()
        self._patch = pytest.MonkeyPatch()
        turn_wall_clock(self._patch, lambda: self.ahead)

    @property
    def ahead(self) -> float:
        return self._server.ahead

    async def pass_time(self, seconds: float) -> None:
        """Turn the clocks of the servers and of the clients, when the servers have read what was put off."""
        if CAN_TURN:
            for way in self._ways.values():
                await way.flush()
            for step in steps(seconds, self._turned.step_max):
                self._clock.turned += step
                await asyncio.to_thread(self._turned.turn, step)
        else:
            await super().pass_time(seconds)

    async def left_behind(self) -> dict[str, int]:
        server, store = await asyncio.to_thread(lambda: (self._server.asked("varz"), self._server.asked("jsz")))
        kept = {what: store[what] for what in ("streams", "consumers")}
        return {what: server[what] for what in ("connections", "subscriptions")} | kept

    async def write_foreign(self, queue: str, how: str) -> None:
        way, home = next(iter(self._ways.values())), queue.removesuffix(DEAD_SUFFIX)
        await place(way.backend.broker, self, queue, f"foreign: {how}".encode())  # so that the queue is there
        where = way.backend.broker._places.place_of(queue)
        client = await driver.connect(self._server.url)
        for subject in (f"{where.subject}.theirs", where.subject_of(f"theirs-{how.replace(' ', '-')}")):
            lines = [f"{name}: {value}".encode(errors="surrogateescape") for name, value in MESSAGES[how].items()]
            headers = b"\r\n".join([b"NATS/1.0", *lines, b"", b""])
            body = f"foreign: {how} {home}".encode()
            await store(client, subject.encode(), headers, body)
        await client.close()

    async def edit(self, queue: str, how: str) -> None:
        broker = next(iter(self._ways.values())).backend.broker
        client, places = broker._client, broker._places
        stream = places.place_of(queue).stream

        async def ask(connection: Connection) -> None:
            if how == "delete":
                await client.call(connection, f"STREAM.DELETE.{stream}")
            elif how == "forget":
                await client.call(connection, f"STREAM.PURGE.{places.bucket}", {"filter": places._subject_of(queue)})
            elif (consumer := await places.consumer_of(connection, queue)) is not None:
                await client.call(connection, f"CONSUMER.DELETE.{stream}.{consumer.name}")

        await client.run(ask)

    async def forward(self, source: str, target: str) -> None:
        places = next(iter(self._ways.values())).backend.broker._places
        client = await driver.connect(self._server.url)
        stream = places.place_of(source).stream
        last = (await api(client, f"STREAM.INFO.{stream}"))["state"]["last_seq"]
        found = (await api(client, f"STREAM.MSG.GET.{stream}", {"seq": last}))["message"]
        headers, body = (b64decode(found.get(one, "")) for one in ("hdrs", "data"))
        headers = re.sub(rb"Nats-Expected-[^\r]*\r\n", b"", headers)  # with that, the server refuses it
        await store(client, f"{places.place_of(target).subject}.theirs".encode(), headers, body)
        await client.close()

    async def open(self) -> Broker:
        way = Way(self._server.port, self.login, self._clock)
        broker = FaultyBroker.around(await way.open())
        self._ways[broker] = way
        return broker

    async def close(self) -> None:
        self._patch.undo()
        await self.leave()

    async def leave(self) -> None:
        while self._ways:
            await self._ways.popitem()[1].close()

    @asynccontextmanager
    async def cut(self, broker: Broker) -> AsyncIterator[None]:
        proxy = self._ways[broker].proxy
        proxy.reset()
        proxy.refuse()
        try:
            yield
        finally:
            proxy.heal()

    def kill(self, broker: Broker, after: int) -> Kill:
        return kill(self._ways[broker].proxy, after=after)

    def lose_answer(self, broker: Broker) -> AbstractAsyncContextManager[None]:
        assert isinstance(broker, FaultyBroker)
        return broker.lose_answer()

    @asynccontextmanager
    async def late(self, broker: Broker) -> AsyncIterator[GiveUp]:
        way = self._ways[broker]
        async with late(way.proxy) as give_up:

            async def give_up_and_leave(request: Awaitable[object]) -> None:
                await give_up(request)
                way.leave_connection()

            yield give_up_and_leave

    @asynccontextmanager
    async def hold(self, broker: Broker, direction: Direction = "down") -> AsyncIterator[Begin]:
        way = self._ways[broker]
        way.is_held = True
        try:
            with way.patient(self.lock):
                async with hold(way.proxy, direction=direction, is_noise=PINGS.__contains__) as begin:
                    yield begin
        finally:
            way.is_held = False


class TestNatsQueues(BrokerSuite):
    harness = NatsQueueHarness


class TestNatsLiveMessages(LiveMessagesSuite):
    harness = NatsQueueHarness


class TestNatsLocks(LockExpirySuite):
    harness = NatsQueueHarness


class TestNatsConsumers(ConsumerSuite):
    harness = NatsQueueHarness


class TestNatsShortUse(ShortUseSuite):
    harness = NatsQueueHarness


class TestNatsStoredAgain(StoredAgainSuite):
    harness = NatsQueueHarness


class TestNatsQueueFaults(BrokerFaultSuite):
    harness = NatsQueueHarness

    @pytest.mark.parametrize(("verdict", "wanted"), [(COMPLETE, LAPSED), (Abandon(), Settled())], ids=repr)
    async def test_only_what_is_compared_is_proved_by_an_answer_after_the_end(
        self, harness: QueueHarness, name: str, verdict: Complete | Abandon, wanted: Lapsed | Settled
    ) -> None:
        broker = await harness.open()
        await broker.send(name, [Outgoing(b"a")])
        [got] = (await broker.receive(name, 1, harness.lock)).deliveries
        await harness.pass_time(harness.lock * 0.6)
        async with harness.hold(broker) as begin:
            asking = await begin(broker.settle([Settlement(got, verdict)]))
            await harness.pass_time(harness.lock * 0.6)
        assert await asking == [wanted]


class WireHarness(NatsQueueHarness):
    """The answers are lost on the wire: requests were carried out, of a verb with several the first."""

    faults = frozenset({"lose_answer"})

    @asynccontextmanager
    async def lose_answer(self, broker: Broker) -> AsyncIterator[None]:
        proxy = self._ways[broker].proxy
        proxy.lose_answers()
        try:
            yield
        finally:
            proxy.heal()


class TestNatsQueuesOnTheWire(BrokerFaultSuite):
    harness = WireHarness

    @pytest.mark.parametrize("verdict", [COMPLETE], ids=repr)  # the others have several requests, of which one decides
    async def test_a_repeated_verdict_has_lapsed(self, harness: QueueHarness, name: str, verdict: Complete) -> None:
        await super().test_a_repeated_verdict_has_lapsed(harness, name, verdict)


class KilledNatsQueueHarness(NatsQueueHarness):
    """A server with users, which no other test uses: it may be killed, and its users' rights revoked."""

    faults = frozenset({"away", "restart"})
    server: ClassVar[dict[str, Any]] = {"users": {USER: (PASSWORD, EVERYTHING)}}
    login = f"{USER}:{PASSWORD}@"

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Permit the user nothing of JetStream."""
        await self._permit({"publish": {"deny": ["tenure.>", "$KV.>", "$JS.>"]}})
        try:
            yield
        finally:
            await self._permit(EVERYTHING)

    async def _permit(self, permissions: Mapping[str, object]) -> None:
        self._server.users[USER] = (PASSWORD, permissions)
        await asyncio.to_thread(self._server.reconfigure)

    async def restart(self) -> None:
        await self.leave()
        self._server.kill()
        await asyncio.to_thread(self._server.start)


class TestNatsQueuesKilled(BrokerFaultSuite):
    harness = KilledNatsQueueHarness


class StrainedNatsQueueHarness(NatsQueueHarness):
    """A server that can be filled, over a link that can be slow."""

    faults = frozenset({"full", "slow"})
    server: ClassVar[dict[str, Any]] = {"storage": 8 * 2**20}
    drains_when_full = False  # a verdict stores the message again

    @asynccontextmanager
    async def full(self) -> AsyncIterator[None]:
        client = await driver.connect(self._server.url)
        context = client.jetstream()
        await context.add_stream(StreamConfig(name="filler", subjects=["filler"]))
        try:
            for size in (100_000, 10_000, 1_000, 100, 1):
                with suppress(ServerError, APIError):
                    while True:
                        await context.publish("filler", b"x" * size)
            yield
        finally:
            await context.delete_stream("filler")
            await client.close()

    @asynccontextmanager
    async def slow(self, broker: Broker, round_trip: float) -> AsyncIterator[None]:
        proxy = self._ways[broker].proxy
        proxy.delay(round_trip / 2)
        try:
            yield
        finally:
            proxy.heal()

    async def reset(self, broker: Broker) -> None:
        self._ways[broker].proxy.reset()


class TestNatsQueueStrain(BrokerCapacitySuite):
    harness = StrainedNatsQueueHarness


class CountingNatsQueueHarness(NatsQueueHarness):
    """Counts the messages that the server gets: each request is one, and so is each acknowledgement."""

    scale = Scale("messages", shallow=20, deep=200, few=3, several=16, flood=120, noise=6, times=2, rounds=SCANS)
    server: ClassVar[dict[str, Any]] = {"options": {"max_connections": 65_100}}
    """As good as the default; but no other test uses such a server, so that its messages are those of the test."""
    if not CAN_TURN:
        lock = 20.0  # much longer than a test that lets no lock end

    async def work_of(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        before = await asyncio.to_thread(self._server.requests)
        answer = await ask()
        return answer, await asyncio.to_thread(self._server.requests) - before


class TestNatsQueueCost(BrokerCostSuite):
    harness = CountingNatsQueueHarness
    if not CAN_TURN:  # in real time, the end of so many locks can't be waited for
        test_every_lock_has_expired = None  # type: ignore[assignment]
        test_everything_has_expired = None  # type: ignore[assignment]
        test_beside_many_that_have_expired = None  # type: ignore[assignment]
