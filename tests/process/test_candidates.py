"""Real processes on one SQLite file, killed, stopped, blocked, stubborn: the old leader is out before the new is in."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.absent import skip_or_fail
from tests.process.stage import HERE, PATIENCE, Stage

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.name != "posix", reason="needs signals and /proc")]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    try:
        yield stage
    finally:
        stage.close()


def test_killed_leaders_are_succeeded(stage: Stage) -> None:
    for _ in range(3):
        stage.start()
    stage.wait_for_newer(0)
    for _ in range(5):
        token = stage.newest()
        leader = next(pid for what, of, pid in stage.lines() if what == "act" and of == token)
        process = next(process for process in stage.processes if process.pid == leader)
        process.kill()
        process.wait()
        stage.start()
        stage.wait_for_newer(token)
    stage.judge()


@pytest.mark.parametrize("mode", ["stop-before-check", "stop-before-write"])
def test_a_leader_stopped_past_its_lease(stage: Stage, mode: str) -> None:
    old = stage.start(mode)
    token = stage.token_of("stopping")
    stage.start()
    stage.wait_for_newer(token)
    old.send_signal(signal.SIGCONT)
    stage.wait(lambda lines: ("continued", token, old.pid) in lines)
    if mode == "stop-before-write":
        # It had checked, and then slept through its lease: only the fence can help, and it does.
        stage.wait(lambda lines: ("refused", token, old.pid) in lines)
    stage.wait(lambda lines: ("lost", token, old.pid) in lines)
    stage.judge()


def test_a_leader_whose_loop_is_blocked_is_succeeded(stage: Stage) -> None:
    old = stage.start("block")
    token = stage.token_of("blocking")
    stage.start()
    stage.wait_for_newer(token)
    stage.go_on()
    stage.wait(lambda lines: ("unblocked", token, old.pid) in lines)
    stage.wait(lambda lines: ("lost", token, old.pid) in lines)
    stage.judge()


def test_work_that_ignores_cancellation_does_not_hold_up_the_next(stage: Stage) -> None:
    old = stage.start("stubborn")
    stage.wait(lambda lines: any(what == "act" for what, _, _ in lines))
    stage.start()
    subprocess.run(
        [sys.executable, "-c", _ASK, f"sqlite:///{stage.folder / 'leases.db'}"], check=True, timeout=PATIENCE
    )
    token = stage.token_of("ignored")
    stage.wait_for_newer(token)
    stage.go_on()
    stage.wait(lambda lines: ("gave-up", token, old.pid) in lines)
    stage.judge()


def test_an_overrun_can_end_the_process(stage: Stage) -> None:
    old = stage.start("overrun-exit")
    stage.wait(lambda lines: any(what == "act" for what, _, _ in lines))
    subprocess.run(
        [sys.executable, "-c", _ASK, f"sqlite:///{stage.folder / 'leases.db'}"], check=True, timeout=PATIENCE
    )
    assert old.wait(PATIENCE) == 70
    assert "overrun='exit' ends this process with code 70" in stage.errors()


def test_a_stepped_wall_clock_costs_no_term(stage: Stage, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        skip_or_fail("needs Linux and a C compiler (Debian: gcc) to step the wall clock of one process")
    library = tmp_path / "wallclock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, HERE / "wallclock.c", "-ldl"], check=True)
    steps = tmp_path / "step"
    steps.write_text("0")
    # A lease so long that no load of the machine can cost it: what is left is the clock.
    environment = {"LD_PRELOAD": str(library), "WALL_STEP": str(steps), "CANDIDATE_TTL": "10"}
    shown = [sys.executable, "-c", "import time; print(time.time())"]
    steps.write_text("3600")
    stepped = subprocess.run(shown, env={**os.environ, **environment}, capture_output=True, check=True, text=True)
    assert float(stepped.stdout) > time.time() + 3000, "the wall clock was not stepped"
    steps.write_text("0")
    leader = stage.start(**environment)
    stage.wait_for_newer(0)
    stage.start(**environment)
    for step in (3600, -3600, 7200, 0):
        steps.write_text(str(step))
        stage.wait_for_more(150)  # longer than it takes the other to look again, and in all some renewals
    assert {(token, pid) for what, token, pid in stage.lines() if what == "act"} == {(1, leader.pid)}
    stage.judge()


_ASK = """
import sys, tenure.sync
with tenure.sync.connect(sys.argv[1]) as backend:
    backend.election("chair").ask_to_resign()
"""
