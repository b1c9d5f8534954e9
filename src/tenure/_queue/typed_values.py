"""Values that readers of typed bodies share: misfits and how they are shown, numbers as they were written."""

from __future__ import annotations

import re
import reprlib
import sys
import typing
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

Read = Callable[[Any], Any]
"""Makes the value of a type out of a value of JSON, or raises ``Misfit``."""

TEXTS = (("uuid", "UUID"), ("pathlib", "PurePath"), *(("ipaddress", f"IPv{n}{of}") for n in (4, 6) for of in (
    "Address", "Network", "Interface"
)))  # fmt: skip
"""Types that are made of text, and whose ``str`` is that text."""

DURATION = re.compile(
    r"(?P<sign>-?)P(?:(?P<weeks>\d+)W)?(?:(?P<days>\d+)D)?"
    r"(?:T(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?(?:(?P<seconds>\d+)(?:\.(?P<part>\d{1,9}))?S)?)?"
)

SHOWN = 80
"""So many characters of a value are shown that doesn't fit."""

SHOWN_AT = 300
"""So many characters of its place, if that is deep."""

_Tries = dict[tuple[Read, int], tuple[Any, "Misfit | None"]]

TRIES: ContextVar[_Tries] = ContextVar("tenure_body_tries")
"""The values that unions made of the lists and objects of the body that is read, by the identity of these.

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


def rounded(value: Any) -> Any:
    """Return *value* with nothing but plain numbers in it."""
    if type(value) is Written:
        return float(value)
    if type(value) is list:
        return [rounded(one) for one in value]
    return {key: rounded(one) for key, one in value.items()} if type(value) is dict else value


def name_of_type(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


_SHORT = reprlib.Repr()

_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 4, 8, 8, SHOWN, SHOWN


def shown_briefly(value: Any) -> str:
    text = _SHORT.repr(value) if not isinstance(value, str) else repr(value[:SHOWN])
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
