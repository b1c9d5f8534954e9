"""What the command line writes of others' texts: on lines that are its own, and as JSON that reads as what it was."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tenure.sync
from tenure._cli.child import _read_report
from tenure._cli.exits import Exit
from tenure._cli.output import log_to_stderr, print_json
from tenure._queue.headers import RESERVED_NAMES, RESERVED_PREFIXES
from tenure.cli import main

Captured = pytest.CaptureFixture[str]

HOSTILE = "a\n\r\t\x00\x1b[2J\x7f\x85\x9b31m\u2028\u2029\u200e\u200f\u061c\u202a\u202e\u2066\u2069\ud800é日😀"

hostile = st.text(st.characters() | st.sampled_from(HOSTILE))
values = st.recursive(hostile | st.integers() | st.none(), lambda one: st.lists(one) | st.dictionaries(hostile, one))


@pytest.mark.parametrize("lines", [False, True])
def test_json_has_nothing_raw_that_is_not_printable(lines: bool, capsys: Captured) -> None:
    value = {HOSTILE: [HOSTILE, {"b": HOSTILE}]}
    print_json(value, lines=lines)
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert out.count("\n") == len(out.splitlines()) == (1 if lines else 8)
    assert json.loads(out) == value


def test_json_has_what_is_printable_as_it_is(capsys: Captured) -> None:
    print_json("é 日 😀", lines=True)
    assert capsys.readouterr().out == '"é 日 😀"\n'


@given(values)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_json_reads_as_what_it_was(capsys: Captured, value: object) -> None:
    print_json(value, lines=True)
    out = capsys.readouterr().out
    assert out.removesuffix("\n").isprintable()
    assert json.loads(out) == value


def test_the_messages_of_others_are_shown_as_json_with_nothing_raw(tmp_path: Path, capsys: Captured) -> None:
    url = f"sqlite:///{tmp_path}/work.db"
    text = HOSTILE.replace("\0", "").replace("\ud800", "")
    with tenure.sync.connect(url) as backend:
        backend.queue("orders").send(text.encode(), headers={"note": text})
    assert main(["queue", "peek", "orders", "--on", url, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    [message] = json.loads(out)
    assert (message["body"], message["headers"]) == (text, {"note": text})


# --- the log on stderr -------------------------------------------------------------------------------------------


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("tenure")
    before = logger.handlers, logger.propagate, logger.level
    log_to_stderr(0)
    yield logger
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


def test_no_line_of_a_traceback_looks_like_one_of_ours(log: logging.Logger, capsys: Captured) -> None:
    forged = "no price\ntenure: error: the store is gone\rtenure: error: again\x85tenure: error: and again\x1b[2J"
    try:
        raise ValueError(forged)
    except ValueError:
        log.warning("its handler failed", exc_info=True)
    line, *traceback = capsys.readouterr().err.splitlines()
    assert line == "tenure: warning: its handler failed"
    assert traceback[0] == "    Traceback (most recent call last):"
    assert "    tenure: error: the store is gone" in traceback
    assert all(one.startswith("    ") and one.isprintable() for one in traceback)


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("has no text")


def test_a_record_that_can_not_be_formatted_ends_nothing(
    log: logging.Logger, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log.warning("%s", Rude())
    log.warning("%d messages", "no number")
    log.warning("its handler failed", exc_info=Rude())
    log.warning("goes on")
    assert capsys.readouterr().err.endswith("tenure: warning: goes on\n")


# --- headers and reports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*(f"{prefix}x" for prefix in RESERVED_PREFIXES), "Tenure-X", *sorted(RESERVED_NAMES)])
@pytest.mark.parametrize("lines", [[], ["--lines"]])
def test_a_reserved_header_is_refused(name: str, lines: list[str], tmp_path: Path, capsys: Captured) -> None:
    url = f"sqlite:///{tmp_path}/work.db"
    assert main(["send", "orders", "body", *lines, "--header", f"{name}=1", "--on", url]) == Exit.CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tenure: error: ")
    assert f"the header '{name}' is reserved" in err
    with tenure.sync.connect(url) as backend:
        assert backend.queue("orders").stats() == tenure.Stats()


@pytest.mark.parametrize(
    ("report", "found"),
    [
        (b"", {}),
        (b"running 12\nended 3\n", {"running": 12, "ended": 3}),
        (
            b"running 12\n\xff\nended\nended x\nended 3 4\nlost -1\nother 5\nended " + b"9" * 5_000,
            {"running": 12},
        ),
    ],
)
def test_of_a_guards_report_only_its_own_lines_are_read(report: bytes, found: dict[str, int]) -> None:
    assert _read_report(report) == found
