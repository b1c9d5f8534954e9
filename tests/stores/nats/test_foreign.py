"""What other programs may write to streams, buckets, inboxes: none of it hangs, hides or ends what is beside it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import nats as driver
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("nats")

from nats.aio.client import Client as Driver
from nats.aio.msg import Msg

from tenure._backends import nats
from tenure._backends.nats.client import read, stored_in
from tenure._backends.nats.connection import headers_of
from tenure._backends.nats.copies import Copies
from tenure._backends.nats.errors import BadAnswer, Refusal
from tenure._backends.nats.inbox import DAY
from tenure._backends.nats.lease_records import TTL_MAX, Record, written
from tenure._backends.nats.lease_records import read as read_lease
from tenure._backends.nats.message_format import (
    HEADERS,
    LOCK_MAX,
    NATIVE_ID,
    NO_PROPERTIES,
    NO_STATE,
    STATE,
    Properties,
    decode,
    encode,
)
from tenure._backends.nats.messages import Found, delivered_message, read_message
from tenure._backends.nats.names import name_by, short_word_of
from tenure._backends.nats.places import DURATION_MAX, NEXT_MAX, ack_wait_in, is_own, nanoseconds, record_of
from tenure._backends.nats.places import Record as QueueRecord
from tenure._backends.nats.receiving import deliveries_before
from tenure._backends.nats.store_clock import timestamp_of
from tenure._backends.nats.storing import NAK, PUT_OFF_MAX, Storing, locks_for
from tenure._checks import LONGEST
from tenure._foreign import Unreadable
from tenure._lease import TOKEN_MAX, Granted, HeldBy, Lost, NoAnswer, Vacant
from tenure._queue.broker import EVERY_LIVE, EVERYTHING, Selection
from tenure._queue.checks import COUNT_MAX
from tenure._queue.headers import HEADERS_MAX
from tenure._queue.message import HISTORY_MAX, Delivery, Stats
from tenure._queue.note_headers import SEQUENCE_MAX
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import COMPLETE, LAPSED, Abandon, DeadLetter, Renewed, Settled, Settlement
from tenure._url import Url
from tenure.errors import ConfigError, Unavailable
from tests.durations import until
from tests.servers import Nats, shared
from tests.stores.nats.raw import publish, store

LOCK = 30.0  # of none is the end awaited
TTL = 30.0
INT64 = 2**63 - 1

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
NOTES = [
    "sequence", "enqueued_at", "deliveries", "history", "before", "reason", "description", "dead_at", "error",
    "locked_for", "locked_until", "lock", "due", "new",
]  # fmt: skip


# --- messages ----------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from(NOTES), ANYTHING), st.dictionaries(st.text(max_size=9), ANYTHING, max_size=3))
def test_what_was_read_can_be_written_and_read_again(state: dict[str, Any], headers: dict[str, Any]) -> None:
    found = decode({STATE: json.dumps(state), HEADERS: json.dumps(headers)})
    encoded = encode(found)
    assert all(value.isprintable() and value.encode() for value in encoded.values())
    assert decode(encoded) == found
    assert 0 <= found.state.deliveries <= COUNT_MAX
    assert 0 <= found.state.locked_for <= LOCK_MAX + 1
    assert found.state.before <= len(found.state.history) <= HISTORY_MAX


@given(st.dictionaries(st.sampled_from([STATE, HEADERS, NATIVE_ID, "Tenure-Id", "Tenure-Due", "x"]), st.text()))
def test_no_text_of_a_header_fails(headers: dict[str, str]) -> None:
    encode(decode(headers))


def test_an_unreadable_note_is_ignored_alone() -> None:
    said = {"sequence": 7, "deliveries": "3", "locked_for": 1e300, "reason": "bad", "due": -1, "lock": "x"}
    state = decode({STATE: json.dumps(said)}).state
    assert (state.sequence, state.deliveries, state.locked_for, state.reason, state.due) == (7, 0, 0.0, "bad", 0.0)
    assert state.lock == "x"


def test_an_unreadable_attempt_makes_none_since_the_redrive_an_older_one() -> None:
    attempt = {"number": 1, "at": 5.0, "outcome": "abandoned"}
    state = decode({STATE: json.dumps({"history": [5, attempt, attempt | {"at": 6.0}], "before": 2})}).state
    assert (len(state.history), state.before) == (2, 1)
    assert state.with_expired_attempts(1, 9.0) == state


@pytest.mark.parametrize("text", ["[" * 100_000, '{"deliveries": ' + "9" * 5_000 + "}", '{"lock": "\\ud800"}', "7", ""])
def test_a_state_of_another_form_says_nothing(text: str) -> None:
    assert decode({STATE: text}).state == NO_STATE


def test_a_huge_count_takes_no_longer_than_a_small_one() -> None:
    found = Found("q", "tenure.q.=m.k", 1, 0.0, b"", decode({STATE: '{"deliveries": 1000000000000}'}), "", 2)
    assert found.count == deliveries_before(found) == COUNT_MAX
    state = found.state.with_expired_attempts(found.count, 1.0)
    assert len(state.history) <= HISTORY_MAX
    again = decode(encode(found.dead(state.dead("max_deliveries", "", found.count, 1.0))))
    assert (again.state.deliveries, again.state.reason) == (COUNT_MAX, "max_deliveries")


def test_single_headers_are_dropped_that_no_sender_could_set() -> None:
    written = {"x": [1], "y": None, "tenure-z": 1, "x-death": "n", "n": 1, "big": 2**64, "s": "\ud800"}
    found = decode({"tenant": "blue", "Tenure-New": "1", HEADERS: json.dumps(written)})
    assert dict(found.headers) == {"tenant": "blue", "n": 1, "tenure-z": 1, "x-death": "n"}
    assert decode({"x": "a" * HEADERS_MAX}).headers == {}
    assert decode({HEADERS: "[" * 5_000, "a": "b"}).headers == {"a": "b"}
    assert decode({"Tenure-Id": "7", "Tenure-Reply-To": "$x", "Tenure-Correlation-Id": "\ud800"}) == NO_PROPERTIES


def test_notes_in_another_programs_message_say_nothing() -> None:
    assert decode({STATE: '{"reason": "bad"}'}, is_ours=False).state == NO_STATE
    assert is_own("tenure.orders.=m.aB9_-")
    for subject in ("tenure.orders", "tenure.orders.=m.", "tenure.=m.*", "tenure.=m.\ufffd", "tenure.=m.a.b", ".=m.a"):
        assert not is_own(subject)


ACK = "$JS.ACK.tenure_orders.tenure-30250-abc.1.17.17.1795933187143453167.0"


def message(reply: str) -> Msg:
    return Msg(_client=None, subject="tenure.orders.=m.k", reply=reply, data=b"x", headers=None)  # type: ignore[arg-type]


def test_only_what_a_consumer_delivers_is_a_delivery() -> None:
    found = delivered_message("orders", message(ACK))
    assert found is not None
    assert (found.stored_as, found.delivered, found.consumer) == (17, 1, "tenure-30250-abc")
    with_domain = delivered_message("orders", message(ACK.replace("ACK.", "ACK.hub.hash.") + ".random"))
    assert with_domain is not None
    assert (with_domain.stored_as, with_domain.consumer) == (17, "tenure-30250-abc")
    for reply in ("", "x", "$JS.ACK", "$JS.ACK.a.b", ACK.replace("17", "x"), ACK.replace("17", "-1"), f"a{ACK[1:]}"):
        assert delivered_message("orders", message(reply)) is None
    assert delivered_message("orders", message(ACK.replace("17", "9" * 5_000))) is None


@pytest.mark.parametrize("answer", [b"", b"\xff", b"[]", b"7", b"[" * 100_000, b'{"seq": ' + b"9" * 5_000 + b"}"])
def test_an_answer_of_another_form_is_told(answer: bytes) -> None:
    with pytest.raises(BadAnswer):
        read(answer)


@pytest.mark.parametrize("error", [{"err_code": "x", "description": 7}, {"err_code": 10**30}, {"code": 400}])
def test_a_refusal_of_another_form_is_one(error: object) -> None:
    with pytest.raises(BadAnswer if "10" in str(error) else Refusal):
        read(json.dumps({"error": error}).encode())


@pytest.mark.parametrize("found", [None, [], {"seq": 1}, {"subject": "a", "seq": "1"}, {"subject": "a", "seq": True}])
def test_an_answer_without_a_message_is_told(found: object) -> None:
    with pytest.raises(BadAnswer):
        stored_in({"message": found})
    with pytest.raises(BadAnswer):
        stored_in({"message": {"subject": "a", "seq": 1, "data": "\u00e9"}})


@pytest.mark.parametrize(
    "time",
    [
        None,
        7,
        "",
        "soon",
        "99999-01-01T00:00:00Z",
        "2026-11-24T09:48:57.xZ",
        "1969-12-31T23:59:59Z",
        "9999-12-31T23:59:59Z",
        "9" * 5_000,
    ],
)
def test_odd_times_are_unreadable_and_cost_no_message(time: object) -> None:
    with pytest.raises(Unreadable):
        timestamp_of(time)
    found = read_message("orders", {"message": {"subject": "tenure.orders", "seq": 3, "time": time}})
    assert (found.stored_as, found.stored_at, found.properties) == (3, 0.0, NO_PROPERTIES)


def test_headers_on_the_wire() -> None:
    assert headers_of(b"NATS/1.0\r\nx: a\xff\r\nn\xff: 1\r\nno colon\r\na b: 1\r\n: 2\r\nx-y:z \r\n\r\n") == {
        "x": "a\ufffd",
        "x-y": "z",
    }
    assert headers_of(b"NATS/1.0 404 No Messages\r\nx: 1\r\n\r\n") == {
        "Status": "404",
        "Description": "No Messages",
        "x": "1",
    }
    for odd in (b"", b"NATS/1.0", b"NATS/1.0 \xff\xff\xff\r\n\r\n", b"NATS/1.0 1\r\n\r\n", b"\r\n"):
        assert headers_of(odd) == {}


# --- times -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [1e10, LONGEST, 1e300, math.inf])
def test_no_time_overflows_the_servers_nanoseconds(seconds: float) -> None:
    assert nanoseconds(seconds) == DURATION_MAX * 10**9 < INT64
    assert json.loads(locks_for(seconds).partition(b" ")[2])["delay"] == PUT_OFF_MAX * 10**9


def test_a_dead_letter_is_locked_for_no_longer_than_a_lock_lasts() -> None:
    found = Found("q", "s", 1, 1_000.0, b"", decode({STATE: json.dumps({"locked_until": LONGEST, "reason": "x"})}))
    assert found.locked_until <= 1_000.0 + LOCK_MAX + 1.0


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("tenure-30250-abc", 30.25), ("tenure-0-abc", None), (f"tenure-{'9' * 30}-abc", None), ("theirs", None)],
)
def test_the_lock_of_a_consumer_is_in_its_name(name: str, seconds: float | None) -> None:
    assert ack_wait_in(name) == seconds


# --- records -----------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.sampled_from([*QueueRecord.__dataclass_fields__, "new"]), ANYTHING))
def test_a_queues_record_is_read_field_by_field(fields: dict[str, Any]) -> None:
    found = record_of(json.dumps(fields).encode())
    assert 1 <= found.next <= NEXT_MAX
    assert 1 <= found.next_dead <= NEXT_MAX
    assert found.idle_at is None or 0 <= found.idle_at <= LONGEST
    json.dumps(found.schedules).encode()


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", b"null", b"[" * 100_000])
def test_what_is_no_record_of_a_queue_is_an_empty_one(body: bytes) -> None:
    assert record_of(body) == QueueRecord()


def test_what_is_unreadable_in_a_record_costs_nothing_else() -> None:
    given = {
        "settings": {"lock": 5.0, "max_deliveries": 0, "new": 1},
        "next": True,
        "next_dead": 2**64,
        "idle_at": 1e300,
        "name": 7,
        "schedules": {"a": "x", "b": 7},
    }
    assert record_of(json.dumps(given).encode()) == QueueRecord({"lock": 5.0}, 1, 1, None, "", {"a": "x"})


GOOD = {"name": "n", "holder": "ann#1", "write": "renewed", "token": 7, "ttl": 10, "stamp": "s"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token", True),
        ("token", -1),
        ("token", TOKEN_MAX + 1),
        ("token", 10**30),
        ("ttl", TTL_MAX + 1),
        ("ttl", 1e300),
        ("ttl", True),
        ("holder", "\ud800"),
        ("holder", "x" * 2_000),
        ("stamp", "x" * 2_000),
    ],
)
def test_a_lease_with_an_impossible_field_is_none(field: str, value: object) -> None:
    assert read_lease(json.dumps(GOOD | {field: value}).encode()) is None


@given(st.dictionaries(st.sampled_from([*GOOD, "token_above", "metadata", "resign_asked"]), ANYTHING))
def test_a_lease_that_was_read_can_be_written_and_read_again(fields: dict[str, Any]) -> None:
    found = read_lease(json.dumps(GOOD | fields).encode())
    assert found is None or read_lease(written(found)) == found


def test_a_lease_does_not_depend_on_its_metadata() -> None:
    found = read_lease(json.dumps(GOOD | {"metadata": {"a": 1}, "resign_asked": "yes"}).encode())
    assert found == Record("n", "ann#1", 7, 10.0, "s", "renewed")
    assert read_lease(b"[" * 100_000) is None
    large = Record("n", "ann#1", 7, 10.0, "s", "renewed", {"a": "x" * 200_000, "b": "x" * 200_000})
    assert read_lease(written(large)) == large


@pytest.mark.parametrize("key", ["\ud800", "=FF", "=", "a=2", "", "a==" + "0" * 64])
def test_a_key_that_no_name_has_is_none(key: str) -> None:
    assert name_by(key) is None


# --- with a server -----------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Nats:
    return shared(Nats)


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Return a prefix that no other test uses."""
    return f"f{abs(hash(request.node.nodeid)) % 10**9}-{os.getpid()}"


