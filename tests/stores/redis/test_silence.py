"""The silence of a subscription: how often it is checked, and what shows that it is dead; hours in virtual time."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis import exceptions

from tenure._backends import redis
from tenure._backends.redis import wake
from tenure._backends.redis.client import Client
from tenure._backends.redis.wake import HEARTBEAT, HEARTBEATS_OF_LEASES, WARY_FOR, Wake
from tenure._lease import Granted, HeldBy, Released
from tenure._url import Url
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tenure.testing.loop import run
from tests.servers import Redis, patient, shared

LEASE, QUEUE = "tenure:lease:job", "tenure:queue:{orders}:hints"
TIMEOUT = 5.0
HOUR = 3_600.0
DAY = 24 * HOUR
TTL = 60.0


class Network:
    """Between a client and its server: what it is asked to carry, at which times.

    Args:
        ends_after: The seconds of silence after which it ends a connection.
    """

    def __init__(self, ends_after: float = math.inf) -> None:
        self.ends_after = ends_after
        self.is_silent = False
        """Whether nothing arrives over any connection, and none ends."""
        self.subscribed: list[float] = []
        self.pinged: list[float] = []


class PubSub:
    """A subscription as redis-py has it."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.connection = SimpleNamespace(renewed_at=math.inf)

    async def __aenter__(self) -> PubSub:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def _carry(self, message: dict[str, Any]) -> None:
        if not self._network.is_silent:
            self._messages.put_nowait(message)

    async def subscribe(self, *channels: str) -> None:
        self._network.subscribed.append(asyncio.get_running_loop().time())
        for channel in channels:
            self._carry({"type": "subscribe", "channel": channel.encode(), "data": 1})

    async def ping(self) -> None:
        self._network.pinged.append(asyncio.get_running_loop().time())
        self._carry({"type": "pong", "channel": None, "data": b""})

    async def get_message(self, timeout: float) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(min(timeout, self._network.ends_after)):
                return await self._messages.get()
        except TimeoutError:
            if timeout < self._network.ends_after:
                return None
            raise exceptions.ConnectionError("the connection was closed") from None


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake, "_PubSub", PubSub)


def listened(network: Network, listens: Callable[[Wake], Coroutine[Any, Any, None]]) -> None:
    """Let a process listen over *network*, as *listens* says."""

    async def main() -> None:
        async def endpoint_of(channel: str) -> None:
            return None

        client = SimpleNamespace(
            options=SimpleNamespace(timeout=TIMEOUT),
            at=lambda endpoint: SimpleNamespace(connection_pool=network),
            endpoint_of=endpoint_of,
        )
        hints = Wake(cast(Client, client))
        try:
            await listens(hints)
        finally:
            await hints.close()

    run(main(), seed=1, limit=30 * DAY)


async def listen(hints: Wake, *, to_queue: bool, seconds: float) -> None:
    async def follow(hints: Any) -> None:
        async for _ in hints:
            pass

    topics = [hints.listen_to_lease(LEASE), *([hints.listen(QUEUE)] if to_queue else [])]
    tasks = [asyncio.ensure_future(follow(topic)) for topic in topics]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def require_few_pings() -> None:
    network = Network()
    listened(network, lambda hints: listen(hints, to_queue=False, seconds=HOUR))
    assert len(network.pinged) <= HOUR / (HEARTBEATS_OF_LEASES * HEARTBEAT)
    assert len(network.subscribed) == 1


def require_a_memory_of_what_ends_silent_connections() -> None:
    network = Network(ends_after=HEARTBEAT + 5.0)
    listened(network, lambda hints: listen(hints, to_queue=False, seconds=DAY))
    assert len(network.subscribed) <= DAY / WARY_FOR + 1
    assert len(network.pinged) == pytest.approx(DAY / HEARTBEAT, rel=0.05)


def require_an_end_of_that_memory() -> None:
    network = Network(ends_after=HEARTBEAT + 5.0)

    async def listens(hints: Wake) -> None:
        asyncio.get_running_loop().call_later(HEARTBEAT + 10.0, setattr, network, "ends_after", math.inf)
        await listen(hints, to_queue=False, seconds=2 * WARY_FOR)

    listened(network, listens)
    late = [at for at in network.pinged if at > WARY_FOR + 2 * HEARTBEAT]
    assert len(late) <= WARY_FOR / (HEARTBEATS_OF_LEASES * HEARTBEAT) + 1


