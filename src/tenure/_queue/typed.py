"""Typed bodies: how a value of JSON becomes a dataclass, a ``UUID``, a ``list[Order]``; and what those are as JSON.

House rules:

- A value is never turned into another kind in silence: ``"7"`` is no ``int``, and ``7`` is no ``str``.
- Fields that a type doesn't know are ignored: the sender may be newer than the reader.
- A type that can't be read at all is a ``ConfigError``, whatever the body; a body that doesn't fit is a ``Misfit``.
- What a body costs grows with its length, whatever is in it: each value is read once for each type it may have.
- pydantic and msgspec read and write their own types. They are never imported here: a type of theirs has been.
"""

from __future__ import annotations

import base64
import binascii
import collections
import collections.abc
import dataclasses
import json
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import date, datetime, time, timedelta
from enum import Enum
from functools import lru_cache
from math import isfinite
from typing import Annotated, Any, Literal, NotRequired, Required, TypeVar, Union

from tenure.errors import ConfigError

Read = Callable[[Any], Any]
"""Makes the value of a type out of a value of JSON, or raises ``Misfit``."""

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
_TEXTS = (("uuid", "UUID"), ("pathlib", "PurePath"), *(("ipaddress", f"IPv{n}{of}") for n in (4, 6) for of in (
    "Address", "Network", "Interface"
)))  # fmt: skip
"""Types that are made of text, and whose ``str`` is that text."""

_DURATION = re.compile(
    r"(?P<sign>-?)P(?:(?P<weeks>\d+)W)?(?:(?P<days>\d+)D)?"
    r"(?:T(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?(?:(?P<seconds>\d+)(?:\.(?P<part>\d{1,9}))?S)?)?"
)
SHOWN = 80
"""So many characters of a value are shown that doesn't fit."""
SHOWN_AT = 300
"""So many characters of its place, if that is deep."""

_Tries = dict[tuple[Read, int], tuple[Any, "Misfit | None"]]
_TRIES: ContextVar[_Tries] = ContextVar("tenure_body_tries")
"""What unions made of the lists and objects of the body that is read, by the identity of these.

Without it, types that hold unions of themselves read what is deep inside a body 2^depth times.
"""


