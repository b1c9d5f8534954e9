"""Leases of Kubernetes, under the suites: on the double of its API, and on a real kube-apiserver where one is named."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, TypeVar, cast

import pytest

from tenure._backends import kubernetes
from tenure._election.store import LeaseStore
from tenure._url import Url
from tenure.testing.conformance import (
    FaultyLeaseStore,
    GiveUp,
    LeaseCostSuite,
    LeaseFaultSuite,
    LeaseHarness,
    LeaseStoreSuite,
    Scale,
)
from tenure.testing.faultproxy import Begin, Direction, FaultProxy, hold, late
from tests.clocks import TurnedClock
from tests.servers import KubeApiserver, Kubernetes, private, shared
from tests.servers.kubernetes import PROGRAM, TOKEN_ENV

T = TypeVar("T")

TOKENS = {f"token-{number}": f"user-{number}" for number in range(40)}
"""One for each client of a test, so that a fault can meet one of them."""


class Client:
    """A backend that reaches the server through a proxy of its own."""

    def __init__(self, server: Kubernetes | KubeApiserver, clock: TurnedClock, token: str) -> None:
        self._server = server
        self._clock = clock
        self._token = token
        self.proxy = FaultProxy("127.0.0.1", server.port)

    async def open(self) -> kubernetes.KubernetesBackend:
        await self.proxy.__aenter__()
        through = self._server.url.replace(f":{self._server.port}", f":{self.proxy.port}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(TOKEN_ENV, self._token)
            named = "" if "token_env" in through else f"&token_env={TOKEN_ENV}"
            self.backend = kubernetes.open(Url.parse(f"{through}{named}&timeout=8"), clock=self._clock)
        return self.backend

    @asynccontextmanager
    async def cut(self) -> AsyncIterator[None]:
        self.proxy.reset()
        self.proxy.refuse()
        try:
            yield
        finally:
            self.proxy.heal()

    @asynccontextmanager
    async def stall(self) -> AsyncIterator[None]:
        """Pass nothing on; inside the block, this client has a short timeout."""
        inner = self.backend._client
        patient, inner.options = inner.options, replace(inner.options, timeout=0.5)
        self.proxy.stall()
        try:
            yield
        finally:
            self.proxy.heal()
            inner.options = patient

    async def close(self) -> None:
        await self.backend.close()
        await self.proxy.__aexit__(None, None, None)


LEASES: dict[str, dict[str, dict[str, object]]] = {
    "a renewal in the year 9999": {"spec": {"renewTime": "9999-12-31T23:59:59.999999Z"}},
    "a renewal in the year 1": {"spec": {"renewTime": "0001-01-01T00:00:00.000000Z"}},
    "transitions at their end": {"spec": {"leaseTransitions": 2**31 - 1}},
    "no duration": {"spec": {"leaseDurationSeconds": None}},
    "a long duration": {"spec": {"leaseDurationSeconds": 2**31 - 1}},
    "the last token": {"annotations": {"tenure/token": str(2**63 - 1)}},
    "a token of nines": {"annotations": {"tenure/token": "9" * 18}},
    "a token of many digits": {"annotations": {"tenure/token": "9" * 5_000}},
    "a token as text": {"annotations": {"tenure/token": "new"}},
    "metadata that is no json": {"annotations": {"tenure/metadata": "{"}},
    "metadata of other types": {"annotations": {"tenure/metadata": '{"x": [1], "y": "\\ud800"}'}},
    "deep metadata": {"annotations": {"tenure/metadata": "[" * 100_000}},
    "an odd request": {"annotations": {"tenure/resign-asked": "yes"}},
}
"""What an administrator may set in a Lease, by what that is."""


class KubernetesHarness(LeaseHarness):
    """The double; the clock that judges expiry is ours, and is moved."""

    traits = kubernetes.TRAITS
    foreign = tuple(LEASES)
    ttl = 10.0
    faults = frozenset({"cut", "late", "hold"})

    async def start(self) -> None:
        self._clock = TurnedClock()
        self._clients: list[Client] = []

    @cached_property
    def _server(self) -> Kubernetes | KubeApiserver:
        return shared(Kubernetes, tokens=TOKENS)

    def token(self) -> str:
        return f"token-{len(self._clients)}"

    async def write_foreign(self, name: str, how: str) -> None:
        server = self._server
        assert isinstance(server, Kubernetes)

        def write() -> None:
            lease = server.lease(name)
            lease["spec"] |= LEASES[how].get("spec", {})
            lease["metadata"]["annotations"] |= LEASES[how].get("annotations", {})
            server.put(lease)

        await asyncio.to_thread(write)

    async def open(self) -> LeaseStore:
        client = Client(self._server, self._clock, self.token())
        backend = await client.open()
        self._clients.append(client)
        return cast(LeaseStore, FaultyLeaseStore(backend.leases))

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        if self._clients and isinstance(self._server, Kubernetes):
            self._server.heal()

    async def pass_time(self, seconds: float) -> None:
        self._clock.turned += seconds

    def client_of(self, store: LeaseStore) -> Client:
        assert isinstance(store, FaultyLeaseStore)
        return next(client for client in self._clients if client.backend.leases is store.store)

    def lose_answer(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        assert isinstance(store, FaultyLeaseStore)
        return store.lose_answer()

    def cut(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        return self.client_of(store).cut()

    def late(self, store: LeaseStore) -> AbstractAsyncContextManager[GiveUp]:
        return late(self.client_of(store).proxy)

    def hold(self, store: LeaseStore, direction: Direction = "down") -> AbstractAsyncContextManager[Begin]:
        return hold(self.client_of(store).proxy, direction=direction)


class TestKubernetesLeases(LeaseStoreSuite):
    harness = KubernetesHarness


class TestKubernetesLeaseFaults(LeaseFaultSuite):
    harness = KubernetesHarness


class ServerFaultHarness(KubernetesHarness):
    """Faults made by the server: answers lost after a write, rights revoked for a while, one Lease that fails."""

    faults = frozenset({"lose_answer", "away", "cut_one"})

    @property
    def double(self) -> Kubernetes:
        assert isinstance(self._server, Kubernetes)
        return self._server

    @asynccontextmanager
    async def failing(self, **fault: object) -> AsyncIterator[None]:
        await asyncio.to_thread(self.double.fail, **fault)
        try:
            yield
        finally:
            await asyncio.to_thread(self.double.heal)

    def lose_answer(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        user = TOKENS[self.client_of(store)._token]
        return self.failing(verb=["create", "update"], user=user, drop="after")

    def cut_one(self, store: LeaseStore, name: str) -> AbstractAsyncContextManager[None]:
        user = TOKENS[self.client_of(store)._token]
        return self.failing(name=name, user=user, status=503)

    @asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self.double.set, roles=[])
        try:
            yield
        finally:
            await asyncio.to_thread(self.double.set, roles=None)


class TestKubernetesServerFaults(LeaseFaultSuite):
    harness = ServerFaultHarness


class BlackHoleHarness(KubernetesHarness):
    """Cut off silently: no reset and no answer; requests arrive when the cut ends."""

    faults = frozenset({"cut"})

    def cut(self, store: LeaseStore) -> AbstractAsyncContextManager[None]:
        return self.client_of(store).stall()


class TestKubernetesLeasesInABlackHole(LeaseFaultSuite):
    harness = BlackHoleHarness


class RestartedHarness(KubernetesHarness):
    """A server of its own, killed and started again; only a client starts it, as most tests need other faults."""

    faults = frozenset({"restart"})

    @cached_property
    def _server(self) -> Kubernetes | KubeApiserver:
        return private(Kubernetes, tokens=TOKENS)

    async def restart(self) -> None:
        assert isinstance(self._server, Kubernetes)
        self._server.kill()
        self._server.start()

    async def close(self) -> None:
        await super().close()
        if "_server" in vars(self):
            self._server.close()


class TestKubernetesRestarted(LeaseFaultSuite):
    harness = RestartedHarness


class CountedHarness(KubernetesHarness):
    """Counts the requests to the server."""

    scale: ClassVar[Scale | None] = Scale("requests")

    async def work_of(self, ask: Callable[[], Awaitable[T]]) -> tuple[T, int]:
        assert isinstance(self._server, Kubernetes)
        await asyncio.to_thread(self._server.forget)
        answer = await ask()
        requests = await asyncio.to_thread(self._server.requests)
        return answer, len([one for one in requests if one["path"] != "/control"])


class TestKubernetesLeaseCost(LeaseCostSuite):
    harness = CountedHarness


if os.environ.get(PROGRAM):

    class RealHarness(KubernetesHarness):
        """A real kube-apiserver."""

        foreign = ()  # it refuses most of what the double takes
        faults = frozenset({"lose_answer", "cut", "late", "hold"})

        @cached_property
        def _server(self) -> KubeApiserver:
            return shared(KubeApiserver)

        def token(self) -> str:
            return KubeApiserver.token

    class TestKubeApiserverLeases(LeaseStoreSuite):
        harness = RealHarness

    class TestKubeApiserverLeaseFaults(LeaseFaultSuite):
        harness = RealHarness
