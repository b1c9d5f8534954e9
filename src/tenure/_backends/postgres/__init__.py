"""Leases and queues in PostgreSQL: ``postgresql://user@host/database``, after ``tenure migrate URL``."""

from __future__ import annotations

from collections.abc import Sequence

from tenure._backends.postgres.address import Options, options_of
from tenure._backends.postgres.client import Client
from tenure._backends.postgres.diagnosis import diagnose
from tenure._backends.postgres.fence import fence
from tenure._backends.postgres.leases import TRAITS, PostgresLeases
from tenure._backends.postgres.migrate import Migrated, migrate, migrate_with, version_to_migrate
from tenure._backends.postgres.queue import QUEUE_TRAITS, PostgresBroker
from tenure._backends.postgres.script import script
from tenure._backends.postgres.wake import Wake
from tenure._logins import Source
from tenure._opened import Fact
from tenure._runtime.clock import Clock
from tenure._runtime.closing import close_in_order
from tenure._url import Url

__all__ = [
    "QUEUE_TRAITS",
    "TRAITS",
    "Migrated",
    "Options",
    "PostgresBackend",
    "PostgresBroker",
    "PostgresLeases",
    "fence",
    "migrate",
    "open",
]


def open(url: Url, *, clock: Clock | None = None, credentials: Source | None = None) -> PostgresBackend:
    """Open the database that *url* names; the first request connects to it.

    Raises:
        ConfigError: The address can't be read, or an option is unknown or doesn't fit.
    """
    return PostgresBackend(Client(url, options_of(url), credentials))


def migration_sql(url: Url, since: int) -> str:
    """Return the SQL that upgrades the schema that *url* names from version *since*, or creates it if that is 0.

    Raises:
        ConfigError: There is no such version, or an option is unknown or doesn't fit.
    """
    return script(options_of(url).schema, since)


class PostgresBackend:
    """A connected database: a few connections for each loop, and one that listens for notifications."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.warnings: Sequence[Fact] = client.warnings
        self._wake = Wake(client)
        self.leases: PostgresLeases = PostgresLeases(client, self._wake)
        self.broker: PostgresBroker = PostgresBroker(client, self._wake)

    @property
    def is_listening(self) -> bool:
        """Whether notifications arrive at this moment; if not, callers poll."""
        return self._wake.connected

    async def migrate(self) -> Migrated:
        """Create or upgrade the schema; see :func:`migrate`."""
        return await migrate_with(self._client)

    async def migration_sql(self) -> str:
        """Return the SQL that ``migrate`` would run now; an SQL comment if there is nothing to do."""
        since = await version_to_migrate(self._client)
        schema = self._client.options.schema
        return script(schema, since) if since is not None else f"-- the schema {schema} is up to date: nothing to do"

    async def describe(self) -> Sequence[Fact]:
        """Return facts about the server."""
        return [*await diagnose(self._client), self._wake.fact()]

    async def close(self) -> None:
        """Close every connection."""
        await close_in_order(self.broker.close, self._wake.close, self._client.close)
