"""Real processes on one SQLite file, killed, stopped, blocked, or ignoring cancellation: no two lead at once."""

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

from tenure._timing import Timing
from tests.absent import skip_or_fail
from tests.durations import PATIENCE, stretched
from tests.long import LONG
from tests.process.candidate import PAUSE
from tests.process.candidate_setup import HERE, CandidateSetup

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.name != "posix", reason="needs signals and /proc")]


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[CandidateSetup]:
    setup = CandidateSetup(tmp_path)
    try:
        yield setup
    finally:
        setup.close()


def test_killed_leaders_are_succeeded(setup: CandidateSetup) -> None:
    for _ in range(3):
        setup.start()
    setup.wait_for_newer(0)
    for _ in range(5 if LONG else 3):
        token = setup.newest()
        leader = next(pid for what, of, pid in setup.lines() if what == "act" and of == token)
        process = next(process for process in setup.processes if process.pid == leader)
        process.kill()
        process.wait()
        setup.start()
        setup.wait_for_newer(token)
    setup.check_order()


@pytest.mark.parametrize("mode", ["stop-before-check", "stop-before-write"])
def test_a_leader_stopped_past_its_lease(setup: CandidateSetup, mode: str) -> None:
    old = setup.start(mode)
    token = setup.token_of("stopping")
    setup.start()
    setup.wait_for_newer(token)
    old.send_signal(signal.SIGCONT)
    setup.wait(lambda lines: ("continued", token, old.pid) in lines)
    if mode == "stop-before-write":
        # It had checked, and was stopped past its lease: only the fence refuses its write.
        setup.wait(lambda lines: ("refused", token, old.pid) in lines)
    setup.wait(lambda lines: ("lost", token, old.pid) in lines)
    setup.check_order()


def test_a_leader_whose_loop_is_blocked_is_succeeded(setup: CandidateSetup) -> None:
    old = setup.start("block")
    token = setup.token_of("blocking")
    setup.start()
    setup.wait_for_newer(token)
    setup.go_on()
    setup.wait(lambda lines: ("unblocked", token, old.pid) in lines)
    setup.wait(lambda lines: ("lost", token, old.pid) in lines)
    setup.check_order()


def test_work_that_ignores_cancellation_does_not_delay_the_next_leader(setup: CandidateSetup) -> None:
    old = setup.start("stubborn")
    setup.wait(lambda lines: any(what == "act" for what, _, _ in lines))
    setup.start()
    subprocess.run(
        [sys.executable, "-c", _ASK, f"sqlite:///{setup.folder / 'leases.db'}"], check=True, timeout=PATIENCE
    )
    token = setup.token_of("ignored")
    setup.wait_for_newer(token)
    setup.go_on()
    setup.wait(lambda lines: ("gave-up", token, old.pid) in lines)
    setup.check_order()


def test_an_overrun_can_end_the_process(setup: CandidateSetup) -> None:
    old = setup.start("overrun-exit")
    setup.wait(lambda lines: any(what == "act" for what, _, _ in lines))
    subprocess.run(
        [sys.executable, "-c", _ASK, f"sqlite:///{setup.folder / 'leases.db'}"], check=True, timeout=PATIENCE
    )
    assert old.wait(PATIENCE) == 70
    assert "overrun='exit' ends this process with code 70" in setup.errors()


def test_a_stepped_wall_clock_ends_no_term(setup: CandidateSetup, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        skip_or_fail("needs Linux and a C compiler (Debian: gcc) to step the wall clock of one process")
    library = tmp_path / "wallclock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, HERE / "wallclock.c", "-ldl"], check=True)
    steps = tmp_path / "step"
    steps.write_text("0")
    timing = Timing(stretched(2.0))  # a lease so long that only the clock could end it
    environment = {"LD_PRELOAD": str(library), "WALL_STEP": str(steps), "CANDIDATE_TTL": str(timing.ttl)}
    shown = [sys.executable, "-c", "import time; print(time.time())"]
    steps.write_text("3600")
    stepped = subprocess.run(shown, env={**os.environ, **environment}, capture_output=True, check=True, text=True)
    assert float(stepped.stdout) > time.time() + 3000, "the wall clock was not stepped"
    steps.write_text("0")
    leader = setup.start(**environment)
    setup.wait_for_newer(0)
    setup.start(**environment)
    for step in (3600, -3600, 7200, 0):
        steps.write_text(str(step))
        setup.wait_for_more(round(1.1 * timing.ttl / PAUSE))  # so that the other has asked meanwhile
    assert {(token, pid) for what, token, pid in setup.lines() if what == "act"} == {(1, leader.pid)}
    setup.check_order()


_ASK = """
import sys, tenure.sync
with tenure.sync.connect(sys.argv[1]) as backend:
    backend.election("chair").ask_to_resign()
"""