@pytest_asyncio.fixture
async def backend(server: Nats, prefix: str) -> AsyncIterator[nats.NatsBackend]:
    async with opened(server, prefix) as backend:
        yield backend


@asynccontextmanager
async def opened(server: Nats, prefix: str) -> AsyncIterator[nats.NatsBackend]:
    backend = nats.open(Url.parse(f"{server.url}?prefix={prefix}"))
    try:
        yield backend
    finally:
        await backend.close()


@pytest_asyncio.fixture
async def native(server: Nats) -> AsyncIterator[Driver]:
    client = await driver.connect(server.url)
    yield client
    await client.close()


def stated(**state: object) -> bytes:
    return b"NATS/1.0\r\nTenure-State: %s\r\n\r\n" % json.dumps(state).encode()


async def receive(broker: nats.NatsBroker, queue: str = "orders", limit: int = 10) -> list[Delivery]:
    return list((await broker.receive(queue, limit, LOCK)).deliveries)


async def settle(broker: nats.NatsBroker, one: Delivery, verdict: Any = COMPLETE) -> object:
    [answer] = await broker.settle([Settlement(one, verdict)])
    return answer


@pytest.mark.parametrize(
    ("end", "headers"),
    [
        (b"a", b"NATS/1.0 \xff\xff\xff\r\n\r\n"),
        (b"a", b"NATS/1.0 200 \r\nx: \xff\r\n\r\n"),
        (b"a", b"NATS/1.0 503\r\n\r\n"),
        (b"\xff", b"NATS/1.0\r\nx: y\r\n\r\n"),
        (b"=m.\xff", b"NATS/1.0\r\nx: y\r\n\r\n"),
        (b"=m.a.b", stated(locked_for=1e6, reason="x")),
    ],
)
async def test_no_first_line_and_no_subject_ends_the_connection(
    backend: nats.NatsBackend, native: Driver, prefix: str, end: bytes, headers: bytes
) -> None:
    broker = backend.broker
    await broker.send("orders", [Outgoing(b"first")])
    await store(native, f"{prefix}.orders.".encode() + end, headers, b"theirs")
    await broker.send("orders", [Outgoing(b"last")])
    found = {one.body: one for one in await receive(broker)}
    assert found.keys() == {b"first", b"theirs", b"last"}
    for one in found.values():
        assert await settle(broker, one, Abandon()) == Settled()
    again = await receive(broker)
    assert sorted(one.body for one in again) == sorted(found)
    assert [await settle(broker, one, DeadLetter("bad")) for one in again] == [Settled()] * len(again)
    assert await broker.redrive("orders", EVERYTHING, None) == len(again)
    assert len(await receive(broker)) == len(again)


