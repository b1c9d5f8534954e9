"""JSON and typed bodies: a thin layer over bytes. Dataclasses by themselves; pydantic and msgspec where installed.

No envelope and no type names on the wire: what is sent is the JSON that any client would send.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from datetime import date, datetime
from enum import Enum
from typing import Any, TypeVar

from tenure.errors import ConfigError

T = TypeVar("T")

JSON_TYPE = "application/json"


def encode(value: object) -> bytes:
    """Return *value* as JSON: what ``json`` takes, dataclasses, pydantic models, msgspec structs, dates.

    Raises:
        ConfigError: It holds something that has no JSON form.
    """
    if _is_of("pydantic", "BaseModel", value):
        return value.model_dump_json().encode()  # type: ignore[attr-defined,no-any-return]
    if _is_of("msgspec", "Struct", value):
        return sys.modules["msgspec"].json.encode(value)  # type: ignore[no-any-return]
    try:
        return json.dumps(value, default=_plain, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"json={value!r:.80} can't be written as JSON: {error}") from error


def decode(body: bytes, kind: type[T]) -> T:
    """Return the JSON in *body* as a *kind*: a dataclass, a pydantic model, a msgspec struct, or what JSON has itself.

    Raises:
        ValueError: The body is no JSON, or doesn't fit. (pydantic and msgspec raise their own kinds of it.)
    """
    if _is_subclass("pydantic", "BaseModel", kind):
        return kind.model_validate_json(body)  # type: ignore[attr-defined,no-any-return]
    if _is_subclass("msgspec", "Struct", kind):
        return sys.modules["msgspec"].json.decode(body, type=kind)  # type: ignore[no-any-return]
    return _fit(json.loads(body), kind, "the body")  # type: ignore[no-any-return]


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if _is_of("pydantic", "BaseModel", value):
        return value.model_dump(mode="json")  # type: ignore[attr-defined]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _fit(value: Any, kind: Any, where: str) -> Any:
    """Build a *kind* out of what JSON had; say *where* it doesn't fit."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return value
    if origin in (typing.Union, types.UnionType):
        return _fit_any(value, arguments, where)
    if dataclasses.is_dataclass(kind):
        return _fit_fields(value, kind, where)
    if kind in (datetime, date) and isinstance(value, str):
        return kind.fromisoformat(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin in (list, tuple, set, frozenset) and isinstance(value, list):
        inner = arguments[0] if arguments else Any
        return origin(_fit(one, inner, f"{where}[{number}]") for number, one in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {name: _fit(one, arguments[1], f"{where}[{name!r}]") for name, one in value.items()}
    expected = kind if origin is None else origin
    if kind is None or kind is type(None):
        expected = type(None)
    if isinstance(expected, type) and isinstance(value, expected) and (expected is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{where} must be {getattr(kind, '__name__', kind)}, not {value!r:.80}")


def _fit_any(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    for kind in kinds:
        try:
            return _fit(value, kind, where)
        except ValueError:
            continue
    raise ValueError(f"{where} fits none of {', '.join(getattr(kind, '__name__', str(kind)) for kind in kinds)}")


def _fit_fields(value: Any, kind: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object with the fields of {kind.__name__}, not {value!r:.80}")
    hints = typing.get_type_hints(kind)
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    if unknown := sorted(set(value) - known):
        raise ValueError(f"{where} has no field {unknown[0]!r} in {kind.__name__}")
    given = {name: _fit(one, hints[name], f"{where}.{name}") for name, one in value.items()}
    try:
        return kind(**given)
    except TypeError as error:
        raise ValueError(f"{where} doesn't make a {kind.__name__}: {error}") from error


def _is_of(library: str, name: str, value: object) -> bool:
    """Tell whether *value* is one of another library's, without importing it: who made the value has."""
    module = sys.modules.get(library)
    return module is not None and isinstance(value, getattr(module, name))


def _is_subclass(library: str, name: str, kind: object) -> bool:
    module = sys.modules.get(library)
    return module is not None and isinstance(kind, type) and issubclass(kind, getattr(module, name))
