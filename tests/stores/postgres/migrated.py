"""Shared by the tests of PostgreSQL: a server that has the schema, a backend on it, and a plain connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import asyncpg

from tenure._backends import postgres
from tenure._url import Url
from tests.servers import Postgres

Native: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


async def migrated(server: Postgres) -> Postgres:
    """Return *server* with the schema of this version in it."""
    await postgres.migrate(server.url)
    return server


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[postgres.PostgresBackend]:
    """Yield a backend, which is closed at the end."""
    backend = postgres.open(Url.parse(url))
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
