"""What other programs write into messages and records of RabbitMQ: it is read as far as it can be.

Properties are written here as bytes: the clients of Python refuse some of what a server takes.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import struct
import time
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, cast

import aiormq
import pamqp.frame
import pytest
from aiormq import spec
from pamqp import encode
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

import tenure
from tenure._backends.rabbitmq import live, records
from tenure._backends.rabbitmq.connection import Delivered
from tenure._backends.rabbitmq.message_format import (
    EXPIRATION_MAX,
    FACTS_MAX,
    Facts,
    check_properties,
    copied,
    delivery_of,
    found_message,
    made_up_id,
    mark_queue,
    properties_of,
)
from tenure._backends.rabbitmq.names import RECORDS
from tenure._backends.rabbitmq.properties import DEPTH_MAX, SHORT_MAX, Properties, _extents, read_properties
from tenure._backends.rabbitmq.records import Record
from tenure._backends.rabbitmq.wire import Frames, Message, unread
from tenure._checks import LONGEST
from tenure._foreign import RECORD_MAX
from tenure._queue import dead_letters
from tenure._queue.broker import EVERYTHING, Selection
from tenure._queue.checks import COUNT_MAX, INT_MAX
from tenure._queue.delivery_ends import noted
from tenure._queue.failures import Failure
from tenure._queue.headers import checked_headers
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import HISTORY_MAX, Attempt
from tenure._queue.note_headers import SEQUENCE_MAX
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import GIVE_BACK, Abandon, DeadLetter, Settled, Settlement
from tenure.errors import ConfigError, MessageRefused, Unavailable
from tests.durations import until
from tests.servers import RabbitMQ, patient, url_of
from tests.stores.ended import ABANDONED, AT_ABANDON, AT_DEATH, ENDED, ERROR, REJECTED
from tests.stores.rabbitmq.opened import complete, opened, received, until_found

NOW = 1_800_000_000.0


@pytest.fixture
def name() -> str:
    return f"rabbit-{secrets.token_hex(6)}"


# --- properties as bytes ---


def table(**headers: bytes) -> bytes:
    """Return headers, whose values are bytes that begin with their type."""
    return b"".join(bytes([len(name)]) + name.encode() + value for name, value in headers.items())


def raw(headers: bytes | None = None, **others: bytes) -> bytes:
    """Return properties: those of one size as they are, texts without their length."""
    flags, parts = 0, []
    for name, flag in Properties.flags.items():
        value = headers if name == "headers" else others.get(name)
        if value is None:
            continue
        flags |= flag
        match name:
            case "headers":
                parts.append(struct.pack(">I", len(value)) + value)
            case "timestamp" | "priority" | "delivery_mode":
                parts.append(value)
            case _:
                parts.append(bytes([len(value)]) + value)
    return struct.pack(">H", flags) + b"".join(parts)


def long(code: bytes, value: bytes) -> bytes:
    return code + struct.pack(">I", len(value)) + value


def nested(depth: int) -> bytes:
    value = b"V"
    for _ in range(depth):
        value = long(b"A", value)
    return value


ODD: dict[str, bytes] = {
    "a time in microseconds": raw(timestamp=struct.pack(">Q", 1_800_000_000_000_000)),
    "a time before 1970": raw(timestamp=struct.pack(">q", -1)),
    "the latest time": raw(timestamp=struct.pack(">Q", int(LONGEST))),
    "texts in Latin-1": raw(
        table(ort=long(b"S", b"Z\xfcrich")),
        **dict.fromkeys(("content_type", "correlation_id", "reply_to", "message_id", "app_id"), b"\xfc" * 255),
    ),
    "a name in Latin-1": raw(b"\1\xfcI\0\0\0\1"),
    "the longest name": raw(table(**{"k" * 255: b"V"})),
    "500 arrays in each other": raw(table(deep=nested(500))),
    "30,000 voids": raw(table(many=long(b"A", b"V" * 30_000))),
    "times in headers": raw(table(far=b"T" + b"\x7f" * 8, near=b"T" + struct.pack(">Q", 9_500_000_000))),
    "doubles": raw(table(large=b"d" + struct.pack(">d", 1e300), none=b"d" + struct.pack(">d", math.nan))),
    "a decimal": raw(table(d=b"D\xff\xff\xff\xff\xff")),
    "whole numbers": raw(table(a=b"l" + b"\x7f" + b"\xff" * 7, b=b"L" + b"\xff" * 8, c=b"B\xff", d=b"i" + b"\xff" * 4)),
    "bytes, a table and None": raw(table(raw=long(b"x", b"\0\xff"), t=long(b"F", table(inner=b"t\1")), none=b"V")),
    "NUL characters": raw(table(text=long(b"S", b"a\0b")), message_id=b"a\0b", correlation_id=b"a\0b", reply_to=b"\0"),
    "the highest priority": raw(priority=b"\xff"),
    "a long expiration": raw(expiration=b"9" * 250),
    "an odd expiration": raw(expiration="٣".encode()),
    "our own names": raw(table(**{f"x-tenure-{one}": b"V" for one in ("sequence", "history", "deliveries", "reason")})),
    "an unknown type": raw(table(first=b"I\0\0\0\1", odd=b"?" * 9, last=b"I\0\0\0\2"), message_id=b"theirs"),
    "a value longer than its array": raw(table(a=long(b"A", b"I\0\0")), message_id=b"theirs"),
}
"""Properties by which the driver would end the connection, or which it can't write again."""


def delivered(properties: Properties, body: bytes = b"body") -> Delivered:
    return Delivered(cast(Any, None), 1, "tag", False, properties, body, 0.0)


