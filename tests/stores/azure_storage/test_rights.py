"""What docs/azure.md says of signatures: with the rights of a row, its part works, and others are refused."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("azure.storage.blob")

from azure.storage.blob import AccountSasPermissions, ResourceTypes, Services, generate_account_sas

import tenure
from tests.docs.pages import table
from tests.servers import Azurite, private
from tests.servers.azurite import ACCOUNT, KEY
from tests.stores.rights import EITHER, Act, acting, lead, refused

pytestmark = pytest.mark.process

ROWS = {row[0]: row[-1] for row in table("docs/azure.md", "to do", "role", "rights of a signature")}


@pytest.fixture(scope="module")
def server() -> Iterator[Azurite]:
    with private(Azurite) as own:
        yield own


@asynccontextmanager
async def signed(server: Azurite, rights: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tenure.Backend]:
    """Yield a backend whose signature has the *rights*, as the page writes them."""
    services, _, names = rights.partition(": ")
    permitted = AccountSasPermissions(**dict.fromkeys(re.split(", ", names), True))
    token = generate_account_sas(
        ACCOUNT,
        KEY,
        ResourceTypes(service=True, container=True, object=True),
        permitted,
        services=Services(blob="blobs" in services, queue="queues" in services),
        expiry=datetime.now(UTC) + timedelta(days=3_000),
    )
    endpoints = f"BlobEndpoint={server.blob.url};QueueEndpoint={server.queue.url}"
    monkeypatch.setenv("SIGNED", f"AccountName={ACCOUNT};{endpoints};SharedAccessSignature={token}")
    async with acting("azure://?connection_string_env=SIGNED") as backend:
        yield backend


async def receives(backend: tenure.Backend) -> None:
    queue = backend.queue("orders")
    [message] = await queue.receive()
    await message.renew()
    await message.abandon()
    [message] = await queue.receive()
    await message.dead_letter("bad")
    assert await queue.dead_letters.redrive() == 1
    [message] = await queue.receive()
    await message.complete()


async def looks(backend: tenure.Backend) -> None:
    queue = backend.queue("orders")
    assert "job" in await backend.leaders()
    assert "orders" in await backend.queues()
    await backend.election("job").leader()
    await queue.stats()
    await queue.settings()
    await queue.peek()
    await queue.dead_letters.peek()
    await backend.schedules()


ACTS: dict[str, Act] = {
    "lead": lambda backend: lead(backend, "job"),
    "send": lambda backend: backend.queue("orders").send(b"x"),
    "receive, settle, redrive, purge": receives,
    "look": looks,
    "purge": lambda backend: backend.queue("orders").purge(),
    "delete": lambda backend: backend.queue("orders").delete(force=True),
    "declare": lambda backend: backend.queue("orders").declare(lock=31),
    "make a queue": lambda backend: backend.queue("orders-made").send(b"x"),
}
WORKS = {
    "lead": {"lead"},
    "send": {"send"},
    "receive, settle, redrive, purge": {"send", "receive, settle, redrive, purge", "purge"},
    "look": {"look"},
    "run schedules": {"lead"},
}
"""What each row of the page permits of these."""


def test_each_row_of_the_page_is_tried() -> None:
    assert WORKS.keys() == ROWS.keys()


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("row", WORKS)
async def test_a_signature_permits_what_its_row_says(
    server: Azurite, row: str, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = "blobs, queues: read, write, delete, list, add, create, update, process"
    async with signed(server, every, monkeypatch) as owner:
        queue = owner.queue("orders")
        await queue.declare()
        await queue.send(b"x")
        [message, *_] = await queue.receive()
        await message.dead_letter("bad")
        await queue.purge()
        await queue.dead_letters.purge()
        await queue.send(b"x")
        await lead(owner, "job")
    async with signed(server, ROWS[row], monkeypatch) as backend:
        if act in WORKS[row]:
            await ACTS[act](backend)
        else:
            await refused(backend, ACTS[act], "does not permit this user", error=EITHER)
