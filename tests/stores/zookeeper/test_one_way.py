"""A process whose requests reach ZooKeeper, and that gets no answers in time, blocks a name no longer than a dead one.

A request to connect extends a session, so the attempts have to end before the session can. Nothing here heals a link
before another candidate leads.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import pytest

pytest.importorskip("kazoo")

from tenure._backends import zookeeper
from tenure._backends.zookeeper import ZooKeeperBackend
from tenure._lease import Grant, Granted, HeldBy, Lost
from tenure._runtime.clock import Clock
from tenure._url import Url
from tenure.errors import Unavailable
from tenure.testing.faultproxy import FaultProxy
from tests.clocks import TurnedClock
from tests.durations import PATIENCE, stretched, until
from tests.servers import ZooKeeper, private, shared

T = TypeVar("T")

TICK = 0.1
LOGIN = "ann", "s3cret"
SESSION_MIN = 1.5
"""The ``minSessionTimeout`` of a server that requires a login, in seconds: longer than the pauses between attempts."""

Break = Callable[[FaultProxy], None]


@pytest.fixture
def name() -> str:
    return f"election-{secrets.token_hex(6)}"


@pytest.fixture
def server() -> ZooKeeper:
    return shared(ZooKeeper, tick=TICK, options=())


@pytest.fixture
def ttl() -> float:
    return stretched(1.5)


@asynccontextmanager
async def opened(
    port: int, *, login: str = "", options: str = "", clock: Clock | None = None
) -> AsyncIterator[ZooKeeperBackend]:
    url = Url.parse(f"zookeeper://{login}127.0.0.1:{port}/?tick={TICK}{options}")
    backend = zookeeper.open(url, clock=clock)
    try:
        yield backend
    finally:
        await backend.close()


async def claim(backend: ZooKeeperBackend, name: str, holder: str, ttl: float) -> Grant:
    answer = await backend.leases.acquire(name, holder, ttl)
    assert isinstance(answer, Granted), answer
    return answer.grant


async def waits(backend: ZooKeeperBackend, name: str, holder: str, ttl: float) -> None:
    assert isinstance(await backend.leases.acquire(name, holder, ttl), HeldBy)


async def asks_in_vain(backend: ZooKeeperBackend, name: str, holder: str, ttl: float) -> None:
    """Ask for ever, as a candidate does."""
    while True:
        with pytest.raises(Unavailable):
            await backend.leases.acquire(name, holder, ttl)


async def leads(backend: ZooKeeperBackend, name: str, holder: str, ttl: float) -> Grant:
    """Ask until it leads; return its claim."""
    grants: list[Grant] = []

    async def is_granted() -> bool:
        answer = await backend.leases.acquire(name, holder, ttl)
        grants.extend([answer.grant] if isinstance(answer, Granted) else [])
        return bool(grants)

    await until(is_granted)
    return grants[0]


async def answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until there is an answer."""
    answers: list[T] = []

    async def is_answered() -> bool:
        with suppress(Unavailable):
            answers.append(await ask())
        return bool(answers)

    await until(is_answered)
    return answers[0]


def lost(proxy: FaultProxy) -> None:
    proxy.stall("down")


def late(proxy: FaultProxy) -> None:
    """Each answer comes when its request was given up."""
    proxy.delay(PATIENCE, "down")


def reset(proxy: FaultProxy) -> None:
    proxy.lose_answers()


BREAKS = pytest.mark.parametrize("break_", [lost, late, reset])


@BREAKS
async def test_a_leader_without_answers_is_followed(server: ZooKeeper, name: str, ttl: float, break_: Break) -> None:
    async with (
        FaultProxy("127.0.0.1", server.port) as proxy,
        opened(proxy.port) as ann,
        opened(server.port) as bob,
    ):
        grant = await claim(ann, name, "ann#1", ttl)
        await waits(bob, name, "bob#1", ttl)
        break_(proxy)
        asking = asyncio.ensure_future(asks_in_vain(ann, name, "ann#1", ttl))
        async with asyncio.timeout(2 * ttl + 30.0):
            new = await leads(bob, name, "bob#1", ttl)
        assert new.token > grant.token
        assert not asking.done()
        asking.cancel()
        proxy.reset()
        proxy.heal()
        assert await answered(lambda: ann.leases.renew([grant], ttl)) == [Lost(grant)]
        assert await bob.leases.renew([new], ttl) == [Granted(new)]
        await answered(lambda: waits(ann, name, "ann#1", ttl))  # in a new session