async def test_a_delay_beyond_the_servers_clock_is_waited_for_in_steps(backend: nats.NatsBackend) -> None:
    broker = backend.broker
    await broker.send("orders", [Outgoing(b"x", delay=1e10), Outgoing(b"now")])
    [now] = await receive(broker)
    assert now.body == b"now"
    for _ in range(3):
        assert await receive(broker) == []
    client, place = backend._client, broker._places.place_of("orders")
    consumer = await client.run(lambda connection: broker._places.consumer_of(connection, "orders"))
    assert consumer is not None
    info = await client.run(lambda one: client.call(one, f"CONSUMER.INFO.{place.stream}.{consumer.name}"))
    assert info["delivered"]["consumer_seq"] == 2  # each once


async def test_the_same_sequence_twice_is_told_apart(backend: nats.NatsBackend, native: Driver, prefix: str) -> None:
    broker = backend.broker
    await broker.send("orders", [Outgoing(b"ours")])
    for key, sequence in [("a", 1), ("b", 1), ("c", SEQUENCE_MAX)]:
        await store(native, f"{prefix}.orders.=m.{key}".encode(), stated(sequence=sequence), key.encode())
    held = await receive(broker)
    assert [one.body for one in sorted(held, key=lambda one: one.sequence)] == [b"ours", b"a", b"b", b"c"]
    assert len({one.sequence for one in held}) == 4
    ours = next(one for one in held if one.body == b"ours")
    assert await settle(broker, ours) == Settled()
    for one in held:
        if one is not ours:
            assert await settle(broker, one, DeadLetter("bad")) == Settled()
    assert [one.body for one in await broker.peek_dead("orders", EVERYTHING, 9)] == [b"a", b"b", b"c"]


