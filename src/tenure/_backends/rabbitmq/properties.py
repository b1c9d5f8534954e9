"""The properties of a message in AMQP, read and written here, as other programs may have written anything there.

The driver ends the connection, with all locks on it, for a text that isn't UTF-8 or a time that no calendar has. For a
large array, it takes time by the square of its size. It writes numbers in single precision. So it gets the properties
as bytes (see ``wire``). They are read here value by value: what is unreadable is left out, and the rest stays.

A copy of a message has the properties and headers that are passed on as the very bytes that came: the server has taken
them once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

from aiormq import spec

from tenure._checks import LONGEST
from tenure._foreign import Unreadable

SHORT_MAX = 255
"""Bytes of a property that is a text, and of a header's name."""

DEPTH_MAX = 32
"""Tables and arrays inside each other that are read; what is deeper is read as None."""

FLAGS_MAX = 32
"""Bytes of the flags that say which properties there are. AMQP has two; behind more than these, nothing is read."""

_FLAGS, _SIZE, _TIME, _DECIMAL = (struct.Struct(form) for form in (">H", ">I", ">Q", ">Bi"))
_FIXED = {
    ord(code): struct.Struct(form)
    for code, form in (
        *(("t", ">?"), ("b", ">b"), ("B", ">B"), ("s", ">h"), ("u", ">H"), ("I", ">i"), ("i", ">I")),
        *(("l", ">q"), ("L", ">q"), ("f", ">f"), ("d", ">d")),
    )
}
"""The types of values that have one size, by their codes."""

_TEXT, _BYTES, _ARRAY, _TABLE, _MOMENT, _SCALED, _VOIDS = *b"SxAFTD", b"V\0"
_INT_MAX = 2**31 - 1
_CUT = (Unreadable, IndexError, struct.error)
"""What reading raises where a value can't be read, or the bytes end within it: what comes behind is unknown."""


class Properties(spec.Basic.Properties):
    """The properties of a message. ``headers`` are written as text, whole numbers, double precision and booleans."""

    came = b""
    """What has come, as bytes: a property that is not changed is written as it came."""
    table = b""
    """The headers that have come, as bytes."""
    passed_on = b""
    """Those of another message that are written besides ``headers``, as bytes."""

    def marshal(self) -> bytes:
        """Return all properties as bytes; called by the driver."""
        came = {name: (start, end) for name, start, end in _extents(self.came) if name != "headers"}
        flags, parts = 0, []
        for name, flag in self.flags.items():
            value = getattr(self, name)
            if name in came and _property(name, self.came, *came[name]) == value:
                start, end = came[name]
                parts.append(self.came[start:end])
            elif value is None or value == "":
                continue
            else:
                parts.append(self.encode_property(name, value))
            flags |= flag
        return _FLAGS.pack(flags) + b"".join(parts)

    def encode_property(self, name: str, value: Any) -> bytes:
        """Return one property as bytes; called by the driver."""
        if name != "headers":
            return super().encode_property(name, value)
        table = self.passed_on + b"".join(_written(name.encode(), one) for name, one in value.items())
        return _SIZE.pack(len(table)) + table

    def headers_without(self, is_dropped: Callable[[str], bool]) -> bytes:
        """Return the headers that have come as bytes, without those whose names *is_dropped* says."""
        return b"".join(self.table[start:end] for name, start, end, _ in _entries(self.table) if not is_dropped(name))


# --- reading -----------------------------------------------------------------------------------------------------


def read_properties(data: bytes) -> Properties:
    """Return the properties that a message came with. Of what is unreadable, only that is left out."""
    found = Properties()
    found.came = data
    for name, start, end in _extents(data):
        if name == "headers":
            found.table = data[start + _SIZE.size : end]
            found.headers = {name: value for name, _, _, value in _entries(found.table)}
        else:
            setattr(found, name, _property(name, data, start, end))
    return found


