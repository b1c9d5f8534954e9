"""Planted bugs: the wrong parts that each puts into a run, and how one is found by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Generic, TypeVar

from tenure.errors import ConfigError

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Mutant(Generic[P]):
    """A planted bug: a description, the parts of a run with the bug in them, and the violation that must show it."""

    about: str
    """What is wrong, in a sentence."""
    parts: P
    """The parts of a run, with the bug in them."""
    shows: str = ""
    """The kind of the violation that must show it; empty if none may."""


def parts_of(mutant: str | None, known: Mapping[str, Mutant[P]], usual: P) -> P:
    """Return the parts of a run with the planted bug called *mutant*; without one, the *usual* parts.

    Raises:
        ConfigError: There is no such bug among the *known* ones; the message names the nearest one.
    """
    if mutant is None:
        return usual
    if mutant not in known:
        close = get_close_matches(mutant, known, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
        raise ConfigError(f"there is no planted bug {mutant!r}{hint}")
    return known[mutant].parts
