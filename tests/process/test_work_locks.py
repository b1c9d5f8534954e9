"""``tenure work`` as a real process: locks that are kept, and what a dead or stopped worker held is delivered again."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tenure
import tenure.sync
from tests.process.looking import PATIENCE, is_alive
from tests.process.work_stage import LONG, ONCE, SHORT, Stage

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="needs signals and /proc")]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    try:
        yield stage
    finally:
        stage.close()


def test_a_killed_worker_takes_its_command_along_and_its_message_is_back(stage: Stage) -> None:
    stage.send("one")
    script = f"echo $$ >> said; {ONCE} sleep 600"
    worker = stage.work("--", "sh", "-c", script, lock=SHORT)
    stage.wait(stage.said)
    worker.kill()
    worker.wait()
    stage.wait(lambda: not is_alive(int(stage.said()[0])))
    stage.work("--", "sh", "-c", script, lock=SHORT)
    stage.wait(lambda: len(stage.said()) > 1)
    stage.wait(lambda: stage.stats() == tenure.Stats())


@pytest.mark.parametrize("script", ["sleep 600", "trap '' TERM; sleep 600; sleep 600"])
def test_the_command_of_a_stopped_worker_is_gone_before_its_message_is_back(stage: Stage, script: str) -> None:
    stage.send("one")
    script = f"echo $$ >> said; {ONCE} {{ {script}; }}"
    worker = stage.work("--", "sh", "-c", script, lock=SHORT)
    stage.wait(stage.said)
    stage.stop(worker)
    with tenure.sync.connect(stage.url) as backend:
        queue = backend.queue("orders")
        stage.wait(lambda: queue.stats().locked == 0)  # claimable now, by whomever
        assert not any(map(is_alive, map(int, stage.said())))
    os.kill(worker.pid, signal.SIGCONT)
    stage.work("--", "sh", "-c", script, lock=SHORT)
    stage.wait(lambda: stage.stats() == tenure.Stats())


def test_a_command_that_outlasts_many_renewals_goes_on(stage: Stage) -> None:
    stage.send("one")
    worker = stage.work("--until-empty", "--", "sh", "-c", "sleep 6; echo $TENURE_DELIVERY_COUNT >> said", lock=SHORT)
    assert worker.wait(PATIENCE) == 0
    assert stage.said() == ["1"]
    assert stage.stats() == tenure.Stats()


def test_the_lock_that_others_gave_the_queue_counts(stage: Stage) -> None:
    with tenure.sync.connect(stage.url) as backend:
        queue = backend.queue("orders", lock=float(SHORT))
        queue.send(b"one")
        worker = stage.work("--", "sh", "-c", "echo $$ >> said; sleep 600", lock="")
        stage.wait(stage.said)
        worker.kill()
        assert queue.receive(wait=25.0)  # not after the 30 s that a queue has by default


def test_a_killed_guard_takes_its_own_command_along_and_no_other(stage: Stage) -> None:
    stage.send("one", "two", "three")
    script = """
        body=$(cat); echo "$body $TENURE_DELIVERY_COUNT $$" >> said
        until [ -e go ]; do sleep 0.05; done; echo "$body done" >> said
    """
    stage.work("-c", "3", "--", "sh", "-c", script)
    stage.wait(lambda: len(stage.said()) == 3)
    [pid] = [line.split()[2] for line in stage.said() if line.startswith("one 1 ")]
    os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    stage.wait(lambda: any(line.startswith("one 2 ") for line in stage.said()))
    assert not is_alive(int(pid))
    (stage.folder / "go").touch()
    stage.wait(lambda: stage.stats() == tenure.Stats())
    assert sorted(line.rpartition(" ")[0] for line in stage.said()) == sorted(
        ["one 1", "one 2", "one", "two 1", "two", "three 1", "three"]
    )


def test_the_command_of_a_stopped_worker_is_gone_before_its_session_is_free(stage: Stage) -> None:
    with tenure.sync.connect(stage.url) as backend:
        backend.queue("orders").send(b"one", session="a")
        worker = stage.work("--sessions", "--", "sh", "-c", "echo $$ >> said; sleep 600", lock=SHORT)
        stage.wait(stage.said)
        stage.stop(worker)
        queue = backend.queue("orders")
        queue.declare(lock=float(LONG))
        with queue.session("a", wait=PATIENCE) as session:
            assert not any(map(is_alive, map(int, stage.said())))
            assert float(SHORT) < session.remaining() < float(LONG)
            [message] = session.receive()
            message.complete()
        os.kill(worker.pid, signal.SIGCONT)