@BREAKS
async def test_a_candidate_without_answers_does_not_block_those_behind_it(
    server: ZooKeeper, name: str, ttl: float, break_: Break
) -> None:
    async with FaultProxy("127.0.0.1", server.port) as proxy, opened(server.port) as ann, opened(server.port) as cat:
        async with opened(proxy.port) as bob:
            grant = await claim(ann, name, "ann#1", ttl)
            await waits(bob, name, "bob#1", ttl)
            await waits(cat, name, "cat#1", ttl)
            break_(proxy)
            asking = asyncio.ensure_future(asks_in_vain(bob, name, "bob#1", ttl))
            await ann.leases.release(grant)
            async with asyncio.timeout(2 * ttl + 30.0):
                await leads(cat, name, "cat#1", ttl)
            assert not asking.done()
            asking.cancel()
        await until(lambda: sum(thread.name == "tenure-zookeeper" for thread in threading.enumerate()) == 2)


async def test_a_session_that_may_not_be_ended_is_not_kept_up_by_the_request_to_end_it(name: str, ttl: float) -> None:
    """A server that requires a login lets a client connect before it, and ends no session. Here it does it at once."""
    options = [("minSessionTimeout", f"{SESSION_MIN * 1_000:.0f}")]
    with private(ZooKeeper, tick=TICK, login=LOGIN, needs_login=True, options=options) as server:
        user = "{}:{}@".format(*LOGIN)
        async with (
            FaultProxy("127.0.0.1", server.port) as proxy,
            opened(proxy.port, login=user, options="&auth=sasl") as ann,
            opened(server.port, login=user, options="&auth=sasl") as bob,
        ):
            await claim(ann, name, "ann#1", ttl)
            await waits(bob, name, "bob#1", ttl)
            proxy.lose_answers()
            async with asyncio.timeout(2 * ttl + 30.0):
                await leads(bob, name, "bob#1", ttl)


async def test_an_old_claim_ends_when_its_servers_are_back_after_a_long_outage(name: str) -> None:
    """They give the session its full time again; the client neither uses nor keeps it."""
    ttl, clock = 30.0, TurnedClock()
    clock.turn_loop()
    with private(ZooKeeper, tick=TICK) as server:
        async with opened(server.port, clock=clock) as ann, opened(server.port) as bob:
            await claim(ann, name, "ann#1", ttl)
            session = ann.client.session(ttl)
            server.kill()
            await until(lambda: not session.is_connected)
            clock.turned += ttl
            await until(lambda: session.is_over)
            server.start()
            began = time.monotonic()
            await answered(lambda: leads(bob, name, "bob#1", ttl))
            assert time.monotonic() - began < ttl * 2 / 3


async def test_a_session_is_kept_while_one_of_its_claims_may_be_saved(server: ZooKeeper, name: str) -> None:
    ttl, clock = 50.0, TurnedClock()
    clock.turn_loop()
    async with FaultProxy("127.0.0.1", server.port) as proxy, opened(proxy.port, clock=clock) as ann:
        old, new = [await claim(ann, f"{name}-{number}", "ann#1", ttl) for number in range(2)]
        clock.turned += 0.6 * ttl
        assert await answered(lambda: ann.leases.renew([new], ttl)) == [Granted(new)]
        session = ann.client.session(ttl)
        proxy.refuse()
        proxy.reset()
        await until(lambda: not session.is_connected)
        clock.turned += 0.6 * ttl
        place = ann.leases._places.find(old.name, old.holder)
        assert place is not None
        await until(lambda: place.ending is not None)
        proxy.heal()
        assert await answered(lambda: ann.leases.renew([old, new], ttl)) == [Lost(old), Granted(new)]
        assert ann.client.session(ttl) is session
