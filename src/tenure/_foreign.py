"""The reader of what other programs may have written: JSON, numbers, times, texts. All of it raises one error only.

A store's records, a message's properties, a lease's metadata can be edited by anybody who may write there. So each
decoder reads them value by value, with these functions, and never trusts a form, a type or a size. What can't be read
is an :class:`Unreadable`; the decoder decides what it means there: ignored, shown as unreadable, or set aside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from tenure._checks import LONGEST, is_encodable

T = TypeVar("T")
Otherwise = TypeVar("Otherwise")

RECORD_MAX = 262_144
"""Bytes or characters of the longest JSON that is read: the largest that tenure writes is about half of that."""

DIGITS_MAX = 20
"""Digits of the longest number that is read: those of 64 bits."""

_INT_MAX = 2**63 - 1


class Unreadable(ValueError):
    """What somebody else may have written doesn't have the form that tenure writes. The text says why."""


def read_or(read: Callable[[Any], T], value: object, otherwise: Otherwise) -> T | Otherwise:
    """Return what *read* makes of *value*, or *otherwise* if it is unreadable, or None: most values are not there."""
    if value is None:
        return otherwise
    try:
        return read(value)
    except Unreadable:
        return otherwise


# --- JSON --------------------------------------------------------------------------------------------------------


def read_json(text: object, most: int = RECORD_MAX) -> Any:
    """Return the value of a JSON text of at most *most* bytes or characters.

    A number may be infinite, as in settings without a limit; what reads a number refuses that where it can't be.
    """
    if not isinstance(text, (str, bytes, bytearray)):
        raise Unreadable(f"it is no text, but {type(text).__name__}")
    if len(text) > most:
        raise Unreadable(f"it is longer than {most:,} bytes")
    try:
        return _JSON.decode(text if isinstance(text, str) else text.decode())
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable("it is nested too deeply") from None
    except ValueError as error:  # also a UnicodeDecodeError
        raise Unreadable(f"it is no JSON: {error}") from None


def read_object(text: object, most: int = RECORD_MAX) -> dict[str, Any]:
    """Return the fields of a JSON text that is an object."""
    return an_object(read_json(text, most))


def an_object(value: object) -> dict[str, Any]:
    """Return *value* if it is a JSON object."""
    if not isinstance(value, dict):
        raise Unreadable(f"it is no object, but {_shown(value)}")
    return value


def a_list(value: object) -> list[Any]:
    """Return *value* if it is a JSON array."""
    if not isinstance(value, list):
        raise Unreadable(f"it is no list, but {_shown(value)}")
    return value


def _whole_number(digits: str) -> int:
    if len(digits) > DIGITS_MAX:
        raise Unreadable(f"it has a number of {len(digits)} digits")
    return int(digits)


def _constant(name: str) -> float:
    if name != "Infinity":
        raise Unreadable(f"it has the number {name}")
    return math.inf


_JSON = json.JSONDecoder(parse_int=_whole_number, parse_constant=_constant)


# --- values ------------------------------------------------------------------------------------------------------


def a_count(value: object, least: int = 0, most: int = _INT_MAX) -> int:
    """Return *value* if it is a whole number from *least* to *most*; a boolean is none."""
    if type(value) is not int or not least <= value <= most:
        raise Unreadable(f"it is no whole number from {least} to {most}, but {_shown(value)}")
    return value


def digits(value: object, most: int = _INT_MAX) -> int:
    """Return the whole number, 0 or more, that a text or bytes have as decimal digits."""
    text = value.decode("ascii", "replace") if isinstance(value, (bytes, bytearray)) else value
    if not isinstance(text, str) or not text.isascii() or not text.isdecimal() or len(text) > DIGITS_MAX:
        raise Unreadable(f"it is no whole number in digits, but {_shown(value)}")
    return a_count(int(text), most=most)


def seconds(value: object, least: float = 0.0, most: float = LONGEST) -> float:
    """Return *value* if it is a time in Unix seconds, or a duration, that every clock can represent."""
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise Unreadable(f"it is no number of seconds from {least:g} to {most:g}, but {_shown(value)}")
    return float(value)  # type: ignore[arg-type]


def clipped(value: object, least: float = 0.0, most: float = LONGEST) -> float | None:
    """Return a number, an infinite one too, as the nearest one from *least* to *most*; None if *value* is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return None
    return float(min(max(value, least), most))


def a_text(value: object, most: int = RECORD_MAX) -> str:
    """Return *value* if it is a text of at most *most* characters that every store can keep."""
    if not isinstance(value, str):
        raise Unreadable(f"it is no text, but {_shown(value)}")
    if len(value) > most:
        raise Unreadable(f"it is a text of {len(value):,} characters, and at most {most:,} are allowed")
    if "\0" in value or (not value.isascii() and not is_encodable(value)):
        raise Unreadable(f"it is a text with characters that can't be kept: {_shown(value)}")
    return value


def texts(value: object) -> dict[str, str]:
    """Return the fields of an object whose values are all texts, such as a leader's metadata."""
    return {a_text(name): a_text(one) for name, one in an_object(value).items()}


def a_flag(value: object) -> bool:
    """Return *value* if it is true or false."""
    if not isinstance(value, bool):
        raise Unreadable(f"it is neither true nor false, but {_shown(value)}")
    return value


def _shown(value: object) -> str:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return ascii(value[:80] if isinstance(value, (str, bytes)) else value)[:100]
    return type(value).__name__