def copy_of(found: Found, copies: Copies, stored_as: int) -> Found:
    return replace(found, stored_as=stored_as, native_id=copies.id_of(found))


def test_a_copy_is_one_of_its_message_only_and_so_is_the_copy_of_a_copy() -> None:
    copies = Copies("tenure_orders", "tenure-30250-abc")
    original = Found("orders", "tenure.orders.=m.k", 5, 0.0, b"", NO_PROPERTIES)
    copy = copy_of(original, copies, 9)
    second = copy_of(copy, copies, 12)
    assert [copies.first_of(one) for one in (original, copy, second)] == [5, 5, 5]
    assert all(copies.has(one, later) for one, later in [(original, copy), (original, second), (copy, second)])
    assert not any(copies.has(one, earlier) for one, earlier in [(copy, original), (second, copy), (copy, copy)])
    theirs = replace(original, stored_as=7)  # on the same subject
    assert not copies.has(original, theirs)
    assert not copies.has(original, copy_of(theirs, copies, 10))
    keys = {copies.key_aside(copy, 1), copies.key_aside(copy, 2), copies.key_aside(original, 1)}
    assert len({*keys, copies.key_of_dead(copy), copies.key_of_dead(theirs)}) == 5
    assert copies.key_of_dead(copy) == copies.key_of_dead(second)


