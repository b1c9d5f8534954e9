"""Readers of typed bodies: each makes a value of one kind out of a value of JSON, or raises ``Misfit``."""

from __future__ import annotations

import base64
import collections
import collections.abc
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from enum import Enum
from math import isfinite
from typing import Any

from tenure._queue.typed_collisions import UNCHECKED, Hashes, refused_if_colliding
from tenure._queue.typed_libraries import is_of
from tenure._queue.typed_values import (
    DURATION,
    TEXTS,
    TRIES,
    Misfit,
    Read,
    Written,
    name_of_type,
    reason_of,
    rounded,
    shown_briefly,
)
from tenure._queue.typed_writing import form_of


def tried_once(read: Read) -> Read:
    """Return a reader of lists and objects that calls *read* once for each of them, and keeps the result."""

    def read_once(value: Any) -> Any:
        tries = TRIES.get()
        key = (read, id(value))  # the id is unique: the whole body exists while it is read
        if key not in tries:
            try:
                tries[key] = (read(value), None)
            except Misfit as misfit:
                tries[key] = (None, misfit)
        made, problem = tries[key]
        if problem is not None:  # a new exception: the outer readers add their place to it
            raise Misfit(problem.problem, problem.at) from problem.__cause__
        return made

    return read_once


def anything(value: Any) -> Any:
    return value


def simple_reader(kind: Any) -> Read | None:
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
    if any(is_of(*text, kind) for text in TEXTS):
        return _from_text(kind, kind, f"a {kind.__name__}")
    if issubclass(kind, (int, float, str)):
        return _subclass(kind, next(one for one in (int, float, str) if issubclass(kind, one)))
    return None


def _instance(kind: Any, name: str) -> Read:
    def read_instance(value: Any) -> Any:
        if type(value) is not kind:
            raise Misfit(f"must be {name}, not {shown_briefly(value)}")
        return value

    return read_instance


def _float(value: Any) -> Any:
    if type(value) is float or type(value) is Written:
        if not isfinite(value):
            raise Misfit("must be float, and is too large for one")
        return float(value)
    if type(value) is not int:
        raise Misfit(f"must be float, not {shown_briefly(value)}")
    try:
        return float(value)
    except OverflowError:
        raise Misfit(f"must be float, and {shown_briefly(value)} is too large for one") from None


def _subclass(kind: Any, base: Any) -> Read:
    read = _float if base is float else _instance(base, base.__name__)

    def read_subclass(value: Any) -> Any:
        return _made_of(kind, read(value), f"must be {name_of_type(kind)}")

    return read_subclass


def _from_text(kind: Any, make: Callable[[str], Any], what: str) -> Read:
    def read_text(value: Any) -> Any:
        if type(value) is not str:
            raise Misfit(f"must be {what}, not {shown_briefly(value)}")
        return _made_of(make, value, f"must be {what} ({name_of_type(kind)})")

    return read_text


def decimal_of(kind: Any) -> Read:
    def read_decimal(value: Any) -> Any:
        if type(value) not in (str, int, float, Written):
            raise Misfit(f"must be a Decimal, as text or number, not {shown_briefly(value)}")
        try:
            made = kind(value.text if type(value) is Written else str(value))
        except ArithmeticError:  # its InvalidOperation
            raise Misfit(f"must be a Decimal, as text or number, not {shown_briefly(value)}") from None
        if not made.is_finite():
            raise Misfit(f"must be a Decimal that is a number, not {shown_briefly(value)}")
        return made

    return read_decimal


def _timedelta(value: Any) -> Any:
    if type(value) in (int, float, Written):
        return _made_of(lambda seconds: timedelta(seconds=seconds), value, "must be a timedelta")
    found = DURATION.fullmatch(value) if type(value) is str else None
    if not found or not value[-1].isalpha() or value[-1] in "PT":
        raise Misfit(f"must be a duration as in ISO 8601 (PT90S) or seconds, not {shown_briefly(value)}")
    amounts = {name: int(found[name] or 0) for name in ("weeks", "days", "hours", "minutes", "seconds")}
    amounts["microseconds"] = int((found["part"] or "").ljust(6, "0")[:6])
    sign = -1 if found["sign"] else 1
    return _made_of(lambda given: sign * timedelta(**given), amounts, "must be a timedelta")


def _made_of(make: Callable[[Any], Any], value: Any, must: str) -> Any:
    try:
        return make(value)
    except Exception as error:  # raised by a derived type's own code, too
        raise Misfit(f"{must}, not {shown_briefly(value)}") from error


