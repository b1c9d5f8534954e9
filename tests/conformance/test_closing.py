"""A closed backend: a lease that it was granted goes on until it runs out, as its work may still run; a place ends."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tenure._lease import Granted, HeldBy
from tenure._opened import Opened
from tenure._registry import load
from tenure._url import Url
from tenure.testing._conformance.leases.steps import claim, holder
from tests.servers import Etcd, Kubernetes, Postgres, Redis, ZooKeeper, url_of

TTL = 15.0  # none ends during a test

STORES: dict[str, Callable[[Path], str]] = {
    "sqlite": lambda folder: f"sqlite:///{folder / 'work.db'}",
    "postgres": lambda _: url_of(Postgres),
    "redis": lambda _: url_of(Redis),
    "etcd": lambda _: url_of(Etcd),
    "zookeeper": lambda _: url_of(ZooKeeper),
    "kubernetes": lambda _: url_of(Kubernetes),
}


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Opened]:
    """Open a backend, and close it."""
    parsed = Url.parse(url)
    backend: Opened = load(parsed).open(parsed)
    try:
        yield backend
    finally:
        await backend.close()


@pytest.mark.parametrize("store", STORES)
async def test_a_closed_backend_ends_no_lease_and_leaves_no_place(store: str, tmp_path: Path) -> None:
    url, name = STORES[store](tmp_path), f"closing-{secrets.token_hex(6)}"
    if store == "postgres":
        await load(Url.parse(url)).migrate(url)
    async with opened(url) as staying:
        async with opened(url) as leaving:
            await claim(leaving.leases, name, "gone#1", TTL)
            other = await claim(staying.leases, f"{name}-other", "ann#1", TTL)
            assert isinstance(await leaving.leases.acquire(other.name, "gone#1", TTL), HeldBy)
        assert await holder(staying.leases, name) == "gone#1"
        assert isinstance(await staying.leases.acquire(name, "ann#1", TTL), HeldBy)
        assert list(await staying.leases.renew([other], TTL)) == [Granted(other)]
        await staying.leases.release(other)
        new = await claim(staying.leases, other.name, "ann#2", TTL)  # at once: the closed one doesn't wait any more
        assert new.token > other.token
