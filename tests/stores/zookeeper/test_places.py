"""Places in ZooKeeper's queues that end while a request for them is under way: no node stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("kazoo")

from tenure._backends import zookeeper
from tenure._backends.zookeeper.leases import ZooKeeperLeases
from tenure._url import Url
from tenure.errors import Unavailable
from tenure.testing import until
from tenure.testing.faultproxy import FaultProxy
from tests.servers import ZooKeeper, private

TTL = 10.0


class Setup:
    """A server, and leases that reach it through a proxy."""

    def __init__(self, server: ZooKeeper, proxy: FaultProxy, leases: ZooKeeperLeases) -> None:
        self.server, self.proxy, self.leases = server, proxy, leases

    async def disconnect(self) -> None:
        """Break the connection; none can be made until ``proxy.heal()``."""
        self.proxy.refuse()
        self.proxy.reset()
        session = self.leases._client.session(TTL)
        await until(lambda: not session.is_connected)

    def nodes(self) -> int:
        """Return how many candidates stand in the queue for the name."""
        return self.server.word("dump").count("/name/")


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    with private(ZooKeeper) as server:
        async with FaultProxy("127.0.0.1", server.port) as proxy:
            opened = zookeeper.open(Url.parse(server.url.replace(str(server.port), str(proxy.port)) + "&timeout=5"))
            assert isinstance(opened.leases, ZooKeeperLeases)
            await opened.leases.acquire("name", "first", TTL)
            try:
                yield Setup(server, proxy, opened.leases)
            finally:
                proxy.heal()
                await opened.close()


async def test_a_request_creates_no_node_for_a_place_that_ends_meanwhile(setup: Setup) -> None:
    place = setup.leases._places.find("name", "first")
    assert place is not None
    await setup.disconnect()
    asking = asyncio.create_task(setup.leases.acquire("name", "first", TTL))
    await until(place.turn.locked)
    ending = setup.leases._places.end(place)  # as at its deadline
    setup.proxy.heal()
    with pytest.raises(Unavailable, match="has ended meanwhile"):
        await asking
    await ending
    assert setup.nodes() == 0


async def test_a_request_beside_another_is_refused_at_once(setup: Setup) -> None:
    await setup.disconnect()
    given_up = asyncio.create_task(setup.leases.acquire("name", "second", TTL))
    await until(lambda: setup.leases._places.find("name", "second"))
    with pytest.raises(Unavailable, match="an earlier request of 'second' for 'name' is still under way"):
        await setup.leases.acquire("name", "second", TTL)
    given_up.cancel()
    await asyncio.wait({given_up})
    setup.proxy.heal()
    await setup.leases.acquire("name", "second", TTL)
    assert setup.nodes() == 2  # of the first, and of the second
