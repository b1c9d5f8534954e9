"""Answers of JetStream that lack what tenure needs of them: each is told as one that can't be JetStream's."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

pytest.importorskip("nats")

from nats.aio.msg import Msg

from tenure._backends import nats
from tenure._backends.nats.client import Json, names_in, number_in, part_of
from tenure._backends.nats.errors import BadAnswer
from tenure._queue.broker import EVERY_LIVE, EVERYTHING
from tenure._url import Url
from tenure.errors import Unavailable
from tests.servers import Nats, shared

NUMBER_MAX = 2**64 - 1

ODD: list[Json] = [
    {},
    {"state": None, "config": None, "consumers": None, "streams": None},
    {"state": [], "config": [], "consumers": 7, "streams": 7},
    {"state": {"messages": "1", "last_seq": True}, "config": {}, "consumers": [7], "streams": [None]},
    {"state": {"messages": 1, "last_seq": 1}, "config": {"num_replicas": "x"}, "num_pending": -2, "delivered": 7},
]


@pytest.mark.parametrize("found", [None, True, "7", 1.5, -2, NUMBER_MAX + 1, []])
def test_a_number_of_another_form_is_told(found: object) -> None:
    with pytest.raises(BadAnswer, match="of its messages"):
        number_in({"messages": found}, "messages")


@pytest.mark.parametrize("found", [-1, 0, NUMBER_MAX])
def test_every_number_of_jetstream_is_read(found: int) -> None:
    assert number_in({"messages": found}, "messages") == found


def test_a_part_and_names_of_another_form_are_told() -> None:
    assert part_of({"state": {"messages": 1}}, "state") == {"messages": 1}
    assert names_in({}, "streams") == names_in({"streams": None}, "streams") == []
    assert names_in({"streams": ["a"]}, "streams") == ["a"]
    with pytest.raises(BadAnswer, match="of its state"):
        part_of({}, "state")
    for found in (7, [7], [None], {"a": 1}):
        with pytest.raises(BadAnswer, match="of its streams"):
            names_in({"streams": found}, "streams")


@pytest_asyncio.fixture
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[nats.NatsBackend]:
    prefix = f"a{abs(hash(request.node.nodeid)) % 10**9}-{os.getpid()}"
    backend = nats.open(Url.parse(f"{shared(Nats).url}?prefix={prefix}"))
    yield backend
    await backend.close()


@pytest.mark.parametrize("answer", ODD, ids=range(len(ODD)))
async def test_no_answer_of_another_form_ends_a_request_otherwise(
    backend: nats.NatsBackend, monkeypatch: pytest.MonkeyPatch, answer: Json
) -> None:
    connection = await backend._client.connection()

    async def odd(*arguments: object) -> Msg:
        return Msg(_client=None, subject="_INBOX.1", data=json.dumps(answer).encode())  # type: ignore[arg-type]

    broker, leases = backend.broker, backend.leases
    asked: list[Callable[[], Awaitable[object]]] = [
        lambda: leases.acquire("job", "ann#1", 30.0),
        leases.names,
        lambda: leases.inspect("job"),
        broker.names,
        lambda: broker.stats("orders"),
        lambda: broker.peek("orders", EVERY_LIVE, 1),
        lambda: broker.purge("orders", EVERYTHING, None),
        lambda: broker.peek_dead("orders", EVERYTHING, 1),
        lambda: broker.delete("orders", force=True),
        lambda: broker.purge_live("orders", EVERY_LIVE),
        backend.describe,
    ]
    monkeypatch.setattr(connection, "request", odd)
    for ask in asked:
        told = ""
        try:
            await ask()  # what it doesn't need may be anything
        except Unavailable as error:
            told = str(error)
        assert not told or "can't be JetStream's" in told
