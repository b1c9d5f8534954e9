"""What foreigners write: values that tenure has written, with one to three of their parts replaced, from a seed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

NINES = "9" * 5_000
DEEP = "[" * 5_000

_SIMPLE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30),
    *(1.5, -0.0, 1e300, 5e-324, math.inf, -math.inf, math.nan, 250e9, 250e9 + 1, 1e18, -1.5),
    *("", "x", "\0", "a\0b", "\n", " ", "\ud800", "\u202e", "\u0663", "é" * 300, "{", "[", '"', "null", "-1", "1e400"),
    *(NINES, "9" * 19, "9" * 20, "9" * 21, DEEP, '{"a":' * 2_000, "inf", "nan", "Infinity", "0x7", "1_000", "%", "="),
    *(b"", b"\xff", b"\0", b"\xff\xfe{\0", b"7", b"x" * 300),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, (), [1, "a", 1.5, None, {}], {"x-tenure-a": 1}),
    *("abandoned", "expired", "rejected", "max_deliveries", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00-23:59"),
]
_NAMES = [one for one in _SIMPLE if isinstance(one, str) and len(one) < 1_000]

_LITERALS = [NINES, f"-{NINES}", f"{NINES}.5", f"1e{NINES}", "1e400", "Infinity", "-Infinity", "NaN", DEEP, '"\\ud800"']
"""Values that JSON texts can have, and that Python writes otherwise, or not at all."""

_MARK = "\x1aliteral-%d\x1a"

_ENDS = ('"', "[", "{")
"""How a text begins that is parsed as JSON."""


def mutated(rng: Random, sample: Any) -> Any:
    """Return *sample*, made of dicts, lists, tuples, texts, bytes and numbers, with one to three parts replaced."""
    value = sample
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _changed(rng, value, sample)
    return value


def _changed(rng: Random, value: Any, whole: Any) -> Any:
    """Return *value* with one part replaced, at any depth."""
    if isinstance(value, (dict, list, tuple)) and value and rng.random() < 0.93:
        if rng.random() < 0.12:
            return _with_other_entries(rng, value, whole)
        return _with_part(rng, value, lambda part: _changed(rng, part, whole))
    if isinstance(value, (str, bytes)) and rng.random() < 0.6:
        inner = _parsed(value)
        if inner is not None:
            text = _dumped(rng, _changed(rng, inner[0], whole))
            return text.encode("utf-8", "surrogatepass") if isinstance(value, bytes) else text
    return _other(rng, value, whole)


def _with_part(rng: Random, value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with one of its parts changed."""
    if isinstance(value, dict):
        name = rng.choice(list(value))
        return {**value, name: change(value[name])}
    place = rng.randrange(len(value))
    changed = [*value[:place], change(value[place]), *value[place + 1 :]]
    return tuple(changed) if isinstance(value, tuple) else changed


def _with_other_entries(rng: Random, value: Any, whole: Any) -> Any:
    """Return a container with entries removed, added, renamed or repeated."""
    kind = rng.randrange(4)
    if isinstance(value, dict):
        name = rng.choice(list(value))
        rest = {one: other for one, other in value.items() if one != name}
        if kind == 0:
            return rest
        if kind == 1:
            return {**value, rng.choice(_NAMES): _any(rng, whole)}
        if kind == 2:
            return {**rest, rng.choice(_NAMES): value[name]}
        return {**value, **{f"{name}{number}": value[name] for number in range(100)}}
    place = rng.randrange(len(value))
    if kind == 0:
        changed = [*value[:place], *value[place + 1 :]]
    elif kind == 1:
        changed = [*value[:place], _any(rng, whole), *value[place:]]
    elif kind == 2:
        changed = list(reversed(value))
    else:
        changed = [*value, *[value[place]] * 100]
    return tuple(changed) if isinstance(value, tuple) else changed


def _other(rng: Random, value: Any, whole: Any) -> Any:
    """Return another value in place of *value*."""
    kind = rng.randrange(10)
    if kind < 5:
        return _any(rng, whole)
    if kind == 5:
        return _of_another_type(rng, value)
    if isinstance(value, (str, bytes)) and value:
        return _spliced(rng, value)
    if type(value) in (int, float):
        return _near(rng, value)
    return _any(rng, whole)


def _any(rng: Random, whole: Any) -> Any:
    """Return a value that others write, or one of another part of the sample."""
    kind = rng.randrange(200)
    if kind == 0:
        return rng.choice(("x", "9", '"', "[", "\u202e")) * 300_000
    if kind == 1:
        return _nested(rng.choice((10, 40, 400)))
    if kind < 40:
        return _part_of(rng, whole)
    return rng.choice(_SIMPLE)


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def _part_of(rng: Random, whole: Any) -> Any:
    value = whole
    while isinstance(value, (dict, list, tuple)) and value and rng.random() < 0.8:
        value = rng.choice(list(value.values())) if isinstance(value, dict) else rng.choice(value)
    return value


def _of_another_type(rng: Random, value: Any) -> Any:
    """Return what says the same to people: "7" for 7."""
    conversions: list[Callable[[], Any]] = [
        lambda: str(value),
        lambda: [value],
        lambda: {"value": value},
        lambda: json.dumps(value, default=str),
        lambda: value.encode() if isinstance(value, str) else value.decode("latin-1"),
        lambda: int(value),
        lambda: float(value),
        lambda: bool(value),
    ]
    try:
        return rng.choice(conversions)()
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _spliced(rng: Random, value: Any) -> Any:
    """Return a text, or bytes, cut off, with a part taken out, doubled, written over, or put in."""
    start, end = sorted((rng.randrange(len(value) + 1), rng.randrange(len(value) + 1)))
    kind = rng.randrange(5)
    if kind == 0:
        return value[:start]
    if kind == 1:
        return value[:start] + value[end:]
    if kind == 2:
        return value[:end] + value[start:]
    more: Any
    if isinstance(value, bytes):
        more = rng.choice((b"\xff", b"\0", b"\xff" * 8, b"[" * 500, b"9" * 40, bytes([rng.randrange(256)])))
    else:
        more = rng.choice(("\0", "\ud800", "[", '"', "9" * 40, "|", ".", "-", "\u0663"))
    return value[:start] + more + value[start + (len(more) if kind == 3 else 0) :]


def _near(rng: Random, value: Any) -> Any:
    near = (-value, value + 1, value - 1, value * 1_000, value * 10**6, value * 10**12, value * 2)
    return rng.choice(near)


def _parsed(text: str | bytes) -> tuple[Any] | None:
    """Return the value of a JSON text, in a tuple; None if it is none that is worth changing inside."""
    try:
        shown = text if isinstance(text, str) else text.decode()
        return (json.loads(shown),) if shown.startswith(_ENDS) else None
    except (ValueError, RecursionError):
        return None


def _dumped(rng: Random, value: Any) -> str:
    literals: list[str] = []

    def literal(_: Any) -> str:
        literals.append(rng.choice(_LITERALS))
        return _MARK % (len(literals) - 1)

    if rng.random() < 0.15:
        value = _with_literal(rng, value, literal)
    try:
        text = json.dumps(value, default=literal, skipkeys=True, ensure_ascii=rng.random() < 0.7)
    except (ValueError, RecursionError):
        return DEEP
    for number, written in enumerate(literals):
        text = text.replace(json.dumps(_MARK % number), written)
    return str(_spliced(rng, text)) if rng.random() < 0.1 else text


def _with_literal(rng: Random, value: Any, literal: Callable[[Any], Any]) -> Any:
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        return _with_part(rng, value, lambda part: _with_literal(rng, part, literal))
    return literal(value)
