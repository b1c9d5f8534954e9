"""Messages and requests in the form of AMQP.

What comes from others is read section by section, and property by property: what is unreadable is missing, and nothing
else is. What is sent again is as it came, byte by byte, but for the few values that change.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from tenure._backends.servicebus import amqp
from tenure._foreign import Unreadable, read_or

TTL_MAX = 2**32 - 1
"""The longest life in milliseconds that fits into a header."""

PARTITION = "x-opt-partition-key"

END_OF_TIME = 253_402_300_799_999
"""The last moment of the year 9999, which the service can't pass, in milliseconds."""

ONE, MANY = 0, 0x80013700
"""The format of a transfer: of one message, or of several."""

ID, REPLY_TO, CORRELATION, CONTENT_TYPE, EXPIRES, CREATED, GROUP, PROPERTIES_MAX = 0, 4, 5, 6, 8, 9, 10, 13
"""Places among the properties of a message, and their number."""

DURABLE, PRIORITY, TTL, COUNT, HEADER_MAX = 0, 1, 2, 4, 5
"""The same of its header."""


class Encoded(NamedTuple):
    """A message as it is sent."""

    data: bytes
    id: Any = None
    """Its message id, and its session: by them, the service chooses the partition of a batch."""
    session: Any = None


class Transfer(NamedTuple):
    """What is sent at once: a message, or several."""

    payload: bytes
    format: int = ONE


def encoded(
    body: bytes,
    *,
    message_id: str,
    session: str | None,
    reply_to: str | None,
    correlation_id: str | None,
    content_type: str | None,
    application: Mapping[str, object],
    ttl: float | None,
    due_at: float | None,
) -> Encoded:
    """Return a message as it is sent."""
    expires, created = _lifetime(ttl)
    properties = {
        ID: amqp.encoded(message_id),
        REPLY_TO: amqp.encoded(reply_to),
        CORRELATION: amqp.encoded(correlation_id),
        CONTENT_TYPE: amqp.NULL if content_type is None else amqp.symbol(content_type),
        EXPIRES: expires,
        CREATED: created,
        GROUP: amqp.encoded(session),
    }
    data = b"".join(
        (
            _header(ttl),
            _annotations(due_at),
            _properties(properties),
            amqp.section(amqp.APPLICATION, amqp.encoded(application)) if application else b"",
            amqp.section(amqp.DATA, amqp.binary(body)),
        )
    )
    return Encoded(data, message_id, session)


# --- read --------------------------------------------------------------------------------------------------------


class Incoming(NamedTuple):
    """A message as it came: what can be read of it. Texts and symbols are text, moments are milliseconds."""

    header: Sequence[Any]
    """As many as there can be; None for those that are missing. The properties, too."""
    annotations: Mapping[Any, Any]
    properties: Sequence[Any]
    application: Mapping[Any, Any]
    data: tuple[bytes, ...]
    """The parts of the body, if it is binary."""
    parts: Mapping[int, bytes]
    """Other sections that copies keep as they came, still encoded, by their codes; sequences one behind the other."""

    @property
    def size(self) -> int:
        """The bytes of its body."""
        parts = self.parts
        return sum(map(len, self.data)) + len(parts.get(amqp.VALUE, b"")) + len(parts.get(amqp.SEQUENCE, b""))

    @property
    def body(self) -> bytes:
        """The content: binary, or a text, as it is; any other value as JSON; one that is unreadable as AMQP has it."""
        if self.data:
            return self.data[0] if len(self.data) == 1 else b"".join(self.data)
        for code in (amqp.VALUE, amqp.SEQUENCE):
            part = self.parts.get(code)
            if part is not None:
                try:
                    return bytes_of(
                        amqp.value_of(part) if code == amqp.VALUE else [*map(amqp.value_of, _sequences(part))]
                    )
                except Unreadable:
                    return part
        return b""


def incoming(message: memoryview) -> Incoming:
    """Return what can be read of an encoded message."""
    header: Sequence[Any] = _NO_HEADER
    properties: Sequence[Any] = _NO_PROPERTIES
    annotations: Mapping[Any, Any] = {}
    application: Mapping[Any, Any] = {}
    parts: dict[int, bytes] = {}
    data: list[bytes] = []
    sequences: list[memoryview] = []
    at = 0
    try:
        for code, value, end in amqp.sections(message):
            if code == amqp.DATA:
                data.append(_data(value))
            elif code == amqp.HEADER:
                header = amqp.list_of(bytes(value), HEADER_MAX)
            elif code == amqp.ANNOTATIONS:
                annotations = amqp.map_of(bytes(value))
            elif code == amqp.SEQUENCE:
                sequences.append(value)
            elif code in _KEPT:
                parts[code] = bytes(value)
            at = end
    except Unreadable:  # from here on, nothing can be told apart
        if not data and not sequences and amqp.VALUE not in parts:
            data.append(bytes(message[at:]))
    if sequences:
        parts[amqp.SEQUENCE] = b"".join(sequences)
    if (part := parts.get(amqp.PROPERTIES)) is not None:
        properties = amqp.list_of(part, PROPERTIES_MAX)
    if (part := parts.get(amqp.APPLICATION)) is not None:
        application = amqp.map_of(part)
    return Incoming(header, annotations, properties, application, tuple(data), parts)


