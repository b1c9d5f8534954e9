"""The page for the night: its messages are in the source, its reasons are all of them, its commands run."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from tenure._queue.judge import WHY
from tenure._telemetry.metrics import REASONS
from tenure.events import Reason
from tests.docs.pages import ROOT, broken_links, code, fenced, table, text_of

PAGE = "docs/troubleshooting.md"
BIN = Path(sys.executable).parent


# --- messages ---------------------------------------------------------------------------------------------------------


@cache
def texts_of_the_source() -> list[str]:
    """Return each text of the program, with … where a value is inserted."""
    found = []
    for file in sorted((ROOT / "src" / "tenure").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def messages() -> list[str]:
    section = text_of(PAGE).split("## By message\n")[1]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


@pytest.mark.parametrize("message", messages())
def test_a_message_is_one_of_the_program(message: str) -> None:
    parts = [part for part in message.split("…") if part]
    assert max(map(len, parts)) > 10, "too little to be found by"
    assert any(holds(text, parts) for text in texts_of_the_source())


def holds(text: str, parts: list[str]) -> bool:
    """Return whether *parts* are in a text in this order."""
    place = 0
    for part in parts:
        found = text.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


def test_the_search_for_messages_can_fail() -> None:
    assert len(messages()) > 50
    assert not any("could not campaign; trying again" in text for text in texts_of_the_source())


def test_each_line_of_the_log_that_warns_is_explained() -> None:
    """Each text that an event becomes, as a warning or an error, is in a table or in the text."""
    tree = ast.parse((ROOT / "src" / "tenure" / "_telemetry" / "log.py").read_text(encoding="utf-8"))
    known = [[part for part in one.split("…") if part] for one in messages()]
    missing = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)):
            continue
        level, text = node.value.elts
        if not (isinstance(level, ast.Attribute) and level.attr in ("WARNING", "ERROR")):
            continue
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        words = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)  # type: ignore[misc]
        if not any(holds(words, parts) for parts in known):
            missing.append(words)
    assert all(re.search(r"the slots? …|were missed", one) for one in missing), missing
    assert "`SlotsSkipped`" in text_of(PAGE)


# --- reasons ----------------------------------------------------------------------------------------------------------


def test_each_reason_for_the_end_of_a_term_is_explained() -> None:
    named = [reason for row in table(PAGE, "Reason", "Cause") for reason in code(row[0])]
    assert sorted(named) == sorted(get_args(Reason))


def test_each_reason_for_the_loss_of_a_lock_is_explained() -> None:
    assert set(re.findall(r"\| `its lock is over \((\w+)\)` \|", text_of(PAGE))) == set(WHY)


def test_each_reason_of_dead_letters_is_explained() -> None:
    section = text_of(PAGE).split("### Dead letters appear\n")[1].split("\n### ")[0]
    assert {reason for reason in REASONS if f"`{reason}`" in section} == REASONS - {"unknown"}


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sockets() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="shop") as folder:  # a socket's path must be short
        yield folder


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, sockets: str) -> Iterator[dict[str, str]]:
    """Return an environment with a store that has a leader, a dead letter and a message."""
    folder = tmp_path_factory.mktemp("shop")
    environment = os.environ | {
        "TENURE_URL": f"sqlite:///{folder}/work.db",
        "TENURE_SOCKET_DIR": sockets,
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }

    def run(*words: str) -> int:
        return subprocess.run(words, env=environment, capture_output=True, check=False, timeout=60).returncode

    assert run("tenure", "send", "orders", "one") == 0
    assert run("tenure", "work", "orders", "--max-deliveries", "1", "--until-empty", "--", "false") == 0
    assert run("tenure", "send", "orders", "two") == 0
    with subprocess.Popen(["tenure", "lead", "nightly-report", "--", "sleep", "600"], env=environment) as leader:
        try:
            give_up = time.monotonic() + 60
            while run("tenure", "status", "nightly-report", "--me", "--ready") != 0:
                assert time.monotonic() < give_up, "no leader"
                time.sleep(0.05)
            yield environment
        finally:
            leader.terminate()
            leader.wait(60)


def commands() -> list[str]:
    lines = [line for block in fenced(PAGE, "sh") for line in block.splitlines()]
    return sorted(set(lines))


@pytest.mark.process
def test_the_commands_run_and_change_nothing(shop: dict[str, str]) -> None:
    def run(command: str) -> str:
        done = subprocess.run(command.split(), env=shop, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def numbers() -> dict[str, object]:
        shown: dict[str, object] = json.loads(run("tenure queue orders --json"))
        return {name: number for name, number in shown.items() if isinstance(number, int)}

    before = numbers()
    assert (before["ready"], before["dead"]) == (1, 1)
    assert len(commands()) > 8
    for command in commands():
        if "watch" not in command:
            assert run(command) or command == "tenure schedule"  # there is none
    assert numbers() == before


@pytest.mark.process
def test_the_command_that_watches_shows_the_leader(shop: dict[str, str]) -> None:
    [command] = [one for one in commands() if "watch" in one]
    with subprocess.Popen(command.split(), env=shop, stdout=subprocess.PIPE, text=True) as watching:
        try:
            assert watching.stdout is not None
            assert "token 1" in watching.stdout.readline()
        finally:
            watching.terminate()


def test_links_lead_somewhere() -> None:
    assert broken_links(PAGE) == []
