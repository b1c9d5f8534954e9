"""The parts of ``tenure lead`` that need no process: the command's environment, pauses, repeated lines."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tenure._cli.child import environment
from tenure._cli.exits import Exit
from tenure._cli.lead_run import PAUSE_MOST, QUICK, _next_pause
from tenure._cli.output import log_to_stderr
from tenure._url import Url
from tenure.cli import main


def environment_of(url: str) -> dict[str, str]:
    return environment(Url.parse(url), {"TENURE_NAME": "job", "TENURE_SESSION": None})


@pytest.mark.parametrize("url", ["redis://u:hunter2@host", "azure://account?sas_token=hunter2"], ids=["user", "option"])
def test_the_command_gets_no_password(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_URL", url)
    environment = environment_of(url)
    assert "TENURE_URL" not in environment
    assert "hunter2" not in str(environment)


def test_the_command_gets_the_url_of_a_store_without_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_URL", "sqlite:///another.db")
    monkeypatch.setenv("TENURE_SESSION", "of a worker that has started us")
    environment = environment_of("sqlite:///work.db?busy=1")
    assert environment["TENURE_URL"] == "sqlite:///work.db?busy=1"
    assert environment["TENURE_NAME"] == "job"
    assert "TENURE_SESSION" not in environment


def test_the_command_gets_all_other_variables_with_their_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_URL", "redis://:hunter2@host")
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    environment = environment_of("redis://:hunter2@host")
    assert environment["PGPASSWORD"] == "hunter2"
    assert os.environ.keys() - environment.keys() == {"TENURE_URL"}


def test_a_command_that_ends_at_once_is_started_with_growing_pauses() -> None:
    pauses = [0.0]
    for _ in range(12):
        pauses.append(_next_pause(pauses[-1], ran_for=0.1))
    assert pauses[1] < pauses[4] < pauses[7] <= PAUSE_MOST
    assert _next_pause(pauses[-1], ran_for=QUICK) == 0.0


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """The log of tenure; as it was, afterwards."""
    log = logging.getLogger("tenure")
    try:
        yield log
    finally:
        log_to_stderr(-1)
        log.handlers, log.propagate = [], True
        log.setLevel(logging.NOTSET)


def test_a_command_does_not_have_the_verbosity_of_the_one_before(
    log: logging.Logger, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log_to_stderr(1)
    assert main(["status", "job", "--me", "--socket-dir", str(tmp_path)]) != Exit.DONE
    assert log.level == logging.ERROR
    assert re.match(r"tenure: error: [a-z]", capsys.readouterr().err)


def test_the_same_line_is_not_printed_twice_in_a_row(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(0)
    log.warning("down")
    log.warning("down")
    log.info("not asked for")
    log.error("worse")
    log_to_stderr(1)
    log.info("up")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["tenure: warning: down", "tenure: error: worse"]
    assert re.fullmatch(r"tenure: \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 up", lines[2])


def on_terminal(code: str, **environment: str) -> bytes:
    """Run Python *code* with stdout and stderr on a terminal; return its output."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        line = [sys.executable, "-c", code]
        subprocess.run(line, stdout=theirs, stderr=theirs, check=True, env={**os.environ, **environment})
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the end of a terminal is an error; the output may come in pieces
            while more := screen.read(4096):
                shown += more
    return shown


def test_error_is_coloured_on_a_terminal() -> None:
    code = "from tenure._cli.output import print_error, notice, warn; print_error('a'); warn('b'); notice('c')"
    plain = b"tenure: error: a\r\ntenure: warning: b\r\ntenure: c\r\n"
    coloured = b"tenure: \x1b[1;31merror:\x1b[0m a\r\ntenure: \x1b[33mwarning:\x1b[0m b\r\ntenure: c\r\n"
    assert on_terminal(code, TERM="xterm", NO_COLOR="") == coloured
    assert on_terminal(code, TERM="xterm", NO_COLOR="1") == plain
    assert on_terminal(code, TERM="dumb", NO_COLOR="") == plain


def test_a_table_on_a_terminal() -> None:
    code = "from tenure._cli.output import print_table; print_table(('NAME', 'X'), [('[red]a', '\\x1b[2J')])"
    shown = on_terminal(code, TERM="dumb")
    assert b"[red]a" in shown
    assert rb"\x1b[2J" in shown
