"""The glossary has each word of the public API: those of its classes and verbs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import tenure

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")

PLAIN = """
    aclose ask attempt batch clock close connect decode delete diagnose error fact failure filter header headers json
    leaders leave list live metadata migrate migration names note of on open option options outgoing partition pause
    place places policy remaining remove resume reveal run running secret seen send serve set settings settled settling
    shutdown soon sql startup state stop support text timing url vacancies value withdraw work
"""
"""Words with their usual meaning, or explained by others."""


def terms() -> list[str]:
    """Return the terms of the glossary, in lower case."""
    rows = re.findall(r"^\| (.+?) \|", PAGE, re.MULTILINE)
    return [word for row in rows if row != "Word" for word in re.findall(r"[a-z]+", row.lower())]


def words() -> set[str]:
    """Return the words of public classes and of what can be called on them."""
    names: set[str] = set()
    for name in tenure.__all__:
        what = getattr(tenure, name)
        if inspect.isclass(what) and issubclass(what, Exception):
            continue
        names.add(name)
        if inspect.isclass(what):
            names |= {verb for verb, value in vars(what).items() if verb[0] != "_" and inspect.isfunction(value)}
    return {word.lower() for name in names for word in re.findall(r"[A-Z]?[a-z]+", name)}


def test_each_word_of_the_api_is_in_the_glossary() -> None:
    known = terms()
    stems = {word: word.removesuffix("s").removesuffix("e")[:5] for word in words() - set(PLAIN.split())}
    missing = {word for word, stem in stems.items() if not any(term.startswith(stem) for term in known)}
    assert not missing, "put them into docs/glossary.md, or among the plain words here"


def test_each_term_stands_once_and_has_a_meaning() -> None:
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", PAGE, re.MULTILINE)]
    rows = [row for row in rows if row[0] != "Word" and not row[0].startswith("---")]
    first = [row[0] for row in rows]
    assert len(first) == len(set(first))
    assert all(len(row) == 3 and row[1] for row in rows)
