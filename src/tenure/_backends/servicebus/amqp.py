"""AMQP 1.0 as bytes: what senders may have written, of every type, read within bounds; and what is written here.

The client library has no reader for some types, fails with all of a connection at what it can't read, and makes lists
as long as a message says. Here, a value is an ``Unreadable`` if it is longer than its bytes, has more parts than bytes,
or is nested too deeply. What is to be sent again is taken apart without being decoded, so that nothing of it changes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any
from uuid import UUID

from tenure._foreign import Unreadable, read_or

HEADER, ANNOTATIONS, PROPERTIES, APPLICATION = 0x70, 0x72, 0x73, 0x74
DATA, SEQUENCE, VALUE, FOOTER = 0x75, 0x76, 0x77, 0x78
"""The sections of a message, by the codes of their descriptors."""

DEPTH_MAX = 32
"""How deeply values may be nested."""

NULL = b"\x40"

_DESCRIBED = 0x00
_SECTIONS = {
    "amqp:header:list": HEADER,
    "amqp:message-annotations:map": ANNOTATIONS,
    "amqp:properties:list": PROPERTIES,
    "amqp:application-properties:map": APPLICATION,
    "amqp:data:binary": DATA,
    "amqp:amqp-sequence:list": SEQUENCE,
    "amqp:amqp-value:*": VALUE,
    "amqp:footer:map": FOOTER,
}
_WIDTHS = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}
"""The bytes of values without a length of their own, by the first half of their type's code."""


# --- sections ----------------------------------------------------------------------------------------------------


def sections(message: memoryview) -> Iterator[tuple[int, memoryview, int]]:
    """Yield the code of each section of an encoded message, its value, still encoded, and where it ends.

    Raises:
        Unreadable: It is none from here on.
    """
    at, length = 0, len(message)
    while at < length:
        if length - at > 3 and message[at] == _DESCRIBED and message[at + 1] == 0x53:
            code, start = message[at + 2], at + 3
        else:
            code, start = _descriptor(message, at)
        at = end_of(message, start)
        yield code, message[start:at], at


def _descriptor(message: memoryview, at: int) -> tuple[int, int]:
    if message[at] != _DESCRIBED:
        raise Unreadable("a section has no descriptor")
    end = end_of(message, at + 1)
    found = value_of(bytes(message[at + 1 : end]))
    return found if isinstance(found, int) else _SECTIONS.get(str(found), 0), end


def section(code: int, value: bytes) -> bytes:
    """Return an encoded value as a section."""
    return bytes((_DESCRIBED, 0x53, code)) + value


# --- values ------------------------------------------------------------------------------------------------------


def value_of(encoded: bytes) -> Any:
    """Return the value that is encoded: texts and symbols as text, moments in milliseconds, nothing of descriptors.

    Raises:
        Unreadable: It can't be read, or there is more than one.
    """
    try:
        found, end = _read(encoded, 0, 0)
    except (IndexError, struct.error):
        raise Unreadable("a value is cut off") from None
    if end != len(encoded):
        raise Unreadable("a value has another length than it says")
    return found


def map_of(encoded: bytes) -> dict[Any, Any]:
    """Return the entries of an encoded map; one that is unreadable is left out by itself."""
    try:
        found = value_of(encoded)
    except Unreadable:
        found = {}
        for key, value in read_or(pairs_of, encoded, []):
            with suppress(Unreadable):
                named = value_of(key)
                if _is_key(named):
                    found[named] = value_of(value)
    return found if isinstance(found, dict) else {}


def list_of(encoded: bytes, length: int) -> list[Any]:
    """Return the first elements of an encoded list; None for those that are missing, and for unreadable ones."""
    try:
        found = value_of(encoded)
    except Unreadable:
        found = [read_or(value_of, one, None) for one in read_or(parts_of, encoded, [])]
    elements = found if isinstance(found, list) else []
    return elements[:length] + [None] * (length - len(elements))