def _enum(kind: type[Enum]) -> Read:
    forms = [(form_of(member.value), member) for member in kind]
    choices = ", ".join(repr(form) for form, _ in forms)

    def read_enum(value: Any) -> Any:
        value = rounded(value)
        for form, member in forms:
            if type(form) is type(value) and form == value:
                return member
        if type(value) in (int, str):
            try:
                return kind(value)  # combined flags, and values of its _missing_
            except Exception as error:  # raised by the enumeration's own code, too
                raise Misfit(f"must be one of {choices[:200]}, not {shown_briefly(value)}") from error
        raise Misfit(f"must be one of {choices[:200]}, not {shown_briefly(value)}")

    return read_enum


def choice_of(given: tuple[Any, ...]) -> Read:
    forms = [(form_of(one), one) for one in given]

    def read_choice(value: Any) -> Any:
        for form, one in forms:
            if type(form) is type(value) and form == value:
                return one
        raise Misfit(f"must be {' or '.join(repr(one) for _, one in forms)[:200]}, not {shown_briefly(value)}")

    return read_choice


def list_of(make: Callable[[Iterable[Any]], Any], read: Read) -> Read:
    is_hashed = make in (set, frozenset)

    def read_list(value: Any) -> Any:
        if not isinstance(value, list):
            raise Misfit(f"must be a list, not {shown_briefly(value)}")
        done: list[Any] = []
        try:
            for one in value:
                done.append(read(one))  # noqa: PERF401  # its length is the place of an error
        except Misfit as misfit:
            raise misfit.inside(f"[{len(done)}]") from misfit.__cause__
        if not is_hashed:
            return make(done)
        try:
            return make(refused_if_colliding(done))
        except TypeError as error:  # of unhashable values
            raise Misfit(f"can't be a set: {reason_of(error)}") from error

    return read_list


def read_each(values: list[Any], reads: list[Read]) -> list[Any]:
    done = []
    for number, (value, read) in enumerate(zip(values, reads, strict=True)):
        try:
            done.append(read(value))
        except Misfit as misfit:
            raise misfit.inside(f"[{number}]") from misfit.__cause__
    return done


def mapping_of(kind: Any, read_key: Read, read: Read) -> Read:
    def read_mapping(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Misfit(f"must be an object, not {shown_briefly(value)}")
        made: dict[Any, Any] = collections.OrderedDict() if kind is collections.OrderedDict else {}
        hashes = Hashes() if len(value) > UNCHECKED else None
        for key, one in value.items():
            try:
                name = read_key(key)
                is_known = name in made
            except Misfit as misfit:
                raise Misfit(f"has the key {shown_briefly(key)}, which {misfit.problem}") from misfit.__cause__
            except TypeError as error:  # of an unhashable type
                raise Misfit(f"has the key {shown_briefly(key)}, which can't be one: {reason_of(error)}") from error
            if is_known:
                raise Misfit(f"has the key {shown_briefly(key)}, which equals an earlier one")
            if hashes is not None:
                hashes.note(name)
            try:
                made[name] = read(one)
            except Misfit as misfit:
                raise misfit.inside(f"[{key!r:.80}]") from misfit.__cause__
        return collections.defaultdict(None, made) if kind is collections.defaultdict else made

    return read_mapping


def structure_of(kind: Any, reads: dict[str, Read], required: frozenset[str]) -> Read:
    """Return the reader that makes a *kind* with named fields from an object."""

    def read_structure(value: Any) -> Any:
        if not isinstance(value, dict):
            raise Misfit(f"must be an object with the fields of {kind.__name__}, not {shown_briefly(value)}")
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
        except Exception as error:  # of its own checks, which may be assertions
            raise Misfit(f"is no valid {kind.__name__}: {reason_of(error)}") from error

    return read_structure


def named_tuple_of(kind: Any, from_object: Read, reads: list[Read], least: int) -> Read:
    """Return the reader of a NamedTuple, from a list or an object; items beyond its fields are ignored."""

    def read_named_tuple(value: Any) -> Any:
        if not isinstance(value, list):
            return from_object(value)
        if len(value) < least:
            raise Misfit(f"must be a list of at least {least} for a {kind.__name__}, not {shown_briefly(value)}")
        known = value[: len(reads)]
        return kind(*read_each(known, reads[: len(known)]))

    return read_named_tuple