_KEPT = frozenset((amqp.PROPERTIES, amqp.APPLICATION, amqp.VALUE, amqp.FOOTER))

_NO_HEADER, _NO_PROPERTIES = (None,) * HEADER_MAX, (None,) * PROPERTIES_MAX


def _data(value: memoryview) -> bytes:
    """Return a part of a binary body, of whatever type it is."""
    found = amqp.binary_in(value)
    return bytes_of(read_or(amqp.value_of, bytes(value), bytes(value))) if found is None else found


def _sequences(part: bytes) -> list[bytes]:
    """Return values that stand one behind the other, each still encoded."""
    at, found = 0, []
    while at < len(part):  # each has an end: it was found when the message was read
        begin, at = at, amqp.end_of(part, at)
        found.append(part[begin:at])
    return found


def bytes_of(value: object) -> bytes:
    """Return what stands where bytes are expected: bytes, a text in UTF-8, or another value as JSON."""
    match value:
        case bytes():
            return value
        case bytearray() | memoryview():
            return bytes(value)
        case str():
            return value.encode(errors="replace")
        case None:
            return b""
    return json.dumps(plain(value)).encode()


def plain(value: Any) -> Any:
    """Return a value of AMQP as JSON takes it."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes():
            return value.decode(errors="replace")
        case dict():
            return {_key(name): plain(each) for name, each in value.items()}
        case list():
            return [plain(each) for each in value]
    return str(value)


def _key(name: Any) -> str:
    found = plain(name)
    return found if isinstance(found, str) else json.dumps(found)


# --- sent again --------------------------------------------------------------------------------------------------


def encoded_again(
    message: Incoming,
    *,
    message_id: str | None,
    application: Mapping[str, object],
    dropped: Container[str],
    ttl: float | None,
    due_at: float | None,
) -> Encoded:
    """Return a received *message* as it is sent again, with all that its sender has set but a few values."""
    durable, priority = message.header[DURABLE], message.header[PRIORITY]
    partition = message.annotations.get(PARTITION)
    header = _header(
        ttl,
        durable if isinstance(durable, bool) else None,
        priority if type(priority) is int and 0 <= priority <= 255 else None,
    )
    data = b"".join(
        (
            header,
            _annotations(due_at, partition if isinstance(partition, str) else None),
            _properties_again(message, message_id, ttl),
            _application_again(message, application, dropped),
            *(amqp.section(amqp.DATA, amqp.binary(one)) for one in message.data),
            *_body_again(message),
        )
    )
    id_ = message_id or message.properties[ID]
    session = message.properties[GROUP]
    return Encoded(data, id_ if _is_id(id_) else None, session if isinstance(session, str) else None)


def _properties_again(message: Incoming, message_id: str | None, ttl: float | None) -> bytes:
    fields = read_or(amqp.parts_of, message.parts.get(amqp.PROPERTIES), [])[:PROPERTIES_MAX]
    fields += [amqp.NULL] * (PROPERTIES_MAX - len(fields))
    fields[EXPIRES], fields[CREATED] = _lifetime(ttl)
    if message_id is not None:
        fields[ID] = amqp.encoded(message_id)
    return amqp.section(amqp.PROPERTIES, amqp.joined_list(fields))


def _application_again(message: Incoming, application: Mapping[str, object], dropped: Container[str]) -> bytes:
    parts: list[bytes] = []
    for key, value in read_or(amqp.pairs_of, message.parts.get(amqp.APPLICATION), []):
        name = read_or(amqp.value_of, key, None)
        if not isinstance(name, str) or (name not in dropped and name not in application):
            parts += (key, value)
    for name, own in application.items():
        parts += (amqp.encoded(name), amqp.encoded(own))
    return amqp.section(amqp.APPLICATION, amqp.joined_map(parts)) if parts else b""


def _body_again(message: Incoming) -> list[bytes]:
    found = [amqp.section(amqp.SEQUENCE, one) for one in _sequences(message.parts.get(amqp.SEQUENCE, b""))]
    others = (code for code in (amqp.VALUE, amqp.FOOTER) if code in message.parts)
    return found + [amqp.section(code, message.parts[code]) for code in others]


def _is_id(value: Any) -> bool:
    """Return whether it is a message id that a transfer can name."""
    return isinstance(value, (str, bytes, UUID)) or (type(value) is int and 0 <= value < 2**64)


def _header(ttl: float | None, durable: bool | None = None, priority: int | None = None) -> bytes:
    if ttl is None and durable is None and priority is None:
        return b""
    found = [amqp.NULL] * HEADER_MAX
    found[DURABLE] = amqp.encoded(durable)
    if priority is not None:
        found[PRIORITY] = amqp.ubyte(priority)
    if ttl is not None:
        found[TTL] = amqp.uint(max(1, min(int(ttl * 1_000), TTL_MAX)))
    return amqp.described(amqp.HEADER, found)


def _lifetime(ttl: float | None) -> tuple[bytes, bytes]:
    """Return the end of a life and its beginning, if its length doesn't fit into a header: over 49 days."""
    if ttl is None or ttl * 1_000 < TTL_MAX:
        return amqp.NULL, amqp.NULL
    created = int(time.time() * 1_000)  # only the difference of the two counts
    return amqp.timestamp(min(created + int(ttl * 1_000), END_OF_TIME)), amqp.timestamp(created)