def check_message(queue: str, properties: Properties) -> Facts:
    """Check that a message is read, shown and copied; return its facts."""
    found = found_message(queue, delivered(properties), NOW)
    shown = delivery_of(found, "token", NOW)
    assert shown.body == b"body"
    assert 0 <= (found.delayed_in or 0) <= INT_MAX
    assert 0 <= shown.sequence <= SEQUENCE_MAX
    assert (not found.is_dead) <= shown.delivery_count <= COUNT_MAX
    assert 0 <= shown.enqueued_at <= LONGEST
    assert 0 < len(shown.id.encode()) <= SHORT_MAX
    assert checked_headers(shown.headers) == shown.headers  # a handler may pass them on
    datetime.fromtimestamp(shown.enqueued_at, UTC)
    for facts in (
        found.facts,
        found.facts.with_expired_attempts(found.count, NOW).with_attempt(Attempt(found.count, NOW, "abandoned")),
        found.facts.dead("why", "", found.count, NOW),
        found.facts.redriven(),
    ):
        copy = read_properties(copied(found, facts, now=NOW).marshal())
        again = found_message(queue, delivered(copy), NOW)
        assert (again.id, again.facts.sequence) == (found.id, found.facts.sequence)
        assert delivery_of(again, "token", NOW).headers == shown.headers
    return found.facts


MARKS: dict[str, Any] = {
    "x-tenure-sequence": 7 << 10,
    "x-tenure-deliveries": 5,
    "x-tenure-history": f"[{json.dumps({'number': 1, 'at': 1.0, 'outcome': 'abandoned'})}]",
    "x-tenure-expires-at": 1,
    "x-tenure-delayed": 0,
    "x-tenure-reason": "why",
}


@pytest.mark.parametrize(
    ("queue", "more", "is_ours"),
    [
        ("orders", {}, True),
        ("orders", {"x-tenure-queue": "orders"}, True),
        ("orders", {"x-tenure-queue": "others"}, False),
        ("orders", {"x-tenure-queue": "orders:dead"}, False),
        ("orders", {"x-tenure-queue": 7}, False),
        ("orders", {"x-tenure-queue": "orders", "x-death": [{"queue": "tenure:delay:03"}]}, True),
        ("orders", {"x-tenure-queue": "orders", "x-death": [{"queue": "orders", "reason": "expired"}]}, False),
        ("orders$dead", {}, True),
        ("orders$dead", {"x-tenure-queue": "orders:dead"}, True),
        ("orders$dead", {"x-tenure-queue": "orders", "x-death": [{"queue": "orders", "reason": "expired"}]}, True),
        ("orders$dead", {"x-tenure-queue": "others:dead"}, False),
    ],
)
def test_our_headers_count_in_the_queue_alone_that_they_name(queue: str, more: dict[str, Any], is_ours: bool) -> None:
    found = found_message(queue, delivered(Properties(headers={**MARKS, **more}, message_id="id")), NOW)
    facts, is_dead = found.facts, queue.endswith("dead")
    assert (facts.deliveries, len(facts.history)) == ((5, 1) if is_ours else (0, 0))
    assert (facts.sequence == 7 << 10) == is_ours
    assert found.delayed_in == (0 if is_ours else None)
    assert found.is_expired_at(NOW) == (is_ours and not is_dead)
    assert facts.reason == (None if not is_dead else "why" if is_ours else "unknown")
    copy = copied(found, facts, now=NOW)
    mark_queue(copy, queue)
    again = found_message(queue, delivered(read_properties(copy.marshal())), NOW).facts
    assert (again.sequence, again.deliveries, again.history) == (facts.sequence, facts.deliveries, facts.history)


def test_what_becomes_of_a_message_is_written_as_ever() -> None:
    """Releases of before read it, too."""
    found = found_message("q", delivered(Properties()), NOW)
    facts = noted(Facts(sequence=7, sent_at=1.0, expires_at=NOW + 9.0), AT_ABANDON, 5.0, fills=True)
    always = {"x-tenure-sequence": 7, "x-tenure-sent-at": 1_000_000}
    assert copied(found, facts, now=NOW).headers == always | {
        "x-tenure-expires-at": int((NOW + 9.0) * 1e6),
        "x-tenure-deliveries": 2,
        "x-tenure-history": f"[{ENDED}, {ABANDONED}]",
    }
    assert copied(found, noted(facts, AT_DEATH, 6.0, fills=True), now=NOW).headers == always | {
        "x-tenure-deliveries": 3,
        "x-tenure-history": f"[{ENDED}, {ABANDONED}, {REJECTED}]",
        "x-tenure-reason": "bad",
        "x-tenure-description": "why",
        "x-tenure-died-at": 6_000_000,
        "x-tenure-error": ERROR,
    }


@pytest.mark.parametrize("what", ODD)
def test_odd_properties_are_read_and_copied(what: str, name: str) -> None:
    for queue in (name, dead_letters_of(name)):
        check_message(queue, read_properties(ODD[what]))


def test_what_is_readable_beside_it_is_read() -> None:
    got = read_properties(ODD["an unknown type"])
    assert (got.headers, got.message_id) == ({"first": 1}, "theirs")
    got = read_properties(ODD["a value longer than its array"])
    assert (got.headers, got.message_id) == ({"a": []}, "theirs")
    got = read_properties(ODD["texts in Latin-1"])
    assert got.headers == {"ort": b"Z\xfcrich"}
    assert got.app_id == ("\\xfc" * 255)[:255]
    got = read_properties(ODD["times in headers"])
    assert got.headers == {"far": 0x7F7F7F7F7F7F7F7F, "near": datetime.fromtimestamp(9_500_000_000, UTC)}


