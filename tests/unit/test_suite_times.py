"""The profile of the tests: CPU time, children and waiting are told apart, and a place is named."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.suite_times.__main__ import main, report
from scripts.suite_times.meter import ROOT, awaited_by
from scripts.suite_times.plugin import WRITES_TO

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it reads /proc, so it needs Linux")

TESTS = """
import subprocess, sys, time

BURN = "import time\\nwhile time.process_time() < 0.4: pass"

def test_computing():
    exec(BURN.replace("< 0.4", f"< {time.process_time() + 0.4}"))

def test_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_waiting():
    time.sleep(0.4)
"""


@pytest.fixture
def costs(tmp_path: Path) -> dict[str, dict[str, Any]]:
    file, records = tmp_path / "test_three.py", tmp_path / "records.jsonl"
    file.write_text(TESTS)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "scripts.suite_times.plugin", "-p", "no:cacheprovider", "-q", str(file)],
        cwd=ROOT,
        env=os.environ | {WRITES_TO: str(records)},
        check=True,
        capture_output=True,
    )
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    return {row["test"].rpartition("::test_")[2]: row for row in rows}


def test_computing_children_and_waiting_are_told_apart(costs: dict[str, dict[str, Any]]) -> None:
    assert set(costs) == {"computing", "child", "waiting"}
    assert costs["computing"]["own"] >= 0.4
    assert costs["child"]["children_user"] + costs["child"]["children_system"] >= 0.3
    assert costs["waiting"]["waited"] >= 0.3
    # However busy the machine is: wanting a core is not waiting.
    assert costs["computing"]["waited"] < 0.2
    assert costs["waiting"]["own"] < 0.2
    assert all(cost["wall"] >= 0.4 for cost in costs.values())


async def test_the_innermost_line_that_a_task_awaits_is_found() -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await asyncio.gather(inner())

    task = asyncio.create_task(outer())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [code.co_name for code, _ in awaited_by(task)] == ["outer", "inner", "wait"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_the_report_adds_up_by_folder_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "records.jsonl"
    cost = {
        "wall": 2.0,
        "own": 0.5,
        "children_user": 0.25,
        "children_system": 0.25,
        "waited": 1.0,
        "places": {"a:1 b": 1},
    }
    tests = ["tests/unit/test_a.py::test_x", "tests/unit/test_b.py::test_y", "tests/cli/test_c.py::test_z"]
    records.write_text("".join(json.dumps({"test": test, **cost}) + "\n" for test in tests))
    report(records)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "4.0", "1.0", "1.0", "0.5", "2.0", "tests/unit"] in rows
    assert ["1", "2.0", "0.5", "0.5", "0.2", "1.0", "tests/unit/test_b.py"] in rows
    assert ["3", "6.0", "1.5", "1.5", "0.8", "3.0", "in", "all"] in rows
    assert ["3.0", "a:1", "b"] in rows


def test_an_earlier_run_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--read", str(tmp_path / "nothing.jsonl")]) == 2
    assert "--read needs the file of an earlier run" in capsys.readouterr().err


def test_a_run_without_tests_keeps_the_records_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "build" / "suite_times.jsonl"
    records.parent.mkdir()
    records.write_text("kept")
    os.utime(records, (1, 1))
    monkeypatch.setattr("scripts.suite_times.__main__.RECORDS", records)
    assert main(["--version"]) == 0
    assert records.read_text() == "kept"
    assert "No test was measured." in capsys.readouterr().err