@pytest.mark.parametrize(
    "native_id", ["", "order-17", f"tenure-5-5-{'0' * 32}", f"tenure-{'9' * 5_000}-5-{'0' * 32}", "tenure-\u0665-5-"]
)
def test_an_id_without_the_proof_is_that_of_no_copy(native_id: str) -> None:
    copies = Copies("tenure_orders", "tenure-30250-abc")
    original = Found("orders", "tenure.orders.=m.k", 5, 0.0, b"", NO_PROPERTIES)
    assert not copies.has(original, replace(original, stored_as=9, native_id=native_id))
    for other in (Copies("tenure_others", "tenure-30250-abc"), Copies("tenure_orders", "tenure-30250-abd")):
        assert not copies.has(original, copy_of(original, other, 9))


def found_of(broker: nats.NatsBroker, delivery: Delivery) -> Found:
    held = broker._receipts.find(delivery)
    assert held is not None
    return held.found


@pytest.mark.parametrize("is_served", [False, True])
@pytest.mark.parametrize("how", ["id", "subject"])
async def test_nobody_else_can_send_what_is_taken_for_a_copy(
    backend: nats.NatsBackend, native: Driver, prefix: str, how: str, is_served: bool
) -> None:
    """As it was stored already, the original would be removed."""
    broker = backend.broker
    await broker.send("orders", [Outgoing(b"ours")])
    await native.jetstream().publish(f"{prefix}.orders", b"other program's")
    held = await receive(broker)
    for number, one in enumerate(held, start=1):
        found = found_of(broker, one)
        subject = broker._storing.subject_of(found)
        key = subject.rpartition(".")[2]
        if how == "subject":
            await store(native, subject.encode(), stated(sequence=number), b"theirs")
        else:
            for id_ in (f"tenure-{prefix}_orders-{number}-{key}", f"tenure-{number}-{number}-{'0' * 32}"):
                await native.jetstream().publish(f"{prefix}.orders.x", b"theirs", headers={NATIVE_ID: id_})
    theirs = await receive(broker) if is_served else []
    assert [await settle(broker, one) for one in theirs] == [Settled()] * len(theirs)
    assert [await settle(broker, one, Abandon()) for one in held] == [Settled()] * 2
    again = [one for one in await receive(broker) if one.body != b"theirs"]
    assert [(one.body, one.delivery_count) for one in again] == [(b"ours", 2), (b"other program's", 2)]
    assert [await settle(broker, one, DeadLetter("bad")) for one in again] == [Settled()] * 2
    assert [one.body for one in await broker.peek_dead("orders", EVERYTHING, 9)] == [b"ours", b"other program's"]


@pytest.fixture
def on_its_subject(native: Driver) -> Callable[[Found], Awaitable[None]]:
    """Return what sends something to the subject of a message, as any sender can."""

    async def send(found: Found) -> None:
        await store(native, found.subject.encode(), b"NATS/1.0\r\nx: y\r\n\r\n", b"theirs")

    return send


