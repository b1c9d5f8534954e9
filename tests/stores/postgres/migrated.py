"""Shared by the tests of PostgreSQL: a server that has the schema, a backend on it, and a plain connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias
from weakref import WeakSet

import asyncpg

from tenure._backends import postgres
from tenure._url import Url
from tests.servers import Postgres, patient

Native: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


async def migrated(server: Postgres) -> Postgres:
    """Return *server* with the schema of this version in it: to look whether it is there takes a connection's time."""
    if server not in _servers:
        await postgres.migrate(server.url)
        _servers.add(server)
    return server


_servers: WeakSet[Postgres] = WeakSet()
"""Those that have the schema."""


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[postgres.PostgresBackend]:
    """Yield a backend, which is closed at the end."""
    backend = postgres.open(Url.parse(patient(url)))
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def native(url: str) -> AsyncIterator[Native]:
    """Yield a connection of the driver itself, as another program uses it."""
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()
