"""An ensemble of three: its leader is killed, a follower stops, while candidates stand on them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from tenure._backends import zookeeper
from tenure._lease import Grant, Granted, HeldBy, Vacant
from tenure._url import Url
from tenure.errors import Unavailable
from tests.servers import ZooKeeper, ZooKeeperEnsemble, private

TICK = 0.1
TTL = 1.5
LONG = 8.0
"""A lease that outlasts the choice of a new leader, on a busy machine too."""


@pytest.fixture(scope="module")
def shared_ensemble() -> Iterator[ZooKeeperEnsemble]:
    with private(ZooKeeperEnsemble, tick=TICK) as ensemble:
        yield ensemble


@pytest.fixture
def ensemble(shared_ensemble: ZooKeeperEnsemble) -> Iterator[ZooKeeperEnsemble]:
    """Give the ensemble; afterwards, all its servers run again."""
    yield shared_ensemble
    for node in shared_ensemble.nodes:
        node.resume()
    shared_ensemble.start()


@pytest.fixture
def name() -> str:
    return f"election-{secrets.token_hex(6)}"


@asynccontextmanager
async def opened(*nodes: ZooKeeper) -> AsyncIterator[zookeeper.ZooKeeperBackend]:
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    backend = zookeeper.open(Url.parse(f"zookeeper://{hosts}/?tick={TICK}"))
    try:
        yield backend
    finally:
        await backend.close()


async def claim(backend: zookeeper.ZooKeeperBackend, name: str, holder: str, ttl: float) -> Grant:
    answer = await backend.leases.acquire(name, holder, ttl)
    assert isinstance(answer, Granted), answer
    return answer.grant


def server_of(backend: zookeeper.ZooKeeperBackend, ensemble: ZooKeeperEnsemble, ttl: float) -> ZooKeeper:
    """Return the server to which the session of *backend* is connected."""
    _, port = backend.client.session(ttl)._driver._connection._socket.getpeername()
    return next(node for node in ensemble.nodes if node.port == port)


async def renewed(backend: zookeeper.ZooKeeperBackend, grant: Grant, ttl: float) -> object:
    """Renew until there is an answer."""
    while True:
        try:
            (answer,) = await backend.leases.renew([grant], ttl)
        except Unavailable:
            await asyncio.sleep(0.02)
        else:
            return answer


async def test_a_term_outlives_the_leader_of_the_ensemble(ensemble: ZooKeeperEnsemble, name: str) -> None:
    async with opened(*ensemble.nodes) as ann, opened(*ensemble.nodes) as bob:
        grant = await claim(ann, name, "ann#1", LONG)
        assert isinstance(await bob.leases.acquire(name, "bob#1", LONG), HeldBy)
        ensemble.leader.kill()
        assert await renewed(ann, grant, LONG) == Granted(grant)
        assert await renewed(ann, grant, LONG) == Granted(grant)
        await ann.leases.release(grant)
        assert (await claim(bob, name, "bob#1", LONG)).token > grant.token


async def test_a_candidate_leaves_a_server_that_has_stopped(ensemble: ZooKeeperEnsemble, name: str) -> None:
    async with opened(*ensemble.nodes) as ann:
        grant = await claim(ann, name, "ann#1", LONG)
        stopped = server_of(ann, ensemble, LONG)
        stopped.pause()
        assert await renewed(ann, grant, LONG) == Granted(grant)
        assert server_of(ann, ensemble, LONG) is not stopped


@pytest.mark.parametrize("pause", [0.0, 0.5 * TICK, TICK, TTL / 3])
async def test_no_successor_comes_before_the_end_of_a_term_whose_server_is_cut_off_right_after_its_answer(
    ensemble: ZooKeeperEnsemble, name: str, pause: float
) -> None:
    """The server never tells the ensemble's leader of the last renewals; the successor asks at every moment."""
    follower, other = ensemble.followers
    async with opened(follower) as ann, opened(other) as bob:
        clock = ann.client.clock
        granted_at = clock.now()
        grant = await claim(ann, name, "ann#1", TTL)
        assert isinstance(await bob.leases.acquire(name, "bob#1", TTL), HeldBy)
        for _ in range(4):
            await asyncio.sleep(pause)
            asked_at = clock.now()
            (renewed,) = await ann.leases.renew([grant], TTL)
            assert isinstance(renewed, Granted)
            granted_at = max(granted_at, asked_at - renewed.age)
        follower.pause()
        new: Grant | None = None
        async with asyncio.timeout(60.0):
            while new is None:
                try:
                    answer = await bob.leases.acquire(name, "bob#1", TTL)
                except Unavailable:
                    continue
                if isinstance(answer, Granted):
                    new = answer.grant
        assert clock.now() - granted_at >= TTL  # if clocks drift, the election trusts it for less than that
        assert new.token > grant.token


async def test_one_server_that_is_away_delays_nobody(ensemble: ZooKeeperEnsemble, name: str) -> None:
    ensemble.followers[0].kill()
    async with opened(*ensemble.nodes) as ann:
        grant = await claim(ann, name, "ann#1", LONG)
        assert await ann.leases.renew([grant], LONG) == [Granted(grant)]


async def test_a_server_that_is_behind_catches_up_before_it_is_read(ensemble: ZooKeeperEnsemble, name: str) -> None:
    """It reads the question and the news of the others at the same time; without care, the old answer often wins."""
    behind, other = ensemble.followers
    async with opened(other) as ann, opened(behind) as bob:
        for each in (f"{name}-{number}" for number in range(15)):
            assert await bob.leases.inspect(each) == Vacant(each, 0)
            behind.pause()
            try:
                grant = await claim(ann, each, "ann#1", LONG)
                asked = [asyncio.ensure_future(ask(each)) for ask in (bob.leases.inspect, bob.leases.ask_to_resign)]
                await asyncio.sleep(0.05)  # they are sent before it goes on
            finally:
                behind.resume()
            held, was_asked = await asyncio.gather(*asked)
            assert (held, was_asked) == (HeldBy(each, "ann#1", grant.token, None), True)


async def test_without_a_majority_there_is_no_answer(ensemble: ZooKeeperEnsemble, name: str) -> None:
    async with opened(*ensemble.nodes) as ann:
        grant = await claim(ann, name, "ann#1", LONG)
        for node in ensemble.followers:
            node.pause()
        with pytest.raises(Unavailable):
            await ann.leases.renew([grant], 0.5)
        for node in ensemble.nodes:
            node.resume()
        assert await renewed(ann, grant, LONG) == Granted(grant)
