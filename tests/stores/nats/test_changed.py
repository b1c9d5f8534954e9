"""Consumers and streams of queues that an administrator has changed: set back, refused or shown, never trusted."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("nats")

import nats as driver
from nats.aio.client import Client as Driver

from tenure._backends import nats
from tenure._backends.nats.configuration import CHECKED_FOR
from tenure._backends.nats.live import STUCK_FOR
from tenure._opened import Fact
from tenure._queue.message import Delivery, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, Settled, Settlement
from tenure._url import Url
from tests.explained import facts_by_name
from tests.servers import Nats, shared
from tests.servers.turned_process import CAN_TURN
from tests.stores.nats.raw import api, flush
from tests.stores.nats.test_queues import CLOCK, pass_time
from tests.stores.nats.wall_clock import turn_wall_clock

pytestmark = pytest.mark.skipif(not CAN_TURN, reason="the clock of a server can't be turned here")

LOCK = 30.0
SECOND = 10**9


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Nats:
    found = shared(Nats, is_turned=True)
    turn_wall_clock(monkeypatch, lambda: found.ahead)
    return found


@pytest.fixture
def url(server: Nats, request: pytest.FixtureRequest) -> str:
    return f"{server.url}?prefix=c{abs(hash(request.node.nodeid)) % 10**9}-{os.getpid()}"


@pytest_asyncio.fixture
async def native(server: Nats) -> AsyncIterator[Driver]:
    client = await driver.connect(server.url)
    yield client
    await client.close()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[nats.NatsBroker, list[Fact]]]:
    """Yield a broker of a process of its own, and what it reports."""
    backend = nats.open(Url.parse(url), clock=CLOCK)
    reported: list[Fact] = []
    backend.report_to(reported.append)
    try:
        yield backend.broker, reported
    finally:
        await backend.close()


async def receive(broker: nats.NatsBroker) -> list[Delivery]:
    return list((await broker.receive("orders", 10, LOCK)).deliveries)


def stream_of(url: str) -> str:
    return f"{url.partition('prefix=')[2]}_orders"


async def consumer_config(native: Driver, url: str) -> dict[str, Any]:
    [found] = (await api(native, f"CONSUMER.LIST.{stream_of(url)}", {}))["consumers"]
    return dict(found["config"])


async def edit(native: Driver, url: str, **changes: object) -> dict[str, Any]:
    """Change the consumer as an administrator does; return its configuration before."""
    before = await consumer_config(native, url)
    name = before["durable_name"]
    wanted = {"stream_name": stream_of(url), "config": before | changes}
    answer = await api(native, f"CONSUMER.DURABLE.CREATE.{stream_of(url)}.{name}", wanted)
    assert changes.items() <= answer["config"].items()
    return before


EDITS: dict[str, tuple[object, str]] = {
    "ack_wait": (2 * SECOND, "ack_wait is 2 s instead of 30.25 s"),
    "max_deliver": (1, "max_deliver is 1 instead of -1"),
    "max_ack_pending": (1, "max_ack_pending is 1 instead of -1"),
    "filter_subject": ("<prefix>.orders.eu", "filter_subject is <prefix>.orders.eu instead of none"),
    "backoff": ([SECOND, 2 * SECOND], "backoff is [1000000000, 2000000000] instead of none"),
    "headers_only": (True, "headers_only is True instead of none"),
    "inactive_threshold": (3600 * SECOND, "inactive_threshold is 3600 s instead of none"),
    "max_batch": (1, "max_batch is 1 instead of none"),
    "max_expires": (SECOND, "max_expires is 1 s instead of none"),
    "max_bytes": (100, "max_bytes is 100 instead of none"),
}
"""By the field: what an administrator sets, and what is said of that."""


@pytest.mark.parametrize("when", ["before use", "during use"])
@pytest.mark.parametrize("field", EDITS)
async def test_what_was_changed_of_a_consumer_is_set_back_and_reported(
    native: Driver, url: str, field: str, when: str
) -> None:
    prefix = url.partition("prefix=")[2]
    value, said = EDITS[field]
    if field == "filter_subject":
        value, said = f"{prefix}.orders.eu", said.replace("<prefix>", prefix)
    more = {"max_deliver": 3} if field == "backoff" else {}
    async with opened(url) as (broker, reported):
        await broker.send("orders", [Outgoing(b"first")])
        [message] = await receive(broker)
        await broker.settle([Settlement(message, COMPLETE)])
        before = await edit(native, url, **{field: value, **more})
        async with opened(url) as (other, reported_by_other):
            if when == "before use":
                broker, reported = other, reported_by_other
            else:
                await pass_time(CHECKED_FOR)
            await broker.send("orders", [Outgoing(b"1"), Outgoing(b"2")])
            assert [one.body for one in await receive(broker)] == [b"1", b"2"]
            assert await consumer_config(native, url) == before
            [fact] = reported
            assert before["durable_name"] in fact.name
            assert said in fact.value
            assert (fact.advice, fact.code) == ("tenure has set it back", "nats-queue-consumer")
            await pass_time(CHECKED_FOR)
            await receive(broker)
            assert len(reported) == 1


@pytest.mark.parametrize("change", [{"ack_wait": 2 * SECOND}, {"backoff": [2 * SECOND], "max_deliver": 2}], ids=str)
async def test_a_shortened_lock_gives_no_message_to_a_second_receiver(
    native: Driver, url: str, change: dict[str, object]
) -> None:
    async with opened(url) as (holder, _), opened(url) as (other, reported):
        await holder.send("orders", [Outgoing(b"x")])
        await receive(other)
        await holder.send("orders", [Outgoing(b"y")])
        held = await receive(holder)
        assert len(held) == 1
        before = await edit(native, url, **change)
        await pass_time(3.0)
        assert await receive(other) == []
        assert await consumer_config(native, url) == before
        assert len(reported) == 1
        assert await holder.settle([Settlement(one, COMPLETE) for one in held]) == [Settled()]
        await pass_time(2 * LOCK)
        assert [one.body for one in await receive(other)] == [b"x"]


async def test_a_message_that_was_given_up_is_shown_and_comes_again(native: Driver, url: str) -> None:
    async with opened(url) as (broker, _):
        await broker.send("orders", [Outgoing(b"x")])
        assert len(await receive(broker)) == 1
        await edit(native, url, max_deliver=1)
        await pass_time(1.1 * LOCK)
        while not (await broker.stats("orders")).ready:  # it is set back
            assert (await broker.stats("orders")).locked == 1
            await pass_time(STUCK_FOR)
        [message] = await receive(broker)
        assert (message.body, message.delivery_count) == (b"x", 2)
        assert await broker.settle([Settlement(message, COMPLETE)]) == [Settled()]
        assert await broker.stats("orders") == Stats()


async def test_a_given_up_message_is_counted_beside_a_locked_one(native: Driver, url: str) -> None:
    async with opened(url) as (broker, _):
        await broker.send("orders", [Outgoing(b"x")])
        assert len(await receive(broker)) == 1
        await edit(native, url, max_deliver=1)
        await pass_time(1.1 * LOCK)
        pull = f"$JS.API.CONSUMER.MSG.NEXT.{stream_of(url)}.{await name_of(native, url)}"
        await native.publish(pull, b'{"batch": 1, "no_wait": true}', reply=native.new_inbox())  # as another program
        await flush(native)
    async with opened(url) as (broker, _):
        await broker.send("orders", [Outgoing(b"y")])
        found = await receive(broker)
        assert (await broker.stats("orders")).locked == 1, found  # the other may be one that is just being removed
        await pass_time(STUCK_FOR)
        stats = await broker.stats("orders")
        assert (stats.ready, stats.locked) == (0, 2)


async def name_of(native: Driver, url: str) -> str:
    return str((await consumer_config(native, url))["durable_name"])


async def test_what_a_filter_has_left_out_comes_when_it_is_set_back(native: Driver, url: str) -> None:
    prefix = url.partition("prefix=")[2]
    async with opened(url) as (broker, _):
        await broker.send("orders", [Outgoing(b"first")])
        [first] = await receive(broker)
        await broker.settle([Settlement(first, COMPLETE)])
        await edit(native, url, filter_subject=f"{prefix}.orders.eu")
        await broker.send("orders", [Outgoing(b"left out")])
        await native.request(f"{prefix}.orders.eu", b"passed")
        [passed] = await receive(broker)
        await broker.settle([Settlement(passed, COMPLETE)])
        assert passed.body == b"passed"
        await pass_time(CHECKED_FOR)
        await receive(broker)
        assert (await broker.stats("orders")).locked == 1
        await pass_time(STUCK_FOR)
        assert (await broker.stats("orders")).ready == 1
        assert (await broker.stats("orders")).ready == 1  # JetStream counts none now
        assert [one.body for one in await receive(broker)] == [b"left out"]


async def test_a_paused_consumer_is_reported_and_left_alone(native: Driver, url: str) -> None:
    async with opened(url) as (broker, reported):
        await broker.send("orders", [Outgoing(b"x")])
        [message] = await receive(broker)
        await broker.settle([Settlement(message, COMPLETE)])
        pause = f"CONSUMER.PAUSE.{stream_of(url)}.{await name_of(native, url)}"
        if broker._client._connections and next(iter(broker._client._connections.values())).version < (2, 11, 0):
            pytest.skip("this server knows no pause")
        await api(native, pause, {"pause_until": "2200-01-01T00:00:00Z"})
        await broker.send("orders", [Outgoing(b"y")])
        for _ in range(2):
            await pass_time(CHECKED_FOR)
            assert await receive(broker) == []
        [fact] = reported
        assert fact.value == "it is paused until 2200-01-01T00:00:00Z"
        await api(native, pause, {})
        await pass_time(CHECKED_FOR)
        assert [one.body for one in await receive(broker)] == [b"y"]
        assert len(reported) == 1


# --- tenure doctor ---


STREAM_EDITS: dict[str, tuple[dict[str, object], str]] = {
    "max_age": ({"max_age": 600 * SECOND}, "max_age is 600 s: older messages vanish; set it to 0"),
    "max_msgs": (
        {"max_msgs": 9, "discard": "old"},
        "max_msgs is 9 with discard old: when it is full, the oldest messages vanish; set it to -1",
    ),
    "max_bytes": (
        {"max_bytes": 10**6, "discard": "old"},
        "max_bytes is 1000000 with discard old: when it is full, the oldest messages vanish; set it to -1",
    ),
    "max_msg_size": (
        {"max_msg_size": 1000},
        "max_msg_size is 1000: longer messages can't be sent or delivered again; set it to -1",
    ),
    "duplicate_window": (
        {"duplicate_window": SECOND},
        "duplicate_window is 1 s: a message may come twice; set it to 120 s",
    ),
    "max_msgs_per_subject": (
        {"max_msgs_per_subject": 2},
        "max_msgs_per_subject is 2: some messages with one subject vanish, or are refused; set it to -1",
    ),
    "sealed": ({"sealed": True}, "sealed is set, so queues don't work; make the queue anew"),
}


async def facts_of(url: str) -> dict[str, Fact]:
    backend = nats.open(Url.parse(url), clock=CLOCK)
    try:
        return facts_by_name(await backend.describe())
    finally:
        await backend.close()


@pytest.mark.parametrize("field", STREAM_EDITS)
async def test_doctor_tells_what_was_changed_of_a_stream(native: Driver, url: str, field: str) -> None:
    async with opened(url) as (broker, _):
        await broker.send("orders", [Outgoing(b"x")])
        await receive(broker)
    found = await facts_of(url)
    assert [found[one].advice for one in ("queues", "consumers")] == ["", ""]
    changes, said = STREAM_EDITS[field]
    stream = stream_of(url)
    config = (await api(native, f"STREAM.INFO.{stream}"))["config"]
    await api(native, f"STREAM.UPDATE.{stream}", config | changes)
    fact = (await facts_of(url))["queues"]
    assert (fact.value, fact.code) == ("1", "nats-queue-stream")
    assert fact.advice == f"of {stream}, {said} (nats stream edit)"


async def test_doctor_tells_what_was_changed_of_the_stream_of_dead_letters(native: Driver, url: str) -> None:
    async with opened(url) as (broker, _):
        await broker.declare("orders", {"max_deliveries": 1})
        await broker.send("orders", [Outgoing(b"x")])
        await receive(broker)
        await pass_time(1.1 * LOCK)
        await receive(broker)
    assert (await facts_of(url))["queues"].advice == ""
    stream = f"{stream_of(url)}=24dead"
    config = (await api(native, f"STREAM.INFO.{stream}"))["config"]
    await api(native, f"STREAM.UPDATE.{stream}", config | {"max_age": 600 * SECOND, "max_msgs_per_subject": 5})
    said = (await facts_of(url))["queues"].advice
    assert f"of {stream}, max_age is 600 s: older dead letters vanish" in said
    assert "max_msgs_per_subject is not 1" in said


async def test_doctor_tells_what_was_changed_of_a_consumer(native: Driver, url: str) -> None:
    async with opened(url) as (broker, _):
        await broker.send("orders", [Outgoing(b"x")])
        await receive(broker)
    before = await edit(native, url, ack_wait=2 * SECOND)
    fact = (await facts_of(url))["consumers"]
    assert (fact.value, fact.code) == ("1", "nats-queue-consumer")
    assert fact.advice.startswith(
        f"of {before['durable_name']} of {stream_of(url)}, ack_wait is 2 s instead of 30.25 s; set it back"
    )
    assert (await consumer_config(native, url))["ack_wait"] == 2 * SECOND  # doctor only reads


async def test_doctor_reads_all_pages_of_consumers(native: Driver, url: str) -> None:
    """A page of the server has 256 of them."""
    async with opened(url) as (broker, _):
        await broker.declare("orders", {})
        await broker.send("orders", [Outgoing(b"x")])
    stream = stream_of(url)
    subject = stream.replace("_orders", ".orders")
    for number in range(260):
        config = {"durable_name": f"c{number}", "ack_policy": "explicit", "filter_subject": f"{subject}.{number}"}
        await api(native, f"CONSUMER.DURABLE.CREATE.{stream}.c{number}", {"stream_name": stream, "config": config})
    assert (await facts_of(url))["consumers"].value == "260"
