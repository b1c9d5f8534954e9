"""The headers of a message: what a sender may set, and what is shown of those that other programs have written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tenure._foreign import Unreadable, a_text, an_object
from tenure._frozen import FrozenDict
from tenure._queue.checks import INT_MAX, TEXT_MAX, check_encodable, check_text
from tenure._queue.message import NO_HEADERS, Headers, HeaderValue
from tenure.errors import ConfigError

HEADERS_MAX = 65_536
"""Bytes that the headers of a message may have, names and texts as UTF-8, and 8 for each other value."""

HEADERS_JSON_MAX = 8 * HEADERS_MAX
"""The longest JSON of headers that is read: six characters may stand for one, and 24 digits for 8 bytes."""

RESERVED_PREFIXES = ("tenure-", "x-tenure-", "nats-", "x-first-death-", "x-last-death-")
"""Beginnings of names, in capitals or not, that a store or tenure uses for its bookkeeping."""

RESERVED_NAMES = frozenset(
    {
        "x-death",
        "x-delivery-count",
        "x-acquired-count",
        "x-opt-deaths",
        "CC",
        "BCC",
        "DeadLetterReason",
        "DeadLetterErrorDescription",
    }
)
"""Names that a store uses for its bookkeeping, or by which it puts a message into other queues, too."""


def is_reserved(name: str) -> bool:
    """Return whether a header of this *name* means something to a store or to tenure; no sender may set it."""
    return name in RESERVED_NAMES or name.lower().startswith(RESERVED_PREFIXES)


def checked_headers(headers: object) -> Headers:
    """Return a copy of the *headers* that a sender sets.

    Raises:
        ConfigError: They can't be kept by every store as they are, or one is reserved.
    """
    if not isinstance(headers, Mapping):
        raise ConfigError(f"headers must be a mapping of names to values, not {type(headers).__name__}")
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str):
            raise ConfigError(f"a header's name must be text, not {name!r}")
        check_text("a header's name", name)
        if is_reserved(name):
            raise ConfigError(f"the header {name!r} is reserved: stores keep their own notes so; name it otherwise")
        if type(value) not in (str, int, float, bool):
            raise ConfigError(
                f"the header {name!r} must be text, a whole number, a number or a boolean, not {type(value).__name__}"
            )
        if type(value) is str:
            check_encodable(f"the header {name!r}", value)
        if type(value) is int and not -INT_MAX - 1 <= value <= INT_MAX:
            raise ConfigError(f"the header {name!r} must fit into 64 bits, {value} does not; write it as text")
        if type(value) is float and not math.isfinite(value):
            raise ConfigError(f"the header {name!r} must be a finite number, not {value!r}")
        size += _size_of(name, value)
    if size > HEADERS_MAX:
        raise ConfigError(
            f"headers ({size:,} bytes) must not be larger than {HEADERS_MAX:,} bytes; put what is large into the body"
        )
    return FrozenDict(headers) if headers else NO_HEADERS


def read_headers(value: object) -> Headers:
    """Return the headers in an object that another program may have written.

    Those that no store could keep are left out, and those for which there is no room. Reserved ones are left to the
    store: where headers have a place of their own, these mean nothing, and an older version has let senders set them.

    Raises:
        Unreadable: It is no object.
    """
    found: dict[str, HeaderValue] = {}
    size = 0
    for name, one in an_object(value).items():
        if _is_readable(name, one):
            larger = size + _size_of(name, one)
            if larger <= HEADERS_MAX:
                found[name], size = one, larger
    return FrozenDict(found) if found else NO_HEADERS


def _is_readable(name: object, value: Any) -> bool:
    try:
        if not a_text(name, TEXT_MAX):
            return False
        if type(value) is str:
            a_text(value)
            return True
    except Unreadable:
        return False
    match value:
        case bool():
            return True
        case int():
            return -INT_MAX - 1 <= value <= INT_MAX
        case float():
            return math.isfinite(value)
    return False


def _size_of(name: str, value: HeaderValue) -> int:
    return len(name.encode()) + (len(value.encode()) if isinstance(value, str) else 8)
