"""What only Azure Storage has: consumers who must look, and are told of nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("azure.storage.queue")

import tenure
from tenure.backends import azure_storage
from tenure.backends.azure_storage.queue import LOOK_AGAIN, LOOKS
from tenure.queue.message import COMPLETE, Outgoing, Settlement
from tenure.testing import until
from tenure.url import Url
from tests.servers import Azurite, url_of


@asynccontextmanager
async def opened() -> AsyncIterator[azure_storage.AzureBackend]:
    backend = azure_storage.open(Url.parse(url_of(Azurite)))
    try:
        yield backend
    finally:
        await backend.close()


async def test_who_finds_nothing_looks_on_while_messages_are_out_of_sight() -> None:
    async with opened() as mine, opened() as others:
        await others.broker.send("out-of-sight", [Outgoing(b"a")])
        [held] = (await others.broker.receive("out-of-sight", 1, 30.0)).deliveries
        claims = [await mine.broker.receive("out-of-sight", 1, 30.0) for _ in range(LOOKS + 2)]
        assert {claim.due_in for claim in claims[:LOOKS]} == {None}
        assert {claim.due_in for claim in claims[LOOKS:]} == {LOOK_AGAIN}
        await others.broker.settle([Settlement(held, COMPLETE)])
        assert (await mine.broker.receive("out-of-sight", 1, 30.0)).due_in is None


async def test_a_dead_consumers_message_is_with_an_idle_one_soon_after_its_lock() -> None:
    lock, came = 10.0, list[float]()

    def handle(message: tenure.Message) -> None:
        came.append(time.monotonic())

    async with opened() as dead, tenure.connect(url_of(Azurite)) as backend:
        queue = backend.queue("from-the-dead", lock=lock)
        await queue.send(b"a")
        locked = time.monotonic()
        assert len((await dead.broker.receive("from-the-dead", 1, lock)).deliveries) == 1
        consuming = asyncio.ensure_future(queue.consume(handle, poll_every=60.0))
        await until(lambda: bool(came), within=60)
        await queue.drain()
        await consuming
    assert came[0] - locked < lock + 5.0