@pytest.mark.parametrize("what", ODD)
def test_properties_that_end_too_early_are_read_up_to_there(what: str) -> None:
    data = ODD[what]
    for end in range(0, len(data), max(1, len(data) // 200)):
        found_message("orders", delivered(read_properties(data[:end])), NOW)


def test_the_usual_properties_are_those_of_the_driver() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    headers: dict[str, Any] = {"text": "Ünï", "n": -7, "big": 2**40, "yes": True, "half": 0.5, "none": None}
    headers |= {"when": moment, "raw": bytearray(b"\xff"), "rows": [1, {"a": ["b"]}], "price": Decimal("1.25")}
    theirs = spec.Basic.Properties("a/b", "gzip", headers, 2, 9, "c", "r", "1000", "id", moment, "t", "guest", "app")
    ours = read_properties(theirs.marshal())
    assert dict(ours) == dict(theirs)
    assert read_properties(b"\0\1\xff\1\0\0").message_id is None  # more flags than there are properties
    assert [read_properties(b"\x08\1" + b"\0\1" * more + b"\0\0\7").priority for more in (7, 100)] == [7, None]
    milliseconds = read_properties(raw(timestamp=struct.pack(">Q", int(NOW * 1_000))))
    assert milliseconds.timestamp == datetime.fromtimestamp(NOW, UTC)


def test_a_history_has_room_beside_the_largest_headers() -> None:
    """Of letters that take four bytes, too."""
    failure = Failure("𝔸", "𝔸" * 4_000, "𝔸" * 16_000)
    for length in range(1, HISTORY_MAX + 1):
        facts = Facts(1, 2.0, history=tuple(Attempt(number, NOW, "abandoned", failure) for number in range(length)))
        dead = facts.dead("why", "𝔸" * 4_000, COUNT_MAX, NOW, failure)
        for one in (facts, dead):
            properties = copied(found_message("orders", delivered(Properties()), NOW), one, now=NOW)
            assert len(properties.marshal()) <= FACTS_MAX + 1_000


def test_a_copy_has_the_bytes_of_the_headers_that_it_passes_on() -> None:
    theirs = table(deep=nested(DEPTH_MAX + 9), far=b"T" + b"\xff" * 8, single=b"f" + struct.pack(">f", 0.1))
    ours = table(**{"x-tenure-sequence": b"I\0\0\0\5", "CC": long(b"A", b""), "x-death": b"I\0\0\0\5"})
    found = found_message("orders", delivered(read_properties(raw(theirs + ours))), NOW)
    copy = read_properties(copied(found, found.facts, now=NOW).marshal())
    assert copy.headers_without(lambda one: one.startswith("x-tenure-")) == theirs
    assert (copy.headers or {})["x-tenure-sequence"] == 5


AS_BYTES: dict[str, bytes] = {
    "content_type": b"text/\xe4",
    "content_encoding": b"\xff",
    "priority": b"\xff",
    "correlation_id": b"\xfc" * 255,
    "reply_to": b"a\0b",
    "message_id": b"\xe4\0",
    "message_type": b"",
    "app_id": b"\xc3",
    "cluster_id": b"\x80",
}
"""Properties whose texts are no UTF-8, empty, or longer when they are shown."""

TIMES = {"microseconds": 1_800_000_000_123_456, "milliseconds": 1_800_000_000_123, "no time": 2**64 - 1, "the first": 0}


@pytest.mark.parametrize("what", TIMES)
def test_a_copy_has_the_bytes_of_every_property_that_it_passes_on(what: str) -> None:
    theirs = AS_BYTES | {"timestamp": struct.pack(">Q", TIMES[what])}
    found = found_message("orders", delivered(read_properties(raw(**theirs))), NOW)
    for facts in (found.facts, found.facts.dead("why", "", 1, NOW), found.facts.redriven()):
        copy = copied(found, facts, now=NOW)
        assert as_came(read_properties(copy.marshal())) == theirs
        again = found_message("orders", delivered(read_properties(copy.marshal())), NOW)
        assert again.id == found.id
    named = read_properties(copied(found, found.facts, now=NOW, id_="another").marshal())
    assert as_came(named) == theirs | {"message_id": b"another"}


def as_came(properties: Properties) -> dict[str, bytes]:
    """Return the properties that a sender sets, besides headers, as the bytes that came: texts without their length."""
    found = {}
    for name, start, end in _extents(properties.came):
        if name not in ("headers", "delivery_mode"):
            is_short = name in ("timestamp", "priority")
            found[name] = properties.came[start if is_short else start + 1 : end]
    return found


# --- our own headers, written by others ---

OURS = (
    *(f"x-tenure-{one}" for one in ("sequence", "sent-at", "expires-at", "deliveries", "history", "before", "reason")),
    *(f"x-tenure-{one}" for one in ("description", "died-at", "error", "delayed")),
    *("x-death", "x-delivery-count", "timestamp_in_ms", "x-first-death-queue"),
)
VALUES: dict[str, object] = {
    "a high number": 10**12,
    "the highest number": INT_MAX,
    "a negative number": -1,
    "a boolean": True,
    "a number": 1e300,
    "not a number": math.nan,
    "a text": "odd",
    "an empty text": "",
    "a text with NUL": "a\0b",
    "bytes": b"\xff",
    "nothing": None,
    "a time": datetime.fromtimestamp(LONGEST, UTC),
    "a list": [1, "a", None, {}],
    "odd deaths": [{"queue": 5, "reason": [], "time": "noon", "count": "many"}, {"reason": None}, {}],
    "a table": {"a": {}},
    "a deep text": "[" * 5_000,
    "an object": '{"type": 5, "message": null}',
    "an odd history": json.dumps([5, {}, {"number": "1"}, {"number": 10**15, "at": 1e300, "outcome": "x"}, [1, 2]]),
    "a long history": json.dumps([{"number": n, "at": 1.0, "outcome": "abandoned"} for n in range(1, 900)]),
    "a high history": json.dumps([{"number": 10**18, "at": 1.0, "outcome": "abandoned", "more": 1}]),
}


def written(value: object) -> bytes:
    match value:
        case bytes():
            return long(b"S", value)
        case float():
            return b"d" + struct.pack(">d", value)
    return encode.encode_table_value(cast(Any, value))


@pytest.mark.parametrize("what", VALUES)
def test_odd_values_of_our_own_headers_are_read_and_copied(what: str) -> None:
    value = written(VALUES[what])
    for header in OURS:
        for queue in ("orders", dead_letters_of("orders")):
            check_message(queue, read_properties(raw(table(**{header: value}))))
    for queue in ("orders", dead_letters_of("orders")):
        facts = check_message(queue, read_properties(raw(table(**dict.fromkeys(OURS, value)))))
        assert len(facts.history) <= HISTORY_MAX
        assert 0 <= facts.before <= len(facts.history)


def test_an_unreadable_attempt_makes_none_since_the_redrive_an_older_one() -> None:
    history = [5, {"number": 1, "at": 5.0, "outcome": "abandoned"}, {"number": 1, "at": 6.0, "outcome": "abandoned"}]
    headers: dict[str, Any] = {"x-tenure-history": json.dumps(history), "x-tenure-before": 2, "x-tenure-deliveries": 1}
    facts = found_message("orders", delivered(Properties(headers=headers)), NOW).facts
    assert (len(facts.history), facts.before) == (2, 1)
    assert facts.with_expired_attempts(1, NOW) == facts


def test_what_an_older_version_has_written_is_read() -> None:
    attempt = {"number": 1, "at": 5.0, "outcome": "abandoned"}
    failure = {"type": "ValueError", "message": "no", "traceback": ""}
    headers: dict[str, Any] = {
        "x-tenure-sequence": int(NOW * 1e6) << 10,
        "x-tenure-sent-at": 3_000_000,
        "x-tenure-deliveries": 2,
        "x-tenure-history": json.dumps([attempt | {"error": failure}, attempt | {"error": None}]),
        "x-tenure-before": 1,
        "x-tenure-reason": "why",
        "x-tenure-description": "because",
        "x-tenure-died-at": 7_000_000,
        "x-tenure-error": json.dumps(failure),
    }
    facts = found_message(dead_letters_of("orders"), delivered(Properties(headers=headers)), NOW).facts
    assert (facts.sent_at, facts.deliveries, facts.before, facts.dead_at) == (3.0, 2, 1, 7.0)
    assert (facts.reason, facts.description) == ("why", "because")
    assert facts.error is not None
    assert facts.error.type == "ValueError"
    assert [one.error and one.error.message for one in facts.history] == ["no", None]


# --- what is sent ---


def test_a_message_that_lives_longer_than_the_server_counts_is_ended_by_its_receivers() -> None:
    longest = EXPIRATION_MAX / 1_000
    assert sent(expires_in=longest).expiration == str(EXPIRATION_MAX)
    for seconds in (longest + 1.0, LONGEST):
        properties = sent(expires_in=seconds)
        assert properties.expiration is None
        facts = found_message("orders", delivered(read_properties(properties.marshal())), NOW).facts
        assert facts.expires_at == pytest.approx(min(NOW + seconds, LONGEST))


def sent(**options: Any) -> Properties:
    return properties_of(Outgoing(b"", **options), "id", int(NOW * 1e6) << 10, is_delayed=False)


def test_headers_are_written_as_they_are() -> None:
    headers: dict[str, Any] = {"large": 1e300, "exact": 0.1, "most": INT_MAX, "least": -INT_MAX - 1, "n": -7}
    headers |= {"yes": True, "no": False, "text": "Ünï", "k" * 255: "", "content-type": "x" * 300}
    got = read_properties(sent(headers=headers).marshal())
    assert dict(delivery_of(found_message("orders", delivered(got), NOW), "", 0.0).headers) == headers
    theirs = spec.Basic.Properties()
    data = sent(headers=headers).marshal()
    theirs.unmarshal(int.from_bytes(data[:2], "big"), data[2:])
    assert headers.items() <= (theirs.headers or {}).items()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": "𝔸" * 64}, r"^id \(256 bytes\) must not be longer than 255 bytes"),
        ({"correlation_id": "ä" * 128}, r"^correlation_id \(256 bytes\)"),
        ({"reply_to": "漢" * 86}, r"^reply_to \(258 bytes\)"),
        ({"headers": {"ä" * 128: 1}}, r"^a header's name \(256 bytes\)"),
        ({"reply_to": "amq.rabbitmq.reply-to"}, r"^reply_to \('amq.rabbitmq.reply-to'\) is for .*; name a queue"),
    ],
)
def test_a_text_without_room_is_refused(options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_properties(Outgoing(b"", **options))


def test_an_id_that_is_made_up_of_a_long_name_has_room() -> None:
    assert made_up_id("orders", 17) == "orders--17"
    made_up = made_up_id("漢" * 200, SEQUENCE_MAX)
    assert len(made_up.encode()) <= SHORT_MAX
    assert made_up.endswith(f"漢--{SEQUENCE_MAX}")


# --- frames ---


def frames(properties: bytes, body: bytes = b"body", *, routing_key: bytes = b"orders") -> bytes:
    """Return a delivery, as the server sends it."""
    deliver = spec.Basic.Deliver("tag", 7, True, "", "").marshal()[:-2]
    return b"".join(
        [
            frame(1, b"\0\x3c\0\x3c" + deliver + b"\1\xff" + bytes([len(routing_key)]) + routing_key),
            frame(2, struct.pack(">HHQ", 60, 0, len(body)) + properties),
            frame(3, body),
        ]
    )


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, 5, len(payload)) + payload + b"\xce"


