"""Verbs of ZooKeeper's leases that overtake each other, and nodes whose candidates are not heard of any more."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from kazoo.client import KazooClient

from tenure._backends import zookeeper
from tenure._backends.zookeeper import leases, proof
from tenure._backends.zookeeper.names import node_prefix
from tenure._backends.zookeeper.touches import session_of
from tenure._lease import Grant, Granted, HeldBy, Lost, Released
from tenure._url import Url
from tenure.errors import Unavailable
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy, late
from tests.servers import ZooKeeper, shared

TICK = 0.1
TTL = 1.5
LASTS = session_of(TTL, TICK)
LONG = 30.0
"""A lease that does not end during a test."""


@pytest.fixture
def name() -> str:
    return f"election-{secrets.token_hex(6)}"


@pytest.fixture
def server() -> ZooKeeper:
    return shared(ZooKeeper, tick=TICK, options=())


@asynccontextmanager
async def opened(port: int, options: str = "") -> AsyncIterator[zookeeper.ZooKeeperBackend]:
    backend = zookeeper.open(Url.parse(f"zookeeper://127.0.0.1:{port}/?tick={TICK}{options}"))
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def foreign(server: ZooKeeper) -> AsyncIterator[KazooClient]:
    """Connect with plain kazoo."""
    client = KazooClient(f"127.0.0.1:{server.port}")
    await asyncio.to_thread(client.start)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.stop)
        client.close()


async def claim(backend: zookeeper.ZooKeeperBackend, name: str, holder: str, ttl: float = TTL) -> Grant:
    answer = await backend.leases.acquire(name, holder, ttl)
    assert isinstance(answer, Granted), answer
    return answer.grant


async def test_an_attempt_after_one_without_a_connection_has_a_place_that_can_be_renewed(
    server: ZooKeeper, name: str
) -> None:
    async with FaultProxy("127.0.0.1", server.port) as proxy, opened(proxy.port) as ann:
        proxy.refuse()
        first = asyncio.ensure_future(ann.leases.acquire(name, "ann#1", TTL))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        proxy.heal()
        answer = await ann.leases.acquire(name, "ann#1", TTL)
        assert isinstance(answer, Granted)
        assert await ann.leases.renew([answer.grant], TTL) == [Granted(answer.grant)]
        async with foreign(server) as client:
            assert len(client.get_children(f"/{name}")) == 1
            assert await ann.leases.release(answer.grant) == Released(answer.grant)
            assert client.get_children(f"/{name}") == []


async def test_a_copy_of_our_node_in_another_session_is_not_taken_for_ours(server: ZooKeeper, name: str) -> None:
    """As a tool makes it that copies nodes. It stands before ours, which is created after that request was given up."""
    async with (
        FaultProxy("127.0.0.1", server.port) as proxy,
        opened(proxy.port) as ann,
        foreign(server) as client,
    ):
        session = ann.client.session(LONG)
        await ann.leases.release(await claim(ann, f"{name}-before", "ann#1", LONG))  # they know of containers now
        client.create(f"/{name}")
        async with late(proxy) as give_up:
            await give_up(ann.leases.acquire(name, "ann#1", LONG))
            place = ann.leases._places.find(name, "ann#1")
            assert place is not None
            copy = f"/{name}/{node_prefix('latch', place.guid)}"
            copy, stat = client.create(copy, b"a copy", ephemeral=True, sequence=True, include_data=True)
        assert await ann.leases.acquire(name, "ann#1", LONG) == HeldBy(name, "a copy", stat.czxid, None)
        client.delete(copy)
        answer = await ann.leases.acquire(name, "ann#1", LONG)
        assert isinstance(answer, Granted)
        (node,) = client.get_children(f"/{name}")
        stat = client.exists(f"/{name}/{node}")
        assert (stat.ephemeralOwner, stat.czxid) == (session.id, answer.grant.token)


async def test_a_withdrawal_ends_an_acquisition_that_waits_for_the_end_of_an_earlier_place(
    server: ZooKeeper, name: str
) -> None:
    async with FaultProxy("127.0.0.1", server.port) as proxy, opened(proxy.port) as ann, opened(server.port) as bob:
        grant = await claim(bob, name, "bob#1")
        assert isinstance(await ann.leases.acquire(name, "ann#1", TTL), HeldBy)
        place = ann.leases._places.find(name, "ann#1")
        assert place is not None
        proxy.stall("down")
        ann.leases._places.end(place)  # as at its deadline
        acquiring = asyncio.ensure_future(ann.leases.acquire(name, "ann#1", TTL))
        await asyncio.sleep(0)
        withdrawing = asyncio.ensure_future(ann.leases.withdraw(name, "ann#1"))
        await asyncio.sleep(0)
        proxy.heal()
        await asyncio.gather(acquiring, withdrawing, return_exceptions=True)
        assert withdrawing.exception() is None
        async with foreign(server) as client:
            assert len(client.get_children(f"/{name}")) == 1
        assert await bob.leases.release(grant) == Released(grant)


@pytest.mark.parametrize("steps", range(5))
async def test_a_claim_that_is_granted_while_the_backend_closes_is_not_ended(
    server: ZooKeeper, name: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the caller gets no grant, or the session goes on until it runs out."""
    closing: asyncio.Future[None] | None = None
    async with opened(server.port) as bob:
        ann = zookeeper.open(Url.parse(f"zookeeper://127.0.0.1:{server.port}/?tick={TICK}"))
        prove = proof.proven

        async def prove_and_close(*arguments: Any, **options: Any) -> float | None:
            nonlocal closing
            age = await prove(*arguments, **options)
            closing = asyncio.ensure_future(ann.close())
            for _ in range(steps):
                await asyncio.sleep(0)
            return age

        monkeypatch.setattr(leases, "proven", prove_and_close)
        try:
            answer = await ann.leases.acquire(name, "ann#1", TTL)
        except Unavailable:
            answer = None
        assert closing is not None
        await closing
        assert answer is None or isinstance(await bob.leases.inspect(name), HeldBy)


