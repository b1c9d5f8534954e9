"""Claims that are made after their caller has gone: released, unless the same holder may know of them."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tenure._backends import sqlite
from tenure._backends.sqlite import worker
from tenure._lease import Granted, HeldBy, Vacant
from tenure._url import Url
from tenure.errors import Unavailable
from tenure.testing import until

Opener = Callable[..., sqlite.SqliteBackend]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.db"


@pytest.fixture
async def opener(file: Path) -> AsyncIterator[Opener]:
    opened: list[sqlite.SqliteBackend] = []

    def open_file(query: str = "busy=20") -> sqlite.SqliteBackend:
        opened.append(sqlite.open(Url.parse(f"sqlite:///{file}?{query}")))
        return opened[-1]

    yield open_file
    for backend in opened:
        await backend.close()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Keep every connection from writing."""
    other = sqlite3.connect(file, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        yield
    finally:
        other.close()


async def requested(backend: sqlite.SqliteBackend, holder: str) -> asyncio.Task[Granted | HeldBy]:
    """Let *holder* claim the name, and return when the thread works on that, or on the call before."""
    call = asyncio.create_task(backend.leases.acquire("name", holder, 60))
    await asyncio.sleep(0.05)
    assert not call.done()
    return call


async def test_a_claim_made_while_its_backend_closes_is_released(file: Path, opener: Opener) -> None:
    one, other = opener(), opener()
    assert await one.leases.names() == []
    with locked(file):
        call = await requested(one, "ann#1")
        call.cancel()
        closing = asyncio.create_task(one.close())
        await asyncio.sleep(0.05)
    await closing
    assert isinstance(await other.leases.inspect("name"), Vacant)


async def test_a_claim_whose_caller_got_no_answer_is_released(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = opener("busy=0.1"), opener()
    assert await one.leases.names() == []
    committed, goes_on = threading.Event(), threading.Event()

    def notify(_: str) -> None:
        committed.set()
        goes_on.wait(60)

    monkeypatch.setattr(one._wake, "notify", notify)
    with monkeypatch.context() as patch, pytest.raises(Unavailable, match="no answer"):
        patch.setattr(worker, "PATIENCE", 1.0)  # enough for the thread to begin it
        await one.leases.acquire("name", "ann#1", 600)
    assert await asyncio.to_thread(committed.wait, 30)
    assert isinstance(await other.leases.inspect("name"), HeldBy)
    goes_on.set()

    async def is_vacant() -> bool:
        return isinstance(await other.leases.inspect("name"), Vacant)

    await until(is_vacant, within=30)


async def test_a_claim_is_kept_for_a_holder_that_repeated_its_request(file: Path, opener: Opener) -> None:
    one, other = opener(), opener()
    assert await one.leases.names() == []
    with locked(file):
        first = await requested(one, "ann#1")
        again = await requested(one, "ann#1")
        first.cancel()
        await asyncio.sleep(0.05)
    assert isinstance(await again, Granted)
    await one.leases.names()  # the thread has finished all jobs before it
    seen = await other.leases.inspect("name")
    assert isinstance(seen, HeldBy)
    assert seen.holder == "ann#1"
    assert one.leases._pending == {}


async def test_a_claim_is_released_when_no_call_waits_for_it(file: Path, opener: Opener) -> None:
    one, other = opener(), opener()
    assert await one.leases.names() == []
    with locked(file):
        calls = [await requested(one, "ann#1"), await requested(one, "ann#1")]
        for call in calls:
            call.cancel()
        await asyncio.sleep(0.05)
    await one.leases.names()
    assert isinstance(await other.leases.inspect("name"), Vacant)
    assert one.leases._pending == {}


async def test_a_delivered_grant_survives_a_cancelled_call(file: Path, opener: Opener) -> None:
    one, other = opener(), opener()
    assert isinstance(await one.leases.acquire("name", "ann#1", 60), Granted)
    with locked(file):
        (await requested(one, "ann#1")).cancel()
        await asyncio.sleep(0.05)
    await one.leases.names()
    assert isinstance(await other.leases.inspect("name"), HeldBy)