def no_message(message: Message) -> None:
    raise AssertionError(f"{message} is not to a consumer")


def parsed(data: bytes) -> list[Any]:
    """Return the frames that the driver reads."""
    found = []
    while data:
        size, _, one = pamqp.frame.unmarshal(data)
        found.append(one)
        data = data[size:]
    return found


def test_a_decimal_may_be_negative() -> None:
    found = read_properties(raw(table(d=b"D\x01" + (-15).to_bytes(4, "big", signed=True))))
    assert found.headers == {"d": Decimal("-1.5")}


GOT = b"\0\x3c\0\x47" + struct.pack(">QB", 9, 0) + b"\0\1\xff" + struct.pack(">I", 3)
"""The answer to a get, before its properties and its body come."""


@pytest.mark.parametrize("what", ODD)
def test_every_message_to_a_consumer_is_taken_and_the_driver_reads_every_other(what: str) -> None:
    come: list[Message] = []
    reader = Frames(come.append)
    assert reader.readable(frames(ODD[what], routing_key=b"\xff" * 9)) == b""
    assert come == [Message(5, "tag", 7, True, ODD[what], b"body")]
    properties = struct.pack(">HHQ", 60, 0, 4) + ODD[what]
    answer, header, body = parsed(reader.readable(frame(1, GOT) + frame(2, properties) + frame(3, b"body")))
    assert (answer.delivery_tag, answer.message_count) == (9, 3)
    assert (header.body_size, unread(header.properties), body.value) == (4, ODD[what], b"body")
    assert len(come) == 1


