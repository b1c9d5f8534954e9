"""The nodes of elections: containers, which the servers remove when no candidate has stood below them for a while."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("kazoo")

from kazoo.handlers.threading import AsyncResult
from kazoo.security import ACL

from tenure._backends import zookeeper
from tenure._backends.zookeeper import ZooKeeperBackend
from tenure._backends.zookeeper.driver import CreateContainer, Driver
from tenure._lease import Grant, Granted, HeldBy, Released, Vacant
from tenure._url import Url
from tests.durations import until
from tests.servers import ZooKeeper, private, shared

TTL = 30.0
NO_REQUEST = 99
"""The number of a request that no server knows."""


@pytest.fixture
def name() -> str:
    return f"election-{secrets.token_hex(6)}"


@pytest.fixture
def server() -> ZooKeeper:
    return shared(ZooKeeper, tick=0.1, containers_checked=0.05)


@asynccontextmanager
async def opened(server: ZooKeeper, path: str = "") -> AsyncIterator[ZooKeeperBackend]:
    backend = zookeeper.open(Url.parse(f"zookeeper://127.0.0.1:{server.port}/{path}?tick={server.tick:g}"))
    try:
        yield backend
    finally:
        await backend.close()


async def claim(backend: ZooKeeperBackend, name: str, holder: str) -> Grant:
    answer = await backend.leases.acquire(name, holder, TTL)
    assert isinstance(answer, Granted), answer
    return answer.grant


async def used(backend: ZooKeeperBackend, name: str) -> None:
    """Lead once."""
    assert isinstance(await backend.leases.release(await claim(backend, name, "ann#1")), Released)


async def test_the_node_of_an_election_is_removed_and_not_those_above_it(server: ZooKeeper, name: str) -> None:
    async with opened(server, path=f"{name}/jobs") as ann:
        with server.client() as client:
            await used(ann, "report")
            await until(lambda: client.exists(f"/{name}/jobs/report") is None)
            await used(ann, "billing")
            await until(lambda: client.exists(f"/{name}/jobs/billing") is None)
            assert client.exists(f"/{name}/jobs") is not None


@pytest.mark.parametrize("why", ["the servers know no containers", "a former version has made it"])
async def test_a_node_that_stays_is_used_as_well(
    server: ZooKeeper, name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that knows no containers breaks the connection of the request, so that is sent once, and alone."""
    asked: list[str] = []
    create_container = Driver.create_container_async

    def noted(driver: Driver, path: str, acl: Sequence[ACL]) -> AsyncResult:
        asked.append(path)
        return create_container(driver, path, acl)

    async with opened(server) as ann, opened(server) as bob:
        with server.client() as client:
            with monkeypatch.context() as patch:
                if why == "the servers know no containers":
                    patch.setattr(CreateContainer, "type", NO_REQUEST)
                    patch.setattr(Driver, "create_container_async", noted)
                else:
                    client.create(f"/{name}")
                    client.create(f"/{name}-too")
                await used(ann, name)
                await used(ann, f"{name}-too")
            assert asked == ([f"/{name}"] if why == "the servers know no containers" else [])
            await used(bob, f"{name}-container")
            await until(lambda: client.exists(f"/{name}-container") is None)
            assert client.exists(f"/{name}") is not None
            assert client.exists(f"/{name}-too") is not None
            await used(bob, name)


async def test_tokens_rise_and_a_name_is_forgotten_when_its_node_is_removed(name: str) -> None:
    with private(ZooKeeper, tick=0.1, containers_checked=0.05) as server:  # nobody else's names are listed
        async with opened(server) as ann, opened(server) as bob:
            grant = await claim(ann, name, "ann#1")
            other = await claim(ann, f"{name}-other", "ann#1")
            hints = bob.leases.hints(name)
            waiting = asyncio.ensure_future(anext(hints))
            assert await ann.leases.names() == sorted([name, other.name])
            assert await ann.leases.release(grant) == Released(grant)
            with server.client() as client:
                await until(lambda: client.exists(f"/{name}") is None)
                assert client.exists(f"/{other.name}") is not None
            await waiting
            assert await ann.leases.names() == [other.name]
            assert await bob.leases.inspect(name) == Vacant(name, 0)
            assert not await bob.leases.ask_to_resign(name)
            assert isinstance(await bob.leases.inspect(other.name), HeldBy)
            new = await claim(bob, name, "bob#1")
            assert new.token > grant.token
            assert await bob.leases.renew([new], TTL) == [Granted(new)]


async def test_candidates_come_and_go_while_the_servers_remove_the_node(name: str) -> None:
    """It may be gone between any two requests of a candidate until the one that makes its place."""
    tokens: list[int] = []
    with private(ZooKeeper, tick=0.1, containers_checked=0.001) as server:
        async with opened(server) as ann, opened(server) as bob:
            removed = 0
            with server.client() as client:
                while removed < 20 or len(tokens) < 100:
                    for backend, holder in ((ann, "ann"), (bob, "bob")):
                        grant = await claim(backend, name, f"{holder}#{len(tokens)}")
                        tokens.append(grant.token)
                        assert await backend.leases.release(grant) == Released(grant)
                        if len(tokens) % 3 == 0:
                            await until(lambda: client.exists(f"/{name}") is None)
                            removed += 1
    assert tokens == sorted(set(tokens))
