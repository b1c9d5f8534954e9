"""Leases in etcd, under the suites, on servers whose clocks are turned, and with faults."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, TypeVar

import pytest

from tenure._backends import etcd
from tenure._backends.etcd import leases
from tenure._backends.etcd.requests import Keys
from tenure._election.store import LeaseStore
from tenure._url import Url
from tenure.testing import until
from tenure.testing._conformance.cost import Scale
from tenure.testing.conformance import (
    GiveUp,
    LeaseCostSuite,
    LeaseFaultSuite,
    LeaseHarness,
    LeaseQueueSuite,
    LeaseStoreSuite,
)
from tenure.testing.faultproxy import Begin, Direction, FaultProxy, hold, late
from tests.clocks import TurnedClock
from tests.durations import ANSWERED_WITHIN
from tests.servers import Etcd, EtcdCluster, shared
from tests.servers.etcd import end_of, in_base64
from tests.servers.turned_process import CAN_TURN, steps

T = TypeVar("T")

LATE_MAX = 30.0  # seconds, after which what is over must have ended, also on a busy machine
USER, PASSWORD, ROOT = "app", "s3cret", "r00t"


RECORDS = {
    "no text": b"\xff",
    "no record": b"{}",
    "a deep record": b"[" * 100_000,
    "a record of another kind": b'{"holder": "somebody"}',
    "a token as text": b'{"token": "new", "holder": "b", "metadata": {}}',
    "a token without end": b'{"token": 1e999, "holder": "b", "metadata": {}}',
    "a token below zero": b'{"token": -1, "holder": "b", "metadata": {}}',
    "the last token": b'{"token": 9223372036854775807, "holder": "b", "metadata": {}}',
    "a holder as a number": b'{"token": 1, "holder": 7, "metadata": {}}',
    "metadata of other types": b'{"token": 1, "holder": "b", "metadata": {"x": [1], "y": "\\ud800"}}',
}
"""What others may write in place of the record of an election, by what that is."""


class EtcdHarness(LeaseHarness):
    traits = etcd.TRAITS
    foreign = tuple(RECORDS)
    ttl = 60.0 if CAN_TURN else 2.0  # long enough for three hundred claims on a busy machine; turning it takes no time
    ends_within = 0.2  # the client ends a lease itself; etcd, if that can't be reached, up to 1 s later
    has_sessions = True
    keeps_unanswered = False
    faults = frozenset({"lose_answer", "cut", "late", "hold"})
    server: ClassVar[dict[str, Any]] = {}
    """The server's options; other options start another server."""
    login: ClassVar[str] = ""
    patience: ClassVar[float] = ANSWERED_WITHIN
    _server: Etcd
    _turned: Etcd | EtcdCluster

    def __init__(self) -> None:
        self._proxies: dict[int, list[FaultProxy]] = {}  # one to each member
        self._backends: list[etcd.EtcdBackend] = []
        self._cut_off: set[int] = set()
        self._clock = TurnedClock()

    async def start(self) -> None:
        self._server = self._turned = shared(Etcd, **self.server)
        # Else those that the tests before have left would end when this one turns the clock, one after the other.
        await asyncio.to_thread(self._server.end_leases)
        self._ports = deque([self._server.port])
        self._clock.turn_loop()

    async def write_foreign(self, name: str, how: str) -> None:
        value = base64.b64encode(RECORDS[how]).decode()
        key = base64.b64encode(Keys("tenure/").record(name)).decode()
        await asyncio.to_thread(self._server.call, "kv/put", {"key": key, "value": value})

    async def open(self) -> LeaseStore:
        proxies = [await FaultProxy("127.0.0.1", port).__aenter__() for port in self._ports]
        self._ports.rotate()  # the next client asks another member first
        hosts = ",".join(f"{proxy.host}:{proxy.port}" for proxy in proxies)
        backend = etcd.open(Url.parse(f"etcd://{self.login}{hosts}/?timeout={self.patience}"), clock=self._clock)
        self._backends.append(backend)
        self._proxies[id(backend.leases)] = proxies
        # With a session, so that a fault concerns the first request of the test.
        holder = f"warm#{len(self._backends)}"
        await backend.leases.acquire(f"warm {holder}", holder, self.ttl)
        await backend.leases.withdraw(f"warm {holder}", holder)
        return backend.leases

    async def close(self) -> None:
        while self._backends:
            await self._backends.pop().close()
        for proxy in chain.from_iterable(self._proxies.values()):
            await proxy.__aexit__(None, None, None)
        self._proxies.clear()

    async def pass_time(self, seconds: float) -> None:
        """Turn the clocks of the server and of the clients; wait until they have ended what is over by them."""
        if not CAN_TURN:
            await super().pass_time(seconds)
            return
        for step in steps(seconds, self._turned.step_max):
            self._clock.turned += step
            await asyncio.to_thread(self._turned.turn, step)
        await until(lambda: not any(self._overdue()), within=LATE_MAX)
        while await asyncio.to_thread(self._server.ended_leases):
            await asyncio.sleep(0.01)

    def _overdue(self) -> Iterator[bool]:
        """Yield whether a client that is not cut off still has a place that is over."""
        for backend in self._backends:
            if id(backend.leases) not in self._cut_off:
                sessions = backend.leases._sessions
                yield bool(sessions._ending)
                yield any(place.deadline <= self._clock.now() for place in sessions._places.values())

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

    @asynccontextmanager
    async def lose_answer(self, store: LeaseStore) -> AsyncIterator[None]:
        self._cut_off.add(id(store))
        for proxy in self._proxies[id(store)]:
            proxy.lose_answers()
        try:
            yield
        finally:
            self._cut_off.discard(id(store))
            self._heal(store)

    def _heal(self, store: LeaseStore) -> None:
        for proxy in self._proxies[id(store)]:
            proxy.heal()

    def late(self, store: LeaseStore) -> AbstractAsyncContextManager[GiveUp]:
        return late(*self._proxies[id(store)])

    @asynccontextmanager
    async def hold(self, store: LeaseStore, direction: Direction = "down") -> AsyncIterator[Begin]:
        """The client has the patience of a whole lease, as its timers follow the clock that is turned."""
        (client,) = (one._client for one in self._backends if one.leases is store)
        self._cut_off.add(id(store))
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(leases, "patience", lambda ttl: ttl)
                patch.setattr(client, "options", replace(client.options, timeout=self.ttl))
                async with hold(*self._proxies[id(store)], direction=direction) as begin:
                    yield begin
        finally:
            self._cut_off.discard(id(store))