async def test_another_message_of_the_same_subject_takes_no_ones_place(
    backend: nats.NatsBackend, on_its_subject: Callable[[Found], Awaitable[None]]
) -> None:
    """Also when it has been stored again itself, or is a dead letter already."""
    broker = backend.broker
    await broker.send("orders", [Outgoing(b"ours")])
    [ours] = await receive(broker)
    await on_its_subject(found_of(broker, ours))
    [theirs] = await receive(broker)
    assert await settle(broker, theirs, Abandon()) == Settled()
    assert await settle(broker, ours, Abandon()) == Settled()
    held = {one.body: one for one in await receive(broker)}
    assert held.keys() == {b"ours", b"theirs"}
    for body in (b"theirs", b"ours"):
        assert await settle(broker, held[body], DeadLetter("bad")) == Settled()
    assert sorted(one.body for one in await broker.peek_dead("orders", EVERYTHING, 9)) == [b"ours", b"theirs"]
    assert await broker.redrive("orders", EVERYTHING, None) == 2
    assert sorted(one.body for one in await receive(broker)) == [b"ours", b"theirs"]


@pytest.mark.parametrize("is_just_removed", [False, True])
async def test_a_message_that_is_gone_is_not_stored_again_beside_another_of_its_subject(
    backend: nats.NatsBackend,
    on_its_subject: Callable[[Found], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    is_just_removed: bool,
) -> None:
    broker = backend.broker
    await broker.send("orders", [Outgoing(b"ours")])
    [ours] = await receive(broker)
    found, stream = found_of(broker, ours), broker._places.place_of("orders").stream
    await on_its_subject(found)
    await backend._client.run(lambda one: broker._storing.delete(one, stream, found.stored_as))
    if is_just_removed:

        async def exists(*_: object) -> bool:
            return True  # when it was asked

        monkeypatch.setattr(Storing, "exists", exists)
    assert await settle(broker, ours, Abandon()) == LAPSED
    assert [one.body for one in await receive(broker)] == [b"theirs"]


async def test_a_locked_copy_is_renewed_and_completed_beside_another_message_of_its_subject(
    backend: nats.NatsBackend, on_its_subject: Callable[[Found], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = backend.broker
    await broker.send("orders", [Outgoing(b"ours")])
    [first] = await receive(broker)
    await backend._client.run(lambda one: broker._storing.acknowledge(one, [found_of(broker, first)], NAK))
    [ours] = await receive(broker)
    assert (ours.delivery_count, found_of(broker, ours).reply) == (2, "")
    for _ in range(2):
        await on_its_subject(found_of(broker, ours))
        [renewed] = await broker.renew([ours], 2 * LOCK)
        assert isinstance(renewed, Renewed)
        monkeypatch.setattr(broker._receipts.find(ours), "ends_at", broker._local.now() + LOCK)
    theirs = await receive(broker)
    assert [one.body for one in theirs] == [b"theirs"] * 2
    assert [await settle(broker, one) for one in [ours, *theirs]] == [Settled()] * 3
    assert await broker.stats("orders") == Stats()


async def test_what_is_sent_to_an_inbox_is_no_delivery(backend: nats.NatsBackend, native: Driver) -> None:
    broker = backend.broker
    await broker.send("orders", [Outgoing(b"1"), Outgoing(b"2")])
    [first] = await receive(broker, limit=1)
    connection = await backend._client.connection()
    inboxes = broker._receiving._inboxes._free[connection]
    for inbox in inboxes:
        for number in (inbox._number, inbox._number + 1):
            for reply in (b"", b"x.y", b"$JS.ACK.a", b"$JS.ACK.a.b.1.x.1.1.0"):
                for headers in (b"NATS/1.0\r\nx: y\r\n\r\n", b"NATS/1.0 \xff\xff\xff\r\n\r\n"):
                    await publish(native, f"{inbox.subject}.{number}".encode(), headers, b"?", reply)
    [second] = await receive(broker, limit=1)
    assert {first.body, second.body} == {b"1", b"2"}
    assert [await settle(broker, one) for one in (first, second)] == [Settled()] * 2


async def test_a_dead_letter_with_the_sequence_of_another_hides_and_ends_none(
    backend: nats.NatsBackend, native: Driver, prefix: str
) -> None:
    broker = backend.broker
    await broker.send("orders", [Outgoing(b"ours")])
    [ours] = await receive(broker)
    await settle(broker, ours, DeadLetter("bad"))
    subject = broker._places.place_of("orders$dead").subject
    forged = stated(sequence=ours.sequence, locked_until=LONGEST, reason="bad", deliveries=1)
    await store(native, f"{subject}.=m.a".encode(), forged, b"theirs")
    assert len(await broker.peek_dead("orders", EVERYTHING, 9)) == 2
    assert await broker.purge("orders", EVERYTHING, None) == 1  # theirs is locked
    assert [one.body for one in await broker.peek_dead("orders", EVERYTHING, 9)] == [b"theirs"]


async def test_a_message_without_room_for_notes_disturbs_no_other(
    backend: nats.NatsBackend, native: Driver, prefix: str
) -> None:
    """It can be completed at its first delivery; later, it is put off for a while, again and again."""
    broker = backend.broker
    headers = b"NATS/1.0\r\nx: y\r\n\r\n"
    await broker.send("orders", [Outgoing(b"first")])
    large = b"x" * (native.max_payload - len(headers))
    for end in ("a", "b"):
        await store(native, f"{prefix}.orders.{end}".encode(), headers, large)
    await broker.send("orders", [Outgoing(b"last")])
    held = await receive(broker)
    assert [len(one.body) for one in held] == [5, len(large), len(large), 4]
    assert await settle(broker, held[1]) == Settled()
    with pytest.raises(Unavailable, match="too large"):
        await settle(broker, held[2], Abandon())
    answers = await broker.settle([Settlement(one, Abandon()) for one in held[2:]])
    assert isinstance(answers[0], NoAnswer)
    assert answers[1] == Settled()
    found = (await broker.peek("orders", EVERY_LIVE, 9))[0]
    assert found.body == b"last"


async def test_odd_dead_letters_hide_none_behind_them(backend: nats.NatsBackend, native: Driver) -> None:
    """They are read one by one, and one may claim a higher sequence than those behind it, or the same."""
    broker = backend.broker
    await broker.send("orders", [Outgoing(b"ours")])
    [ours] = await receive(broker)
    subject = broker._places.place_of("orders$dead").subject
    await settle(broker, ours, Abandon())
    await broker._client.run(lambda connection: broker._places.make(connection, "orders$dead"))
    for number in range(40):
        sequence = ours.sequence if number % 2 else SEQUENCE_MAX - number
        headers = stated(sequence=sequence, history=[5] * 9, deliveries=-1, reason=7)
        await store(native, f"{subject}.=m.a{number}".encode(), headers, b"theirs")
    [ours] = await receive(broker)
    await settle(broker, ours, DeadLetter("bad"))
    which = Selection(ids=frozenset({ours.id}), reason="bad")
    assert [one.body for one in await broker.peek_dead("orders", which, 9)] == [b"ours"]
    assert [one.body for one in await broker.peek_dead("orders", EVERYTHING, 99)].count(b"theirs") == 40
    assert await broker.redrive("orders", which, None) == 1
    assert [one.body for one in await receive(broker)] == [b"ours"]
    assert await broker.purge("orders", EVERYTHING, None) == 40


async def test_a_dead_letter_without_room_for_notes_disturbs_no_other(
    backend: nats.NatsBackend, native: Driver
) -> None:
    broker = backend.broker
    await broker.send("orders", [Outgoing(b"ours")])
    [ours] = await receive(broker)
    await settle(broker, ours, DeadLetter("bad"))
    subject, headers = broker._places.place_of("orders$dead").subject, b"NATS/1.0\r\nx: y\r\n\r\n"
    await store(native, f"{subject}.a".encode(), headers, b"x" * (native.max_payload - len(headers)))
    [held] = await receive(broker, "orders$dead")
    assert await settle(broker, held, Abandon()) == Settled()
    assert await broker.redrive("orders", EVERYTHING, None) == 1
    assert [one.body for one in await receive(broker)] == [b"ours"]
    assert await broker.purge("orders", EVERYTHING, None) == 1
    assert await broker.peek_dead("orders", EVERYTHING, 9) == []


async def test_edited_records_of_queues_and_ids_disturb_nothing(
    backend: nats.NatsBackend, native: Driver, prefix: str
) -> None:
    broker, stream = backend.broker, native.jetstream()
    for queue in ("orders", "other"):
        await broker.declare(queue, {"dedupe_window": 1.0})
    assert await broker.send("orders", [Outgoing(b"a", id="7")]) == ["7"]
    bucket = f"KV_{prefix}-inbox"
    for one in (f"$KV.{prefix}-queues.orders", f"$KV.{prefix}-queues.=FF"):
        await stream.publish(one, b'{"settings": {"lock": 1e300}, "next": true, "idle_at": "soon", "name": 7}')
    assert await broker.names() == ["orders", "other"]
    assert await broker.idle() == []
    assert (await broker.settings("other")).dedupe_window == 1.0
    assert (await broker.settings("orders")).lock == 30.0
    found = await stream.get_last_msg(bucket, f"$KV.{prefix}-inbox.orders.sent.*")
    for edit in (b"[]", b"\xff", json.dumps({"until": LONGEST, "name": "shared"}).encode(), b'{"until": true}'):
        await stream.publish(str(found.subject), edit)
        name = await backend._client.run(lambda one: broker._inbox.name_of(one, "orders", "7", DAY))
        assert name.startswith("7/")
    assert list(await broker.handled("orders", ["7"])) == [False]
    [got] = await receive(broker)
    assert got.body == b"a"


async def test_an_answer_that_is_no_json_is_unavailable(
    backend: nats.NatsBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await backend._client.connection()

    async def odd(*arguments: object) -> Msg:
        return message("")

    monkeypatch.setattr(connection, "request", odd)
    with pytest.raises(Unavailable, match="can't be JetStream's"):
        await backend.broker.settings("orders")
    with pytest.raises(Unavailable, match="can't be JetStream's"):
        await backend.leases.acquire("job", "ann#1", TTL)


async def test_a_bad_record_costs_its_own_lease_only(backend: nats.NatsBackend, native: Driver, prefix: str) -> None:
    leases, stream = backend.leases, native.jetstream()
    answers = [await leases.acquire(name, "ann#1", TTL) for name in ("bad", "good", "x" * 200)]
    bad, good, long = (one.grant for one in answers if isinstance(one, Granted))
    for key, body in [
        ("bad", b"[" * 100_000),
        ("=FF", b"x"),
        (short_word_of("y" * 200), json.dumps(GOOD).encode()),
    ]:
        await stream.publish(f"$KV.{prefix}-leases.{key}", body)
    assert await leases.names() == sorted(["bad", "good", long.name])
    one, two, three = await leases.inspect_many(["bad", "good", long.name])
    assert one == Vacant("bad", bad.token)
    assert isinstance(two, HeldBy)
    assert isinstance(three, HeldBy)
    [answer] = await leases.renew([bad], TTL)  # alone, too: the leader's other leases are renewed by the same thread
    assert isinstance(answer, NoAnswer)
    assert "nats kv del" in str(answer)
    assert list(await leases.renew([good, long], TTL)) == [Granted(good), Granted(long)]


async def test_no_report_ends_the_connection(
    server: Nats, backend: nats.NatsBackend, native: Driver, prefix: str
) -> None:
    leases = backend.leases
    hints = leases.hints("job")
    await anext(hints)
    connection = await backend._client.connection()
    async with opened(server, prefix) as other:
        answer = await other.leases.acquire("job", "ann#1", TTL)
    for body in (b"?", b"[" * 100_000, json.dumps(GOOD | {"name": "job"}).encode(), b""):
        for headers in (b"NATS/1.0 \xff\xff\xff\r\n\r\n", b"NATS/1.0\r\nNats-Sequence: " + b"9" * 5_000 + b"\r\n\r\n"):
            await publish(native, f"{prefix}-leases.job".encode(), headers, body)
    await anext(hints)
    held = await leases.acquire("job", "bob#1", TTL)
    assert isinstance(answer, Granted)
    assert isinstance(held, HeldBy)
    assert held.token == answer.grant.token
    assert await backend._client.connection() is connection


async def test_no_token_follows_the_last_one(backend: nats.NatsBackend, native: Driver, prefix: str) -> None:
    leases, stream = backend.leases, native.jetstream()
    answer = await leases.acquire("job", "ann#1", TTL)
    assert isinstance(answer, Granted)
    edit = GOOD | {"name": "job", "holder": "", "write": "released", "token": TOKEN_MAX}
    await stream.publish(f"$KV.{prefix}-leases.job", json.dumps(edit).encode())
    assert list(await leases.renew([answer.grant], TTL)) == [Lost(answer.grant)]
    with pytest.raises(ConfigError, match="nats kv del"):
        await leases.acquire("job", "bob#1", TTL)


async def test_a_message_that_is_waited_for_is_the_consumers(
    backend: nats.NatsBackend, native: Driver, prefix: str
) -> None:
    """The pull that waits ignores what no consumer has delivered, and goes on."""
    broker = backend.broker
    await broker.declare("orders", {"lock": LOCK})
    hints = broker.hints("orders")
    await anext(hints)
    [pull] = broker._standing._pulls.values()
    assert await receive(broker) == []
    connection = await backend._client.connection()
    subscribed = [one for one in connection._driver._subs.values() if one.subject.endswith(".*")]
    for one in subscribed:
        for number in range(4):
            await publish(native, f"{one.subject[:-1]}{number}".encode(), b"NATS/1.0\r\nx: y\r\n\r\n", b"?", b"a.b")
    await broker.send("orders", [Outgoing(b"x")])
    await until(lambda: pull.has_one)
    [got] = await receive(broker)
    assert got.body == b"x"
    assert await settle(broker, got) == Settled()


def test_properties_without_notes_are_those_of_the_sender() -> None:
    assert decode({"tenant": "blue", NATIVE_ID: "17"}) == Properties("17", {"tenant": "blue"})
