"""Tests that run beside each other: each has its own end, and only those that leave the others alone do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import asyncio, threading
import pytest
from tenure.testing._conformance.queues.steps import QueueSuite
from tests.side_by_side import side_by_side
from tests.stores.memory.test_suites import MemoryQueueHarness

together = asyncio.Barrier(4)
open_harnesses = []

class Harness(MemoryQueueHarness):
    async def start(self):
        open_harnesses.append(self)

    async def close(self):
        open_harnesses.remove(self)

    async def pass_time(self, seconds):
        await together.wait()

class Suite(QueueSuite):
    @pytest.mark.parametrize("number", [1, 2])
    async def test_that_waits(self, harness, name, number):
        await harness.pass_time(1.0)

    async def test_that_fails(self, harness, name):
        await harness.pass_time(1.0)
        assert not "this one fails"

    async def test_that_is_skipped(self, harness):
        pytest.skip("this one is skipped")

    async def test_that_patches(self, harness, monkeypatch):
        assert threading.current_thread() is threading.main_thread()

@side_by_side
class TestFirst(Suite):
    harness = Harness

@side_by_side
class TestSecond(QueueSuite):
    harness = Harness

    async def test_that_waits_for_the_first(self, harness, name):
        await harness.pass_time(1.0)

class TestAlone(QueueSuite):
    harness = MemoryQueueHarness

    async def test_alone(self, harness, name):
        assert not open_harnesses
"""


def test_each_test_has_an_end_of_its_own(tmp_path: Path) -> None:
    tmp_path.joinpath("test_it.py").write_text(TESTS)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    ended = sorted(
        line.partition(" - ")[0] for line in run.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))
    )
    assert ended == [
        "FAILED test_it.py::TestFirst::test_that_fails",
        "PASSED test_it.py::TestAlone::test_alone",
        "PASSED test_it.py::TestFirst::test_that_patches",
        "PASSED test_it.py::TestFirst::test_that_waits[1]",
        "PASSED test_it.py::TestFirst::test_that_waits[2]",
        "PASSED test_it.py::TestSecond::test_that_waits_for_the_first",
    ], run.stdout
    assert "this one is skipped" in run.stdout
