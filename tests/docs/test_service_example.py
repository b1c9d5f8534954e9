"""The service of the README, as its reader runs it: in two shells."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenure.sync

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "service.py"
PATIENCE = 60.0

pytestmark = pytest.mark.process


@pytest.fixture
def shells(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    started = []
    for number in range(2):
        with (tmp_path / f"out-{number}").open("wb") as out:
            started.append(
                subprocess.Popen([sys.executable, str(EXAMPLE)], cwd=tmp_path, stdout=out, stderr=out, process_group=0)
            )
    yield started
    for one in started:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def test_both_instances_serve_and_the_other_leads_when_the_leader_is_stopped(
    shells: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    def wait_for(line: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not any(line in out.read_text() for out in tmp_path.glob("out-*")):
            assert time.monotonic() < deadline, [out.read_text() for out in tmp_path.glob("out-*")]
            time.sleep(0.05)

    wait_for("1 kettle served")
    with tenure.sync.connect(f"sqlite:///{tmp_path}/work.db") as backend:
        leader = backend.election("shop").leader()
    assert leader is not None
    leads, stands_by = sorted(shells, key=lambda one: f"-{one.pid}-" not in leader.holder)
    leads.send_signal(signal.SIGTERM)
    assert leads.wait(PATIENCE) == 0
    wait_for("2 kettle served")
    stands_by.send_signal(signal.SIGINT)
    assert stands_by.wait(PATIENCE) == 0
    printed = [line for out in tmp_path.glob("out-*") for line in out.read_text().splitlines()]
    assert {line.partition(" ")[2] for line in printed} <= {
        "kettle served",
        "handlers may finish; interrupt again to stop without waiting",
    }
