"""Shared by the readers of typed bodies: the error for a value that doesn't fit, and numbers as they were written."""

from __future__ import annotations

import re
import reprlib
import sys
import typing
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from tenure._queue.failures import text_of

Read = Callable[[Any], Any]
"""Makes a value of a type from a value of JSON, or raises ``Misfit``."""

TEXTS = (("uuid", "UUID"), ("pathlib", "PurePath"), *(("ipaddress", f"IPv{n}{of}") for n in (4, 6) for of in (
    "Address", "Network", "Interface"
)))  # fmt: skip
"""Types that are made of text, and whose ``str`` is that text."""

DURATION = re.compile(
    r"(?P<sign>-?)P(?:(?P<weeks>\d{1,20})W)?(?:(?P<days>\d{1,20})D)?"
    r"(?:T(?:(?P<hours>\d{1,20})H)?(?:(?P<minutes>\d{1,20})M)?(?:(?P<seconds>\d{1,20})(?:\.(?P<part>\d{1,9}))?S)?)?",
    re.ASCII,
)
"""A duration in ISO 8601. The longest ``timedelta`` has 14 digits of seconds; no int is made of many more."""

SHOWN = 80
"""The characters shown of a value that doesn't fit, at most."""

SHOWN_AT = 300
"""The characters shown of its place, at most."""

SHOWN_WHY = 400
"""The characters shown of the error of a type's own code, or of its library, at most."""

_Tries = dict[tuple[Read, int], tuple[Any, "Misfit | None"]]

TRIES: ContextVar[_Tries] = ContextVar("tenure_body_tries")
"""The results of unions for the lists and objects of the present body, by their identity.

Without it, a recursive type with unions would read a deeply nested value 2^depth times.
"""


class Misfit(Exception):
    """A value that doesn't fit, and its place, which the readers around it complete from the inside out."""

    def __init__(self, problem: str, at: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.at = at

    def inside(self, place: str) -> Misfit:
        """Add *place*, in which this place is, and return this error."""
        self.at = place + self.at
        return self

    def __str__(self) -> str:
        at = self.at
        if len(at) > SHOWN_AT:
            at = f"{at[: SHOWN_AT // 2]}…{at[-SHOWN_AT // 2 :]}"
        return f"the body{at} {self.problem}"


class Written(float):
    """A number that a ``float`` does not hold exactly, with its text, from which a ``Decimal`` is made."""

    text: str


def written(text: str) -> float:
    """Return the number in *text*; a ``Written`` one if a ``float`` does not hold it exactly."""
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
    """Return *value* with each ``Written`` number in it as a plain float."""
    if type(value) is Written:
        return float(value)
    if type(value) is list:
        return [rounded(one) for one in value]
    return {key: rounded(one) for key, one in value.items()} if type(value) is dict else value


def name_of_type(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


_SHORT = reprlib.Repr()

_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 4, 8, 8, SHOWN, SHOWN


def reason_of(error: BaseException) -> str:
    """Return the text of an error that a type's own code has raised; it may quote all of the body."""
    return text_of(error)[:SHOWN_WHY]


def shown_briefly(value: Any) -> str:
    text = _SHORT.repr(value) if not isinstance(value, str) else repr(value[:SHOWN])
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
