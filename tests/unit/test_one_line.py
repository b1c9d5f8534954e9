"""What others wrote stays on the line that it is on: in log records, whatever handler and formatter they get."""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tenure
from tenure import events
from tenure._one_line import INDENT, Indented, indented, one_line
from tenure._telemetry.callbacks import OneLineFilter
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


class Hostile:
    def __str__(self) -> str:
        return HOSTILE


class Rude:
    def __str__(self) -> str:
        raise RuntimeError("has no text")


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("by %s", (HOSTILE,)),
        (HOSTILE, ()),
        ("by %(name)s", ({"name": HOSTILE},)),
        ("by %s", (Hostile(),)),
        ("by %s", (ValueError(HOSTILE),)),
        (Hostile(), ()),
        ("%d: %s", (7, HOSTILE)),
    ],
)
def test_every_record_of_the_logger_is_one_line(
    message: object, arguments: tuple[Any, ...], records: list[logging.LogRecord]
) -> None:
    logging.getLogger("tenure").warning(message, *arguments)
    [record] = records
    line = logging.Formatter("%(levelname)s %(name)s: %(message)s").format(record)
    assert line.isprintable()
    assert "forged" in line


def test_what_has_no_text_is_left_to_the_handler() -> None:
    rude = Rude()
    record = logging.makeLogRecord({"msg": "by %s", "args": (rude,)})
    assert OneLineFilter().filter(record)
    assert record.args == (rude,)


def test_a_trace_keeps_its_lines(records: list[logging.LogRecord]) -> None:
    logging.getLogger("tenure").warning("failed%s", Indented("\n" + indented("one\ntwo")))
    assert records[0].getMessage() == "failed\n    one\n    two"


SOURCE = Path(tenure.__file__).parent
OTHER_LOGGERS = {
    "_backends/azure_storage/client.py": {"'azure.core.pipeline.policies.http_logging_policy'"},  # filtered only
    "_backends/rabbitmq/connection.py": {"'aiormq'", "'aiormq.channel'", "'aiormq.connection'"},  # of its driver
    "testing/loop.py": {"'asyncio'"},
}


def loggers_in(source: str) -> set[str]:
    """Return the loggers that *source* asks for, and what it logs without one."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)).rpartition(".")[2] in (
            "getLogger",
            "getChild",
        ):
            found |= {ast.unparse(node.args[0]) if node.args else called}
        elif isinstance(node, ast.Call) and re.fullmatch(
            r"logging\.(debug|info|warning|error|exception|critical|log)", called
        ):
            found.add(called)
    return found - {"'tenure'"}


def test_tenure_has_one_logger() -> None:
    files = {path.relative_to(SOURCE).as_posix(): loggers_in(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert {name: found for name, found in files.items() if found} == OTHER_LOGGERS


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import logging\nlogging.getLogger(__name__).info(x)", "__name__"),
        ("import logging\nlogging.getLogger('tenure.queue')", "'tenure.queue'"),
        ("from logging import getLogger\ngetLogger()", "getLogger"),
        ("logger.getChild('queue').info(x)", "'queue'"),
        ("import logging\nlogging.warning(x)", "logging.warning"),
    ],
)
def test_a_planted_logger_is_found(source: str, found: str) -> None:
    assert loggers_in(source) == {found}
