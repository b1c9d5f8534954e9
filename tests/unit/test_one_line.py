"""What others wrote stays on the line that it is on: in log records, whatever handler and formatter they get."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure import events
from tenure._one_line import INDENT, indented, one_line
from tenure._telemetry.log import log_event

SPECIAL = [
    *map(chr, range(0x20)),
    *map(chr, range(0x7F, 0xA0)),
    *"\u2028\u2029\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
    "\ud800",
    "\udfff",
]
HOSTILE = "x\n2026-11-29 ERROR tenure: forged" + "".join(SPECIAL)
KINDS = sorted(
    (one for one in vars(events).values() if isinstance(one, type) and issubclass(one, events.Event)),
    key=lambda one: one.__name__,
)


@pytest.mark.parametrize("letter", SPECIAL, ids=ascii)
def test_what_could_end_a_line_or_change_how_it_looks_is_escaped(letter: str) -> None:
    shown = one_line(f"a{letter}b")
    assert shown.isascii()
    assert shown.isprintable()
    assert shown.encode().decode("unicode_escape") == f"a{letter}b"


@pytest.mark.parametrize("text", ["", "two kettles", "Übergrößenträger", "日本語", "\\n", "😀"])
def test_what_is_printable_is_shown_as_it_is(text: str) -> None:
    assert one_line(text) == text


@given(st.text(st.characters()))
def test_any_text_is_one_line_that_can_be_written(text: str) -> None:
    shown = one_line(text)
    assert shown.isprintable()
    assert len(shown.splitlines()) <= 1
    assert shown.encode().decode() == shown
    assert one_line(shown) == shown


@given(st.text(st.characters() | st.sampled_from(SPECIAL)))
def test_no_line_of_an_indented_text_begins_an_entry(text: str) -> None:
    assert all(line == "" or line.startswith(INDENT) for line in indented(text).split("\n"))
    assert len(indented(text).split("\n")) == max(1, len(text.splitlines()))


# --- log records -------------------------------------------------------------------------------------------------


def hostile(kind: type[events.Event]) -> events.Event:
    """Return an event of this *kind*, with a hostile text in each field that may have any."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        values[field.name] = 1 if hint is int else 1.0 if hint is float or float in get_args(hint) else HOSTILE
    return kind(**values)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    found: list[logging.LogRecord] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    handler, log = Keeping(), logging.getLogger("tenure")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@pytest.mark.parametrize("kind", KINDS, ids=lambda one: one.__name__)
def test_the_record_of_each_event_is_one_line_with_any_formatter(
    kind: type[events.Event], records: list[logging.LogRecord]
) -> None:
    log_event(event := hostile(kind))
    [record] = records
    line = logging.Formatter("%(levelname)s %(name)s: %(message)s").format(record)
    assert line.isprintable()
    assert "forged" in line
    assert all(one.isprintable() for one in record.args or () if isinstance(one, str))
    assert record.__dict__["tenure"] == dataclasses.asdict(event)  # as they are, for a formatter that writes JSON
