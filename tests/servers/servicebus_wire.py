"""Messages of a look-alike of Service Bus as bytes. A sender's sections are kept as they are: nothing is re-encoded."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from proton import Data, Message, symbol, timestamp

from tests.servers.servicebus_entities import Content, Item, Refusal

HEADER, DELIVERY, ANNOTATIONS, PROPERTIES, APPLICATION, DATA = 0x70, 0x71, 0x72, 0x73, 0x74, 0x75
BODY = frozenset((DATA, 0x76, 0x77, 0x78))

SCHEDULED = "x-opt-scheduled-enqueue-time"
OF_SERVICE = ("x-opt-sequence-number", "x-opt-enqueued-time", "x-opt-locked-until", "x-opt-message-state")
STATES = {"active": 0, "deferred": 1, "scheduled": 2}


def sections(raw: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield the code of each section of a message, all its bytes, and those of its value."""
    at = 0
    while at < len(raw):
        code, kind = raw[at + 2], raw[at + 3]
        if kind == 0x45:
            head, size = 4, 0
        elif kind in (0xA0, 0xC0, 0xC1, 0xA1):
            head, size = 5, raw[at + 4]
        elif kind in (0xB0, 0xD0, 0xD1, 0xB1):
            head, size = 8, int.from_bytes(raw[at + 4 : at + 8], "big")
        else:  # a value of some other type; a footer is not expected behind it
            head, size = 4, len(raw) - at - 4
        yield code, raw[at : at + head + size], raw[at + head : at + head + size]
        at += head + size


def unbatched(raw: bytes) -> list[bytes]:
    """Return the messages in a transfer: a batch has several data sections, each an encoded message."""
    data = [value for code, _, value in sections(raw) if code == DATA]
    if data and all(len(one) > 3 and one[:2] == b"\x00\x53" and HEADER <= one[2] <= 0x78 for one in data):
        return data
    return [raw]


def content_of(raw: bytes) -> Content:
    """Return what was sent as *raw*."""
    parts: dict[int, bytes] = {}
    rest = b""
    for code, whole, _ in sections(raw):
        if code in BODY:
            rest += whole
        else:
            parts[code] = whole
    message = Message()
    message.decode(raw)
    annotations = {str(name): value for name, value in (message.annotations or {}).items()}
    due = annotations.get(SCHEDULED)
    return Content(
        parts.get(PROPERTIES, b""),
        parts.get(APPLICATION, b""),
        rest,
        {name: value for name, value in annotations.items() if name not in OF_SERVICE},
        message.id,
        message.group_id,
        (message.expiry_time - message.creation_time) or message.ttl or None,
        message.priority if HEADER in parts else None,
        bool(message.durable),
        None if due is None else due / 1_000,
    )


def encoded(item: Item, *, is_locked: bool = False, shows_state: bool = False) -> bytes:
    """Return *item* as it is delivered."""
    content = item.content
    header = Data()
    header.put_described()
    header.enter()
    header.put_ulong(HEADER)
    header.put_list()
    header.enter()
    header.put_bool(content.durable)
    header.put_ubyte(content.priority if content.priority is not None else 4)
    if content.ttl is None:
        header.put_null()
    else:
        header.put_uint(min(int(content.ttl * 1_000), 2**32 - 1))
    header.put_null()
    header.put_uint(item.count)
    header.exit()
    header.exit()
    annotations: dict[Any, Any] = {symbol(name): value for name, value in content.annotations.items()}
    annotations[symbol("x-opt-sequence-number")] = item.sequence
    annotations[symbol("x-opt-enqueue-sequence-number")] = item.sequence
    annotations[symbol("x-opt-enqueued-time")] = timestamp(int(item.enqueued * 1_000))
    if is_locked:
        annotations[symbol("x-opt-locked-until")] = timestamp(int(item.until * 1_000))
    if shows_state:
        annotations[symbol("x-opt-message-state")] = STATES[item.state]
    application = _merged(content.application, item.changes) if item.changes else content.application
    return bytes(header.encode()) + _map(ANNOTATIONS, annotations) + content.properties + application + content.rest


PROPERTIES_MAX = 65_536
"""Bytes of all properties of a message, its application's and the others."""


def require_room(item: Item, changes: Mapping[str, Any]) -> None:
    """Refuse *changes* with which the properties of a message are too large: how the service does is not documented."""
    merged = _merged(item.content.application, {**item.changes, **changes})
    if len(merged) + len(item.content.properties) > PROPERTIES_MAX:
        raise Refusal("amqp:not-allowed", f"The properties of a message must not exceed {PROPERTIES_MAX} bytes.")


def _map(code: int, values: Mapping[Any, Any]) -> bytes:
    data = Data()
    data.put_described()
    data.enter()
    data.put_ulong(code)
    data.put_object(dict(values))
    data.exit()
    return bytes(data.encode())


def _merged(section: bytes, changes: Mapping[str, Any]) -> bytes:
    data = Data()
    if section:
        data.decode(section)
        data.rewind()
        data.next()
        found = data.get_object()
        values = dict(found.value)
    else:
        values = {}
    return _map(APPLICATION, {**values, **changes})


def token_tag(token: uuid.UUID) -> bytes:
    """Return the delivery tag of a lock."""
    return token.bytes_le
