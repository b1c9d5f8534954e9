"""Filters of dead letters hold few bodies at once on every store, however large they are."""

from __future__ import annotations

import contextlib
import secrets
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure._queue.page_size import BYTES
from tests.servers import Nats, Postgres, Redis, ServiceBus, patient, shared, url_of
from tests.stores.postgres.migrated import migrated

LETTERS, SIZE = 160, 200_000
"""In all 32 MB."""
MEMORY_MAX = 6 * BYTES
"""A page that is read, the one before, and each of them as it came, in parts and whole."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
        print(f"{peak / 1e6:.1f} MB")
        assert peak < MEMORY_MAX
    finally:
        tracemalloc.stop()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("store", [None, Nats, Postgres, Redis, ServiceBus])
async def test_many_large_dead_letters_are_never_in_memory_at_once(store: Any, tmp_path: Path) -> None:
    if store is None:
        url = f"sqlite:///{tmp_path}/queue.db"
    elif store is Postgres:
        url = patient((await migrated(shared(Postgres, turnable=True))).url)
    else:
        url = patient(url_of(store))
    async with tenure.connect(url) as backend:
        queue = backend.queue(f"large-{secrets.token_hex(6)}", lock=60)
        for number in range(LETTERS):
            await queue.send(b"%d %b" % (number, b"x" * SIZE))
            [message] = await queue.receive(1, wait=10)
            await message.dead_letter("why")
        letters = queue.dead_letters
        with bounded():
            assert len(await letters.peek(where=lambda one: one.body.startswith(b"77 "))) == 1
        with bounded():
            assert await letters.redrive(where=lambda one: one.body.startswith(b"77 ")) == 1
        with bounded():
            assert await letters.purge(reason="nothing") == 0
        with bounded():
            assert await letters.purge(where=lambda one: int(one.body.split()[0]) % 2 == 0) == LETTERS / 2
        with bounded():
            assert await letters.redrive() == LETTERS / 2 - 1
        with bounded():
            assert len(await queue.peek(2)) == 2
        await queue.delete(force=True)
