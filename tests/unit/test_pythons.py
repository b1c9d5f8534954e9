"""``make pythons`` and ``make lowest``: the Pythons that they find, and the packages that they install."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from scripts.install import HASHES, LOWEST_HASHES, merged, requirements
from scripts.pythons import ROOT, interpreter, supported

LOWEST = ROOT / "constraints" / "lowest.txt"

OURS = f"{sys.version_info[0]}.{sys.version_info[1]}"


def a_command(folder: Path, script: str) -> str:
    folder.mkdir()
    command = folder / f"python{OURS}"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return str(folder)


def test_the_running_python_is_supported_and_found(tmp_path: Path) -> None:
    assert OURS in supported()
    found, why = interpreter(OURS, [a_command(tmp_path / "bin", f'exec {sys.executable} "$@"')])
    assert (found, why) == (sys.executable, "")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'shim: no such version' >&2; exit 127", "can't make environments: shim: no such version"),
        ("echo 3.1 /usr/bin/python", "can't make environments: 3.1 /usr/bin/python"),
        ("exit 1", "can't make environments: it prints nothing"),
    ],
)
def test_a_shim_counts_as_absent_and_is_skipped(tmp_path: Path, script: str, says: str) -> None:
    stand_in = a_command(tmp_path / "stand_in", script)
    found, why = interpreter(OURS, [stand_in])
    assert found == ""
    assert says in why
    real = a_command(tmp_path / "real", f'exec {sys.executable} "$@"')
    assert interpreter(OURS, [stand_in, real]) == (sys.executable, "")


def test_a_missing_python_is_absent(tmp_path: Path) -> None:
    assert interpreter("3.11", [tmp_path]) == ("", "no python3.11 on the path")


def test_the_lowest_versions_are_the_bounds_of_pyproject() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    runtime = [
        each
        for extra in ("azure", "cli", "etcd", "kubernetes", "nats", "postgres", "redis", "zookeeper")
        for each in extras[extra]
    ]
    bounds = {re.split(r"[\[>]", each)[0]: each.partition(">=")[2] for each in runtime}
    pinned = dict(line.split("==") for line in LOWEST.read_text().splitlines() if "==" in line)
    assert {name: pinned.get(name) for name in bounds} == bounds
    hashes = merged(HASHES.read_text(encoding="utf-8"), LOWEST_HASHES.read_text(encoding="utf-8"))
    pins = re.findall(r"^[\w.-]+==\S+", requirements(["all", "test"], hashes), re.MULTILINE)
    assert {f"{name}=={version}" for name, version in bounds.items()} <= set(pins)
    names = [pin.partition("==")[0].lower() for pin in pins]
    assert sorted(set(names)) == sorted(names)  # pip can't install two versions of one
