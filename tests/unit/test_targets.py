"""What `make quick`, `make test` and `make full` run: each test is in one of the last two, and no file is missed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import busy, stages
from tests import targets
from tests.targets import HERE

ROOT = HERE.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TESTS = ["a/test_one.py::test_x", "a/test_one.py::TestY::test_y", "a/test_two.py::test_z", "b/test_three.py::test_x"]


@pytest.mark.parametrize(
    ("entry", "theirs"),
    [
        ("a", TESTS[:3]),
        ("a/test_one.py", TESTS[:2]),
        ("a/test_one.py::TestY", TESTS[1:2]),
        ("a/test_one.py::test_x", TESTS[:1]),
        ("a/test_one.py::test", []),
        ("a/test_one", []),
    ],
)
def test_full_has_what_is_named_and_test_has_the_others(
    entry: str, theirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "FULL", [entry])
    monkeypatch.setattr(targets, "QUICK", ["a"])
    monkeypatch.setattr(targets, "NOT_QUICK", ["a/test_two.py"])
    assert [test for test in TESTS if targets.has("full", test)] == theirs
    assert [test for test in TESTS if targets.has("test", test)] == [test for test in TESTS if test not in theirs]
    assert [test for test in TESTS if targets.has("quick", test)] == [test for test in TESTS[:2] if test not in theirs]
    for target in targets.TARGETS:
        for test in TESTS:
            file = test.partition("::")[0]
            if targets.has(target, test):  # then its file and its folder are looked into
                assert targets.may_have(target, file)
                assert targets.may_have(target, file.partition("/")[0])


def test_an_entry_without_its_test_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert targets.missing() == []
    wrong = ["unit/test_nothing.py", "unit/test_targets.py::test_nothing", "nothing"]
    monkeypatch.setattr(targets, "FULL", [*wrong, "unit/test_targets.py::test_an_entry_without_its_test_is_named"])
    assert targets.missing() == wrong


def test_the_page_of_what_waits_names_tests_of_make_test() -> None:
    page = (HERE / "waits.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_/]+\.py::\w+)", page)
    assert len(named) == len(re.findall(r"^\| \d", page, re.MULTILINE))
    assert [test for test in named if not targets.is_there(test) or not targets.has("test", test)] == []


def test_every_target_of_the_tests_is_a_target_of_make_and_every_stage_belongs_to_one() -> None:
    names = set(re.findall(r"^([a-z]+):.*##", MAKEFILE, re.MULTILINE))
    assert set(targets.TARGETS) <= names
    run = " ".join(re.findall(r"scripts/stages\.py (.*)$", MAKEFILE, re.MULTILINE)).split()
    assert set(run) == set(stages.STAGES)


def test_ci_runs_what_make_test_and_make_full_run() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"^make (\w+)", script, re.MULTILINE) == ["test", "full"]
    assert "set -euo pipefail" in script  # so that the first that fails ends it, and fails it


def test_a_command_beside_a_load_gives_its_status_and_leaves_no_process(tmp_path: Path) -> None:
    report = tmp_path / "loads"
    list_them = (
        "import os, sys; print(os.popen(f'ps -o pid= --ppid {os.getppid()}').read(), file=open(sys.argv[1], 'w'))"
    )
    line = [sys.executable, busy.__file__, sys.executable, "-c", list_them + "; sys.exit(7)", str(report)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert "exit status 7" in done.stdout
    pids = [int(pid) for pid in report.read_text().split()]
    assert len(pids) == busy.BUSY + 1  # and the command itself
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids if os.path.isdir("/proc"))


def test_a_load_without_a_command_or_with_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert busy.main([]) == 2
    assert "Name the command" in capsys.readouterr().err
    assert busy.main(["no-such-command-of-ours"]) == 127
    assert "no-such-command-of-ours" in capsys.readouterr().err