def test_frames_that_come_in_pieces_are_those_that_come_at_once() -> None:
    got = frame(1, GOT) + frame(2, struct.pack(">HHQ", 60, 0, 3) + ODD["a decimal"]) + frame(3, b"got")
    large = struct.pack(">HHQ", 60, 0, 500) + ODD["a decimal"]
    deliver = frames(b"", b"").removesuffix(frame(2, struct.pack(">HHQ", 60, 0, 0)) + frame(3, b""))
    in_two = deliver + frame(2, large) + frame(3, b"y" * 400) + frame(3, b"y" * 100)
    data = (
        frames(ODD["texts in Latin-1"], b"a")
        + Heartbeat().marshal()
        + got
        + frames(ODD["a decimal"], b"x" * 300) * 2
        + in_two
        + got
    )
    come: list[Message] = []
    whole = Frames(come.append).readable(data)
    assert [len(one.body) for one in come] == [1, 300, 300, 500]
    assert len(parsed(whole)) == 7
    for size in (1, 2, 3, 7, 8, 11, 64, 500):
        again: list[Message] = []
        pieces = Frames(again.append)
        assert b"".join(pieces.readable(data[at : at + size]) for at in range(0, len(data), size)) == whole
        assert again == come


def test_messages_on_several_channels_come_between_one_another() -> None:
    come: list[Message] = []
    header, body = frame(2, struct.pack(">HHQ", 60, 0, 4) + b"\0\0"), frame(3, b"abcd")
    method = frames(b"\0\0", b"abcd").removesuffix(header + body)

    def on(channel: int, one: bytes) -> bytes:
        return one[:1] + struct.pack(">H", channel) + one[3:]

    reader = Frames(come.append)
    mixed = on(1, method) + on(2, method) + on(2, header) + on(1, header) + on(1, body) + on(2, body)
    assert reader.readable(mixed) == b""
    assert [(one.channel, one.body) for one in come] == [(1, b"abcd"), (2, b"abcd")]
    closed = pamqp.frame.marshal(spec.Channel.Close(404, "gone", 0, 0), 1)
    assert reader.readable(on(1, method) + closed + on(1, body)) == closed + on(1, body)  # its message never comes
    assert len(come) == 2


def test_what_has_come_is_not_held_back() -> None:
    """A heartbeat, or a short body, is less than what tells the kind of a frame with a method."""
    for last in (Heartbeat().marshal(), frame(3, b""), frame(3, b"a")):
        assert Frames(no_message).readable(last) == last
    large = frame(3, b"x" * 100_000)
    passing = Frames(no_message)
    assert passing.readable(large[:50_000]) == large[:50_000]  # and the beginning of a body waits for no end
    assert passing.readable(large[50_000:] + Heartbeat().marshal()) == large[50_000:] + Heartbeat().marshal()


def test_a_message_that_comes_back_keeps_its_id() -> None:
    """By it, the driver knows which one has come back."""
    returned = pamqp.frame.marshal(spec.Basic.Return(312, "NO_ROUTE", "", "orders"), 5)
    header = frame(2, struct.pack(">HHQ", 60, 0, 0) + raw(table(deep=nested(500)), message_id=b"ours"))
    reader = Frames(no_message)
    [_, ours] = parsed(reader.readable(returned + header))
    assert ours.properties.message_id == "ours"
    [theirs] = parsed(reader.readable(header))
    assert theirs.properties.message_id is None
    assert read_properties(unread(theirs.properties)).message_id == "ours"


def test_an_answer_without_a_message_has_no_properties() -> None:
    assert read_properties(unread(ContentHeader().properties)) == Properties()
    assert parsed(pamqp.frame.marshal(ContentBody(b"a"), 1))[0].value == b"a"


# --- records ---


def stored(*bodies: bytes) -> tuple[list[bytes], records.Records, int]:
    found, known, version = records._newest([delivered(Properties(), one) for one in bodies])
    return [one.body for one in found], known, version


@pytest.mark.parametrize("idle_at", ["0", "-0.0", "null", '"soon"', "-1"])
def test_a_record_that_was_read_is_written_as_it_is(idle_at: str) -> None:
    _, known, version = stored(f'{{"version": 7, "queues": {{"orders": {{"idle_at": {idle_at}}}}}}}'.encode())
    assert known == {"orders": Record()}
    assert stored(records._encode(known, version))[1] == known


