"""Options of other clients that change nothing here: they are accepted, and ``tenure doctor`` says so.

An option may only be set aside if what it asks for holds anyhow, or matters to its own client alone. What protects a
connection is refused instead where it can't be had.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from tenure._opened import Fact

_WHY, _IF = "set aside", "set aside if"


def set_aside(why: str, default: object = None, *, only: object = None) -> Any:
    """Return the field of an option that is set aside: with any value, or with the value *only*.

    Args:
        why: What holds instead, for ``tenure doctor``.
        default: Its default.
        only: The value that is set aside, if the others are not.
    """
    return field(default=default, metadata={_WHY: why, _IF: only})


def names_set_aside(options: Any) -> frozenset[str]:
    """Return the names of the options of a store that are set aside with any value."""
    return frozenset(one.name for one in fields(options) if _WHY in one.metadata and one.metadata[_IF] is None)


def facts_set_aside(options: Any) -> list[Fact]:
    """Return a fact about each option that was given and is set aside."""
    found = []
    for one in fields(options):
        value = getattr(options, one.name)
        if _WHY in one.metadata and value is not None and one.metadata[_IF] in (None, value):
            found.append(Fact(f"option {one.name}", f"set aside: {one.metadata[_WHY]}"))
    return found