class KilledEtcdHarness(EtcdHarness):
    """A server with users, which no other test uses: it may be killed, and its users' rights revoked."""

    faults = EtcdHarness.faults | {"away", "restart"}
    server: ClassVar[dict[str, Any]] = {"password": ROOT}
    login = f"{USER}:{PASSWORD}@"

    async def start(self) -> None:
        await super().start()
        if USER not in self._ask("auth/user/list", {}).get("users", ()):
            self._server.add_user(USER, PASSWORD, "tenure/")

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._server.call(path, body, token=self._server.login())

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Revoke the right to use the keys."""
        keys = {"key": in_base64("tenure/"), "range_end": in_base64(end_of("tenure/"))}
        self._ask("auth/role/revoke", {"role": USER, **keys})
        try:
            yield
        finally:
            self._ask("auth/role/grant", {"name": USER, "perm": {"permType": "READWRITE", **keys}})

    async def restart(self) -> None:
        """Kill the server, and restart it from its files; it has forgotten who is logged in."""
        self._server.kill()
        self._server.start()


class CountingEtcdHarness(EtcdHarness):
    """Counts the requests that the server gets, and the ranges that it reads for them."""

    scale = Scale("requests and reads", noise=1)
    server: ClassVar[dict[str, Any]] = {"options": ("--max-request-bytes=1572864",)}
    """The default; but no other test uses such a server, so that its requests are those of the test."""

    async def work_of(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        before = self._count()
        answer = await ask()
        return answer, self._count() - before

    def _count(self) -> int:
        reads = self._server.metrics()["etcd_debugging_mvcc_range_total"]
        return sum(self._server.requests().values()) + int(reads)


class TestEtcdLeases(LeaseStoreSuite):
    harness = EtcdHarness


class TestEtcdLeaseFaults(LeaseFaultSuite):
    harness = KilledEtcdHarness


class TestEtcdWaiting(LeaseQueueSuite):
    harness = EtcdHarness


class TestEtcdLeaseCost(LeaseCostSuite):
    harness = CountingEtcdHarness