async def test_a_claim_ends_when_the_renewal_loop_is_blocked(server: ZooKeeper, name: str) -> None:
    """kazoo's own thread goes on meanwhile; it must not keep the session up."""
    blocked, unblock = threading.Event(), threading.Event()

    async def block() -> None:
        async with opened(server.port) as ann:
            grant = await claim(ann, name, "ann#1")
            blocked.set()
            unblock.wait()
            while True:
                with suppress(Unavailable):
                    assert await ann.leases.renew([grant], TTL) == [Lost(grant)]
                    return

    async with opened(server.port) as bob:
        blocking = asyncio.ensure_future(asyncio.to_thread(asyncio.run, block()))
        await asyncio.to_thread(blocked.wait)
        try:
            async with asyncio.timeout(2 * LASTS + 10.0):
                while not isinstance(await bob.leases.acquire(name, "bob#1", TTL), Granted):
                    await asyncio.sleep(0.05)
        finally:
            unblock.set()
        await blocking


async def test_a_claim_ends_when_its_loop_was_left_without_closing(server: ZooKeeper, name: str) -> None:
    left: list[zookeeper.ZooKeeperBackend] = []

    async def leave() -> None:
        left.append(zookeeper.open(Url.parse(f"zookeeper://127.0.0.1:{server.port}/?tick={TICK}")))
        await claim(left[0], name, "ann#1")

    await asyncio.to_thread(asyncio.run, leave())
    async with opened(server.port) as bob, asyncio.timeout(2 * LASTS + 10.0):
        while not isinstance(await bob.leases.acquire(name, "bob#1", TTL), Granted):
            await asyncio.sleep(0.05)
    await until(lambda: not [thread for thread in threading.enumerate() if thread.name == "tenure-zookeeper"])
    left[0].client.session(TTL)._driver.close()  # its sockets


async def test_a_release_whose_answer_is_lost_says_that_it_released(server: ZooKeeper, name: str) -> None:
    """The request is repeated on the next connection, within the verb, and finds no node."""
    async with FaultProxy("127.0.0.1", server.port) as proxy, opened(proxy.port) as ann:
        grant = await claim(ann, name, "ann#1")
        proxy.lose_answers()
        releasing = asyncio.ensure_future(ann.leases.release(grant))
        await until(lambda: releasing.done() or not ann.client.session(TTL).is_connected)
        proxy.heal()
        assert await releasing == Released(grant)


@pytest.mark.parametrize("steps", range(0, 24, 2))
async def test_a_renewal_beside_an_acquisition_that_replaces_its_node_is_answered(
    server: ZooKeeper, name: str, steps: int
) -> None:
    async with opened(server.port) as ann:
        grant, other = await claim(ann, name, "ann#1"), await claim(ann, f"{name}-other", "ann#1")
        async with foreign(server) as client:
            (node,) = client.get_children(f"/{name}")
            client.delete(f"/{name}/{node}")
        acquiring = asyncio.ensure_future(ann.leases.acquire(name, "ann#1", TTL))
        for _ in range(steps):
            await asyncio.sleep(0.0002)
        assert await ann.leases.renew([grant, other], TTL) == [Lost(grant), Granted(other)]
        answer = await acquiring
        assert isinstance(answer, Granted)
        assert answer.grant.token > grant.token
        assert await ann.leases.renew([answer.grant], TTL) == [Granted(answer.grant)]
