"""Messages in the bytes of AMQP 1.0, as another library encodes them."""

from __future__ import annotations

from typing import Any

from proton import Data, Described, ulong

from tenure._backends.servicebus import amqp


def value(one: Any) -> bytes:
    """Return a value as another AMQP library encodes it."""
    data = Data()
    data.put_object(one)
    return bytes(data.encode())


def section(code: int, one: Any) -> bytes:
    """Return a section of a message."""
    return value(Described(ulong(code), one))


def message(body: bytes, application: dict[Any, Any], properties: list[Any] | None = None) -> bytes:
    """Return a message with a *body* of bytes."""
    parts = [
        b"" if properties is None else section(amqp.PROPERTIES, properties),
        section(amqp.APPLICATION, application),
        section(amqp.DATA, body),
    ]
    return b"".join(parts)