def _extents(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the names of the properties that have come in full, and where each begins and ends."""
    size, at, flags = len(data), 2, int.from_bytes(data[:2], "big")
    more = flags
    while more & 1:  # more flags, which mean nothing
        if at >= FLAGS_MAX:
            return
        more = int.from_bytes(data[at : at + 2], "big")
        at += 2
    for name in _names(flags & 0xFFFF):
        start = at
        if start >= size:
            return
        if name == "headers":
            if start + _SIZE.size > size:
                return
            at += _SIZE.size + _SIZE.unpack_from(data, at)[0]
        elif name == "timestamp":
            at += _TIME.size
        elif name in ("delivery_mode", "priority"):
            at += 1
        else:
            at += 1 + data[at]
        if at > size:
            return
        yield name, start, at


def _property(name: str, data: bytes, start: int, end: int) -> str | int | datetime | None:
    """Return the property between *start* and *end*, none of headers; None if it is a time that can't be read."""
    match name:
        case "timestamp":
            moment = _moment(_TIME.unpack_from(data, start)[0])
            return moment if isinstance(moment, datetime) else None
        case "delivery_mode" | "priority":
            return data[start]
        case _:
            return _shown(data[start + 1 : end])


@lru_cache(maxsize=256)
def _names(flags: int) -> list[str]:
    """Return which properties there are, in order."""
    return [name for name, flag in Properties.flags.items() if flags & flag]


def _entries(table: bytes) -> Iterator[tuple[str, int, int, Any]]:
    """Yield the names of the headers in a table, where each begins and ends, and its value."""
    at, limit = 0, len(table)
    try:
        while at < limit:
            named = at + 1 + table[at]
            value, end = _value(table, named, limit, 0)
            yield _shown(table[at + 1 : named]), at, end, value
            at = end
    except _CUT:
        return


def _value(data: bytes, at: int, limit: int, depth: int) -> tuple[Any, int]:
    """Return the value at *at*, before *limit*, and where it ends."""
    code = data[at]
    at += 1
    value: Any
    if (fixed := _FIXED.get(code)) is not None:
        value, end = fixed.unpack_from(data, at)[0], at + fixed.size
    elif code == _TEXT:
        start, end = _extent(data, at, limit)
        value = data[start:end]
        with suppress(UnicodeDecodeError):
            value = value.decode()
    elif code in (_BYTES, _ARRAY, _TABLE):
        start, end = _extent(data, at, limit)
        if code == _BYTES:
            value = data[start:end]
        elif depth == DEPTH_MAX:
            value = None
        else:
            value = (_array if code == _ARRAY else _table)(data, start, end, depth + 1)
    elif code == _MOMENT:
        value, end = _moment(_TIME.unpack_from(data, at)[0]), at + _TIME.size
    elif code == _SCALED:
        scale, digits = _DECIMAL.unpack_from(data, at)
        value, end = Decimal(digits).scaleb(-scale), at + _DECIMAL.size
    elif code in _VOIDS:
        value, end = None, at
    else:
        raise Unreadable(f"it is of the unknown type {code}")
    if end > limit:
        raise Unreadable("it is longer than what it is in")
    return value, end


def _array(data: bytes, at: int, end: int, depth: int) -> list[Any]:
    found = []
    with suppress(*_CUT):
        while at < end:
            value, at = _value(data, at, end, depth)
            found.append(value)
    return found


def _table(data: bytes, at: int, end: int, depth: int) -> dict[str, Any]:
    found = {}
    with suppress(*_CUT):
        while at < end:
            start, at = at + 1, at + 1 + data[at]
            name = _shown(data[start:at])
            found[name], at = _value(data, at, end, depth)
    return found


def _extent(data: bytes, at: int, limit: int) -> tuple[int, int]:
    """Return where the contents of a long text, a table or an array begin and end."""
    start = at + _SIZE.size
    end = start + _SIZE.unpack_from(data, at)[0]
    if end > limit:
        raise Unreadable("it is longer than what it is in")
    return start, int(end)


def _moment(number: int) -> datetime | int:
    """Return a time: in seconds, as it should be, or in milliseconds; a number that can be neither stays one."""
    for seconds in (number, number / 1_000):
        if seconds <= LONGEST:
            return datetime.fromtimestamp(seconds, UTC)
    return number


def _shown(raw: bytes) -> str:
    """Return a short text; of one that isn't UTF-8, which is longer when it is shown, the beginning."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return cut(raw.decode("utf-8", "backslashreplace"), SHORT_MAX)


def cut(text: str, size: int) -> str:
    """Return the beginning of *text* that has at most *size* bytes."""
    return text.encode()[:size].decode("utf-8", "ignore")


# --- writing -----------------------------------------------------------------------------------------------------


def _written(name: bytes, value: Any) -> bytes:
    """Return a header as bytes."""
    match value:
        case bool():
            written = b"t\1" if value else b"t\0"
        case int():
            is_long = not -_INT_MAX <= value <= _INT_MAX
            written = struct.pack(">cq", b"l", value) if is_long else struct.pack(">ci", b"I", value)
        case float():
            written = struct.pack(">cd", b"d", value)
        case str():
            text = value.encode()
            written = b"S" + _SIZE.pack(len(text)) + text
        case _:
            raise TypeError(f"a header can't be {type(value).__name__}")
    return bytes([len(name)]) + name + written
