"""Typed bodies: how a value of JSON becomes a dataclass, a ``UUID``, a ``list[Order]``; and what those are as JSON.

Rules:

- A value is never converted to another type silently: ``"7"`` is no ``int``, and ``7`` is no ``str``.
- Fields that a type doesn't know are ignored: the sender may be newer than the reader.
- A type that can't be read at all is a ``ConfigError``, whatever the body; a body that doesn't fit is a ``Misfit``.
- The cost of a body is proportional to its length: each value is read once for each type that it may have.
- pydantic and msgspec read and write their own types. They are not imported here: a program that uses one of their
  types has imported them.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import itertools
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from enum import Enum
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar, Union

from tenure._queue.typed_kinds import (
    aliased,
    bare,
    bound_of,
    discriminators_of,
    fields_of,
    flattened,
    hints_of,
    is_alias,
    is_mark,
    is_named_tuple,
    is_record,
    is_typed_dict,
    key_values,
    keys_of,
    required_keys,
    variables_of,
    variables_of_fields,
)
from tenure._queue.typed_libraries import constrained_by, is_of, library_of
from tenure._queue.typed_readers import (
    anything,
    choice_of,
    decimal_of,
    list_of,
    mapping_of,
    named_tuple_of,
    read_each,
    simple_reader,
    structure_of,
    tried_once,
)
from tenure._queue.typed_screening import screened_reader
from tenure._queue.typed_values import TRIES, Misfit, Read, name_of_type, rounded, shown_briefly
from tenure.errors import ConfigError

_LISTS: dict[Any, Callable[[Iterable[Any]], Any]] = {
    list: list,
    set: set,
    frozenset: frozenset,
    collections.deque: collections.deque,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Collection: list,
    collections.abc.Iterable: list,
    collections.abc.Set: set,
    collections.abc.MutableSet: set,
}

_MAPPINGS = (dict, collections.OrderedDict, collections.abc.Mapping, collections.abc.MutableMapping)


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """Reads whole bodies of a type."""

    read: Read
    takes_bytes: bool
    """Whether another library reads the type, from the bytes of the body."""
    exact: bool
    """Whether the type has a ``Decimal`` in it: then numbers must be ``written`` ones."""


def reader(kind: Any) -> Reader:
    """Return the reader of bodies of this *kind*.

    Raises:
        ConfigError: Bodies can't be read as a *kind*.
    """
    try:
        hash(kind)
    except TypeError:
        return _build(kind)
    return _built(kind, repr(kind))  # equal unions may have another order, in which they are read


@lru_cache(maxsize=512)
def _built(kind: Any, text: str) -> Reader:
    return _build(kind)


def _build(kind: Any) -> Reader:
    try:
        return _ReaderBuilder().whole(kind)
    except RecursionError as error:
        raise ConfigError(
            f"a body can't be read as {name_of_type(kind)}, as there is no end to the types in it"
        ) from error


def _unreadable(kind: Any) -> ConfigError:
    return ConfigError(
        f"a body can't be read as {name_of_type(kind)}; there are dataclasses, TypedDict, NamedTuple, pydantic "
        "models, msgspec structs, and what can stand in their fields. For another type, make it of message.json()"
    )


class _ReaderBuilder:
    """Makes the readers of a type and of all types inside it; those of recursive types once."""

    def __init__(self) -> None:
        self._begun: dict[tuple[Any, str], Read] = {}
        self._chooses = False
        self._exact = False

    def whole(self, kind: Any) -> Reader:
        """Return the reader of whole bodies of this *kind*."""
        takes_bytes = isinstance(kind, type) and library_of(kind) is not None
        read = self.of(kind, {})
        if not self._chooses:
            return Reader(read, takes_bytes, self._exact)

        def read_whole(value: Any) -> Any:
            before = TRIES.set({})
            try:
                return read(value)
            finally:
                TRIES.reset(before)

        return Reader(read_whole, takes_bytes, self._exact)

    def _plain(self, read: Read) -> Read:
        """Return *read* with ``Written`` numbers converted to floats first, as there may be a ``Decimal`` elsewhere."""
        return lambda value: read(rounded(value)) if self._exact else read(value)

    def of(self, kind: Any, bound: Mapping[Any, Any]) -> Read:
        """Return the reader of *kind*, in which type variables are *bound* to types."""
        if isinstance(kind, TypeVar):
            return self.of(bound_of(kind, bound), bound)
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is Annotated:
            if library := constrained_by(kind.__metadata__):
                return self._plain(screened_reader(library, kind))
            return self.of(arguments[0], bound)
        if is_mark(origin):
            return self.of(arguments[0], bound)
        if isinstance(kind, (typing.NewType, dataclasses.InitVar)):
            return self.of(kind.__supertype__ if isinstance(kind, typing.NewType) else kind.type, bound)
        alias = kind if origin is None else origin
        if is_alias(alias):
            value, given = aliased(kind, bound)
            return self._once(alias, given, lambda: self.of(value, given))
        if origin in (Union, types.UnionType):
            return self._union(arguments, bound)
        if origin is Literal:
            return choice_of(arguments)
        if kind is not None and not isinstance(alias, type):
            raise _unreadable(kind)
        if (library := library_of(alias)) is not None:
            return self._plain(screened_reader(library, kind))
        if kind is Any or kind is object:
            return self._plain(anything)
        if is_of("decimal", "Decimal", kind):
            self._exact = True
            return decimal_of(kind)
        if (simple := simple_reader(kind)) is not None:
            return simple
        return self._of_many(kind, alias, arguments, bound)

    def _of_many(self, kind: Any, alias: Any, arguments: tuple[Any, ...], bound: Mapping[Any, Any]) -> Read:
        if alias is tuple:
            return self._tuple(kind, arguments, bound)
        if alias in _LISTS:
            return list_of(_LISTS[alias], self.of(arguments[0] if arguments else Any, bound))
        if alias in _MAPPINGS or alias is collections.defaultdict:
            key, value = arguments or (str, Any)
            return mapping_of(alias, self._key(key, bound), self.of(value, bound))
        if dataclasses.is_dataclass(alias) or is_named_tuple(alias) or is_typed_dict(alias):
            given = variables_of(alias, arguments, bound)
            return self._once(alias, given, lambda: self._record(alias, given))
        raise _unreadable(kind)

    def _union(self, kinds: tuple[Any, ...], bound: Mapping[Any, Any]) -> Read:
        flat = _dates_first(flattened(kinds, bound), bound)
        reads = [(kind, self.of(kind, bound)) for kind in flat]
        exact = _exact_of(reads, bound)
        records: list[_Candidate] = []
        others: list[tuple[Any, Read]] = []
        for kind, read in reads:
            inner = bare(kind, bound, constrained=True)
            if is_record(inner):
                records.append(_Candidate(kind, read, keys_of(inner), discriminators_of(inner)))
            else:
                others.append((kind, read))
        of_objects = {id(one.read) for one in records}
        only = [read for kind, read in reads if kind is not type(None)]
        named = ", ".join(name_of_type(kind) for kind in flat)
        if len(only) > 1:
            self._chooses = True

        def read_union(value: Any) -> Any:
            if (fitting := exact.get(type(value))) is not None:
                return fitting(value)
            if len(only) == 1:  # Optional: the error of the one type is the most precise
                return only[0](value)
            return once_each(value) if type(value) in (dict, list) else choose(value)

        def choose(value: Any) -> Any:
            likely = _likely(value, records) if isinstance(value, dict) else []
            tries = [*((one.kind, one.read) for one in likely), *others] if likely and len(records) > 1 else reads
            problems: list[str] = []
            last: Misfit | None = None
            for kind, read in tries:
                try:
                    return read(value)
                except Misfit as misfit:
                    if misfit.at or (
                        isinstance(value, dict) and id(read) in of_objects
                    ):  # the error is inside of the value
                        problems.append(f"{name_of_type(kind)}: {misfit.at.lstrip('.') or 'it'} {misfit.problem}")
                        last = misfit
            if last is not None and len(likely) == len(problems) == 1:
                raise last
            why = f" ({'; '.join(problems)[:400]})" if problems else f", being {shown_briefly(value)}"
            raise Misfit(f"fits none of {named}{why}")

        once_each = tried_once(choose)
        return read_union

    def _tuple(self, kind: Any, arguments: tuple[Any, ...], bound: Mapping[Any, Any]) -> Read:
        if kind in (tuple, typing.Tuple):  # noqa: UP006  # the older spelling
            return list_of(tuple, self.of(Any, bound))
        if len(arguments) == 2 and arguments[1] is ...:
            return list_of(tuple, self.of(arguments[0], bound))
        reads = [self.of(one, bound) for one in arguments]

        def read_tuple(value: Any) -> Any:
            if not isinstance(value, list) or len(value) != len(reads):
                raise Misfit(f"must be a list of {len(reads)}, not {shown_briefly(value)}")
            return tuple(read_each(value, reads))

        return read_tuple

    def _key(self, kind: Any, bound: Mapping[Any, Any]) -> Read:
        """Return the reader of a mapping's keys, which are text in JSON."""
        read = self.of(kind, bound)
        if kind is str or kind is Any:
            return read
        reads = [self.of(one, bound) for one in flattened((kind,), bound)]

        def read_key(text: str) -> Any:
            for one in reads:
                for form in itertools.chain((text,), key_values(text)):
                    try:
                        return one(form)
                    except Misfit:
                        continue
            return read(text)  # which tells why it fits none

        return read_key

    def _once(self, kind: Any, bound: Mapping[Any, Any], make: Callable[[], Read]) -> Read:
        """Return the reader of a *kind* that may be recursive: inside of itself, it is read by the same reader."""
        key = (kind, repr(sorted((str(variable), repr(given)) for variable, given in bound.items())))
        if key not in self._begun:
            made: list[Read] = []
            self._begun[key] = lambda value: made[0](value)
            made.append(make())
            self._begun[key] = made[0]
        return self._begun[key]

    def _record(self, kind: Any, bound: Mapping[Any, Any]) -> Read:
        """Return the reader of a type with named fields."""
        hints = hints_of(kind)
        fields = fields_of(kind)
        variables = variables_of_fields(kind, dict(bound))
        reads = {name: self.of(hints.get(name, Any), variables[name]) for name in fields}
        required = frozenset(name for name in fields if name in required_keys(kind, hints))
        made = structure_of(kind, reads, required)
        if is_named_tuple(kind):
            return named_tuple_of(kind, made, list(reads.values()), len(required))
        return made


