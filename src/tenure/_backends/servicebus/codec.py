"""Messages and values in the form of AMQP, encoded and decoded by the client library's own functions.

It touches names of the library with an underscore, as ``driver`` says.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from azure.servicebus._pyamqp._decode import decode_payload
from azure.servicebus._pyamqp._encode import encode_payload
from azure.servicebus._pyamqp.message import BatchMessage, Header, Message, Properties
from azure.servicebus._pyamqp.utils import amqp_array_value, amqp_long_value, amqp_timestamp_value, amqp_uint_value

TTL_MAX = 2**32 - 1
"""The longest life in milliseconds that fits into a header."""

PARTITION = b"x-opt-partition-key"

END_OF_TIME = 253_402_300_799_999
"""The last moment of the year 9999, which the service can't pass, in milliseconds."""


class Encoded(NamedTuple):
    """A message as it is sent."""

    message: Any
    data: bytes
    """The same in bytes, as it is part of a batch."""


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
    properties = Properties(
        message_id=message_id,
        group_id=session,
        reply_to=reply_to,
        correlation_id=correlation_id,
        content_type=content_type,
        **_lifetime(ttl),
    )
    return _encoded(
        Message(
            header=_header(ttl),
            message_annotations=_annotations(due_at),
            properties=properties,
            application_properties={name: _wide(value) for name, value in application.items()} or None,
            data=[body],
        )
    )


def encoded_again(
    message: Any,
    *,
    message_id: str | None,
    application: Mapping[str, object],
    dropped: Container[str],
    ttl: float | None,
    due_at: float | None,
) -> Encoded:
    """Return a received *message* as it is sent again, with all that its sender has set but a few values.

    The library doesn't tell texts from bytes when it reads; what can be text becomes text.
    """
    given = {text_of(name): _as_text(value) for name, value in (message.application_properties or {}).items()}
    kept = {name: value for name, value in given.items() if name not in dropped}
    properties = Properties(*[_as_text(value) for value in message.properties or ()])
    properties = properties._replace(creation_time=None, absolute_expiry_time=None, **_lifetime(ttl))
    if message_id is not None:
        properties = properties._replace(message_id=message_id)
    header = message.header
    return _encoded(
        Message(
            header=_header(ttl, None if header is None else header[0], None if header is None else header[1]),
            message_annotations=_annotations(due_at, (message.message_annotations or {}).get(PARTITION)),
            footer=message.footer,
            properties=properties,
            application_properties={name: _wide(value) for name, value in {**kept, **application}.items()} or None,
            data=message.data,
            value=message.value,
            sequence=message.sequence,
        )
    )


def _header(ttl: float | None, durable: bool | None = None, priority: int | None = None) -> Any:
    if ttl is None and durable is None and priority is None:
        return None
    life = None if ttl is None else max(1, min(int(ttl * 1_000), TTL_MAX))
    return Header(durable=durable, priority=priority, ttl=life)


def _lifetime(ttl: float | None) -> dict[str, Any]:
    """Return the properties that say how long a message lives if that doesn't fit into its header: over 49 days."""
    if ttl is None or ttl * 1_000 < TTL_MAX:
        return {}
    created = int(time.time() * 1_000)  # only the difference of the two counts
    return {"creation_time": created, "absolute_expiry_time": min(created + int(ttl * 1_000), END_OF_TIME)}


def _annotations(due_at: float | None, partition: Any = None) -> Any:
    found: dict[bytes, Any] = {}
    if due_at is not None:
        found[b"x-opt-scheduled-enqueue-time"] = amqp_timestamp_value(int(due_at * 1_000))
    if partition is not None:
        found[PARTITION] = _as_text(partition)
    return found or None


def _encoded(message: Any) -> Encoded:
    output = bytearray()
    encode_payload(output, message)
    return Encoded(message, bytes(output))


def batch_of(messages: Sequence[Encoded]) -> Any:
    """Return several messages as one transfer. Partitioned entities take it for one message like the first."""
    first = messages[0].message.properties
    envelope = Properties(message_id=first.message_id, group_id=first.group_id)
    return BatchMessage(properties=envelope, data=[one.data for one in messages])


def _wide(value: object) -> object:
    """Return a whole number that the library would refuse in a form that it takes."""
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        return amqp_long_value(value)
    return value


def _as_text(value: Any) -> Any:
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
    return value


def received_in(value: Any) -> list[tuple[Any, Any]]:
    """Return the messages in the answer of the management node, each with its lock token, which may be None."""
    found = (value or {}).get(b"messages") or []
    return [(decode_payload(memoryview(one[b"message"])), one.get(b"lock-token")) for one in found]


def array_of_longs(numbers: Sequence[int]) -> Any:
    """Return whole numbers as the management node takes them."""
    return amqp_array_value([amqp_long_value(one) for one in numbers])


def array_of(values: Sequence[Any]) -> Any:
    """Return values of one type as the management node takes them."""
    return amqp_array_value(list(values))


def long_of(number: int) -> Any:
    """Return a whole number of 64 bits."""
    return amqp_long_value(number)


def uint_of(number: int) -> Any:
    """Return a whole number of 32 bits without a sign."""
    return amqp_uint_value(number)


def moment_of(value: Any) -> float:
    """Return a moment in Unix seconds."""
    return float(value.timestamp() if hasattr(value, "timestamp") else value / 1_000)


def text_of(value: Any) -> str:
    """Return a text that the library gives as bytes."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).decode(errors="replace")
    return "" if value is None else str(value)
