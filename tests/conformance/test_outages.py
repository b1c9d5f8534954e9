"""What an outage costs: how often the client of each store tries to connect while its server is cut off.

Who listens for hints gets them back by itself, and tries until then: on, and rarely; after the next outage as after the
first. tests/application counts the requests of what asks above the stores.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, NamedTuple

import pytest

from tenure._backends.servicebus import sessions
from tenure._queue.broker import Broker
from tenure._runtime.backoff import LONGEST, STEADY, Backoff
from tenure.errors import Unavailable
from tenure.testing._conformance.counted_hints import counted
from tenure.testing.faultproxy import FaultProxy
from tests.clocks import TurnedClock
from tests.conformance.test_kinds import WHERE
from tests.durations import until
from tests.stores.etcd.test_cluster_suites import ClusterHarness
from tests.stores.etcd.test_suites import EtcdHarness
from tests.stores.kubernetes.test_suites import KubernetesHarness
from tests.stores.nats.test_lease_suites import NatsHarness
from tests.stores.nats.test_queue_suites import NatsQueueHarness
from tests.stores.postgres.test_suites import SeveredHarness, SeveredQueueHarness
from tests.stores.rabbitmq.test_suites import FaultyRabbitHarness
from tests.stores.redis.test_suites import RedisHarness, RedisQueueHarness
from tests.stores.servicebus.test_suites import ServiceBusHarness
from tests.stores.zookeeper.test_ensemble_suites import FaultyEnsembleHarness
from tests.stores.zookeeper.test_suites import FaultyHarness

TIMEOUT = 5.0
"""What clients have by default, in seconds; one that waits for less tries more often."""


class ZooKeeperHarness(FaultyHarness):
    patience = TIMEOUT


class EnsembleHarness(FaultyEnsembleHarness):
    patience = TIMEOUT


class MessagesHarness(ServiceBusHarness):
    async def prepare(self, broker: Broker, name: str) -> None:
        """Make a queue."""
        await broker.receive(name, 1, self.lock)


class SessionsHarness(ServiceBusHarness):
    async def start(self) -> None:
        await super().start()
        self._patch.setattr(sessions, "WAIT_LONG", STEADY)

    async def prepare(self, broker: Broker, name: str) -> None:
        """Make a queue of sessions: who listens to one waits for them, by requests of its own."""
        await broker.accept(name, None, self.lock)


# Redis' driver that is cancelled just when its connection stands leaves it to be collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

STORES: dict[str, type[Any]] = {
    "Etcd": EtcdHarness,
    "Etcd, three members": ClusterHarness,
    "Kubernetes": KubernetesHarness,
    "Nats": NatsHarness,
    "Nats, queues": NatsQueueHarness,
    "Postgres": SeveredHarness,
    "Postgres, queues": SeveredQueueHarness,
    "Rabbit, queues": FaultyRabbitHarness,
    "Redis": RedisHarness,
    "Redis, queues": RedisQueueHarness,
    "ServiceBus, queues": MessagesHarness,
    "ServiceBus, sessions": SessionsHarness,
    "ZooKeeper": ZooKeeperHarness,
    "ZooKeeper, three members": EnsembleHarness,
}
WITHOUT_A_LINK = {"Memory", "Observed", "Queued", "Sqlite"}
WITHOUT_HINTS = {"Azure"}
OF_THEIR_DRIVERS = ("ZooKeeper",)
"""Stores whose drivers pause between connections, and begin anew, by their own rules."""
PAUSING = {which: 1 for which in STORES if not which.startswith(OF_THEIR_DRIVERS)} | {
    "Postgres": 2,
    "Postgres, queues": 2,
}
"""How many pauses a client has: PostgreSQL one for hints, and one for requests."""
ON_A_THREAD = ("ServiceBus", "ZooKeeper")
"""Stores whose clients connect on a thread of their own, by the true time."""

CONNECTIONS = {"Kubernetes": 2, "ZooKeeper": 2}
"""How many connections an attempt makes, if not one: aiohttp repeats it at once; ZooKeeper has two sessions."""
EVERY_MIN = 1.0
"""Seconds between two attempts, once there was no answer for a while: at least, on average."""

LASTS = LONGEST + 2 * STEADY
"""Seconds after which a client has everything back, and for long enough: some begin anew when it is lost then."""


class Outage(NamedTuple):
    """How an outage passes, in seconds."""

    begins: float
    """In this time, the pauses grow."""
    lasts: float
    """In this time, attempts are counted."""
    times: int
    """How much faster than usual the clock runs."""

    @classmethod
    def of(cls, which: str) -> Outage:
        """Return the usual outage of a store."""
        return cls(5.0, 7.0, times=1) if which.startswith(ON_A_THREAD) else cls(20.0, 60.0, times=20)


def most(which: str, seconds: float) -> float:
    """Return how many connections are right in so many seconds of an outage."""
    return (seconds / EVERY_MIN + 1) * CONNECTIONS.get(which.partition(",")[0], 1)


def least(outage: Outage) -> int:
    """Return how many are right at least: one for every few of the longest pauses."""
    return max(1, int(outage.lasts / (4 * LONGEST)))


class Listener:
    """A client that listens for hints, and what stands between it and its store."""

    def __init__(self, harness: Any, client: Any, refusing: set[FaultProxy]) -> None:
        self.client = client
        self._harness = harness
        self._refusing = refusing
        self.clock = TurnedClock()
        self.clock.turn_loop()

    def cut(self) -> AbstractAsyncContextManager[None]:
        """Cut it off inside the block."""
        cut: AbstractAsyncContextManager[None] = self._harness.cut(self.client)
        return cut

    @property
    def connections(self) -> int:
        """How often it has tried to reach a server in vain; the one that it has tried most."""
        return max((proxy.refused for proxy in self._refusing), default=0)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> set[FaultProxy]:
    """Return the proxies that are told to refuse connections from now on."""
    found: set[FaultProxy] = set()
    refuse = FaultProxy.refuse

    def note(proxy: FaultProxy) -> None:
        found.add(proxy)
        refuse(proxy)

    monkeypatch.setattr(FaultProxy, "refuse", note)
    return found


class Pauses:
    """What becomes of the pauses that clients use."""

    def __init__(self) -> None:
        self.grown: set[Backoff] = set()
        """Those that have grown beyond the first."""
        self.told: set[Backoff] = set()
        """Those that were told to begin anew, since the outage."""
        self.anew: set[Backoff] = set()
        """Those that did so, since the outage."""

    def outage_ends(self) -> None:
        """Forget who has begun anew before."""
        self.told.clear()
        self.anew.clear()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    """Watch the pauses that are used from now on."""
    found = Pauses()
    following, reset = Backoff.next, Backoff.reset

    def watched_next(backoff: Backoff, at_most: float = math.inf) -> float:
        if backoff._next > backoff._first:
            found.grown.add(backoff)
        return following(backoff, at_most)

    def watched_reset(backoff: Backoff) -> None:
        reset(backoff)
        found.told.add(backoff)
        found.anew.add(backoff)

    monkeypatch.setattr(Backoff, "next", watched_next)
    monkeypatch.setattr(Backoff, "reset", watched_reset)
    return found


@asynccontextmanager
async def listening(which: str, refusing: set[FaultProxy]) -> AsyncIterator[Listener]:
    """Let a client of a store listen for hints."""
    harness, name = STORES[which](), "outage-" + "".join(filter(str.isalnum, which)).lower()
    await harness.start()
    try:
        client = await harness.open()
        if hasattr(harness, "prepare"):
            await harness.prepare(client, name)
        async with counted(client.hints(name)) as hints:
            await hints.no_more()
            yield Listener(harness, client, refusing)
    finally:
        await harness.close()


async def connections_in(
    which: str, refusing: set[FaultProxy], outage: Outage, enough: float = math.inf
) -> tuple[int, float]:
    """Return how many connections are tried in an outage, and in how many seconds; stop counting at *enough*."""
    loop = asyncio.get_running_loop()
    async with listening(which, refusing) as listener, listener.cut(), listener.clock.hurried(outage.times):
        await asyncio.sleep(outage.begins)
        began, before = loop.time(), listener.connections
        with suppress(TimeoutError):
            async with asyncio.timeout(outage.lasts):
                await until(lambda: listener.connections - before > enough)
        return listener.connections - before, loop.time() - began


@pytest.mark.parametrize("which", STORES)
@pytest.mark.asyncio
async def test_who_is_cut_off_tries_rarely_and_on(which: str, refusing: set[FaultProxy]) -> None:
    outage = Outage.of(which)
    found, seconds = await connections_in(which, refusing, outage)
    assert least(outage) <= found <= most(which, seconds)


async def pauses_begin_anew(
    which: str, refusing: set[FaultProxy], pauses: Pauses, kind: type[Backoff] = Backoff
) -> bool:
    """Return whether pauses that grew in an outage, one of this *kind* among them, begin with the first again.

    It waits until they are told to.
    """

    def have_grown() -> bool:
        return len(pauses.grown) >= PAUSING[which] and any(isinstance(one, kind) for one in pauses.grown)

    outage = Outage.of(which)
    async with listening(which, refusing) as listener, asking(listener.client):
        async with listener.cut(), listener.clock.hurried(outage.times):
            await until(have_grown)
            await asyncio.sleep(outage.begins)
        pauses.outage_ends()
        async with losing_what_has_lasted(listener):
            await until(lambda: pauses.grown <= pauses.told)
        return pauses.grown <= pauses.anew


@asynccontextmanager
async def asking(client: Any) -> AsyncIterator[None]:
    """Ask a client something now and then inside the block: some connect only then."""
    over = asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            with suppress(Unavailable):
                await client.names()
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), STEADY)

    async with asyncio.TaskGroup() as group:
        group.create_task(ask())
        try:
            yield
        finally:
            over.set()


@asynccontextmanager
async def losing_what_has_lasted(listener: Listener) -> AsyncIterator[None]:
    """Cut a client off for a moment inside the block, again and again, more and more rarely: some begin anew then."""

    async def lose() -> None:
        lasts = LASTS
        while True:
            await asyncio.sleep(lasts)
            async with listener.cut():
                pass
            lasts *= 1.5

    async with asyncio.TaskGroup() as group:
        losing = group.create_task(lose())
        try:
            yield
        finally:
            losing.cancel()


@pytest.mark.parametrize("which", PAUSING)
@pytest.mark.asyncio
async def test_after_an_outage_pauses_begin_anew(which: str, refusing: set[FaultProxy], pauses: Pauses) -> None:
    assert await pauses_begin_anew(which, refusing, pauses)


def test_every_store_with_hints_is_tried() -> None:
    assert {which.partition(",")[0] for which in STORES} == WHERE.keys() - WITHOUT_A_LINK - WITHOUT_HINTS
