"""Long arrays and objects of a body, screened before pydantic or msgspec makes sets and mappings of them.

These libraries grow their own sets, so what :mod:`tenure._queue.typed_collisions` refuses is looked for beforehand, in
the bodies of types that have sets or mappings of what a sender can choose the hash of. Each value of a long array, and
each key of a long object, is read by the library as each type that such a set has: only then is its hash known.
"""

from __future__ import annotations

import collections.abc
import json
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import InitVar
from datetime import date, time, timedelta
from enum import Enum
from pathlib import PurePath
from types import GenericAlias
from typing import Any, Literal, TypeVar

from tenure._queue.typed_collisions import UNCHECKED, refused_if_colliding
from tenure._queue.typed_kinds import (
    bare,
    closed,
    fields_of,
    flattened,
    hints_of,
    is_record,
    unmarked,
    variables_of,
    variables_of_fields,
)
from tenure._queue.typed_libraries import library_decoder, library_reader
from tenure._queue.typed_values import Misfit, Read
from tenure.errors import ConfigError

_FEW_OR_SECRET = (str, bytes, bool, float, date, time, timedelta, Enum, PurePath, type(None))
"""Types of which a sender can't make many values with one hash: that of text is secret, of others there are too few."""


WRITTEN_MAX = 8
"""So many times a body may be read again, at most, as each type of a set: so deep may long arrays be in each other."""


class _Pairs(list[tuple[str, Any]]):
    """The keys and values of an object, also those whose key comes again: a library may read these, too."""


class _Number(str):
    """A number, as it was written."""

    __slots__ = ()


def screened_reader(library: str, kind: Any) -> Read:
    """Return the reader of *kind* by its library, which refuses what would stall it.

    Raises:
        ConfigError: The library can't read it.
    """
    read = library_reader(library, kind)
    values, keys = _hashed_in(kind)
    if not values and not keys:
        return read
    read_values = [_each(library, GenericAlias(list, (one,)), "[{}]") for one in values]
    read_keys = [_each(library, GenericAlias(dict, (one, Any)), "{{{}:null}}") for one in keys]

    def read_screened(value: Any) -> Any:
        if isinstance(value, bytes) and len(value) <= 2 * UNCHECKED:  # no array in it is a long one
            return read(value)
        long_ones, size = _long_ones(_read(value) if isinstance(value, bytes) else value)
        texts = _Texts(WRITTEN_MAX * size * (len(read_values) + len(read_keys)))
        for one in long_ones:
            items = one if type(one) is list else _keys_of(one)
            for each in read_values if type(one) is list else read_keys:
                refused_if_colliding(list(each(items, texts)))
        return read(value)

    return read_screened


# --- types -------------------------------------------------------------------------------------------------------


def _hashed_in(kind: Any) -> tuple[list[Any], list[Any]]:
    """Return the types of the values of sets, and of the keys of mappings, that *kind* has anywhere in it."""
    values: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    for one, is_key in _hashed(kind, {}, set()):
        (keys if is_key else values)[repr(one)] = one
    return list(values.values()), list(keys.values())


def _hashed(kind: Any, bound: Mapping[Any, Any], seen: set[tuple[int, str]]) -> Iterator[tuple[Any, bool]]:
    """Yield the types of what is hashed in *kind*, and whether it is a key."""
    kind = kind.type if isinstance(kind, InitVar) else kind
    kind = closed(bare(unmarked(kind)[1], bound, constrained=True), bound)
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is Literal or (id(origin), repr(kind)) in seen:
        return
    seen.add((id(origin), repr(kind)))
    if isinstance(origin, type) and not is_record(origin):
        is_key = issubclass(origin, collections.abc.Mapping)
        if is_key or issubclass(origin, collections.abc.Set):
            one = arguments[0] if arguments else Any
            if not (is_key and one in (Any, object)) and _may_collide(one):  # any key is text
                yield one, is_key
    for one in (*arguments, *_fields(origin, arguments, bound)):
        if one is not ...:
            yield from _hashed(one, bound, seen)


def _may_collide(kind: Any) -> bool:
    """Return whether a sender can choose many values of *kind* with one hash."""
    for one in flattened((kind,), {}):
        inner = bare(one, {}, constrained=True)
        known = isinstance(inner, type) and issubclass(inner, _FEW_OR_SECRET)
        if inner is not None and not known and typing.get_origin(inner) is not Literal:
            return True
    return False