def require_a_replacement_of_a_dead_subscription() -> None:
    network = Network()

    async def listens(hints: Wake) -> None:
        asyncio.get_running_loop().call_later(HOUR, setattr, network, "is_silent", True)
        await listen(hints, to_queue=False, seconds=2 * HOUR)

    listened(network, listens)
    assert len(network.subscribed) > 1
    assert HOUR < network.subscribed[1] <= HOUR + HEARTBEATS_OF_LEASES * HEARTBEAT + TIMEOUT + 1.0


@pytest.mark.parametrize(
    "require",
    [
        require_few_pings,
        require_a_memory_of_what_ends_silent_connections,
        require_an_end_of_that_memory,
        require_a_replacement_of_a_dead_subscription,
    ],
)
def test_a_subscription_to_leases_is_checked_as_often_as_needed(patched: None, require: Callable[[], None]) -> None:
    require()


def test_a_silent_subscription_to_a_queue_is_checked_more_often(patched: None) -> None:
    network = Network()
    listened(network, lambda hints: listen(hints, to_queue=True, seconds=HOUR))
    assert len(network.pinged) == HOUR // HEARTBEAT


@pytest.mark.parametrize(
    ("constant", "planted", "require"),
    [
        ("HEARTBEATS_OF_LEASES", 1, require_few_pings),
        ("HEARTBEATS_OF_LEASES", 1_000, require_a_replacement_of_a_dead_subscription),
        ("WARY_FOR", 0.0, require_a_memory_of_what_ends_silent_connections),
        ("WARY_FOR", DAY, require_an_end_of_that_memory),
    ],
    ids=["pings as for queues", "never pings", "forgets what ended", "remembers for ever"],
)
def test_a_planted_pause_of_the_wrong_length_is_found(
    patched: None, monkeypatch: pytest.MonkeyPatch, constant: str, planted: float, require: Callable[[], None]
) -> None:
    monkeypatch.setattr(wake, constant, planted)
    with pytest.raises(AssertionError):
        require()


# --- with a server ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["acquire", "inspect"])
async def test_a_look_that_shows_a_term_without_a_hint_lets_the_subscription_be_checked(name: str, verb: str) -> None:
    server = shared(Redis)
    async with FaultProxy("127.0.0.1", server.port) as proxy:
        cut = redis.open(Url.parse(f"redis://{proxy.host}:{proxy.port}?timeout=1"))
        other = redis.open(Url.parse(patient(server.url)))
        try:
            hints = cut.leases.hints(name)
            await asyncio.wait_for(anext(hints), 30)
            proxy.stall_existing()  # the subscription: requests go over a new connection

            async def look() -> None:
                found = await (cut.leases.inspect(name) if verb == "inspect" else cut.leases.acquire(name, "bob", TTL))
                assert isinstance(found, HeldBy)

            for holder in ("ann#1", "ann#2"):
                won = await other.leases.acquire(name, holder, TTL)
                assert isinstance(won, Granted)
                await look()
                accepted = proxy.accepted
                if holder == "ann#1":
                    await look()  # nothing has changed
                    assert isinstance(await other.leases.release(won.grant), Released)
            await until(lambda: proxy.accepted > accepted, within=30)
            proxy.heal()
            await asyncio.wait_for(anext(hints), 30)
        finally:
            await other.close()
            await cut.close()


async def test_looks_at_terms_of_which_hints_came_check_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[object] = []
    monkeypatch.setattr(wake.Subscriber, "check_soon", checks.append)
    backend = redis.open(Url.parse(patient(shared(Redis).url)))
    try:
        hints = backend.leases.hints(name)
        await asyncio.wait_for(anext(hints), 30)
        for number in range(3):
            won = await backend.leases.acquire(name, f"ann#{number}", TTL)
            assert isinstance(won, Granted)
            await asyncio.wait_for(anext(hints), 30)
            for _ in range(3):
                assert isinstance(await backend.leases.acquire(name, "bob", TTL), HeldBy)
                await backend.leases.inspect(name)
            await backend.leases.release(won.grant)
            await asyncio.wait_for(anext(hints), 30)
        assert checks == []
    finally:
        await backend.close()


async def test_the_system_probes_silent_connections(name: str) -> None:
    backend = redis.open(Url.parse(patient(shared(Redis).url)))
    try:
        await asyncio.wait_for(anext(backend.leases.hints(name)), 30)
        [subscriber] = backend._wake.here().values()
        assert subscriber._pubsub is not None
        connection: Any = subscriber._pubsub.connection
        probed = connection._writer.get_extra_info("socket")
        assert probed.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert probed.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < HEARTBEAT
    finally:
        await backend.close()
