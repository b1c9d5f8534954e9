"""The roles that docs/postgresql.md grants least rights: what each may do works, and what it may not is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

pytest.importorskip("asyncpg")

import tenure
from tenure._backends import postgres
from tests.docs.pages import commands
from tests.servers import Postgres, private
from tests.stores.postgres.migrated import native
from tests.stores.rights import Act, acting, lead, refused


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """Yield a server whose schema has the roles of the page, a queue, and a name that was led."""

    async def prepare(own: Postgres) -> None:
        await postgres.migrate(own.url)
        async with native(own.url) as connection:
            roles = "CREATE ROLE candidate LOGIN; CREATE ROLE observer LOGIN;"
            await connection.execute(roles + commands("docs/postgresql.md", "Rights", "-- leads"))
        async with acting(own.url) as owner:
            await owner.queue("orders").send_batch([tenure.Outgoing(b"first"), tenure.Outgoing(b"second")])
            [message] = await owner.queue("orders").receive()
            await message.dead_letter("bad")
            await lead(owner, "led")

    with private(Postgres) as own:
        asyncio.run(prepare(own))
        yield own


def url_of(server: Postgres, role: str) -> str:
    return server.url.replace("postgres@", f"{role}@")


async def test_a_candidate_leads(server: Postgres) -> None:
    async with acting(url_of(server, "candidate")) as backend:
        assert [await lead(backend, "job"), await lead(backend, "job")] == [1, 2]
        assert await backend.leaders() == {"job": None, "led": None}
        assert not await backend.election("job").ask_to_resign()
        assert (await backend.diagnose()).traits


@pytest.mark.parametrize(
    "act",
    [
        lambda backend: backend.queue("orders").send(b"x"),
        lambda backend: backend.queue("orders").receive(),
        lambda backend: backend.queue("orders").peek(),
        lambda backend: backend.queue("orders").declare(lock=99),
        lambda backend: backend.queue("orders").stats(),
    ],
    ids=["send", "receive", "peek", "declare", "stats"],
)
async def test_a_candidate_has_no_right_on_queues(server: Postgres, act: Act) -> None:
    async with acting(url_of(server, "candidate")) as backend:
        await refused(backend, act, "permission denied for table queue", "GRANT")


async def test_an_observer_sees_leaders_settings_and_numbers(server: Postgres) -> None:
    async with acting(url_of(server, "observer")) as backend:
        assert "led" in await backend.leaders()
        assert await backend.election("led").leader() is None
        assert await backend.queues() == ["orders"]
        stats = await backend.queue("orders").stats()
        assert (stats.ready, stats.dead) == (1, 1)
        assert (await backend.queue("orders").settings()).lock
        assert await backend.schedules() == []
        assert (await backend.diagnose()).traits


@pytest.mark.parametrize(
    ("act", "table"),
    [
        (lambda backend: lead(backend, "led"), "lease"),
        (lambda backend: backend.election("led").ask_to_resign(), "lease"),
        (lambda backend: backend.queue("orders").send(b"x"), "message"),
        (lambda backend: backend.queue("orders").receive(), "message"),
        (lambda backend: backend.queue("orders").peek(), "message"),
        (lambda backend: backend.queue("orders").purge(), "message"),
        (lambda backend: backend.queue("orders").dead_letters.peek(), "dead"),
        (lambda backend: backend.queue("orders").dead_letters.redrive(), "dead"),
        (lambda backend: backend.queue("orders").declare(lock=99), "queue"),
    ],
    ids=["lead", "resign", "send", "receive", "peek", "purge", "dead letters", "redrive", "declare"],
)
async def test_an_observer_changes_nothing_and_reads_no_body(server: Postgres, act: Act, table: str) -> None:
    async with acting(url_of(server, "observer")) as backend:
        await refused(backend, act, f"permission denied for table {table}", "GRANT")


@pytest.mark.parametrize("role", ["candidate", "observer"])
async def test_no_role_of_the_page_makes_tables(server: Postgres, role: str) -> None:
    with pytest.raises(tenure.ConfigError, match="CREATE on the database"):
        await postgres.migrate(f"{url_of(server, role)}?schema=theirs")