def _annotations(due_at: float | None, partition: str | None = None) -> bytes:
    found: dict[str, object] = {}
    if due_at is not None:
        due = min(int(due_at * 1_000), END_OF_TIME)
        found["x-opt-scheduled-enqueue-time"] = amqp.Value(amqp.timestamp(due))
    if partition is not None:
        found[PARTITION] = partition
    return amqp.section(amqp.ANNOTATIONS, amqp.fields(found)) if found else b""


def _properties(values: Mapping[int, bytes]) -> bytes:
    """Return the section of the properties at these places."""
    return amqp.described(amqp.PROPERTIES, [values.get(at, amqp.NULL) for at in range(max(values) + 1)])


def _id(value: Any) -> bytes:
    """Return an encoded message id."""
    return amqp.ulong(value) if isinstance(value, int) else amqp.encoded(value)


def transfer_of(messages: Sequence[Encoded]) -> Transfer:
    """Return messages as one transfer. Partitioned entities take several for one message like the first."""
    first = messages[0]
    if len(messages) == 1:
        return Transfer(first.data)
    envelope = _properties({ID: _id(first.id), GROUP: amqp.encoded(first.session)})
    return Transfer(b"".join((envelope, *(amqp.section(amqp.DATA, amqp.binary(one.data)) for one in messages))), MANY)


# --- requests ----------------------------------------------------------------------------------------------------


def request_of(node: str, id_: UUID, properties: Mapping[str, object], body: Mapping[str, object]) -> bytes:
    """Return a request to a management node, with an id that its answer names."""
    return b"".join(
        (
            _properties({ID: amqp.encoded(id_), REPLY_TO: amqp.encoded(node)}),
            amqp.section(amqp.APPLICATION, amqp.encoded(properties)),
            amqp.section(amqp.VALUE, amqp.encoded(body)),
        )
    )


def value_in(answer: Incoming) -> dict[Any, Any]:
    """Return the value in an answer of the management node; nothing if it has none, or if that is unreadable."""
    return amqp.map_of(answer.parts.get(amqp.VALUE, amqp.NULL))


def received_in(value: Mapping[Any, Any]) -> list[tuple[Incoming, Any]]:
    """Return the messages in the answer of the management node, each with its lock token, which may be None."""
    found = value.get("messages")
    return [
        (incoming(memoryview(one["message"])), one.get("lock-token"))
        for one in (found if isinstance(found, list) else [])
        if isinstance(one, dict) and isinstance(one.get("message"), bytes)
    ]


def state_in(answer: Mapping[Any, Any]) -> bytes | None:
    """Return the state of a session in the answer of the management node; None if it has none."""
    state = answer.get("session-state")
    return None if state is None else bytes_of(state)


def array_of_longs(numbers: Sequence[int]) -> amqp.Value:
    """Return whole numbers as the management node takes them."""
    return amqp.Value(amqp.array([amqp.long(one) for one in numbers]))


def array_of(tokens: Sequence[UUID]) -> amqp.Value:
    """Return lock tokens as the management node takes them."""
    return amqp.Value(amqp.array([amqp.encoded(one) for one in tokens]))


def long_of(number: int) -> amqp.Value:
    """Return a whole number of 64 bits."""
    return amqp.Value(amqp.long(number))


def uint_of(number: int) -> amqp.Value:
    """Return a whole number of 32 bits without a sign."""
    return amqp.Value(amqp.uint(number))


def moment_of(milliseconds: Any) -> float:
    """Return a moment in Unix seconds.

    Raises:
        Unreadable: It is none.
    """
    if not isinstance(milliseconds, int) or abs(milliseconds) >= 2**63:
        raise Unreadable("a moment is no whole number")
    return milliseconds / 1_000


def text_of(value: Any) -> str:
    """Return a text that the library gives as bytes."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode(errors="replace")
    return "" if value is None else str(value)
