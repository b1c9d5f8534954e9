"""A PostgreSQL that can only be read, behind a balancer that goes to another one by now: connections are replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tenure._backends.postgres.client import Client
from tenure._lease import Granted
from tenure.errors import Unavailable
from tenure.testing.faultproxy import FaultProxy
from tests.durations import until
from tests.servers import Postgres, private, shared
from tests.stores.postgres.migrated import migrated, native, opened

POOL = 3
RAISES = "DO $$BEGIN RAISE EXCEPTION '{}'; END$$"
READ_ONLY = """DO $$BEGIN
    PERFORM set_config('transaction_read_only', 'on', true);
    EXECUTE 'CREATE TABLE never_made ()';
END$$"""


async def processes(client: Client) -> Sequence[int]:
    """Return the processes of the server that answer when all connections are in use."""
    asked = (client.fetch("SELECT pg_backend_pid(), pg_sleep(0.1)") for _ in range(POOL))
    return [rows[0][0] for rows in await asyncio.gather(*asked)]


@pytest.mark.parametrize(
    ("refused", "is_elsewhere"),
    [
        (READ_ONLY, True),
        (RAISES.format("cannot execute UPDATE in a read-only transaction"), True),
        (RAISES.format("cannot execute LISTEN during recovery"), True),
        (RAISES.format("recovery is in progress"), True),
        (RAISES.format("read only what you need"), False),
    ],
)
async def test_one_refusal_replaces_all_connections(refused: str, is_elsewhere: bool) -> None:
    server = await migrated(shared(Postgres))
    async with opened(f"{server.url}?pool={POOL}&listen=false") as backend:
        client = backend.leases._client
        before = await processes(client)
        assert len(set(before)) == POOL
        with pytest.raises(Unavailable, match="needs the primary" if is_elsewhere else "failed: read only what"):
            await client.fetch(refused)
        after = await processes(client)
        assert not set(before) & set(after) if is_elsewhere else set(before) == set(after)


async def test_requests_reach_the_new_primary(name: str) -> None:
    new = await migrated(shared(Postgres))
    with private(Postgres) as old:
        await migrated(old)
        async with (
            FaultProxy("127.0.0.1", old.port) as proxy,
            native(old.url) as admin,
            opened(old.url.replace(f":{old.port}/", f":{proxy.port}/") + f"?pool={POOL}") as backend,
        ):
            granted = await backend.leases.acquire(name, "ann#1", 60.0)
            assert isinstance(granted, Granted)
            await processes(backend.leases._client)
            proxy.redirect("127.0.0.1", new.port)
            await admin.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            await admin.execute("SELECT pg_reload_conf()")

            async def is_refused() -> bool:
                try:
                    await backend.leases.acquire(name, "ann#1", 60.0)
                except Unavailable as error:
                    return "needs the primary" in str(error)
                return False

            await until(is_refused, what="the end of writes at the old primary")
            for _ in range(POOL):
                assert isinstance(await backend.leases.acquire(name, "ann#1", 60.0), Granted)