def test_what_is_written_into_the_records_is_read() -> None:
    known = {
        "orders": Record(
            {"max_deliveries": 3, "dead_retention": math.inf, "rate": (5, 1.0)}, True, schedules={"a": "b"}
        ),
        "mails": Record(generation=2, gone_below=1, gone_until=5.0, idle_at=7.0, delayed_until=9.0),
    }
    body = records._encode(known, 17)
    assert stored(body) == ([body], known, 17)
    many = {f"queue-{n}": Record({"lock": 5.0}, True) for n in range(6_000)}
    body = records._encode(many, 1)
    assert len(body) > RECORD_MAX
    assert stored(body)[1] == many


def test_an_unreadable_record_leaves_the_others() -> None:
    odd = [5, "x", None, [], True, -1, 1e300, {"a": 5}, 10**18]
    queues: dict[str, Any] = {f"odd-{n}": one for n, one in enumerate(odd)}
    for n, one in enumerate(odd):
        queues[f"odd-fields-{n}"] = {
            "settings": one,
            **dict.fromkeys(("is_there", "generation", "gone_below", "gone_until", "idle_at", "delayed_until"), one),
            "schedules": one,
        }
    queues |= {"": {}, "a$dead": {}, "\ud800": {}, "n\n": {}}
    queues["settings"] = {"settings": {"lock": "x", "max_deliveries": 4, "rate": [1], "none": 5}, "is_there": True}
    queues["schedules"] = {"schedules": {"a": "text", "b": 5, "\ud800": "x", "c": "\ud800"}, "new": "later"}
    queues["orders"] = {"settings": {"lock": 5.0}, "is_there": True}
    _, known, _ = stored(json.dumps({"version": 3, "queues": queues}).encode())
    assert known["orders"] == Record({"lock": 5.0}, True)
    assert known["settings"] == Record({"max_deliveries": 4}, True)
    assert known["schedules"] == Record(schedules={"a": "text"})
    assert not {"", "a$dead", "\ud800", "n\n", "odd-0"} & known.keys()
    assert stored(records._encode(known, 4))[1] == known
    for one in known.values():
        one.generation += 1
        assert read_properties(Properties(headers={"x": one.generation}).marshal()).headers == {"x": one.generation}


UNREADABLE = [b"", b"\xff", b"[]", b"5", b'{"version": 1}', b'{"version": 1, "queues": []}', b"[" * 5_000, b"NaN"]


@pytest.mark.parametrize("body", UNREADABLE)
def test_records_that_are_unreadable_are_an_error_that_says_what_to_do(body: bytes) -> None:
    with pytest.raises(ConfigError, match=r"'tenure:records' is not as tenure writes it: it .*or remove it"):
        stored(body)
    ours = records._encode({"orders": Record(is_there=True)}, 2)
    for bodies in ((body, ours), (ours, body)):
        assert stored(*bodies) == ([ours, body], {"orders": Record(is_there=True)}, 2)


@pytest.mark.parametrize("version", ["x", None, -1, 1.5, 10**18, True, []])
def test_records_of_an_unreadable_version_are_the_oldest(version: object) -> None:
    theirs = json.dumps({"version": version, "queues": {"theirs": {}}}).encode()
    assert stored(theirs) == ([theirs], {"theirs": Record()}, 0)
    ours = records._encode({"ours": Record()}, 1)
    assert stored(theirs, ours)[0] == [ours, theirs]


@pytest.mark.parametrize("body", [*UNREADABLE, b'{"version": "x", "queues": {}}'])
def test_older_records_count_for_none_that_are_unreadable(body: bytes) -> None:
    """As those of a newer tenure, or changed by hand: what they say is not what older ones said."""
    ours = records._encode({"orders": Record({"max_deliveries": 3}, True)}, 2)
    by_us = Properties(message_id=RECORDS)
    for bodies in ((body, ours), (ours, body)):
        with pytest.raises(ConfigError, match=r"'tenure:records' is not as tenure writes it: it.*or remove it"):
            records._newest([delivered(by_us, one) for one in bodies])


# --- with a server ---


class Unchecked(spec.Basic.Properties):
    """Properties that are written as they are."""

    def __init__(self, data: bytes) -> None:
        super().__init__(message_id="unchecked")
        self.__dict__["data"] = data

    def marshal(self) -> bytes:
        return cast(bytes, self.__dict__["data"])


async def publish(url: str, queue: str, *messages: tuple[bytes, bytes], exchange: str = "") -> None:
    """Publish bodies with properties, as another program does."""
    theirs = await aiormq.connect(url)
    try:
        channel = await theirs.channel(publisher_confirms=True)
        for properties, body in messages:
            await channel.basic_publish(body, exchange=exchange, routing_key=queue, properties=Unchecked(properties))
    finally:
        await theirs.close()


TAKEN = [one for one in ODD if one not in ("an unknown type", "a value longer than its array", "doubles")] + [
    "a double"
]
"""Those that the server takes."""


@pytest.mark.parametrize("what", TAKEN)
async def test_an_odd_message_is_handed_out_and_disturbs_no_other_queue(what: str, name: str) -> None:
    """Its connection is that of all queues of the process: a message that ends it ends all locks."""
    properties = ODD.get(what) or raw(table(large=b"d" + struct.pack(">d", 1e300)))
    properties = raw(expiration=b"0" * 200 + b"9000000") if what == "a long expiration" else properties
    properties = raw() if what == "an odd expiration" else properties
    async with opened(url_of(RabbitMQ)) as [broker]:
        for queue in (name, f"{name}-2"):
            await broker.declare(queue, {})
        await broker.send(f"{name}-2", [Outgoing(b"innocent")])
        [innocent] = (await broker.receive(f"{name}-2", 1, 60.0)).deliveries
        await publish(url_of(RabbitMQ), name, (properties, b"odd"), (raw(), b"plain"))
        got = {one.body: one for one in await claimed(broker, name, 2)}
        assert await broker.settle([Settlement(got[b"odd"], Abandon())]) == [Settled()]
        await complete(broker, got[b"plain"])
        [again] = await claimed(broker, name, 1)
        assert (again.body, again.delivery_count) == (b"odd", 2)
        assert again.headers == got[b"odd"].headers
        assert await broker.settle([Settlement(again, DeadLetter("why"))]) == [Settled()]
        [dead] = await broker.peek_dead(name, EVERYTHING, 5)
        assert (dead.body, dead.reason) == (b"odd", "why")
        assert await broker.redrive(name, EVERYTHING, None) == 1
        await complete(broker, *await claimed(broker, name, 1), innocent)


