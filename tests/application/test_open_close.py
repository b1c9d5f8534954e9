"""Backends that are opened and closed by functions; TENURE_URL; and their ``repr``."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

import tenure
from tenure._backends.memory import MemoryLeases
from tenure._connection import Elections
from tenure._queue.message import Stats
from tenure._runtime.clock import SystemClock
from tests.durations import until


async def test_a_backend_is_opened_and_closed_and_opened_again() -> None:
    backend = tenure.connect("memory:")
    assert await backend.open() is backend
    queue = backend.queue("orders")
    await queue.send(b"x")
    assert await backend.open() is backend
    with pytest.raises(tenure.ConfigError, match=r"memory: is open already \(a block opens it by itself\)"):
        await backend.__aenter__()
    await asyncio.gather(backend.aclose(), backend.aclose())
    await backend.aclose()
    with pytest.raises(tenure.ConfigError, match=r"memory: was closed; open it again with await open\(\)"):
        backend.queue("orders")
    with pytest.raises(tenure.ConfigError, match="this backend was closed"):
        await queue.send(b"y")
    async with backend:
        assert await backend.queue("orders").stats() == Stats()
        await backend.aclose()  # and the end of the block does nothing


async def test_concurrent_opens_and_closes_run_one_after_the_other() -> None:
    backend = tenure.connect("memory:")
    await asyncio.gather(backend.open(), backend.open())
    await backend.queue("orders").send(b"x")
    await asyncio.gather(backend.aclose(), backend.open(), backend.aclose(), backend.open())
    assert (await backend.queue("orders").stats()).ready == 0
    await backend.aclose()


async def test_closing_ends_consumers_and_campaigns_and_waits_for_them() -> None:
    backend = await tenure.connect("memory:").open()
    queue, election = backend.queue("orders"), backend.election("report")
    ended: list[str] = []

    async def work(term: tenure.Term) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def handle(message: tenure.Message) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("handler")

    running = [asyncio.create_task(queue.consume(handle)), asyncio.create_task(election.run(work))]
    await queue.send(b"x")
    await until(lambda: "1 consuming" in repr(queue) and "leading in term 1" in repr(election))
    async with backend.election("other").campaign():
        pass
    while (await queue.stats()).locked == 0:
        await asyncio.sleep(0)
    await backend.aclose()
    await asyncio.gather(*running, return_exceptions=True)
    assert sorted(ended) == ["handler", "work"]


async def test_a_queue_that_fails_to_close_leaves_no_request_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        raise OSError("the disk is gone")

    backend = await tenure.connect("memory:").open()
    queue, other = backend.queue("prices"), backend.queue("orders")
    request = asyncio.create_task(queue.request(b"x", timeout=600.0))
    await until(lambda: bool(backend._connection.queues.requests))
    monkeypatch.setattr(other, "close", fail)
    monkeypatch.setattr(queue, "close", fail)  # it would close its request by itself
    with pytest.raises(OSError, match="the disk is gone"):
        await backend.aclose()
    with pytest.raises(tenure.Unavailable, match="got no answer before it was closed"):
        await request


def test_loops_may_come_and_go_between_opening_and_closing() -> None:
    backend = asyncio.run(tenure.connect("memory:").open())
    asyncio.run(backend.queue("orders").send(b"x"))
    assert asyncio.run(backend.queue("orders").stats()).ready == 1
    asyncio.run(backend.aclose())


def test_open_and_close_for_threads(tmp_path: Path) -> None:
    backend = tenure.sync.connect(f"sqlite:///{tmp_path}/work.db").open()
    backend.queue("orders").send(b"x")
    with pytest.raises(tenure.ConfigError, match="is open already"), backend:
        pass
    calls = [backend.open, backend.close, backend.open, backend.close] * 3
    closing = [threading.Thread(target=call) for call in calls]
    for one in closing:
        one.start()
    for one in closing:
        one.join()
    backend.close()
    with pytest.raises(tenure.ConfigError, match=r"was closed; open it again with open\(\)"):
        backend.queue("orders")
    with backend:
        assert backend.queue("orders").stats().ready == 1
    with pytest.raises(tenure.ConfigError, match=r"is not open; use it inside 'with tenure\.sync\.connect\(…\)"):
        tenure.sync.connect("memory:").election("report")


@pytest.mark.process
def test_a_child_by_fork_opens_it_again(tmp_path: Path) -> None:
    """As a server that loads the application, and then forks its workers."""
    backend = tenure.sync.connect(f"sqlite:///{tmp_path}/work.db").open()
    queue = backend.queue("orders")
    queue.send(b"parent")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(tenure.ConfigError, match="its child by fork"):
                queue.send(b"lost")
            assert "of the parent process" in repr(backend)
            with backend:
                backend.queue("orders").send(b"child")
            backend.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert queue.stats().ready == 2
    backend.close()


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_opens_a_backend_that_its_parent_is_opening() -> None:
    backend = tenure.connect("memory:")
    is_opening, may_end = threading.Event(), threading.Event()

    async def open_slowly() -> None:
        async with backend._connection.in_turn():
            is_opening.set()
            await asyncio.to_thread(may_end.wait)

    async def open_in_child() -> None:
        async with asyncio.timeout(10):
            await backend.open()
            await backend.queue("orders").send(b"child")

    opening = threading.Thread(target=lambda: asyncio.run(open_slowly()))
    opening.start()
    is_opening.wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            asyncio.run(open_in_child())
            code = 0
        finally:
            os._exit(code)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        may_end.set()
        opening.join()


async def test_the_environment_names_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_URL", "memory:from-the-environment")
    assert str(tenure.connect().url) == str(tenure.sync.connect().url) == "memory:from-the-environment"
    assert str(tenure.connect("memory:given").url) == "memory:given"
    monkeypatch.setenv("TENURE_URL", "")
    with pytest.raises(tenure.ConfigError, match=r"TENURE_URL is empty; set it, or write for example connect\('sqlite"):
        tenure.connect()
    monkeypatch.delenv("TENURE_URL")
    with pytest.raises(tenure.ConfigError, match="TENURE_URL is not set"):
        tenure.sync.connect()
    with pytest.raises(tenure.ConfigError, match="is not the URL of a backend"):
        tenure.connect("")


async def test_the_repr_shows_the_state_and_no_secret() -> None:
    assert repr(tenure.connect("redis://me:secret@host/0")) == "<Backend redis://me:***@host/0, not open>"
    async with tenure.connect("memory:") as backend:
        queue, election = backend.queue("orders", lock=20), backend.election("report", ttl=9)
        assert [repr(one) for one in (backend, queue, queue.dead_letters, election, queue.session("s"))] == [
            "<Backend memory:, open>",
            "<Queue 'orders', lock 20 s>",
            "<DeadLetters of 'orders'>",
            "<Election 'report', ttl 9 s, no candidate>",
            "<Session 's' of 'orders', not entered>",
        ]
        async with election.campaign() as term:
            assert repr(election).startswith("<Election 'report', ttl 9 s, leading in term 1, ")
            assert repr(term).startswith("<Term 1 of 'report', ")
        await queue.send(b"x" * 2**20, session="s", headers={"a": 1})
        async with queue.session() as session:
            assert repr(session).startswith("<Session 's' of 'orders', ")
            [message] = await session.receive()
            assert repr(message) == f"<Message {message.id!r} of 'orders', 1048576 bytes, delivery 1>"
            text = repr(message.delivery)
            assert f"body={b'x' * 60!r}… (1,048,576 bytes), headers={{'a': 1}}, " in text
            assert len(text) < 500
            await message.dead_letter("odd")
        [letter] = await queue.dead_letters.peek()
        assert len(repr(letter)) < 500
    assert repr(backend) == "<Backend memory:, closed>"
    assert len(repr(tenure.Outgoing(b"x" * 2**20))) < 200


def test_a_hook_that_closes_a_closing_backend_does_not_wait_for_itself() -> None:
    closing = threading.Event()

    def close(event: tenure.Event) -> None:
        if closing.is_set():
            backend.close()

    backend = tenure.sync.connect("memory:", on_event=close).open()
    work = threading.Thread(target=lambda: backend.election("report").run(lambda term: term.lost.wait()))
    work.start()
    while backend.election("report").leader() is None:
        pass
    closing.set()
    backend.close()
    work.join()
    assert "closed" in repr(backend)


async def test_elections_that_were_closed_before_the_first_get_no_driver() -> None:
    leases = MemoryLeases()
    elections = Elections(leases, SystemClock())
    assert elections.driver() is elections.driver()
    await elections.close()
    assert elections.driver().is_closing  # it refuses candidates
    elections = Elections(leases, SystemClock())
    await elections.close()
    with pytest.raises(tenure.Unavailable, match="was closed, so no candidate can campaign"):
        elections.driver()
