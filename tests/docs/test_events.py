"""The tables of events equal ``tenure.events``: each event once, with its fields and its first sentence."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

from tenure import events

DOCS = Path(__file__).resolve().parents[2] / "docs"


def names(kind: type[events.Event]) -> list[str]:
    return [field.name for field in fields(kind)]


def row(kind: type[events.Event]) -> str:
    """Return the row of *kind* in a table, without the fields that all events, or all of messages, have."""
    of_message = issubclass(kind, events.MessageEvent)
    own = names(kind)[len(names(events.MessageEvent if of_message else events.Event)) :]
    shown = " ".join([*(["…"] if of_message else []), *(f"`{name}`" for name in own)])
    return f"| `{kind.__name__}` | {shown} | {(inspect.getdoc(kind) or '').splitlines()[0]} |"


def test_the_tables_equal_the_docstrings_of_the_events() -> None:
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)]
    rows = [row(kind) for kind in kinds if kind not in (events.Event, events.MessageEvent)]
    pages = "".join((DOCS / page).read_text() for page in ("elections.md", "queues.md"))
    assert re.findall(r"^\| `[A-Z].*$", pages, re.MULTILINE) == rows


def test_the_page_names_every_reason_and_the_common_fields() -> None:
    elections, queues = ((DOCS / page).read_text() for page in ("elections.md", "queues.md"))
    [reasons] = re.findall(r"^`reason` is (.*)\.$", elections, re.MULTILINE)
    assert re.findall(r"`(\w+)`", reasons) == list(events.Reason.__args__)  # type: ignore[attr-defined]
    assert all(f"`{name}`" in elections for name in names(events.Event))
    assert all(f"`{name}`" in queues for name in names(events.MessageEvent)[3:])