async def test_copies_carry_what_the_sender_wrote(name: str) -> None:
    """After giving back, a delay, the dead letters and being put back, it has the bytes that it was sent with."""
    theirs = AS_BYTES | {"timestamp": struct.pack(">Q", TIMES["microseconds"])}
    async with opened(url_of(RabbitMQ)) as [broker]:

        async def received_again() -> Any:
            [got] = await claimed(broker, name, 1)
            held = broker._receipts.find(got)
            assert as_came(held.found.raw.properties) == theirs
            return got

        await broker.declare(name, {})
        await publish(url_of(RabbitMQ), name, (raw(**theirs), b"odd"))
        verdicts = (GIVE_BACK, Abandon(), Abandon(delay=0.01), DeadLetter("why"))
        for verdict in verdicts:
            got = await received_again()
            assert await broker.settle([Settlement(got, verdict)]) == [Settled()]
        assert await broker.redrive(name, EVERYTHING, None) == 1
        await complete(broker, await received_again())


async def claimed(broker: Any, queue: str, count: int) -> list[Any]:
    got: list[Any] = []
    while len(got) < count:
        got += await until_found(lambda: received_for_long(broker, queue, count))
    return got


async def received_for_long(broker: Any, queue: str, count: int) -> Any:
    return (await broker.receive(queue, count, 60.0)).deliveries


async def test_unreadable_records_are_told_and_their_elders_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"tenure:records:{name}"
    monkeypatch.setattr(records, "RECORDS", place)
    monkeypatch.setattr(records, "RECORDS_LOCK", f"{place}:lock")
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.declare(name, {"max_deliveries": 3})
        stranger, newest = (raw(), b"garbage"), (raw(message_id=place.encode()), b'{"version": 9, "tables": []}')
        await publish(url_of(RabbitMQ), place, stranger)
        assert (await broker.settings(name)).max_deliveries == 3
        await publish(url_of(RabbitMQ), place, newest)
        for _ in range(2):
            with pytest.raises(ConfigError, match=f"'{place}' is not as tenure writes it: it .*or remove it"):
                await broker.declare(name, {"max_deliveries": 4})
        theirs = await aiormq.connect(url_of(RabbitMQ))
        try:
            channel = await theirs.channel()
            one = await channel.basic_get(place)
            while one.body != newest[1]:
                one = await channel.basic_get(place)
            assert one.delivery_tag is not None
            await channel.basic_ack(one.delivery_tag)
        finally:
            await theirs.close()
        assert (await broker.settings(name)).max_deliveries == 3
        assert (await broker.declare(name, {"max_deliveries": 4})).max_deliveries == 4


@pytest.mark.parametrize("durable", [True, False])
async def test_a_queue_in_place_of_the_lock_of_the_records_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """It would be refused for ever, as a lock is that another process has."""
    place = f"tenure:records:{name}:lock"
    monkeypatch.setattr(records, "RECORDS_LOCK", place)
    monkeypatch.setattr(records, "LOCK_LOOK", 0.0)
    theirs = await aiormq.connect(url_of(RabbitMQ))
    try:
        channel = await theirs.channel()
        await channel.queue_declare(place, durable=durable)
        async with tenure.connect(patient(url_of(RabbitMQ))) as backend:
            queue = backend.queue(name)
            for act in (queue.declare, queue.settings, backend.queues, lambda: queue.send(b"x")):
                with pytest.raises(Unavailable, match=f"'{place}' that is not exclusive.*delete_queue -p / {place}"):
                    await act()
            found = await backend.diagnose(write=False)
            [fact] = [one for one in found.facts if one.name == "queues"]
            assert (fact.value, fact.code) == ("unknown", "rabbitmq-records")
            assert place in fact.advice
            assert (await backend.diagnose(write=True)).failure is not None

            await channel.queue_delete(place)
            await queue.declare(max_deliveries=3)
            assert (await queue.settings()).max_deliveries == 3
    finally:
        await (await theirs.channel()).queue_delete(place)
        await theirs.close()


async def test_who_keeps_the_lock_of_the_records_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"tenure:records:{name}:lock"
    monkeypatch.setattr(records, "RECORDS_LOCK", place)
    monkeypatch.setattr(records, "LOCK_LOOK", 0.0)
    theirs = await aiormq.connect(url_of(RabbitMQ))
    try:
        await (await theirs.channel()).queue_declare(place, exclusive=True)
        keeps = f"another connection keeps the exclusive queue '{place}'"
        async with opened(*[url_of(RabbitMQ)] * 2) as (one, other):
            asking = asyncio.ensure_future(one.settings(name))
            await until(lambda: one._client.waits_for)
            with pytest.raises(Unavailable, match=f"could not do it within .*: {keeps}"):
                await one._client.run(one._records.read, within=0.0)
            monkeypatch.setattr(records, "LOCK_WAIT", 0.0)
            with pytest.raises(Unavailable, match=f"can't change its records: {keeps}"):
                await other.settings(name)
            await theirs.close()
            assert await asking
            assert not one._client.waits_for
    finally:
        await theirs.close()


