"""Messages and records of RabbitMQ."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from typing import Any, cast

from aiormq import spec

from tenure._backends.rabbitmq import records
from tenure._backends.rabbitmq.connection import Delivered
from tenure._backends.rabbitmq.message_format import (
    Facts,
    FoundMessage,
    copied,
    death_of,
    delivery_of,
    found_message,
    mark_delayed,
    properties_of,
)
from tenure._backends.rabbitmq.properties import SHORT_MAX, Properties, read_properties
from tenure._backends.rabbitmq.records import Record
from tenure._backends.rabbitmq.wire import Frames, Message, unread
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import dead_message_of
from tenure.errors import ConfigError
from tests.fuzz.decoder import Decoder
from tests.fuzz.using import FAILURE, HISTORY, NOW, SENT, as_bytes, as_objects, use_death, use_delivery, use_notes

QUEUES = ("orders", dead_letters_of("orders"))
TEXT_MAX = 70_000
"""Bytes of the longest text: encoding one in many lists inside each other would take all the time."""
SEQUENCE = int(NOW * 1e6) << 10


def delivered(properties: Properties, body: bytes = b"body") -> Delivered:
    return Delivered(cast(Any, None), 1, "tag", False, properties, body, 0.0)


# --- written ---


def written() -> Iterator[Properties]:
    """Yield properties as tenure writes them: sent, delayed, failed, dead."""
    for message in SENT:
        sent = properties_of(message, "made-up", SEQUENCE, is_delayed=False)
        yield sent
        mark_delayed(sent, 3)
        found = found_message("orders", delivered(read_properties(sent.marshal())), NOW)
        facts = replace(found.facts, history=HISTORY, before=1, deliveries=2, expires_at=NOW + 60.0)
        for one in (facts, facts.dead("rejected", "by its handler", 3, NOW, FAILURE)):
            yield copied(found, one, now=NOW)


def plain(properties: Properties) -> dict[str, Any]:
    """Return properties as values by name, with the headers of the server, as a delivery has them."""
    found = read_properties(properties.marshal())
    values = {name: getattr(found, name) for name in Properties.flags if getattr(found, name) is not None}
    died = {"queue": "orders", "reason": "delivery_limit", "time": NOW, "count": 1, "routing-keys": ["a"]}
    added = {"x-delivery-count": 2, "x-death": [died, {**died, "reason": "expired"}], "when": NOW, "raw": b"\xff"}
    return {**values, "headers": {**(found.headers or {}), **added}}


MESSAGES = [
    *map(plain, written()),
    {"headers": {"timestamp_in_ms": int(NOW * 1e3)}},
    {"message_id": "theirs", "expiration": "60000"},
]


def encoded(given: Any) -> bytes:
    """Return values by name as the bytes of properties, whatever types they have."""
    values = given if isinstance(given, dict) else {"headers": given}
    flags, parts = 0, []
    for name, flag in Properties.flags.items():
        if values.get(name) is None:
            continue
        value, flags = values[name], flags | flag
        if name == "headers":
            parts.append(_sized(_table(value) if isinstance(value, dict) else as_bytes(value)))
        elif name == "timestamp":
            parts.append(struct.pack(">Q", _whole(value.timestamp() if isinstance(value, datetime) else value)))
        elif name in ("delivery_mode", "priority"):
            parts.append(bytes([_whole(value) % 256]))
        else:
            parts.append(_short(value))
    return struct.pack(">H", flags) + b"".join(parts)


def _table(values: dict[Any, Any]) -> bytes:
    return b"".join([_short(name) + _value(value) for name, value in values.items()])


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return b"t" + bytes([value])
        case int():
            return b"l" + struct.pack(">Q", value % 2**64)
        case float():
            return b"d" + struct.pack(">d", value)
        case None:
            return b"V"
        case datetime():
            return b"T" + struct.pack(">Q", _whole(value.timestamp()))
        case Decimal():
            return b"D" + struct.pack(">Bi", 2, 125)
        case dict():
            return b"F" + _sized(_table(value))
        case list() | tuple():
            return b"A" + _sized(b"".join([_value(one) for one in value]))
    return (b"x" if isinstance(value, bytes) else b"S") + _sized(as_bytes(value)[:TEXT_MAX])


def _sized(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _short(value: Any) -> bytes:
    data = as_bytes(value)[:SHORT_MAX]
    return bytes([len(data)]) + data


def _whole(value: Any) -> int:
    return int(value) % 2**64 if isinstance(value, (int, float)) and abs(value) < 1e30 else 2**63


# --- read ---


def read_message(given: Any) -> None:
    use_properties(encoded(given))


def use_properties(data: bytes) -> None:
    for queue in QUEUES:
        use_found(found_message(queue, delivered(read_properties(data)), NOW))


def use_found(found: FoundMessage) -> None:
    use_delivery(shown := delivery_of(found, "token", NOW))
    use_death(death_of(found.facts))
    assert repr(dead_message_of(found.queue, shown, death_of(found.facts)))
    assert found.delayed_in is None or found.delayed_in >= 0
    assert isinstance(found.is_expired_at(NOW), bool)
    for facts in cast("list[Facts]", use_notes(found.facts, found.count)):
        copy = copied(found, facts, now=NOW)
        again = found_message(found.queue, delivered(read_properties(copy.marshal())), NOW)
        assert (again.id, again.facts.sequence) == (found.id, found.facts.sequence)
        assert delivery_of(again, "token", NOW).headers == shown.headers


def read_bytes(given: Any) -> None:
    data = as_bytes(given)
    use_properties(data)
    frames = as_frames(data)
    come: list[Message] = []
    for size in (len(frames), 7):
        pieces = Frames(come.append)
        assert not any(pieces.readable(frames[at : at + size]) for at in range(0, len(frames), size))
    assert come == [Message(5, "tag", 7, False, data, b"body")] * 2
    assert unread(spec.Basic.Properties(headers={"properties": data})) == data


def as_frames(data: bytes) -> bytes:
    """Return a delivery whose properties are *data*, as the server sends it."""
    deliver = b"\0\x3c\0\x3c\3tag" + struct.pack(">QB", 7, 0) + b"\1\xff\6orders"
    header = struct.pack(">HHQ", 60, 0, 4) + data
    frames = ((1, deliver), (2, header), (3, b"body"))
    return b"".join(struct.pack(">BHI", kind, 5, len(one)) + one + b"\xce" for kind, one in frames)


def read_records(given: Any) -> None:
    found = [delivered(Properties(), as_bytes(one)) for one in as_objects(given)[:5]]
    if found:
        _, known, version = records._newest(found)
        again = records._newest([delivered(Properties(), records._encode(known, version + 1))])
        assert again[1] == known


SCHEDULES = {"nightly": '{"record": "r", "by": "x"}'}
KEPT = {
    "orders": Record({"max_deliveries": 3, "lock": 20.0, "rate": (5, 1.0)}, True, schedules=SCHEDULES, made="5f3a"),
    "mails": Record({}, True, 2, 1, NOW, NOW + 5.0, NOW + 9.0),
}
RECORDS = [[records._encode(KEPT, 7)], [records._encode(KEPT, 7), records._encode({}, 6)]]

DECODERS = [
    Decoder("rabbitmq.message", MESSAGES, read_message, share=0.7),
    Decoder("rabbitmq.bytes", [one.marshal() for one in written()], read_bytes),
    Decoder("rabbitmq.records", RECORDS, read_records, (ConfigError,)),
]
