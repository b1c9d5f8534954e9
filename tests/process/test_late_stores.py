"""Consumers whose store is unavailable at their start: they report it once, wait for it, and go on."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tenure
import tenure.sync
from tenure.events import BrokerAnswered, BrokerAwaited, Event
from tests.durations import until
from tests.servers import Azurite, Nats, Postgres, Redis, Server, private

pytestmark = pytest.mark.process


DRIVERS = {
    Redis.scheme: "redis",
    Postgres.scheme: "asyncpg",
    Nats.scheme: "nats",
    Azurite.scheme: "azure.storage.queue",
}


@pytest.mark.parametrize("kind", [Redis, Postgres, Nats, Azurite], ids=lambda kind: str(kind.__name__))
def test_consumers_wait_for_a_server_that_starts_later(kind: type[Server], caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip(DRIVERS[kind.scheme])
    has_sessions = kind.scheme not in (Azurite.scheme, Nats.scheme)
    with private(kind) as server:

        async def send() -> None:
            async with tenure.connect(server.url) as backend:
                await backend.migrate()
                await backend.queue("plain", lock=30).send(b"plain")
                await backend.queue("threads").send(b"threads")
                if has_sessions:
                    await backend.queue("sessions").send(b"sessions", session="a")

        asyncio.run(send())
        server.stop()
        names = ["plain", "threads", *(["sessions"] if has_sessions else [])]
        handled: list[bytes] = []
        events: list[Event] = []

        def in_threads(stop: threading.Event) -> None:
            with tenure.sync.connect(server.url, on_event=events.append) as backend:
                backend.queue("threads").consume(lambda message: handled.append(message.body), stop=stop)

        async def on_a_loop(stop: asyncio.Event) -> None:
            async def handle(message: tenure.Message) -> None:
                handled.append(message.body)

            async with tenure.connect(server.url, on_event=events.append) as backend, asyncio.TaskGroup() as group:
                group.create_task(backend.queue("plain").consume(handle, stop=stop))
                if has_sessions:
                    group.create_task(backend.queue("sessions").consume(handle, stop=stop, sessions=True))

        async def main() -> None:
            ends, ends_threads = asyncio.Event(), threading.Event()
            thread = asyncio.create_task(asyncio.to_thread(in_threads, ends_threads))
            loop = asyncio.create_task(on_a_loop(ends))
            try:
                await until(lambda: sorted(names_of(events, BrokerAwaited)) == sorted(names))
                await asyncio.to_thread(server.start)
                await until(lambda: sorted(handled) == sorted(name.encode() for name in names))
                assert sorted(names_of(events, BrokerAnswered)) == sorted(names)
                assert sorted(names_of(events, BrokerAwaited)) == sorted(names)
            finally:
                ends.set()
                ends_threads.set()
                await asyncio.gather(thread, loop)

        with caplog.at_level(logging.WARNING, "tenure"):
            asyncio.run(main())
    said = [record.getMessage() for record in caplog.records if record.name == "tenure"]
    [waits, begins] = [line for line in said if line.startswith("plain: ")]
    assert waits.startswith("plain: could not start to consume (")
    assert "; waiting for the store" in waits
    assert begins.startswith("plain: the store answers, after ")


def test_a_consumer_waits_for_a_locked_file(tmp_path: Path) -> None:
    """A missing file is not waited for: the consumer creates it."""
    url, handled, events = f"sqlite:///{tmp_path}/work.db?busy=0.05", list[bytes](), list[Event]()

    async def handle(message: tenure.Message) -> None:
        handled.append(message.body)

    async def main() -> None:
        async with tenure.connect(url, on_event=events.append) as backend:
            consuming = asyncio.create_task(backend.queue("orders", lock=20).consume(handle))
            await until(lambda: names_of(events, BrokerAwaited))
            other.rollback()
            await backend.queue("orders").send(b"one")
            await until(lambda: handled == [b"one"])
            assert names_of(events, BrokerAnswered) == ["orders"]
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)

    other = sqlite3.connect(tmp_path / "work.db", isolation_level=None, check_same_thread=False)
    with closing(other):
        other.execute("BEGIN EXCLUSIVE")
        asyncio.run(main())


def test_permanent_errors_are_not_waited_for(tmp_path: Path) -> None:
    """As in an election: a wrong password, a folder that doesn't exist."""
    pytest.importorskip("redis")

    async def consume(url: str, **options: Any) -> None:
        async with tenure.connect(url) as backend:
            await backend.queue("orders").consume(print, **options)

    with private(Redis, password="right") as server:
        with pytest.raises(tenure.ConfigError, match="password"):
            asyncio.run(consume(server.url.replace("right", "wrong")))
        with pytest.raises(tenure.ConfigError, match="does not exist; create it"):
            asyncio.run(consume(f"sqlite:///{tmp_path}/none/work.db"))
        server.stop()
        for wait in (0, 0.2):
            began = time.monotonic()
            with pytest.raises(tenure.Unavailable, match="can't be reached") as raised:
                asyncio.run(consume(server.url, wait=wait))
            assert time.monotonic() - began >= wait
            assert ("no answer within 0.2 s" in str(raised.value)) == (wait > 0)


def names_of(events: list[Event], kind: type[Event]) -> list[str]:
    return [event.name for event in events if isinstance(event, kind)]
