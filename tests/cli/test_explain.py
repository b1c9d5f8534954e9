"""``tenure explain``, and the ways that lead to it: a line after an error on a terminal, the codes of doctor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import tenure.sync
from tenure._cli import group
from tenure._cli.exits import Exit, Failure
from tenure._cli.explanations import sections
from tenure.cli import main
from tests.terminal import Terminal, plain

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENURE_URL", raising=False)
    monkeypatch.chdir(tmp_path)


def run_cli(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    return (code, *capsys.readouterr())


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_section_in_plain_text(capsys: Captured) -> None:
    code, out, err = run_cli(capsys, "explain", "unavailable")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:3] == [
        "unavailable",
        "",
        "The store could not be asked, or gave no answer in time: neither yes nor no is",
    ]
    assert "    tenure doctor --look-only" in lines
    assert [line.partition(":")[0] for line in lines if re.match(r"(Cause|Do now|Meanwhile|More): ", line)] == [
        *("Cause", "Do now", "Meanwhile", "More")
    ]
    assert "(docs/queues.md#consume)" in out
    assert re.search(r"\*\*|```|\]\(", out) is None
    assert max(len(line) for line in lines if not line.startswith("    ")) <= 80


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ("term-lost", "term-lost"),
        ("TermLost", "term-lost"),
        ("tenure.TermLost", "term-lost"),
        ("tenure.errors.TermLost:", "term-lost"),
        ("RenewalMissed", "renewal-missed"),
        ("max_deliveries", "max-deliveries"),
        ("exit 65", "exit-65"),
        ("[redis-eviction]", "redis-eviction"),
        ("69", "exit-69"),
        ("0", "exit-0"),
        ("143", "exit-128"),
    ],
)
def test_what_an_error_or_a_log_shows_is_found(asked: str, code: str, capsys: Captured) -> None:
    done, out, _ = run_cli(capsys, "explain", asked)
    assert (done, out.partition("\n")[0]) == (0, code)


@pytest.mark.parametrize("code", sections())
def test_each_section_can_be_shown(code: str, capsys: Captured) -> None:
    done, out, err = run_cli(capsys, "explain", code)
    assert (done, err) == (0, "")
    assert "\nDo now: " in out
    assert "\x00" not in out


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("unvailable", "there is no code 'unvailable'; did you mean 'unavailable'?; see: tenure explain --help"),
        ("redis-evicted", "there is no code 'redis-evicted'; did you mean 'redis-eviction'?"),
        ("qqq", "there is no code 'qqq'; tenure explain lists all codes"),
        ("", "there is no code ''; tenure explain lists all codes"),
        ("256", "there is no code '256'"),
        ("42", "there is no code '42'"),
    ],
)
def test_an_unknown_code_names_the_nearest_one(asked: str, says: str, capsys: Captured) -> None:
    code, out, err = run_cli(capsys, "explain", asked)
    assert (code, out) == (Exit.USAGE, "")
    assert err.startswith(f"tenure: error: {says}")
    assert err.count("\n") == 1


def test_without_a_code_all_are_listed(capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "explain")
    assert code == 0
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert listed == list(sections())
    assert "Warnings about Redis\n" in out
    assert all(len(line.split()) > 3 for line in out.splitlines() if line.startswith("  "))


def test_for_programs(capsys: Captured) -> None:
    one = json.loads(run_cli(capsys, "explain", "lock-lost", "--json")[1])
    assert (one["code"], one["part"]) == ("lock-lost", "Errors of the library")
    assert one["text"].startswith(one["summary"])
    assert "](docs/queues.md#consume)" in one["text"]
    everything = json.loads(run_cli(capsys, "explain", "--json")[1])
    assert [each["code"] for each in everything] == list(sections())
    assert set(everything[0]) == {"code", "part", "summary"}


def test_it_needs_no_store_and_no_event_loop() -> None:
    line = (
        "import sys; from tenure.cli import main; main(['explain', 'config']); "
        "sys.exit(' '.join({'asyncio', 'sqlite3', 'rich.table'} & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_on_a_narrow_terminal_it_is_wrapped_and_styled() -> None:
    with Terminal("explain", "unavailable", width=60) as terminal:
        assert terminal.wait() == 0
        raw = terminal.raw
    assert raw.startswith("\x1b[1munavailable\x1b[0m\n")
    assert "\x1b[1mCause:\x1b[0m" in raw
    prose = [line for line in plain(raw).splitlines() if not line.startswith("    ")]
    assert max(map(len, prose)) <= 60


# --- after an error --------------------------------------------------------------------------------------------------


def on_terminal(*arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, list[str]]:
    with Terminal(*arguments, width=200, environment=environment) as terminal:
        code = terminal.wait()
        return code, terminal.raw.splitlines()


@pytest.mark.parametrize(
    ("line", "code", "explained"),
    [
        (["status", "--on", "sqlit:///x"], Exit.CONFIG, "config"),
        (["status", "--on", "sqlite:///none.db"], Exit.CONFIG, "config"),
        (["queue", "orders", "--on", "sqlite:///work.db"], Exit.VACANT, "exit-3"),
        (["queue", "delete", "bills", "--on", "sqlite:///work.db"], Exit.BROKEN, "queue-not-empty"),
        (["lead", "job", "--on", "sqlite:///work.db", "--", "no-such-command"], Exit.NOT_FOUND, "exit-127"),
        (["status", "--me", "--socket-dir", "."], Exit.VACANT, "exit-3"),
    ],
)
def test_on_a_terminal_a_line_names_what_explains_it(line: list[str], code: int, explained: str) -> None:
    with tenure.sync.connect("sqlite:///work.db") as backend:
        backend.queue("bills").send(b"")
    done, lines = on_terminal(*line)
    assert done == code
    error, more = lines
    assert plain(error).startswith("tenure: error: ")
    assert more == f"\x1b[2mtenure: more: tenure explain {explained}\x1b[0m"
    assert explained in sections()


def test_without_colours_it_is_plain() -> None:
    _, lines = on_terminal("status", "--on", "sqlit:///x", environment={"NO_COLOR": "1"})
    assert lines[1:] == ["tenure: more: tenure explain config"]


@pytest.mark.parametrize("line", [["stauts"], ["status"], ["explain", "nothing-like-that"]])
def test_a_wrong_command_line_names_its_help_and_no_more(line: list[str]) -> None:
    code, lines = on_terminal(*line)
    assert code == Exit.USAGE
    [error] = lines
    assert "see: tenure" in error


def test_elsewhere_an_error_is_one_line() -> None:
    line = [sys.executable, "-m", "tenure.cli", "status", "--on", "sqlit:///x"]
    run = subprocess.run(line, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert run.returncode == Exit.CONFIG
    assert run.stderr.count("\n") == 1
    assert "tenure explain" not in run.stderr


def test_an_error_behind_a_failure_is_the_one_that_is_explained() -> None:
    failure = Failure(Exit.UNAVAILABLE, "17 were sent; the store did not answer")
    assert group.explained_by(failure) == "exit-69"
    failure.__cause__ = tenure.Unavailable("no answer")
    assert group.explained_by(failure) == "unavailable"
    assert group.explained_by(Failure(Exit.SIGNAL + 2, "interrupted")) == "exit-128"
    assert group.explained_by(KeyError("bug")) == "exit-70"
    assert group.explained_by(tenure.TermLost("over")) == "term-lost"


@pytest.mark.parametrize("code", Exit, ids=lambda code: str(int(code)))
def test_each_failure_leads_to_a_section(code: Exit) -> None:
    assert group.explained_by(Failure(code, "…")) in sections()


# --- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_names_the_code_of_each_warning(capsys: Captured) -> None:
    code, out, _ = run_cli(capsys, "doctor", "memory:")
    assert code == 0
    warned = [line for line in out.splitlines() if line.startswith("! ")]
    named = [line.rpartition(" [")[2].rstrip("]") for line in warned]
    assert named == ["memory-only", "tokens-restart"]
    assert set(named) <= set(sections())
    assert out.endswith("\n\nEach warning in full: tenure explain CODE, for example: tenure explain memory-only\n")
    advice = json.loads(run_cli(capsys, "doctor", "memory:", "--json")[1])["advice"]
    assert [one["code"] for one in advice] == named


def test_doctor_without_warnings_names_no_code(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenure._backends.sqlite.diagnosis.LIBRARY_SOUND", (3, 35, 0))
    with tenure.sync.connect("sqlite:///work.db") as backend:
        backend.queues()
    out = run_cli(capsys, "doctor", "sqlite:///work.db")[1]
    assert out.endswith("\n\nNo warnings.\n")
    assert "tenure explain" not in out