class Misfit(Exception):
    """A value that doesn't fit, and its place, which those around it put together from the inside out."""

    def __init__(self, problem: str, at: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.at = at

    def inside(self, place: str) -> Misfit:
        """Return it as seen from around *place*."""
        self.at = place + self.at
        return self

    def __str__(self) -> str:
        at = self.at
        if len(at) > SHOWN_AT:
            at = f"{at[: SHOWN_AT // 2]}…{at[-SHOWN_AT // 2 :]}"
        return f"the body{at} {self.problem}"


class Written(float):
    """A number with more digits than a ``float`` has, and its text, which a ``Decimal`` is made of."""

    text: str


def written(text: str) -> float:
    """Return the number in *text*; a ``Written`` one if a ``float`` isn't exactly it."""
    exact = sys.modules["decimal"].Decimal  # a kind that holds one has imported it
    number = float(text)
    try:
        if exact(text) == exact(repr(number)):
            return number
    except ArithmeticError:  # an exponent that a Decimal can't have either
        pass
    longer = Written(number)
    longer.text = text
    return longer


def _rounded(value: Any) -> Any:
    """Return *value* with nothing but plain numbers in it."""
    if type(value) is Written:
        return float(value)
    if type(value) is list:
        return [_rounded(one) for one in value]
    return {key: _rounded(one) for key, one in value.items()} if type(value) is dict else value


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """What reads whole bodies of a type, and how it wants them."""

    read: Read
    takes_bytes: bool
    """It is another library's, and takes the bytes of a body as they are."""
    exact: bool
    """There is a ``Decimal`` in it: numbers are to be ``written`` ones."""


def reader(kind: Any) -> Reader:
    """Return what reads a *kind*.

    Raises:
        ConfigError: Bodies can't be read as a *kind*.
    """
    try:
        return _made(kind, repr(kind))  # unions are equal in whatever order, and read in the order written
    except TypeError:  # it can't be hashed
        return _Maker().whole(kind)


@lru_cache(maxsize=512)
def _made(kind: Any, spelled: str) -> Reader:
    return _Maker().whole(kind)


class _Maker:
    """Makes the readers of a type and of all types inside it; those of recursive types once."""

    def __init__(self) -> None:
        self._begun: dict[tuple[Any, str], Read] = {}
        self._chooses = False
        self._exact = False

    def whole(self, kind: Any) -> Reader:
        """Return the reader of whole bodies of this *kind*."""
        takes_bytes = isinstance(kind, type) and _library_of(kind) is not None
        read = self.of(kind, {})
        if not self._chooses:
            return Reader(read, takes_bytes, self._exact)

        def read_whole(value: Any) -> Any:
            before = _TRIES.set({})
            try:
                return read(value)
            finally:
                _TRIES.reset(before)

        return Reader(read_whole, takes_bytes, self._exact)

    def _plain(self, read: Read) -> Read:
        """Return a *read* that knows nothing of ``Written`` numbers, for a type that may stand beside a ``Decimal``."""
        return lambda value: read(_rounded(value)) if self._exact else read(value)

    def of(self, kind: Any, bound: Mapping[Any, Any]) -> Read:
        """Return the reader of *kind*, in which type variables are *bound* to types."""
        if isinstance(kind, TypeVar):
            return self.of(_bound(kind, bound), bound)
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is Annotated:
            if library := _constrained_by(kind.__metadata__):
                return self._plain(_borrowed(library, kind))
            return self.of(arguments[0], bound)
        if origin in (Required, NotRequired, typing.Final) or getattr(origin, "_name", "") == "ReadOnly":
            return self.of(arguments[0], bound)
        if isinstance(kind, (typing.NewType, dataclasses.InitVar)):
            return self.of(kind.__supertype__ if isinstance(kind, typing.NewType) else kind.type, bound)
        alias = kind if origin is None else origin
        if type(alias).__name__ == "TypeAliasType":
            given = {**bound, **_matched(getattr(alias, "__type_params__", ()), arguments, bound)}
            return self._once(alias, given, lambda: self.of(alias.__value__, given))
        if origin in (Union, types.UnionType):
            return self._union(arguments, bound)
        if origin is Literal:
            return _choice(arguments)
        if (library := _library_of(alias)) is not None:
            return self._plain(_borrowed(library, kind))
        if kind is Any or kind is object:
            return self._plain(_anything)
        if _is_of("decimal", "Decimal", kind):
            self._exact = True
            return _decimal(kind)
        if (simple := _simple(kind)) is not None:
            return simple
        return self._of_many(kind, alias, arguments, bound)

    def _of_many(self, kind: Any, alias: Any, arguments: tuple[Any, ...], bound: Mapping[Any, Any]) -> Read:
        if alias is tuple:
            return self._tuple(kind, arguments, bound)
        if alias in _LISTS:
            return _list(_LISTS[alias], self.of(arguments[0] if arguments else Any, bound))
        if alias in _MAPPINGS or alias is collections.defaultdict:
            key, value = arguments or (str, Any)
            return _mapping(alias, self._key(key, bound), self.of(value, bound))
        if dataclasses.is_dataclass(alias) or _is_named_tuple(alias) or _is_typed_dict(alias):
            given = _variables(alias, arguments, bound)
            return self._once(alias, given, lambda: self._record(alias, given))
        raise ConfigError(
            f"a body can't be read as {_name(kind)}; there are dataclasses, TypedDict, NamedTuple, pydantic models, "
            "msgspec structs, and what can stand in their fields. For another type, make it of message.json()"
        )

    def _union(self, kinds: tuple[Any, ...], bound: Mapping[Any, Any]) -> Read:
        flat = tuple(_flat(kinds, bound))
        reads = [(kind, self.of(kind, bound)) for kind in flat]
        scalars = (bool, int, float, type(None))
        exact = {one: read for kind, read in reads for one in scalars if kind is one}
        records = [_Candidate(kind, read, _keys_of(kind), _signs(kind)) for kind, read in reads if _fields_of(kind)]
        others = [(kind, read) for kind, read in reads if not _fields_of(kind)]
        only = [read for kind, read in reads if kind is not type(None)]
        named = ", ".join(_name(kind) for kind in flat)
        if len(only) > 1:
            self._chooses = True

        def read_union(value: Any) -> Any:
            if (fitting := exact.get(type(value))) is not None:
                return fitting(value)
            if len(only) == 1:  # Optional: it says best what is wrong
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
                    if misfit.at or (isinstance(value, dict) and _fields_of(kind)):  # it came so far
                        problems.append(f"{_name(kind)}: {misfit.at.lstrip('.') or 'it'} {misfit.problem}")
                        last = misfit
            if last is not None and len(likely) == len(problems) == 1:
                raise last
            why = f" ({'; '.join(problems)[:400]})" if problems else f", being {_shown(value)}"
            raise Misfit(f"fits none of {named}{why}")

        once_each = _once_each(choose)
        return read_union

    def _tuple(self, kind: Any, arguments: tuple[Any, ...], bound: Mapping[Any, Any]) -> Read:
        if kind in (tuple, typing.Tuple):  # noqa: UP006  # as it was once written
            return _list(tuple, self.of(Any, bound))
        if len(arguments) == 2 and arguments[1] is ...:
            return _list(tuple, self.of(arguments[0], bound))
        reads = [self.of(one, bound) for one in arguments]

        def read_tuple(value: Any) -> Any:
            if not isinstance(value, list) or len(value) != len(reads):
                raise Misfit(f"must be a list of {len(reads)}, not {_shown(value)}")
            return tuple(_read_each(value, reads))

        return read_tuple

    def _key(self, kind: Any, bound: Mapping[Any, Any]) -> Read:
        """Return the reader of a mapping's keys, which are text in JSON."""
        read = self.of(kind, bound)
        if kind is str or kind is Any:
            return read

        def read_key(text: str) -> Any:
            try:
                return read(text)
            except Misfit as misfit:
                for form in _of_key(text):
                    try:
                        return read(form)
                    except Misfit:
                        continue
                raise misfit

        return read_key

    def _once(self, kind: Any, bound: Mapping[Any, Any], make: Callable[[], Read]) -> Read:
        """Return the reader of a *kind* that may stand inside of itself; begun there once more, it is that outside."""
        key = (kind, repr(sorted((str(variable), repr(given)) for variable, given in bound.items())))
        if key not in self._begun:
            made: list[Read] = []
            self._begun[key] = lambda value: made[0](value)
            made.append(make())
            self._begun[key] = made[0]
        return self._begun[key]

    def _record(self, kind: Any, bound: Mapping[Any, Any]) -> Read:
        """Return the reader of a type with named fields."""
        hints = _hints(kind)
        fields = _fields_of(kind)
        reads = {name: self.of(hints.get(name, Any), bound) for name in fields}
        required = frozenset(name for name in fields if name in _required(kind, hints))
        made = _structure(kind, reads, required)
        if _is_named_tuple(kind):
            return _named_tuple(kind, made, list(reads.values()), len(required))
        return made


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A member of a union that has named fields."""

    kind: Any
    read: Read
    keys: frozenset[str]
    signs: Mapping[str, Read]
    """The fields that tell the member from the others, as they are a ``Literal``."""

    def may_be(self, value: dict[str, Any]) -> bool:
        """Tell whether the signs in *value* are this one's."""
        try:
            for key, read in self.signs.items():
                if key in value:
                    read(value[key])
        except Misfit:
            return False
        return True


def _likely(value: dict[str, Any], records: list[_Candidate]) -> list[_Candidate]:
    """Return which *records* an object may be: those that know most of its fields; all, if its signs are of none.

    One that knows fewer isn't tried when that misfits: it would leave out in silence what makes *value* another type.
    """
    fitting = [one for one in records if one.may_be(value)]
    if not fitting:
        return records
    known = [len(value.keys() & one.keys) for one in fitting]
    most = max(known, default=0)
    return [one for one, count in zip(fitting, known, strict=True) if count == most > 0]


# --- readers -----------------------------------------------------------------------------------------------------


def _once_each(read: Read) -> Read:
    """Return a reader of lists and objects that asks *read* once for each of them, however often it is asked."""

    def read_once(value: Any) -> Any:
        tries = _TRIES.get()
        key = (read, id(value))  # all of the body is alive while it is read
        if key not in tries:
            try:
                tries[key] = (read(value), None)
            except Misfit as misfit:
                tries[key] = (None, misfit)
        made, problem = tries[key]
        if problem is not None:  # as a new one: those around it write their place into it
            raise Misfit(problem.problem, problem.at) from problem.__cause__
        return made

    return read_once


def _anything(value: Any) -> Any:
    return value


def _simple(kind: Any) -> Read | None:
    """Return the reader of a type with no other types inside, if *kind* is one."""
    if kind is None or kind is type(None):
        return _instance(type(None), "null")
    if not isinstance(kind, type):
        return None
    if issubclass(kind, Enum):
        return _enum(kind)
    if kind in (bool, int, str):
        return _instance(kind, kind.__name__)
    if kind is float:
        return _float
    if issubclass(kind, (datetime, date, time)):
        return _from_text(kind, kind.fromisoformat, "a date or time in ISO 8601")
    if issubclass(kind, timedelta):
        return _timedelta
    if issubclass(kind, (bytes, bytearray)):
        return _from_text(kind, lambda text: kind(base64.b64decode(text, validate=True)), "bytes in base64")
    if any(_is_of(*text, kind) for text in _TEXTS):
        return _from_text(kind, kind, f"a {kind.__name__}")
    if issubclass(kind, (int, float, str)):
        return _subclass(kind, next(one for one in (int, float, str) if issubclass(kind, one)))
    return None


def _instance(kind: Any, name: str) -> Read:
    def read_instance(value: Any) -> Any:
        if type(value) is not kind:
            raise Misfit(f"must be {name}, not {_shown(value)}")
        return value

    return read_instance


def _float(value: Any) -> Any:
    if type(value) is float or type(value) is Written:
        if not isfinite(value):
            raise Misfit("must be float, and is too large for one")
        return float(value)
    if type(value) is not int:
        raise Misfit(f"must be float, not {_shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise Misfit(f"must be float, and {_shown(value)} is too large for one") from None


def _subclass(kind: Any, base: Any) -> Read:
    read = _float if base is float else _instance(base, base.__name__)

    def read_subclass(value: Any) -> Any:
        return _made_of(kind, read(value), f"must be {_name(kind)}")

    return read_subclass


def _from_text(kind: Any, make: Callable[[str], Any], what: str) -> Read:
    def read_text(value: Any) -> Any:
        if type(value) is not str:
            raise Misfit(f"must be {what}, not {_shown(value)}")
        return _made_of(make, value, f"must be {what} ({_name(kind)})")

    return read_text


def _decimal(kind: Any) -> Read:
    def read_decimal(value: Any) -> Any:
        if type(value) not in (str, int, float, Written):
            raise Misfit(f"must be a Decimal, as text or number, not {_shown(value)}")
        try:
            made = kind(value.text if type(value) is Written else str(value))
        except ArithmeticError:  # its InvalidOperation
            raise Misfit(f"must be a Decimal, as text or number, not {_shown(value)}") from None
        if not made.is_finite():
            raise Misfit(f"must be a Decimal that is a number, not {_shown(value)}")
        return made

    return read_decimal


def _timedelta(value: Any) -> Any:
    if type(value) in (int, float, Written):
        return _made_of(lambda seconds: timedelta(seconds=seconds), value, "must be a timedelta")
    found = _DURATION.fullmatch(value) if type(value) is str else None
    if not found or not value[-1].isalpha() or value[-1] in "PT":
        raise Misfit(f"must be a duration as in ISO 8601 (PT90S) or seconds, not {_shown(value)}")
    amounts = {name: int(found[name] or 0) for name in ("weeks", "days", "hours", "minutes", "seconds")}
    amounts["microseconds"] = int((found["part"] or "").ljust(6, "0")[:6])
    length = _made_of(lambda given: timedelta(**given), amounts, "must be a timedelta")
    return -length if found["sign"] else length


def _made_of(make: Callable[[Any], Any], value: Any, must: str) -> Any:
    try:
        return make(value)
    except (ValueError, OverflowError, binascii.Error) as error:
        raise Misfit(f"{must}, not {_shown(value)}") from error


def _enum(kind: type[Enum]) -> Read:
    forms = [(_form(member.value), member) for member in kind]
    choices = ", ".join(repr(form) for form, _ in forms)

    def read_enum(value: Any) -> Any:
        value = _rounded(value)
        for form, member in forms:
            if type(form) is type(value) and form == value:
                return member
        if type(value) in (int, str):
            try:
                return kind(value)  # combined flags, and whatever its _missing_ knows
            except Exception as error:  # raised by the enumeration's own code, too
                raise Misfit(f"must be one of {choices[:200]}, not {_shown(value)}") from error
        raise Misfit(f"must be one of {choices[:200]}, not {_shown(value)}")

    return read_enum


def _choice(given: tuple[Any, ...]) -> Read:
    forms = [(_form(one), one) for one in given]

    def read_choice(value: Any) -> Any:
        for form, one in forms:
            if type(form) is type(value) and form == value:
                return one
        raise Misfit(f"must be {' or '.join(repr(one) for _, one in forms)[:200]}, not {_shown(value)}")

    return read_choice


def _list(make: Callable[[Iterable[Any]], Any], read: Read) -> Read:
    def read_list(value: Any) -> Any:
        if not isinstance(value, list):
            raise Misfit(f"must be a list, not {_shown(value)}")
        done: list[Any] = []
        try:
            for one in value:
                done.append(read(one))  # noqa: PERF401  # how far it came tells the place
        except Misfit as misfit:
            raise misfit.inside(f"[{len(done)}]") from misfit.__cause__
        try:
            return make(done)
        except TypeError as error:  # a set, of what has no hash
            raise Misfit(f"can't be a set: {error}") from error

    return read_list


def _read_each(values: list[Any], reads: list[Read]) -> list[Any]:
    done = []
    for number, (value, read) in enumerate(zip(values, reads, strict=True)):
        try:
            done.append(read(value))
        except Misfit as misfit:
            raise misfit.inside(f"[{number}]") from misfit.__cause__
    return done


def _mapping(kind: Any, read_key: Read, read: Read) -> Read:
    def read_mapping(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Misfit(f"must be an object, not {_shown(value)}")
        made: dict[Any, Any] = collections.OrderedDict() if kind is collections.OrderedDict else {}
        for key, one in value.items():
            try:
                name = read_key(key)
            except Misfit as misfit:
                raise Misfit(f"has the key {_shown(key)}, which {misfit.problem}") from misfit.__cause__
            if name in made:
                raise Misfit(f"has the key {_shown(key)}, which is the same as one before it")
            try:
                made[name] = read(one)
            except Misfit as misfit:
                raise misfit.inside(f"[{key!r:.80}]") from misfit.__cause__
        return collections.defaultdict(None, made) if kind is collections.defaultdict else made

    return read_mapping


def _structure(kind: Any, reads: dict[str, Read], required: frozenset[str]) -> Read:
    """Return the reader of a *kind* with named fields, out of an object."""

    def read_structure(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Misfit(f"must be an object with the fields of {kind.__name__}, not {_shown(value)}")
        given = {}
        for name, one in value.items():
            read = reads.get(name)
            if read is not None:
                try:
                    given[name] = read(one)
                except Misfit as misfit:
                    raise misfit.inside(f".{name}") from misfit.__cause__
        if missing := required - given.keys():
            names = ", ".join(repr(name) for name in reads if name in missing)
            raise Misfit(f"has no {names}, which {kind.__name__} must have")
        try:
            return kind(**given)
        except (TypeError, ValueError) as error:  # its own checks
            raise Misfit(f"is no valid {kind.__name__}: {error}") from error

    return read_structure


def _named_tuple(kind: Any, from_object: Read, reads: list[Read], least: int) -> Read:
    """Return the reader of a NamedTuple, which JSON has as a list; more items than it knows are ignored."""

    def read_named_tuple(value: Any) -> Any:
        if not isinstance(value, list):
            return from_object(value)
        if len(value) < least:
            raise Misfit(f"must be a list of at least {least} for a {kind.__name__}, not {_shown(value)}")
        known = value[: len(reads)]
        return kind(*_read_each(known, reads[: len(known)]))

    return read_named_tuple


# --- what types are made of --------------------------------------------------------------------------------------


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_typed_dict(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, dict) and hasattr(kind, "__required_keys__")


def _fields_of(kind: Any) -> Mapping[str, object]:
    """Return the names that an object of this *kind* can have; none if it has no named fields."""
    kind = typing.get_origin(kind) or kind
    if dataclasses.is_dataclass(kind):
        of_class = getattr(dataclasses, "_FIELD_CLASSVAR")  # noqa: B009  # it has no public name
        every: dict[str, Any] = kind.__dataclass_fields__  # dataclasses.fields() leaves out what is an InitVar
        return {name: field for name, field in every.items() if field.init and field._field_type is not of_class}
    if _is_named_tuple(kind):
        return dict.fromkeys(kind._fields)
    if _is_typed_dict(kind):
        return dict.fromkeys(kind.__annotations__)
    if isinstance(kind, type):
        return getattr(kind, "model_fields", None) or dict.fromkeys(getattr(kind, "__struct_fields__", ()))
    return {}


def _keys_of(kind: Any) -> frozenset[str]:
    """Return the keys that an object of this *kind* can have in JSON: its fields, and how its library writes them."""
    kind = typing.get_origin(kind) or kind
    keys = {*_fields_of(kind), *getattr(kind, "__struct_encode_fields__", ())}
    described: Mapping[str, Any] = getattr(kind, "__pydantic_fields__", None) or getattr(kind, "model_fields", {})
    for field in described.values():
        alias = field.validation_alias or field.alias
        for choice in getattr(alias, "choices", None) or [alias]:
            keys.add(choice if isinstance(choice, str) else getattr(choice, "path", [""])[0])
    return frozenset(keys)


def _signs(kind: Any) -> dict[str, Read]:
    """Return the readers of those fields of a *kind* that are a ``Literal``, or the tag of a msgspec struct."""
    kind = typing.get_origin(kind) or kind
    try:
        hints = _hints(kind)
    except ConfigError:  # of a type whose library finds what they name
        hints = {}
    signs = {}
    for name, hint in hints.items():
        while typing.get_origin(hint) in (Annotated, Required, NotRequired, typing.Final):
            hint = typing.get_args(hint)[0]
        if typing.get_origin(hint) is Literal:
            signs[name] = _choice(typing.get_args(hint))
    tagged = getattr(kind, "__struct_config__", None)
    if tagged is not None and tagged.tag is not None:
        signs[tagged.tag_field] = _choice((tagged.tag,))
    return signs


def _required(kind: Any, hints: Mapping[str, Any]) -> Iterable[str]:
    if _is_named_tuple(kind):
        return [name for name in kind._fields if name not in kind._field_defaults]
    if _is_typed_dict(kind):
        marks = {name: typing.get_origin(hint) for name, hint in hints.items()}  # as text they were not understood
        return [
            name
            for name in hints
            if marks[name] is Required or (name in kind.__required_keys__ and marks[name] is not NotRequired)
        ]
    missing = dataclasses.MISSING
    return [
        name
        for name, field in kind.__dataclass_fields__.items()
        if field.default is missing and field.default_factory is missing
    ]


def _hints(kind: Any) -> dict[str, Any]:
    try:
        try:
            return typing.get_type_hints(kind, include_extras=True)
        except NameError:  # the early releases of Python 3.12 don't find type parameters that are named as text
            variables = {one.__name__: one for one in getattr(kind, "__type_params__", ())}
            return typing.get_type_hints(kind, localns={**vars(kind), **variables}, include_extras=True)
    except (NameError, TypeError) as error:
        raise ConfigError(
            f"a body can't be read as {_name(kind)}, as its annotations can't be resolved ({error}); "
            "define what they name at the top of a module"
        ) from error


def _bound(variable: TypeVar, bound: Mapping[Any, Any]) -> Any:
    if variable in bound:
        return bound[variable]
    default = getattr(variable, "__default__", None)
    if default is not None and "NoDefault" not in repr(default):
        return default
    if variable.__constraints__:
        return Union[variable.__constraints__]  # noqa: UP007  # they are in a tuple
    return variable.__bound__ or Any


def _matched(variables: Iterable[Any], arguments: Iterable[Any], bound: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what *variables* stand for, where the arguments may be variables that are *bound* outside."""
    return {variable: _closed(argument, bound) for variable, argument in zip(variables, arguments, strict=False)}


def _closed(kind: Any, bound: Mapping[Any, Any]) -> Any:
    """Return *kind* with its type variables filled in."""
    if isinstance(kind, TypeVar):
        return _bound(kind, bound)
    if variables := getattr(kind, "__parameters__", ()):
        return kind[tuple(_bound(variable, bound) for variable in variables)]
    return kind


def _variables(kind: Any, arguments: tuple[Any, ...], bound: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what the type variables of *kind* and of its bases stand for."""
    matched = _matched(getattr(kind, "__parameters__", ()), arguments, bound)
    for base in getattr(kind, "__orig_bases__", ()):
        if (origin := typing.get_origin(base)) is not None and origin is not typing.Generic:
            matched = {**_variables(origin, typing.get_args(base), matched), **matched}
    return matched


def _flat(kinds: Iterable[Any], bound: Mapping[Any, Any]) -> Iterable[Any]:
    for kind in kinds:
        closed = _bound(kind, bound) if isinstance(kind, TypeVar) else kind
        if typing.get_origin(closed) in (Union, types.UnionType):
            yield from _flat(typing.get_args(closed), bound)
        else:
            yield closed


def _of_key(text: str) -> Iterable[Any]:
    """Return which other values of JSON a key may stand for, that are written as this *text*."""
    if text in ("true", "false", "null"):
        yield {"true": True, "false": False, "null": None}[text]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    if type(value) in (int, float) and json.dumps(value) == text:
        yield value


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 4, 8, 8, SHOWN, SHOWN


def _shown(value: Any) -> str:
    text = _SHORT.repr(value) if not isinstance(value, str) else repr(value[:SHOWN])
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


# --- types of pydantic and msgspec -------------------------------------------------------------------------------


def _is_of(module: str, name: str, kind: Any) -> bool:
    """Tell whether the type *kind* is one of another module's, without importing that: who has the type has it."""
    there = sys.modules.get(module)
    return there is not None and isinstance(kind, type) and issubclass(kind, getattr(there, name))


def _library_of(kind: Any) -> str | None:
    """Return the library that reads and writes *kind* and its instances, if there is one."""
    if "pydantic" in sys.modules and hasattr(kind, "__get_pydantic_core_schema__"):
        return "pydantic"
    if hasattr(kind, "__pydantic_validator__"):  # a dataclass of pydantic's
        return "pydantic"
    return "msgspec" if hasattr(kind, "__struct_config__") else None


def _constrained_by(metadata: tuple[Any, ...]) -> str | None:
    """Return the library that minds what an ``Annotated`` says, if it is here."""
    for one in metadata:
        home = type(one).__module__.partition(".")[0]
        if home in ("annotated_types", "pydantic", "pydantic_core") and "pydantic" in sys.modules:
            return "pydantic"
        if home == "msgspec":
            return "msgspec"
    return None


def _borrowed(library: str, kind: Any) -> Read:
    return _by_pydantic(kind) if library == "pydantic" else _by_msgspec(kind)


@lru_cache(maxsize=512)
def _adapter(kind: Any) -> Any:
    return sys.modules["pydantic"].TypeAdapter(kind)


def _by_pydantic(kind: Any) -> Read:
    adapter = sys.modules["pydantic"].TypeAdapter(kind)  # an Annotated may have no hash
    invalid = sys.modules["pydantic"].ValidationError

    def read_with_pydantic(value: Any) -> Any:
        try:
            return adapter.validate_json(value if isinstance(value, bytes) else json.dumps(value))
        except invalid as error:
            raise _as_misfit(error) from error

    return read_with_pydantic


def _as_misfit(error: Any) -> Misfit:
    """Return what pydantic says, in one line."""
    first, *others = error.errors(include_url=False, include_context=False)
    more = f" (and {len(others)} more)" if others else ""
    at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    return Misfit(f"does not fit: {first['msg']}, not {_shown(first['input'])}{more}", at)


def _by_msgspec(kind: Any) -> Read:
    msgspec = sys.modules["msgspec"]

    def read_with_msgspec(value: Any) -> Any:
        try:
            if isinstance(value, bytes):
                return msgspec.json.decode(value, type=kind)
            return msgspec.convert(value, kind, str_keys=True)
        except (msgspec.MsgspecError, ValueError) as error:
            said, _, place = str(error).partition(" - at `$")
            raise Misfit(f"does not fit: {said}", place.rstrip("`")) from error

    return read_with_msgspec


# --- writing -----------------------------------------------------------------------------------------------------


def written_by_library(value: Any) -> bytes | None:
    """Return the JSON of *value* if that is of a type that another library writes."""
    kind: Any = type(value)
    library = _library_of(kind)
    if library == "pydantic":
        return bytes(_adapter(kind).dump_json(value, by_alias=True))
    return bytes(sys.modules["msgspec"].json.encode(value)) if library == "msgspec" else None


def plain(value: Any) -> Any:
    """Return *value*, that JSON does not have, one step nearer to what it has.

    Raises:
        TypeError: It has no JSON form.
    """
    kind: Any = type(value)
    return _writer(kind)(value)


@lru_cache(maxsize=512)
def _writer(kind: Any) -> Callable[[Any], Any]:
    """Return what makes plain a value of this *kind*."""
    library = _library_of(kind)
    if library == "pydantic":
        return lambda value: _adapter(kind).dump_python(value, mode="json", by_alias=True)
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
    if _is_of("decimal", "Decimal", kind):
        return _decimal_text
    if any(_is_of(*text, kind) for text in _TEXTS):
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
    """Return *value* with nothing in it but what JSON has, keys of mappings included.

    Raises:
        TypeError: Something in it has no JSON form; the message says where that is.
    """
    if value is None or (isinstance(value, (str, int, float)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Mapping) and _library_of(type(value)) is None:
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
        raise ValueError(f"{value} is no number in JSON")
    return str(value)


def _duration(length: timedelta) -> str:
    """Return *length* as ISO 8601 has it, exactly: ``P1DT5.5S``."""
    sign, length = ("-", -length) if length < timedelta() else ("", length)
    seconds = (
        f"{length.seconds}.{length.microseconds:06}".rstrip("0").rstrip(".") if length.microseconds else length.seconds
    )
    days = f"{length.days}D" if length.days else ""
    return f"{sign}P{days}T{seconds}S"


def _form(value: Any) -> Any:
    """Return *value* as it comes back from JSON; itself if JSON has no form for it."""
    try:
        return spelled_out(value)
    except (TypeError, ValueError):
        return value