async def test_a_routing_key_that_is_no_text_disturbs_nothing(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.declare(name, {})
        theirs = await aiormq.connect(url_of(RabbitMQ))
        channel = await theirs.channel()
        await channel.exchange_declare(name, exchange_type="fanout", auto_delete=True)
        await channel.queue_bind(name, name)
        key = "ü" * 9  # as long as what is put in its place
        published = spec.Basic.Publish.marshal

        def in_latin_1(method: Any) -> bytes:
            return published(method).replace(key.encode(), b"\xff" * 18)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spec.Basic.Publish, "marshal", in_latin_1)
            await channel.basic_publish(b"odd", exchange=name, routing_key=key)
        [got] = await claimed(broker, name, 1)
        assert got.body == b"odd"
        await complete(broker, got)
        await theirs.close()


async def test_a_count_that_another_program_writes_ends_the_message_only(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.declare(name, {})
        count = raw(table(**{"x-tenure-deliveries": b"l" + struct.pack(">q", 10**12)}))
        await publish(url_of(RabbitMQ), name, (count, b"odd"), (raw(), b"plain"))
        [got] = await until_found(lambda: received(broker, name))
        assert got.body == b"plain"
        await complete(broker, got)
        [dead] = await until_found(lambda: broker.peek_dead(name, EVERYTHING, 5))
        assert (dead.body, dead.reason, len(dead.history)) == (b"odd", "max_deliveries", HISTORY_MAX)


async def test_odd_dead_letters_are_listed_with_the_others(name: str) -> None:
    deaths = (b"I\0\0\0\5", long(b"A", b"I\0\0\0\5"), long(b"A", long(b"F", table(time=b"V", reason=b"t\1"))), b"V")
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.declare(name, {})
        odd = [(raw(table(**{"x-death": one})), bytes([65 + n])) for n, one in enumerate(deaths)]
        await publish(url_of(RabbitMQ), f"{name}:dead", *odd)
        assert {one.body for one in await broker.peek_dead(name, EVERYTHING, 9)} == {b"A", b"B", b"C", b"D"}
        assert await broker.redrive(name, EVERYTHING, None) == 4
        await complete(broker, *await claimed(broker, name, 4))


async def test_a_dead_letter_without_room_for_a_copy_keeps_no_other_from_being_put_back(name: str) -> None:
    full = raw(table(fill=long(b"S", b"x" * (131_072 - 45))))
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.declare(name, {})
        await publish(url_of(RabbitMQ), f"{name}:dead", (raw(), b"a"), (full, b"full"), (raw(), b"b"))
        assert await broker.redrive(name, EVERYTHING, None) == 2
        assert [one.body for one in await broker.peek_dead(name, EVERYTHING, 9)] == [b"full"]
        assert {one.body for one in await claimed(broker, name, 2)} == {b"a", b"b"}
        assert await broker.purge(name, EVERYTHING, None) == 1


async def test_letters_of_high_sequences_hide_none_that_died_after_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are looked at together: a sequence says nothing about the place in the queue."""
    monkeypatch.setattr(live, "PAGE", 5)
    monkeypatch.setattr(dead_letters, "PAGE", 5)
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.declare(name, {})
        high = [
            (raw(table(**{"x-tenure-sequence": b"l" + struct.pack(">q", SEQUENCE_MAX - n)})), b"high")
            for n in range(12)
        ]
        await publish(url_of(RabbitMQ), f"{name}:dead", *high, (raw(message_id=b"good"), b"good"))
        async with tenure.connect(patient(url_of(RabbitMQ))) as backend:
            letters = backend.queue(name).dead_letters
            assert [one.id for one in await letters.peek(where=lambda one: one.body == b"good")] == ["good"]
            assert await letters.redrive(where=lambda one: one.body == b"good") == 1
        assert [one.body for one in await claimed(broker, name, 1)] == [b"good"]
        await publish(url_of(RabbitMQ), f"{name}:dead", (raw(message_id=b"good"), b"good"))
        only = Selection(ids=frozenset({"good"}))
        assert await broker.redrive(name, only, None, dry_run=True) == 1
        assert await broker.purge(name, only, None) == 1
        assert await broker.purge(name, EVERYTHING, None) == len(high)


async def test_what_only_we_can_hold_is_sent_and_put_back(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        await broker.declare(name, {})
        headers = {"large": 1e300, "exact": 0.1}
        await broker.send(name, [Outgoing(b"a", headers=headers, expires_in=LONGEST)])
        [got] = await claimed(broker, name, 1)
        assert dict(got.headers) == headers
        assert await broker.settle([Settlement(got, Abandon())]) == [Settled()]
        [got] = await claimed(broker, name, 1)
        assert (dict(got.headers), got.delivery_count) == (headers, 2)
        await complete(broker, got)
        with pytest.raises(MessageRefused) as refused:
            await broker.send(name, [Outgoing(b"a"), Outgoing(b"b", id="𝔸" * 255)])
        assert refused.value.index == 1


async def test_a_queue_with_a_long_name_of_other_letters_takes_messages(name: str) -> None:
    async with opened(url_of(RabbitMQ)) as [broker]:
        long_name = (name + "漢" * 200)[:200]
        [id_] = await broker.send(long_name, [Outgoing(b"a")])
        [got] = await claimed(broker, long_name, 1)
        assert got.id == id_
        await complete(broker, got)


def test_facts_stay_facts() -> None:
    facts = Facts(1, 2.0, 3.0, deliveries=COUNT_MAX)
    dead = facts.dead("why", "", COUNT_MAX, NOW)
    assert (dead.expires_at, dead.sequence, dead.sent_at) == (None, 1, 2.0)
    assert len(facts.with_expired_attempts(COUNT_MAX, NOW).history) == HISTORY_MAX
    assert replace(dead.redriven(), expires_at=3.0) == Facts(1, 2.0, 3.0)
    assert time.gmtime(dead.dead_at).tm_year == 2027
