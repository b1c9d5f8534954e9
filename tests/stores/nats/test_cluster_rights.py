"""The accounts of docs/nats.md on three servers: a role works at each of them, wherever the streams are led."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

pytest.importorskip("nats")

import tenure
from tenure._backends.nats.leases import SERIALIZABLE
from tests.durations import until
from tests.servers import Nats, NatsCluster, private
from tests.stores.nats.test_rights import WithAccounts, url_of
from tests.stores.rights import LATER, acting, lead, refused


class ClusterWithAccounts(NatsCluster):
    """Servers that have the accounts of the page, each of them."""

    def __init__(self) -> None:
        super().__init__(size=0)
        self.servers = [WithAccounts() for _ in range(3)]
        self.nodes: list[Nats] = [*self.servers]
        for node in self.nodes:
            node.members = [one.cluster_port for one in self.nodes]


async def received(backend: tenure.Backend) -> list[tenure.Message]:
    """Return the next message, by no pull that waits: the page says what becomes of that when a consumer ends."""
    found: list[tenure.Message] = []

    async def receive() -> bool:
        found.extend(await backend.queue("orders").receive())
        return bool(found)

    await until(receive)
    return found


@pytest.fixture
async def cluster() -> AsyncIterator[ClusterWithAccounts]:
    """Yield a cluster with a queue and a name that was led, on all of its servers."""
    with private(ClusterWithAccounts) as own:
        if own.version < SERIALIZABLE:
            pytest.skip("tenure leads on no replicas of this version; see tests/stores/nats/test_leases.py")
        async with acting(f"{url_of(own.servers[0], 'owner')}?replicas=3") as owner:
            await owner.queue("orders").send(b"first")
            [message] = await received(owner)
            await message.dead_letter("bad")
            await lead(owner, "led")
        yield own


async def test_each_role_works_at_each_server(cluster: ClusterWithAccounts) -> None:
    tokens = []
    for node in cluster.servers:
        async with acting(url_of(node, "candidate")) as candidate:
            tokens.append(await lead(candidate, "led"))
        async with acting(url_of(node, "producer")) as producer, acting(url_of(node, "consumer")) as consumer:
            await producer.queue("orders").send(b"x")
            [message] = await received(consumer)
            await message.abandon()
            [again] = await received(consumer)
            assert again.delivery_count == 2
            await again.complete()
            await refused(producer, lambda backend: backend.queue("orders").receive(), "this user", error=LATER)
        async with acting(url_of(node, "observer")) as observer:
            assert "led" in await observer.leaders()
            assert await observer.queues() == ["orders"]
    assert tokens == sorted(set(tokens))
