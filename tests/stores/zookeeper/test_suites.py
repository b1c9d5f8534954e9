"""Leases in ZooKeeper, under the suites, on servers whose clocks are turned, and that can be restarted."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain
from typing import ClassVar, TypeVar

import pytest
from kazoo.client import KazooClient
from kazoo.protocol.serialization import Exists
from kazoo.security import OPEN_ACL_UNSAFE, make_acl, make_digest_acl_credential

from tenure._backends import zookeeper
from tenure._backends.zookeeper import client
from tenure._backends.zookeeper.driver import Driver
from tenure._backends.zookeeper.requests import exists
from tenure._backends.zookeeper.session import SILENCE_SHARE
from tenure._election.store import LeaseStore
from tenure._url import Url
from tenure.testing import until
from tenure.testing.conformance import (
    FaultyLeaseStore,
    GiveUp,
    LeaseCostSuite,
    LeaseFaultSuite,
    LeaseHarness,
    LeaseQueueSuite,
    LeaseStoreSuite,
    Scale,
)
from tenure.testing.faultproxy import Begin, Direction, FaultProxy, hold, late
from tests.clocks import TurnedClock
from tests.servers import ZooKeeper, ZooKeeperEnsemble, shared
from tests.servers.turned_process import steps

T = TypeVar("T")

TICK = 0.1
LATE_MAX = 30.0  # seconds, after which what is over must have ended, also on a busy machine
STEP = 1 / 8
"""The share of a lease by which clocks are turned at once: a client keeps its sessions up more often than that."""
ADMIN = "admin", "of this test"
SYSTEM = "/zookeeper"


RECORDS = {
    "no text": b"\xff",
    "no record": b"{}",
    "a deep record": b"[" * 100_000,
    "a record of another kind": b'{"holder": "somebody"}',
    "a token as text": b'{"tenure": 1, "token": "new", "holder": "b", "metadata": {}}',
    "a token without end": b'{"tenure": 1, "token": 1e999, "holder": "b", "metadata": {}}',
    "a token below zero": b'{"tenure": 1, "token": -1, "holder": "b", "metadata": {}}',
    "the last token": b'{"tenure": 1, "token": 9223372036854775807, "holder": "b", "metadata": {}}',
    "a holder as a number": b'{"tenure": 1, "token": 1, "holder": 7, "metadata": {}}',
    "metadata of other types": b'{"tenure": 1, "token": 1, "holder": "b", "metadata": {"x": [1], "y": "\\ud800"}}',
}
"""What others may write in place of the record of an election, by what that is."""


class ZooKeeperHarness(LeaseHarness):
    """A ZooKeeper for one test; each client has its own proxy, so that faults concern it alone."""

    traits = replace(zookeeper.TRAITS, ttl_min=2 * TICK)
    foreign = tuple(RECORDS)
    ttl = 20.0
    ends_within = 0.2  # a busy machine may delay the request that deletes a node
    has_sessions = True

    patience: ClassVar[float] = 20.0
    """Seconds for a request."""
    options: ClassVar[tuple[tuple[str, str], ...]] = ()
    """The server's options; other options start another server."""
    _turned: ZooKeeper | ZooKeeperEnsemble

    def __init__(self) -> None:
        self._clock = TurnedClock()
        self._cut_off: set[int] = set()
        self._stores: dict[int, int] = {}
        self._proxies: dict[int, list[FaultProxy]] = {}  # one to each server
        self._backends: list[zookeeper.ZooKeeperBackend] = []

    async def start(self) -> None:
        self._server = self._turned = shared(ZooKeeper, tick=TICK, options=self.options)
        self._ports = deque([self._server.port])
        self._clock.turn_loop()

    async def write_foreign(self, name: str, how: str) -> None:
        def write() -> None:
            with self._server.client() as client:
                client.set(self._backends[0].leases._elections.path(name), RECORDS[how])

        await asyncio.to_thread(write)

    async def open(self) -> LeaseStore:
        proxies = [await FaultProxy("127.0.0.1", port).__aenter__() for port in self._ports]
        self._ports.rotate()
        for proxy in proxies[1:]:  # so that each client is connected to another server
            proxy.refuse()
        hosts = ",".join(f"{proxy.host}:{proxy.port}" for proxy in proxies)
        backend = zookeeper.open(
            Url.parse(f"zookeeper://{hosts}/?tick={TICK}&timeout={self.patience}"), clock=self._clock
        )
        store = FaultyLeaseStore(backend.leases)
        self._backends.append(backend)
        self._stores[id(backend)] = id(store)
        self._proxies[id(store)] = proxies
        await backend.client.session(self.ttl).connected(backend.client.until())
        backend.leases._elections._has_containers = True  # as after its first request, which was about nothing else
        self._heal(store)
        return store

    async def close(self) -> None:
        await asyncio.gather(*(backend.close() for backend in self._backends))
        self._backends.clear()
        for proxy in chain.from_iterable(self._proxies.values()):
            await proxy.__aexit__(None, None, None)
        self._proxies.clear()

    async def pass_time(self, seconds: float) -> None:
        """Turn the clocks of the servers and of the clients, in steps; wait until they have ended what is over."""
        for step in steps(seconds, self.ttl * STEP):
            self._clock.turned += step
            await asyncio.to_thread(self._turned.turn, step)
            await asyncio.gather(*(self._keep_up(backend) for backend in self._backends if self._is_reached(backend)))
        while await asyncio.to_thread(self._turned.over):
            await asyncio.sleep(0.01)

    def _is_reached(self, backend: zookeeper.ZooKeeperBackend) -> bool:
        return self._stores[id(backend)] not in self._cut_off

    async def _keep_up(self, backend: zookeeper.ZooKeeperBackend) -> None:
        """Let a client end its places that are over; keep its sessions up, as the driver does by real time only."""
        places = backend.leases._places
        await until(
            lambda: not any(one.ending or one.deadline <= self._clock.now() for one in places._places.values()),
            within=LATE_MAX,
        )
        for session in backend.client._sessions.values():
            if session.is_connected:
                answer = exists("/")(session._driver)
                await until(answer.ready, within=LATE_MAX)

    @asynccontextmanager
    async def lose_answer(self, store: LeaseStore) -> AsyncIterator[None]:
        """Lose the answer of the verb; tests/stores/zookeeper/test_zookeeper.py loses that of each of its requests."""
        assert isinstance(store, FaultyLeaseStore)
        async with store.lose_answer():
            yield

    @asynccontextmanager
    async def cut(self, store: LeaseStore) -> AsyncIterator[None]:
        self._cut_off.add(id(store))
        for proxy in self._proxies[id(store)]:
            proxy.reset()
            proxy.refuse()
        try:
            yield
        finally:
            self._cut_off.discard(id(store))
            self._heal(store)

    def _heal(self, store: LeaseStore) -> None:
        for proxy in self._proxies[id(store)]:
            proxy.heal()

    @asynccontextmanager
    async def late(self, store: LeaseStore) -> AsyncIterator[GiveUp]:
        """Hold back the connection of the request; when that was silent for too long, the client makes a new one."""
        async with late(*self._proxies[id(store)]) as give_up:

            async def give_up_and_leave(request: Awaitable[object]) -> None:
                await give_up(request)
                self._cut_off.add(id(store))
                await self.pass_time(self.ttl * SILENCE_SHARE + TICK)
                self._cut_off.discard(id(store))

            yield give_up_and_leave

    @asynccontextmanager
    async def hold(self, store: LeaseStore, direction: Direction = "down") -> AsyncIterator[Begin]:
        """The client has the patience of a whole lease, as it counts by the clock that is turned."""
        self._cut_off.add(id(store))
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(client, "patience", lambda ttl: ttl)
                async with hold(*self._proxies[id(store)], direction=direction, is_noise=_is_ping) as begin:
                    yield begin
        finally:
            self._cut_off.discard(id(store))

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Revoke all rights on every node."""
        user, password = ADMIN
        rights = [make_acl("digest", make_digest_acl_credential(user, password), all=True)]
        with self._server.client(auth_data={("digest", f"{user}:{password}")}) as client:
            for path in _paths(client):
                client.set_acls(path, rights)
            try:
                yield
            finally:
                for path in _paths(client):
                    client.set_acls(path, OPEN_ACL_UNSAFE)

    async def restart(self) -> None:
        """Kill the server, and restart it from its files; its sessions go on."""
        self._server.kill()
        self._server.start()


def _paths(client: KazooClient, above: str = "") -> Iterator[str]:
    for child in client.get_children(above or "/"):
        path = f"{above}/{child}"
        if path != SYSTEM:
            yield from _paths(client, path)
            yield path
    if not above:
        yield "/"


def _is_ping(frame: bytes) -> bool:
    return frame[4:8] == b"\xff\xff\xff\xfe"  # its number, in requests and answers


class FaultyHarness(ZooKeeperHarness):
    """Three requests in a row are given up before a lease has ended."""

    ttl = 20.0
    patience = 0.6
    faults = frozenset({"lose_answer", "cut", "late"})


class HeldHarness(ZooKeeperHarness):
    """The answers of a connection are held back, for less than a lease."""

    faults = frozenset({"hold"})


class RestartedHarness(ZooKeeperHarness):
    """A server that is killed, or revokes all rights; leases outlast its absence."""

    options = (("globalOutstandingLimit", "1000"),)  # the default; but no other test uses such a server
    ttl = 20.0
    faults = frozenset({"restart", "away"})


class CountedHarness(ZooKeeperHarness):
    """Counts the requests of this process; those that only keep sessions up are noise."""

    faults = frozenset()
    scale = Scale("requests", few=5, several=50, noise=3, times=2)

    async def work_of(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        sent = 0
        call = Driver._call

        def counted(driver: Driver, request: object, result: object) -> object:
            nonlocal sent
            sent += not (isinstance(request, Exists) and request.path == "/")
            return call(driver, request, result)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Driver, "_call", counted)
            answer = await ask()
        return answer, sent


class TestZooKeeperLeases(LeaseStoreSuite):
    harness = ZooKeeperHarness

    async def test_three_hundred_are_renewed_at_once(self, harness: LeaseHarness, name: str) -> None:
        harness.ttl = 20.0  # type: ignore[misc]  # a busy machine takes seconds for so many claims
        await super().test_three_hundred_are_renewed_at_once(harness, name)


class TestZooKeeperWaiting(LeaseQueueSuite):
    harness = FaultyHarness


class TestZooKeeperLeaseFaults(LeaseFaultSuite):
    harness = FaultyHarness


class TestZooKeeperHeldAnswers(LeaseFaultSuite):
    harness = HeldHarness


class TestZooKeeperLeaseCost(LeaseCostSuite):
    harness = CountedHarness


class TestZooKeeperRestarted(LeaseFaultSuite):
    harness = RestartedHarness
