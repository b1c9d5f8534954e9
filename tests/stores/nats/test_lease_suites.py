"""Leases in NATS, under the suites, and with faults: of the link, and of a server that is reconfigured and killed."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, TypeVar

import nats as driver
import pytest

from tenure._backends import nats
from tenure._backends.nats.client import Client
from tenure._backends.nats.names import short_word_of
from tenure._election.store import LeaseStore
from tenure._url import Url
from tenure.errors import Unavailable
from tenure.testing.conformance import GiveUp, LeaseCostSuite, LeaseFaultSuite, LeaseHarness, LeaseStoreSuite, Scale
from tenure.testing.faultproxy import Begin, Direction, FaultProxy, hold
from tests.clocks import TurnedClock
from tests.servers import Nats, shared
from tests.servers.nats import PINGS

T = TypeVar("T")

PATIENCE = 8.0  # seconds; the clients' timeout; no request here stays unanswered
USER, PASSWORD = "app", "s3cret"
EVERYTHING: Mapping[str, object] = {}


RECORDS: dict[str, Mapping[str, object] | bytes] = {
    "no text": b"\xff",
    "no record": b"{}",
    "nothing": b"",
    "a deep record": b"[" * 100_000,
    "a record of another name": {"name": "another"},
    "a token as text": {"write": "renewed", "token": "new"},
    "a token that is true": {"write": "renewed", "token": True},
    "the last token": {"write": "renewed", "token": 2**63 - 1},
    "a token without end": {"write": "renewed", "token": 10**30},
    "a long ttl": {"ttl": 1e300},
    "a ttl below zero": {"ttl": -1},
    "a holder as a number": {"holder": 7},
    "metadata of other types": {"metadata": {"x": [1], "y": "\ud800"}},
}
"""What others may write in place of the record of an election, or of some of its fields, by what that is."""


class NatsHarness(LeaseHarness):
    """The clock that judges expiry is ours, and is moved."""

    traits = nats.TRAITS
    foreign = tuple(RECORDS)
    faults = frozenset({"lose_answer", "cut", "late", "hold"})
    server: ClassVar[dict[str, Any]] = {}
    """The server's options; other options start another server."""
    login: ClassVar[str] = ""
    options: ClassVar[str] = ""
    patience: ClassVar[float] = PATIENCE

    async def start(self) -> None:
        self._server = shared(Nats, **self.server)
        self._ports = deque([self._server.port])
        self.begin()

    def begin(self) -> None:
        self._clock = TurnedClock()
        self._proxies: dict[int, list[FaultProxy]] = {}  # one to each server
        self._backends: list[nats.NatsBackend] = []

    async def write_foreign(self, name: str, how: str) -> None:
        subject, change = f"$KV.tenure-leases.{short_word_of(name)}", RECORDS[how]
        client = await driver.connect(self._server.url)
        stream = client.jetstream()
        if not isinstance(change, bytes):
            found = await stream.get_last_msg("KV_tenure-leases", subject)
            change = json.dumps({**json.loads(found.data or b""), **change}).encode()
        await stream.publish(subject, change)
        await client.close()

    async def open(self) -> LeaseStore:
        proxies = [await FaultProxy("127.0.0.1", port).__aenter__() for port in self._ports]
        self._ports.rotate()  # the next client uses another server
        hosts = ",".join(f"{proxy.host}:{proxy.port}" for proxy in proxies)
        url = f"nats://{self.login}{hosts}/?timeout={self.patience}{self.options}"
        backend = nats.open(Url.parse(url), clock=self._clock)
        self._backends.append(backend)
        self._proxies[id(backend.leases)] = proxies
        # With a connection and a bucket, so that a fault concerns the request of the test.
        await backend.leases.acquire("warm", "warm#1", self.ttl)
        return backend.leases

    async def close(self) -> None:
        while self._backends:
            await self._backends.pop().close()
        for proxy in chain.from_iterable(self._proxies.values()):
            await proxy.__aexit__(None, None, None)

    async def pass_time(self, seconds: float) -> None:
        self._clock.turned += seconds

    def client_of(self, store: LeaseStore) -> Client:
        (backend,) = (one for one in self._backends if one.leases is store)
        return backend._client

    def heal(self, store: LeaseStore) -> None:
        for proxy in self._proxies[id(store)]:
            proxy.heal()

    @asynccontextmanager
    async def cut(self, store: LeaseStore) -> AsyncIterator[None]:
        for proxy in self._proxies[id(store)]:
            proxy.reset()
            proxy.refuse()
        try:
            yield
        finally:
            self.heal(store)

    @asynccontextmanager
    async def lose_answer(self, store: LeaseStore) -> AsyncIterator[None]:
        """Lose the answers to what is written: each verb is decided by its write, and may read first."""
        client = self.client_of(store)
        write = client.store

        async def and_lose_answer(*arguments: Any, **options: Any) -> Any:
            for proxy in self._proxies[id(store)]:
                proxy.lose_answers()
            try:
                return await write(*arguments, **options)
            finally:
                self.heal(store)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(client, "store", and_lose_answer)
            yield

    def hold(self, store: LeaseStore, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        return hold(*self._proxies[id(store)], direction=direction, is_noise=PINGS.__contains__)

    @asynccontextmanager
    async def late(self, store: LeaseStore) -> AsyncIterator[GiveUp]:
        """Hold back what the connection carries; at the end of its time, the client gives up both."""
        proxies, client = self._proxies[id(store)], self.client_of(store)

        async def give_up(request: Awaitable[object]) -> None:
            patient, client.options = client.options, replace(client.options, timeout=0.2)
            held = asyncio.Event()
            for proxy in proxies:
                proxy.holding = held
            try:
                with pytest.raises(Unavailable, match="no answer"):
                    await request
            finally:
                for proxy in proxies:
                    proxy.holding = None
                client.options = patient
            assert held.is_set()

        try:
            yield give_up
        finally:
            for proxy in proxies:
                await proxy.deliver()


class KilledNatsHarness(NatsHarness):
    """A server with users, which no other test uses: it may be killed, and its users' rights revoked."""

    faults = NatsHarness.faults | {"away", "restart", "cut_one"}
    server: ClassVar[dict[str, Any]] = {"users": {USER: (PASSWORD, EVERYTHING)}}
    login = f"{USER}:{PASSWORD}@"

    @asynccontextmanager
    async def denied(self, *subjects: str) -> AsyncIterator[None]:
        """Permit the user to publish to no such subject."""
        await self._permit({"publish": {"deny": list(subjects)}})
        try:
            yield
        finally:
            await self._permit(EVERYTHING)

    async def _permit(self, permissions: Mapping[str, object]) -> None:
        self._server.users[USER] = (PASSWORD, permissions)
        await asyncio.to_thread(self._server.reconfigure)

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        async with self.denied("$KV.>", "$JS.>"):
            yield

    @asynccontextmanager
    async def cut_one(self, store: LeaseStore, name: str) -> AsyncIterator[None]:
        async with self.denied(f"$KV.tenure-leases.{short_word_of(name)}"):
            yield

    async def restart(self) -> None:
        while self._backends:
            await self._backends.pop().close()
        self._server.kill()
        await asyncio.to_thread(self._server.start)


class CountingNatsHarness(NatsHarness):
    """Counts the messages that the server gets: each request is one."""

    scale: ClassVar[Scale | None] = Scale("messages", noise=1)
    server: ClassVar[dict[str, Any]] = {"options": {"max_connections": 65_000}}
    """As good as the default; but no other test uses such a server, so that its messages are those of the test."""

    async def work_of(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        before = await asyncio.to_thread(self._server.requests)
        answer = await ask()
        return answer, await asyncio.to_thread(self._server.requests) - before


class TestNatsLeases(LeaseStoreSuite):
    harness = NatsHarness


class TestNatsLeaseFaults(LeaseFaultSuite):
    harness = KilledNatsHarness


class TestNatsLeaseCost(LeaseCostSuite):
    harness = CountingNatsHarness
