"""An answer that must outlive a loss of power waits for the disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from pathlib import Path

import pytest

from tenure.backends import sqlite
from tenure.backends.sqlite import client
from tenure.queue.message import COMPLETE, Outgoing, Settlement
from tenure.testing import until
from tenure.url import Url


@pytest.mark.parametrize("question", ["send", "settle"])
async def test_nothing_is_answered_before_the_disk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    backend = sqlite.open(Url.parse(f"sqlite:///{tmp_path}/x.db?synchronous=full"))
    broker = backend.broker
    await broker.send("q", [Outgoing(b"a")])
    [got] = (await broker.receive("q", 1, 10.0)).deliveries
    asked, done = threading.Event(), threading.Event()
    disk = client._sync

    def slow_disk(descriptor: int) -> None:
        asked.set()
        assert done.wait(30.0)
        disk(descriptor)

    monkeypatch.setattr(client, "_sync", slow_disk)
    ask: Awaitable[object]
    ask = broker.send("q", [Outgoing(b"b")]) if question == "send" else broker.settle([Settlement(got, COMPLETE)])
    asking = asyncio.ensure_future(ask)
    try:
        await until(asked.is_set)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not asking.done()
    finally:
        done.set()
    await asking
    await backend.close()
