"""How values of typed bodies are written as JSON."""

from __future__ import annotations

import base64
import collections
import collections.abc
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from enum import Enum
from functools import lru_cache
from typing import Any

from tenure._queue.typed_libraries import adapter_of, is_of, library_of
from tenure._queue.typed_values import TEXTS


def written_by_library(value: Any) -> bytes | None:
    """Return the JSON of *value* if another library writes its type; otherwise None."""
    kind: Any = type(value)
    library = library_of(kind)
    if library == "pydantic":
        return bytes(adapter_of(kind).dump_json(value, by_alias=True))
    return bytes(sys.modules["msgspec"].json.encode(value)) if library == "msgspec" else None


def plain(value: Any) -> Any:
    """Return *value*, which has no direct JSON form, as simpler Python values.

    Raises:
        TypeError: It has no JSON form.
    """
    kind: Any = type(value)
    return _writer(kind)(value)


@lru_cache(maxsize=512)
def _writer(kind: Any) -> Callable[[Any], Any]:
    """Return the function that simplifies values of this *kind*."""
    library = library_of(kind)
    if library == "pydantic":
        return lambda value: adapter_of(kind).dump_python(value, mode="json", by_alias=True)
    if library == "msgspec":
        return lambda value: sys.modules["msgspec"].to_builtins(value, str_keys=True)
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return lambda value: {name: getattr(value, name) for name in names}
    if issubclass(kind, (datetime, date, time)):
        return lambda value: value.isoformat()
    if issubclass(kind, Enum):
        return lambda value: value.value
    if issubclass(kind, (bytes, bytearray)):
        return lambda value: base64.b64encode(value).decode()
    if is_of("decimal", "Decimal", kind):
        return _decimal_text
    if any(is_of(*text, kind) for text in TEXTS):
        return str
    kinds: dict[Any, Callable[[Any], Any]] = {
        timedelta: _duration,
        set: _sorted,
        frozenset: _sorted,
        collections.deque: list,
        Mapping: dict,
    }
    for base, write in kinds.items():
        if issubclass(kind, base):
            return write
    raise TypeError(f"{kind.__name__} has no JSON form")


def spelled_out(value: Any, at: str = "") -> Any:
    """Return *value* as values of JSON only, keys of mappings included.

    Raises:
        TypeError: Something in it has no JSON form; the message says where that is.
    """
    if value is None or (isinstance(value, (str, int, float)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Mapping) and library_of(type(value)) is None:
        return {_key_of(key, at): spelled_out(one, f"{at}[{key!r:.80}]") for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [spelled_out(one, f"{at}[{number}]") for number, one in enumerate(value)]
    try:
        nearer = plain(value)
    except TypeError as error:
        raise TypeError(f"{error}, at {at}" if at else str(error)) from error
    return spelled_out(nearer, at)


def _key_of(key: Any, at: str) -> str:
    form = spelled_out(key, f"{at}[{key!r:.80}]")
    if isinstance(form, str):
        return form
    if isinstance(form, (int, float)) or form is None:
        return json.dumps(form, allow_nan=False)
    raise TypeError(f"{type(key).__name__} can't be a key in JSON, at {at}[{key!r:.80}]")


def _sorted(values: Iterable[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:
        return sorted(values, key=lambda one: json.dumps(spelled_out(one), sort_keys=True))


def _decimal_text(value: Any) -> str:
    if not value.is_finite():
        raise ValueError(f"{value} is not a number in JSON")
    return str(value)


def _duration(length: timedelta) -> str:
    """Return *length* in ISO 8601, exactly: ``P1DT5.5S``."""
    sign, length = ("-", -length) if length < timedelta() else ("", length)
    seconds = (
        f"{length.seconds}.{length.microseconds:06}".rstrip("0").rstrip(".") if length.microseconds else length.seconds
    )
    days = f"{length.days}D" if length.days else ""
    return f"{sign}P{days}T{seconds}S"


def form_of(value: Any) -> Any:
    """Return *value* as it is read back from JSON; unchanged if it has no JSON form."""
    try:
        return spelled_out(value)
    except (TypeError, ValueError):
        return value