def _read(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins at *at*, and where it ends; a scalar that is cut off seems to end too late."""
    code = data[at]
    scalar = _SCALARS.get(code)
    return scalar(data, at + 1) if scalar is not None else _compound(data, code, at + 1, depth)


def _compound(data: bytes, code: int, at: int, depth: int) -> tuple[Any, int]:
    """Return the value of a type that has parts, and where it ends. *at* is behind the type's code."""
    if depth >= DEPTH_MAX:
        raise Unreadable("it is nested too deeply")
    if code == _DESCRIBED:
        _, at = _read(data, at, depth + 1)
        return _read(data, at, depth + 1)
    kind, size = code & 0xEF, 4 if code & 0x10 else 1
    if kind not in (0xC0, 0xC1, 0xE0):
        raise Unreadable(f"there is no type 0x{code:02x}")
    end = at + size + int.from_bytes(data[at : at + size], "big")
    at += size
    count = int.from_bytes(data[at : at + size], "big")
    at += size
    if end > len(data) or count > end - at:  # each part takes a byte
        raise Unreadable("a value has more parts than bytes")
    element = None
    if kind == 0xE0 and not count:  # what its elements would be may stand there, or not
        return [], end
    if kind == 0xE0:
        if data[at] == _DESCRIBED:
            _, at = _read(data, at + 1, depth + 1)
        element, at = data[at], at + 1
        if count > end - at:  # as of nulls, which take none
            raise Unreadable("an array has more parts than bytes")
    found = []
    for _ in range(count):
        part, start = (data[at], at + 1) if element is None else (element, at)
        scalar = _SCALARS.get(part)
        one, at = scalar(data, start) if scalar is not None else _compound(data, part, start, depth + 1)
        found.append(one)
    if at != end:
        raise Unreadable("a value has another length than it says")
    return (_dict(found) if kind == 0xC1 else found), end


def _dict(flat: list[Any]) -> dict[Any, Any]:
    if len(flat) % 2:
        raise Unreadable("a map has a key without a value")
    if not all(map(_is_key, flat[::2])):
        raise Unreadable("a map has a key that is none")
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _is_key(value: object) -> bool:
    """Return whether *value* is a key that is read: of larger numbers, senders could choose many with one hash."""
    return isinstance(value, (str, bytes, type(None))) or (isinstance(value, int) and abs(value) < 2**64)


# --- taken apart -------------------------------------------------------------------------------------------------


def end_of(data: memoryview | bytes, at: int) -> int:
    """Return where the encoded value ends that begins at *at*, without reading it."""
    values = 1
    while values:
        if at >= len(data):
            raise Unreadable("a value is cut off")
        code, at = data[at], at + 1
        if code == _DESCRIBED:
            values += 1  # the descriptor; the value follows
            continue
        half = code >> 4
        if half >= 0xA:
            size = 4 if half & 1 else 1
            at += size + int.from_bytes(data[at : at + size], "big")
        elif half in _WIDTHS:
            at += _WIDTHS[half]
        else:
            raise Unreadable(f"there is no type 0x{code:02x}")
        values -= 1
    if at > len(data):
        raise Unreadable("a value is longer than its bytes")
    return at


def parts_of(encoded: bytes | None) -> list[bytes]:
    """Return the elements of an encoded list, each still encoded."""
    if not encoded or encoded[0] not in (0x45, 0xC0, 0xD0):
        raise Unreadable("it is no list")
    return [] if encoded[0] == 0x45 else _parts_of(encoded)


def pairs_of(encoded: bytes | None) -> list[tuple[bytes, bytes]]:
    """Return the keys of an encoded map with their values, each still encoded."""
    if not encoded or encoded[0] not in (0xC1, 0xD1):
        raise Unreadable("it is no map")
    parts = _parts_of(encoded)
    if len(parts) % 2:
        raise Unreadable("a map has a key without a value")
    return list(zip(parts[::2], parts[1::2], strict=True))


def _parts_of(encoded: bytes) -> list[bytes]:
    """Return the elements of a list, or the keys and values of a map in turn."""
    size = 4 if encoded[0] & 0x10 else 1
    at = 1 + size
    count = int.from_bytes(encoded[at : at + size], "big")
    at += size
    found: list[bytes] = []
    while at < len(encoded) and len(found) < count:
        begin, at = at, end_of(encoded, at)
        found.append(encoded[begin:at])
    if len(found) != count or at != len(encoded):
        raise Unreadable("it has another length than it says")
    return found


def joined_list(parts: list[bytes]) -> bytes:
    """Return encoded values as an encoded list."""
    return _joined(0xD0, parts)


def joined_map(parts: list[bytes]) -> bytes:
    """Return encoded keys and values, in turn, as an encoded map."""
    return _joined(0xD1, parts)


def _joined(code: int, parts: list[bytes]) -> bytes:
    content = b"".join(parts)
    return struct.pack(">BII", code, len(content) + 4, len(parts)) + content


def binary_in(encoded: memoryview) -> bytes | None:
    """Return the bytes that are encoded; None if it is another value."""
    match encoded[0]:
        case 0xA0:
            return bytes(encoded[2:])
        case 0xB0:
            return bytes(encoded[5:])
    return None


# --- written -----------------------------------------------------------------------------------------------------


class Value(bytes):
    """A value that is encoded already, in its place among others that are to be."""

    __slots__ = ()


def encoded(value: object) -> bytes:
    """Return a value of Python as an encoded one: whole numbers in 32 bits where they fit, or else in 64.

    Raises:
        ValueError: It has no form in AMQP.
    """
    match value:
        case Value():
            return bytes(value)
        case None:
            return NULL
        case bool():
            return b"\x41" if value else b"\x42"
        case str():
            return _sized(0xA1, value.encode())
        case bytes() | bytearray():
            return binary(bytes(value))
        case int() if -(2**31) <= value < 2**31:
            return struct.pack(">Bi", 0x71, value)
        case int():
            return long(value)
        case float():
            return struct.pack(">Bd", 0x82, value)
        case UUID():
            return b"\x98" + value.bytes
        case Mapping():
            return joined_map([encoded(part) for pair in value.items() for part in pair])
        case list() | tuple():
            return joined_list([encoded(part) for part in value])
    raise ValueError(f"AMQP has no form for a value of type {type(value).__name__}")


def fields(values: Mapping[str, object]) -> bytes:
    """Return an encoded map whose keys are symbols, as of annotations; null if it is empty."""
    return (
        joined_map([part for name, one in values.items() for part in (symbol(name), encoded(one))]) if values else NULL
    )


def binary(value: bytes) -> bytes:
    """Return bytes as an encoded value."""
    return _sized(0xA0, value)


def symbol(text: str) -> bytes:
    """Return an encoded symbol, a text that stands for a name of the protocol."""
    return _sized(0xA3, text.encode())


def long(number: int) -> bytes:
    """Return a whole number in 64 bits."""
    return _packed(">Bq", 0x81, number)


def ulong(number: int) -> bytes:
    """Return a whole number in 64 bits without a sign."""
    return _packed(">BQ", 0x80, number)


def uint(number: int) -> bytes:
    """Return a whole number in 32 bits without a sign."""
    return _packed(">BI", 0x70, number)


def ubyte(number: int) -> bytes:
    """Return a whole number in 8 bits without a sign."""
    return _packed(">BB", 0x50, number)


def timestamp(milliseconds: int) -> bytes:
    """Return a moment, in milliseconds since 1970."""
    return _packed(">Bq", 0x83, milliseconds)


def array(values: Sequence[bytes]) -> bytes:
    """Return encoded values of one type, none of which has a length of its own, as an encoded array."""
    # The type of the elements of an empty array doesn't matter.
    content = struct.pack(">IB", len(values), values[0][0] if values else 0x40) + b"".join(one[1:] for one in values)
    return struct.pack(">BI", 0xF0, len(content)) + content


def described(code: int, elements: Iterable[bytes]) -> bytes:
    """Return encoded elements as an encoded list of the type that *code* describes."""
    return section(code, joined_list(list(elements)))


def frame(channel: int, performative: bytes) -> bytes:
    """Return an encoded performative as a frame."""
    return struct.pack(">IBBH", len(performative) + 8, 2, 0, channel) + performative


def _packed(form: str, code: int, number: int) -> bytes:
    try:
        return struct.pack(form, code, number)
    except struct.error:
        raise ValueError(f"{number} is out of range") from None


def _sized(code: int, content: bytes) -> bytes:
    """Return bytes behind their length. *code* is that of the type with a length of one byte."""
    size = len(content)
    return (bytes((code, size)) if size < 256 else struct.pack(">BI", code | 0x10, size)) + content


# --- types -------------------------------------------------------------------------------------------------------

Scalar = Callable[[bytes, int], tuple[Any, int]]
"""Reads a value without parts: from the data, and where it begins behind its type's code."""


def _constant(value: Any) -> Scalar:
    return lambda _, at: (value, at)


def _empty(_: bytes, at: int) -> tuple[list[Any], int]:
    return [], at


def _fixed(form: str, convert: Callable[[Any], Any] | None = None) -> Scalar:
    reader = struct.Struct(form)
    unpack, width = reader.unpack_from, reader.size
    if convert is None:
        return lambda data, at: (unpack(data, at)[0], at + width)
    return lambda data, at: (convert(unpack(data, at)[0]), at + width)


def _small_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 1 + data[at]
    return data[at + 1 : end], end


def _large_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    end = at + 4 + int.from_bytes(data[at : at + 4], "big")
    return data[at + 4 : end], end


def _small_text(data: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + data[at]
    return data[at + 1 : end].decode(errors="replace"), end


def _large_text(data: bytes, at: int) -> tuple[str, int]:
    end = at + 4 + int.from_bytes(data[at : at + 4], "big")
    return data[at + 4 : end].decode(errors="replace"), end


def _char(code: int) -> str:
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else "\ufffd"


def _decimal(data: bytes) -> Decimal:
    """Return a decimal number of IEEE 754, whose digits are one whole number in binary."""
    bits, raw = len(data) * 8, int.from_bytes(data, "big")
    exponent_bits, bias, digits_max = _DECIMALS[bits]
    sign, combination = raw >> (bits - 1), raw >> (bits - 6) & 0b11111
    if combination >= 0b11110:
        return Decimal("NaN") if combination & 1 else Decimal("-Infinity" if sign else "Infinity")
    digit_bits = bits - 1 - exponent_bits
    if combination < 0b11000:
        exponent, digits = raw >> digit_bits & (1 << exponent_bits) - 1, raw & (1 << digit_bits) - 1
    else:  # two bits more before the exponent, which stand for a first digit of 8 or 9
        digit_bits -= 2
        exponent = raw >> digit_bits & (1 << exponent_bits) - 1
        digits = raw & (1 << digit_bits) - 1 | 0b100 << digit_bits
    if digits >= 10**digits_max:
        digits = 0  # as the standard says
    return Decimal((sign, tuple(map(int, str(digits))), exponent - bias))


_DECIMALS = {32: (8, 101, 7), 64: (10, 398, 16), 128: (14, 6176, 34)}
"""By their bits: those of the exponent, what is taken off it, and the number of digits."""

_SCALARS: dict[int, Scalar] = {
    0x40: _constant(None),
    0x41: _constant(True),
    0x42: _constant(False),
    0x43: _constant(0),
    0x44: _constant(0),
    0x45: _empty,
    0x50: _fixed(">B"),
    0x51: _fixed(">b"),
    0x52: _fixed(">B"),
    0x53: _fixed(">B"),
    0x54: _fixed(">b"),
    0x55: _fixed(">b"),
    0x56: _fixed(">?"),
    0x60: _fixed(">H"),
    0x61: _fixed(">h"),
    0x70: _fixed(">I"),
    0x71: _fixed(">i"),
    0x72: _fixed(">f"),
    0x73: _fixed(">I", _char),
    0x74: _fixed("4s", _decimal),
    0x80: _fixed(">Q"),
    0x81: _fixed(">q"),
    0x82: _fixed(">d"),
    0x83: _fixed(">q"),
    0x84: _fixed("8s", _decimal),
    0x94: _fixed("16s", _decimal),
    0x98: _fixed("16s", lambda data: UUID(bytes=data)),
    0xA0: _small_bytes,
    0xA1: _small_text,
    0xA3: _small_text,
    0xB0: _large_bytes,
    0xB1: _large_text,
    0xB3: _large_text,
}
"""Readers of values without parts, by their types' codes."""