def _fields(kind: Any, arguments: tuple[Any, ...], bound: Mapping[Any, Any]) -> Iterable[Any]:
    """Return the types of the fields of *kind*, if it has any."""
    described: Any = getattr(kind, "model_fields", None) or getattr(kind, "__pydantic_fields__", None)
    if isinstance(kind, type) and described:
        known = [field.annotation for field in described.values()]
        if "ForwardRef(" not in repr(known):  # else it was not defined when the model was
            return known
    if not is_record(kind):
        return []
    try:
        hints = hints_of(kind)
    except ConfigError:  # of a type whose own library can resolve them: they may be any
        return _unknown()
    variables = variables_of_fields(kind, variables_of(kind, arguments, bound))
    return [_with(hints.get(name, Any), variables[name]) for name in fields_of(kind)]


def _unknown() -> list[Any]:
    kinds = [int, *([sys.modules["uuid"].UUID] if "uuid" in sys.modules else [])]  # else no type has one
    return [made for one in kinds for made in (GenericAlias(set, (one,)), GenericAlias(dict, (one, Any)))]


def _with(kind: Any, bound: Mapping[Any, Any]) -> Any:
    return closed(unmarked(kind)[1] if isinstance(kind, TypeVar) else kind, bound)


# --- bodies ------------------------------------------------------------------------------------------------------


def _parsed(text: str) -> Any:
    """Return the JSON in *text*, with whatever numbers."""
    return json.JSONDecoder(object_pairs_hook=_Pairs, parse_int=_Number, parse_float=_Number, strict=False).decode(text)


def _read(body: bytes) -> Any:
    try:
        return _parsed(body.decode(json.detect_encoding(body), "surrogatepass"))
    except ValueError as error:  # its library might tell so only after it has made the sets
        raise Misfit(f"is no JSON: {error}") from error


def _long_ones(value: Any) -> tuple[list[Any], int]:
    """Return the long lists and objects in *value*, each after those in it; and about how many characters it has."""
    found, left, size = list[Any](), [value], 0
    while left:
        one = left.pop()
        size += len(one) + 8 if isinstance(one, str) else 8
        if type(one) is str and len(one) > 2 * UNCHECKED and one.lstrip().startswith(("[", "{")):
            with suppress(ValueError, RecursionError):  # pydantic can read JSON in a text, but none that is so deep
                left.append(_parsed(one))
        elif isinstance(one, (list, dict)):
            if len(one) > UNCHECKED:
                found.append(one)
            left += one if type(one) is list else [inner for _, inner in _pairs_of(one)]
    return found[::-1], size


def _pairs_of(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, dict) else value


def _keys_of(value: Any) -> list[str]:
    return [key for key, _ in _pairs_of(value)]


class _Texts:
    """The JSON of values, with their numbers as they were written: at most so many characters for all of them."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._known: dict[int, str] = {}
        """Of long arrays and objects, which stand in others: these would be written once for each around them."""

    def of(self, value: Any) -> str:
        """Return the JSON of *value*.

        Raises:
            Misfit: It takes too long to read all that stands in long arrays, as there are many in each other.
        """
        text = self._of(value)
        self._spend(text)
        return text

    def _spend(self, text: str) -> None:
        self._left -= len(text)
        if self._left < 0:
            raise Misfit("has too many long arrays and objects in each other")

    def _of(self, value: Any) -> str:
        if type(value) is _Number:
            return value
        if not isinstance(value, (list, dict)):
            return json.dumps(value)
        if (known := self._known.get(id(value))) is not None:
            return known
        if type(value) is list:
            text = f"[{','.join(map(self._of, value))}]"
        else:
            text = f"{{{','.join(f'{json.dumps(key)}:{self._of(one)}' for key, one in _pairs_of(value))}}}"
        if len(value) > UNCHECKED:
            self._spend(text)  # it is kept
            self._known[id(value)] = text
        return text


def _each(library: str, kind: Any, around: str) -> Callable[[list[Any], _Texts], Iterator[Any]]:
    """Return what yields those of some values that fit a *kind* with *around* them."""
    decode = library_decoder(library, kind)

    def each(values: list[Any], texts: _Texts) -> Iterator[Any]:
        for value in values:
            yield from one_of(texts.of(value))

    def one_of(text: str) -> list[Any]:
        try:
            [one] = decode(around.format(text).encode())
            hash(one)
        except RecursionError:
            raise
        except Exception:  # its library refuses it, too
            return []
        return [one]

    return each
