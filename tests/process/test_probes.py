"""``tenure status NAME --me`` asks real processes: leading, standing by, without a store, stopped, killed, blocked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.durations import PATIENCE, stretched, wait_until
from tests.process.test_lead import BEATS, IGNORING, SHORT, LeadSetup
from tests.process_states import states_of, stop

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="needs signals and /proc")]

Probe = subprocess.CompletedProcess[str]


class ProbedSetup(LeadSetup):
    """Instances of ``tenure lead job``, and the probes that ask them."""

    def probe(self, *options: str, wait: float = PATIENCE / 2) -> Probe:
        return warm.run(["status", "job", "--me", "--wait", f"{wait}", *options])

    def statuses(self) -> dict[int, dict[str, Any]]:
        """Return the status of each process that answers, by its number."""
        out = self.probe("--json").stdout
        return {one["pid"]: one for one in json.loads(out or "[]")}

    def wait_for(self, process: warm.Process, **expected: object) -> dict[str, Any]:
        """Wait until the status of a process is as *expected*."""
        seen: dict[str, Any] = {}

        def is_so() -> bool:
            seen.update(self.statuses().get(process.pid, {}))
            return expected.items() <= seen.items()

        wait_until(is_so, lambda: f"{expected} did not come true: {seen}\n{self.errors()}")
        return seen

    @contextmanager
    def store_locked(self) -> Iterator[None]:
        """Let the store answer nobody during the block."""
        with closing(sqlite3.connect(self.folder / "work.db", isolation_level=None, timeout=PATIENCE)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield

    def start_probed(self, fault: str) -> subprocess.Popen[str]:
        """Start a process in which something goes wrong when the file "go" is there; wait for its work."""
        program, ttl = Path(__file__).parent / "probed.py", stretched(2.0)
        line = [sys.executable, str(program), str(self.folder), fault, str(ttl)]
        process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
        self.processes.append(process)
        wait_until((self.folder / "began").exists, self.errors)
        return process


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProbedSetup]:
    sockets = tempfile.mkdtemp(dir="/tmp", prefix="probes")  # a socket's path must be short
    monkeypatch.setenv("TENURE_SOCKET_DIR", sockets)
    setup = ProbedSetup(tmp_path)
    try:
        yield setup
    finally:
        setup.close()
        shutil.rmtree(sockets)


def test_a_leader_and_one_that_stands_by_are_live_and_ready(setup: ProbedSetup) -> None:
    assert setup.probe().returncode == 3
    leader = setup.sh(BEATS)
    token = setup.wait_for_start()
    other = setup.sh(BEATS)
    setup.wait_for(other, state="standing by", is_ready=True)
    led = setup.wait_for(leader, state="leading", token=token, is_ready=True)
    assert 0.0 < led["trusted_for"] <= 60.0
    for options in ([], ["--ready"]):
        probe = setup.probe(*options)
        assert (probe.returncode, probe.stderr) == (0, "")
        shown = sorted(line.split()[2] for line in probe.stdout.splitlines())
        assert shown == sorted([str(leader.pid), str(other.pid)])

    leader.kill()  # its lease has a minute left, and its socket remains
    leader.wait()
    assert list(setup.statuses()) == [other.pid]
    other.send_signal(signal.SIGTERM)
    assert other.wait(PATIENCE) == 143
    assert setup.probe().returncode == 3


def test_without_a_store_it_is_live_and_not_ready(setup: ProbedSetup) -> None:
    process = setup.sh(BEATS, *SHORT)
    setup.wait_for_start()
    with setup.store_locked():
        setup.wait_for(process, state="standing by", is_ready=False, is_live=True)
        probe = setup.probe()
        assert (probe.returncode, probe.stderr) == (0, "")
        assert f"process {process.pid} stands by; the store answered " in probe.stdout
        assert "; since then: " in probe.stdout
        probe = setup.probe("--ready")
        assert (probe.returncode, probe.stdout) == (1, "")
        assert probe.stderr.startswith("tenure: error: job is not ready: process")
    setup.wait_for(process, state="leading", is_ready=True)
    assert setup.probe("--ready").returncode == 0


def test_a_process_that_is_stopped_is_not_live(setup: ProbedSetup) -> None:
    process = setup.sh(BEATS)
    setup.wait_for_start()
    assert setup.probe().returncode == 0
    stop(process.pid, setup.folder / "work.db")
    assert states_of(process.pid) <= set("T")
    for options in ([], ["--ready"]):
        began = time.monotonic()
        probe = setup.probe(*options, wait=0.5)
        assert time.monotonic() - began < PATIENCE / 2
        assert (probe.returncode, probe.stdout) == (69, "")
        expected = (
            f"job: process {process.pid} did not answer within 0.5 s: it is stopped, or its event loop is blocked"
        )
        assert probe.stderr == f"tenure: error: {expected}\n"
    os.kill(process.pid, signal.SIGCONT)
    assert setup.probe().returncode == 0


@pytest.mark.parametrize("fault", ["loop", "renewals"])
def test_a_process_with_a_blocked_loop_is_not_live(setup: ProbedSetup, fault: str) -> None:
    process = setup.start_probed(fault)
    assert setup.probe("--ready").returncode == 0
    (setup.folder / "go").touch()
    wait_until(lambda: setup.probe(wait=0.5).returncode != 0, setup.errors)
    probe = setup.probe(wait=0.5)
    assert probe.returncode == 69
    assert f"process {process.pid} did not answer within 0.5 s" in probe.stderr


def test_a_process_whose_work_runs_beyond_its_term_is_not_live(setup: ProbedSetup) -> None:
    process = setup.start_probed("deaf")
    assert setup.probe().returncode == 0
    with setup.store_locked():
        status = setup.wait_for(process, overran=True)
        assert (status["is_live"], status["is_ready"], status["trusted_for"]) == (False, False, 0.0)
        probe = setup.probe()
    assert (probe.returncode, probe.stdout) == (1, "")
    expected = f"process {process.pid} still runs the work of term {status['token']}, whose lease is over"
    assert probe.stderr.startswith(f"tenure: error: job is not live: {expected}")


def test_a_command_that_takes_its_time_to_end_is_live_while_its_term_is_kept(setup: ProbedSetup) -> None:
    process = setup.sh(IGNORING)
    setup.wait_for_start()
    process.send_signal(signal.SIGTERM)  # the command ignores it; the lease is kept until it ends
    for _ in range(3):
        assert setup.probe("--ready").returncode == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 137
    assert setup.probe().returncode == 3


def test_a_command_that_rests_is_live_and_not_ready(setup: ProbedSetup) -> None:
    process = setup.sh("exit 1", "--again")
    setup.wait_for(process, state="idle", is_live=True)
    wait_until(lambda: "does not campaign at present" in setup.probe("--ready").stderr, setup.errors)


def test_a_place_where_no_socket_can_be_made_does_not_keep_it_from_leading(
    setup: ProbedSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TENURE_SOCKET_DIR")
    code = "from tenure._cli import group, lead_sockets; lead_sockets.SOCKET_BASE = '/nowhere'; "
    code += "import sys; from tenure.cli import main; sys.exit(main(sys.argv[1:]))"
    line = ["lead", "job", "--on", f"sqlite:///{setup.folder / 'work.db'}", "--", "echo", "leading"]
    done = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "leading\n")
    why = f"no socket can be made in /nowhere/tenure-{os.geteuid()}: No such file or directory"
    advice = "name another folder with --socket-dir or TENURE_SOCKET_DIR"
    assert done.stderr == f"tenure: warning: tenure status --me can't ask this process: {why}; {advice}\n"
