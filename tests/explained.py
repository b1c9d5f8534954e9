"""The facts of a store's diagnosis: each advice has a code, under which ``tenure explain`` says more."""

from __future__ import annotations

from collections.abc import Iterable

from tenure._cli.explanations import sections
from tenure._opened import Fact


def facts_by_name(facts: Iterable[Fact]) -> dict[str, Fact]:
    """Return *facts* by their names; fail if one with advice has no code that is explained, or one without has one."""
    found = {fact.name: fact for fact in facts}
    for fact in found.values():
        assert (fact.code in sections()) if fact.advice else not fact.code, fact
    return found