def _dates_first(kinds: Iterable[Any], bound: Mapping[Any, Any]) -> list[Any]:
    """Return *kinds* with ``date`` before ``datetime``, which could also be read from the text of a ``date``."""
    ordered = list(kinds)
    inner = [bare(kind, bound) for kind in ordered]
    if date in inner and datetime in inner and inner.index(datetime) < inner.index(date):
        ordered.insert(inner.index(datetime), ordered.pop(inner.index(date)))
    return ordered


def _exact_of(reads: Iterable[tuple[Any, Read]], bound: Mapping[Any, Any]) -> dict[Any, Read]:
    """Return the readers of those values of JSON that are of a type of the union, and of no ``Enum`` before it."""
    exact: dict[Any, Read] = {}
    scalars = [bool, int, float, type(None)]
    for kind, read in reads:
        inner = bare(kind, bound)
        if inner in scalars or inner is None:
            exact.setdefault(type(None) if inner is None else inner, read)
        elif isinstance(inner, type) and issubclass(inner, Enum):
            scalars = [type(None)]
    return exact


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A member of a union that has named fields."""

    kind: Any
    read: Read
    keys: frozenset[str]
    discriminators: Mapping[str, Read]
    """The discriminators: the fields that distinguish the member, as they are a ``Literal``."""

    def may_be(self, value: dict[str, Any]) -> bool:
        """Return whether the discriminators in *value* are those of this member."""
        try:
            for key, read in self.discriminators.items():
                if key in value:
                    read(value[key])
        except Misfit:
            return False
        return True


def _likely(value: dict[str, Any], records: list[_Candidate]) -> list[_Candidate]:
    """Return which *records* an object may be: those that know most of its fields; all, if no discriminators fit.

    One that knows fewer is not tried after a misfit: it would silently ignore the fields by which *value* differs.
    """
    fitting = [one for one in records if one.may_be(value)]
    if not fitting:
        return records
    known = [len(value.keys() & one.keys) for one in fitting]
    most = max(known, default=0)
    return [one for one, count in zip(fitting, known, strict=True) if count == most > 0]
