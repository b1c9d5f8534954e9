"""``make quick``: which Pythons are taken to be there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from scripts.pythons import interpreter, supported

OURS = f"{sys.version_info[0]}.{sys.version_info[1]}"


def a_command(folder: Path, script: str) -> str:
    folder.mkdir()
    command = folder / f"python{OURS}"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return str(folder)


def test_ours_is_supported_and_found(tmp_path: Path) -> None:
    assert OURS in supported()
    found, why = interpreter(OURS, a_command(tmp_path / "bin", f'exec {sys.executable} "$@"'))
    assert (found, why) == (sys.executable, "")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'shim: no such version' >&2; exit 127", "can't make environments: shim: no such version"),
        ("echo 3.1 /usr/bin/python", "can't make environments: 3.1 /usr/bin/python"),
        ("exit 1", "can't make environments: it says nothing"),
    ],
)
def test_what_only_has_the_name_is_absent_and_no_obstacle(tmp_path: Path, script: str, says: str) -> None:
    stand_in = a_command(tmp_path / "stand_in", script)
    found, why = interpreter(OURS, stand_in)
    assert found is None
    assert says in why
    real = a_command(tmp_path / "real", f'exec {sys.executable} "$@"')
    assert interpreter(OURS, f"{stand_in}{os.pathsep}{real}") == (sys.executable, "")


def test_what_is_not_there_is_absent(tmp_path: Path) -> None:
    assert interpreter("3.11", str(tmp_path)) == (None, "no python3.11 on the path")
