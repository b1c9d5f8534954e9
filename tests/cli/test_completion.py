"""Completion in the shell: by bash's own function, with the names of the store, and without errors."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import tenure.sync
from tests.absent import skip_or_fail
from tests.sharing import sharing

BASH = shutil.which("bash")

LOAD = 'eval "$(_TENURE_COMPLETE=bash_source tenure)"'

COMPLETE = r"""
line=$1 COMP_LINE=$1 COMP_POINT=${#1} COMPREPLY=() COMP_WORDS=() COMP_CWORD=0
compopt() { echo compopt "$@"; }  # it works only while bash itself completes
$(complete -p tenure | sed 's/.*-F \([^ ]*\) .*/\1/') tenure
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENURE_URL", "sqlite:///work.db")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def store(place: None) -> None:
    with tenure.sync.connect("sqlite:///work.db") as backend:
        for name in ("orders", "orbits", "eu:tea", "eu:coffee", "two words", "bills;reboot"):
            backend.queue(name).send(b"")
        with backend.election("nightly-report").campaign():
            pass


def completed(*lines: str) -> list[list[str]]:
    """Return bash's completions at the end of each line."""
    if BASH is None:
        skip_or_fail("there is no bash")
    script = LOAD + "".join(f"\nset -- {shlex.quote(line)}\n{COMPLETE}\necho END" for line in lines)
    done = subprocess.run([BASH, "--norc", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return [sorted(filter(None, part.splitlines())) for part in done.stdout.split("END\n")[:-1]]


def test_words_options_and_names(store: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENURE_COMPLETE_TIMEOUT", "30")  # on a busy machine, a second is short
    lines = {
        "tenure sen": ["send"],
        "tenure dead list --reas": ["--reason"],
        "tenure work ": ["eu:coffee", "eu:tea", "orbits", "orders"],  # the others would need quotes
        "tenure send orders --reply-to orb": ["orbits"],
        "tenure queue pe": ["peek"],
        "tenure queue peek orb": ["orbits"],
        "tenure lead --ttl 5s ni": ["nightly-report"],
        "tenure explain sqlite-": [
            "sqlite-clock-ahead",
            "sqlite-disk-full",
            "sqlite-file-mode",
            "sqlite-folder-mode",
            "sqlite-no-wake-up",
            "sqlite-synchronous",
            "sqlite-version",
        ],
        "tenure work orders -- ./ser": ["compopt -o default"],
        # Bash replaces what is behind the colon, and takes an address for three words.
        "tenure send eu:t": ["tea"],
        "tenure send --on sqlite:///work.db orb": ["orbits"],
    }
    assert dict(zip(lines, completed(*lines), strict=True)) == lines


def test_names_of_partitions_are_completed_after_that_of_their_group(
    store: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENURE_COMPLETE_TIMEOUT", "30")
    with sharing("sqlite:///work.db", "night", 2, ["ann"]):
        pass
    lines = {
        "tenure status n": ["nightly-report"],
        "tenure resign night.part": ["night.partition-0", "night.partition-1"],
        "tenure partitions ": ["night"],
    }
    assert dict(zip(lines, completed(*lines), strict=True)) == lines


def test_a_store_that_can_not_be_asked_completes_nothing_and_is_not_changed(tmp_path: Path) -> None:
    with closing(sqlite3.connect("others.db")) as connection:
        connection.execute("CREATE TABLE customer (id)")
        connection.commit()
    Path("empty.db").touch()
    before = contents(tmp_path)
    urls = ["sqlite:///none.db?create=true", "sqlite:///others.db", "sqlite:///empty.db", "peers://127.0.0.1:1?me=a"]
    lines = [*(f"tenure send --on {url} o" for url in urls), "tenure nonsense ", "tenure send 'a"]
    assert completed(*lines) == [[] for _ in lines]
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[str, str]:
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in folder.iterdir() if one.is_file()}


@pytest.fixture
def silent() -> Iterator[int]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_store_that_does_not_answer_is_not_waited_for(silent: int) -> None:
    pytest.importorskip("redis")
    began = time.monotonic()
    assert completed(f"tenure send --on redis://127.0.0.1:{silent} o") == [[]]
    assert time.monotonic() - began < 10.0  # a second, and two starts of Python on a busy machine


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_scripts_of_other_shells_are_those_of_click(shell: str) -> None:
    environment = {**os.environ, "_TENURE_COMPLETE": f"{shell}_source"}
    done = subprocess.run(["tenure"], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_TENURE_COMPLETE={shell}_complete" in done.stdout


def test_an_unknown_shell_gets_a_list_of_the_known_ones() -> None:
    environment = {**os.environ, "_TENURE_COMPLETE": "csh_source"}
    done = subprocess.run(["tenure"], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "use bash_source, zsh_source or fish_source" in done.stderr
