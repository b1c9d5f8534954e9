"""Invalid arguments are refused before a store gets them, alike on every store, and never as ``Unavailable``."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure._queue.identity import partition_of
from tests.servers import Azurite, Postgres, Redis, ServiceBus, url_of

STORES = ["memory", "sqlite", "postgresql", "redis", "azurite", "servicebus"]
SERVERS: dict[str, Any] = {"postgresql": Postgres, "redis": Redis, "azurite": Azurite, "servicebus": ServiceBus}

NO_COUNT: list[Any] = [0, -3, True, 1.5, math.nan, "3", None, [1], 2**31, 2**40, 2**70, 10**400]
NO_SEQUENCE: list[Any] = [-1, True, 1.5, math.nan, "3", None, 2**63, 2**70, 10**400]
NO_SECONDS: list[Any] = [-1, math.nan, math.inf, "3", True, [1], 1e300, 1e19, 10**400]
NO_TEXT: list[Any] = ["", "a\0b", "\ud800", "x" * 300, 5, b"b"]
NO_STATE: list[Any] = ["text", 5, True, [1], {}, object()]

Call = Callable[[], Awaitable[object]]


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return url_of(SERVERS[request.param])
    return f"sqlite:///{tmp_path}/work.db" if request.param == "sqlite" else "memory:"


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tenure.Backend]:
    async with tenure.connect(url) as backend:
        await backend.migrate()
        yield backend


def counts(queue: tenure.Queue) -> Iterator[tuple[str, Call]]:
    dead = queue.dead_letters
    for bad in NO_COUNT:
        yield f"receive {bad!r:.30}", partial(queue.receive, max=bad)
        yield f"dead receive {bad!r:.30}", partial(dead.receive, max=bad)
        yield f"peek {bad!r:.30}", partial(dead.peek, bad)
        yield f"peek deferred {bad!r:.30}", partial(queue.peek_deferred, bad)
        if bad is not None:
            yield f"redrive {bad!r:.30}", partial(dead.redrive, limit=bad)
            yield f"purge {bad!r:.30}", partial(dead.purge, limit=bad)
    for bad in NO_SEQUENCE:
        yield f"receive deferred {bad!r:.30}", partial(queue.receive_deferred, 1, bad)
        yield f"peek deferred after {bad!r:.30}", partial(queue.peek_deferred, after=bad)
        yield f"peek after {bad!r:.30}", partial(dead.peek, after=bad)
        yield f"peek sequences {bad!r:.30}", partial(dead.peek, sequences=[bad])
        yield f"redrive sequences {bad!r:.30}", partial(dead.redrive, sequences=[bad])
        yield f"purge sequences {bad!r:.30}", partial(dead.purge, sequences=[bad])


def times(queue: tenure.Queue) -> Iterator[tuple[str, Call]]:
    for bad in NO_SECONDS:
        yield f"wait {bad!r:.30}", partial(queue.receive, wait=bad)
        yield f"dead wait {bad!r:.30}", partial(queue.dead_letters.receive, wait=bad)
        yield f"session wait {bad!r:.30}", queue.session("a", wait=bad).__aenter__
        yield f"timeout {bad!r:.30}", partial(queue.request, b"", timeout=bad)
        yield f"delay {bad!r:.30}", partial(queue.send, b"", delay=bad)
        yield f"at {bad!r:.30}", partial(queue.send, b"", at=bad)
        yield f"ttl {bad!r:.30}", partial(queue.send, b"", expires_in=bad)
        yield f"drain {bad!r:.30}", partial(queue.drain, bad)
        if bad != -1:
            yield f"dead before {bad!r:.30}", partial(queue.dead_letters.peek, dead_before=bad)
        for name in ("grace", "inbox_window", "max_hold", "poll_every"):
            if bad != math.inf:
                options: Any = {name: bad}
                yield f"{name} {bad!r:.30}", partial(queue.consume, print, until_empty=True, **options)
    yield "at the end of time", partial(queue.send, b"", at=datetime.max.replace(tzinfo=UTC))
    yield "request without an end", partial(queue.request, b"", timeout=None)  # type: ignore[arg-type]


def texts(queue: tenure.Queue) -> Iterator[tuple[str, Call]]:
    for bad in NO_TEXT:
        yield f"id {bad!r:.30}", partial(queue.send, b"", id=bad)
        yield f"session {bad!r:.30}", partial(queue.send, b"", session=bad)
        yield f"correlation id {bad!r:.30}", partial(queue.send, b"", correlation_id=bad)
        yield f"reply to {bad!r:.30}", partial(queue.send, b"", reply_to=bad)
        yield f"handled {bad!r:.30}", partial(queue.handled, bad)
        yield f"ids {bad!r:.30}", partial(queue.dead_letters.peek, ids=[bad])
        yield f"reason {bad!r:.30}", partial(queue.dead_letters.redrive, reason=bad)


@pytest.mark.parametrize("calls", [counts, times, texts])
async def test_invalid_arguments_are_refused(
    url: str, calls: Callable[[tenure.Queue], Iterator[tuple[str, Call]]]
) -> None:
    answers: dict[str, object] = {}
    async with connected(url) as backend:
        queue = backend.queue(f"unwanted {calls.__name__}")
        await queue.send(b"stays")
        for what, call in calls(queue):
            try:
                answers[what] = await call()
            except (tenure.ConfigError, TypeError, ValueError):
                pass
            except Exception as error:
                answers[what] = error
        assert answers == {}
        [message] = await queue.receive()
        assert (message.body, message.delivery_count) == (b"stays", 1)
        for bad in NO_SECONDS:
            with pytest.raises(tenure.ConfigError, match="delay"):
                await message.abandon(bad)
            with pytest.raises(tenure.ConfigError, match="remember"):
                await message.complete(remember=bad)
        await message.complete()


async def test_settings_that_no_store_can_keep_are_refused(url: str) -> None:
    async with connected(url) as backend:
        for name, bad in [
            *(("lock", bad) for bad in NO_SECONDS),
            *(("dedupe_window", bad) for bad in NO_SECONDS),
            *(("max_deliveries", bad) for bad in NO_COUNT if bad is not None),
            *(("body_max", bad) for bad in NO_COUNT if bad is not None),
        ]:
            with pytest.raises(tenure.ConfigError, match=name):
                backend.queue("unwanted settings", **{name: bad})


async def test_the_longest_times_are_kept(url: str) -> None:
    longest = 604_800.0 if url.startswith("azurite") else 250e9
    async with connected(url) as backend:
        window = 604_800.0 if url.startswith("servicebus") else 250e9
        queue = backend.queue("longest", dedupe_window=window, max_deliveries=2**31 - 1)
        await queue.send(b"far away", delay=longest)
        await queue.send(b"never dead", expires_in=250e9)
        [message] = await queue.receive(max=2**31 - 1, wait=250e9)
        assert message.body == b"never dead"
        await message.abandon(250e9)
        assert await queue.receive(max=2**31 - 1) == []
        assert await queue.dead_letters.peek(2**31 - 1, dead_before=250e9, after=2**63 - 1) == []


@pytest.mark.parametrize("url", [one for one in STORES if one != "azurite"], indirect=True)
async def test_a_sessions_state_is_bytes(url: str) -> None:
    async with connected(url) as backend, backend.queue("states").session("a") as session:
        for bad in NO_STATE:
            with pytest.raises(tenure.ConfigError, match="bytes"):
                await session.set_state(bad)
            with pytest.raises(tenure.ConfigError, match="max"):
                await session.receive(max=bad if bad != 5 else 2**40)
        for good in (bytearray(b"kept"), memoryview(b"kept"), b"kept", None):
            await session.set_state(good)  # type: ignore[arg-type]
            assert session.state == (None if good is None else b"kept")
            assert session.state is None or type(session.state) is bytes


@pytest.mark.parametrize(("key", "partitions"), [(3, 4), (None, 4), ("\ud800", 4), ("a", 0), ("a", 1.5), ("a", 2**70)])
def test_a_partition_needs_a_key_and_a_number(key: Any, partitions: Any) -> None:
    with pytest.raises(tenure.ConfigError, match=r"key|partitions"):
        partition_of(key, partitions)


@pytest.mark.parametrize("bad", NO_SECONDS)
def test_a_wait_must_be_a_number_of_seconds(bad: Any) -> None:
    with pytest.raises(tenure.ConfigError, match="delay"):
        tenure.Retry(delay=bad)
    for name in ("initial", "factor", "maximum", "jitter"):
        with pytest.raises(tenure.ConfigError, match=name):
            tenure.RetryPolicy(**{name: bad})
    for name in ("ttl", "renew_every", "retry_every", "drift", "margin", "grace"):
        with pytest.raises(tenure.ConfigError, match=name):
            tenure.Timing(**{name: bad})


@pytest.mark.parametrize("bad", ["text", 5, [("a", "b")], {5: "a"}, {"a": 5}, {"a": "\0"}, {"a": "\ud800"}])
async def test_metadata_must_be_a_mapping_of_texts(bad: Any) -> None:
    async with tenure.connect("memory:") as backend:
        with pytest.raises(tenure.ConfigError, match="metadata"):
            backend.election("chair", metadata=bad)
