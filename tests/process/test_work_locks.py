"""``tenure work`` as a real process: locks are renewed, and messages of dead workers delivered again."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

import tenure
import tenure.sync
from tests.durations import PATIENCE, stretched
from tests.process.worker_setup import LONG, ONCE, WorkerSetup
from tests.process_states import is_alive

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="needs signals and /proc")]


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[WorkerSetup]:
    setup = WorkerSetup(tmp_path)
    try:
        yield setup
    finally:
        setup.close()


@pytest.fixture
def short() -> str:
    """A lock that is to run out, and must not do so while its worker runs."""
    return f"{stretched(1.0):.3f}"


def test_a_killed_worker_ends_its_command_and_its_message_is_delivered_again(setup: WorkerSetup, short: str) -> None:
    setup.send("one")
    script = f"echo $$ >> said; {ONCE} sleep 600"
    worker = setup.work("--", "sh", "-c", script, lock=short)
    setup.wait(setup.said)
    worker.kill()
    worker.wait()
    setup.wait(lambda: not is_alive(int(setup.said()[0])))
    setup.work("--", "sh", "-c", script, lock=short)
    setup.wait(lambda: len(setup.said()) > 1)
    setup.wait(lambda: setup.stats() == tenure.Stats())


def test_the_command_of_a_stopped_worker_has_ended_before_its_message_is_delivered_again(
    tmp_path: Path, short: str
) -> None:
    def check(name: str, script: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        with closing(WorkerSetup(folder)) as setup:
            setup.send("one")
            script = f"echo $$ >> said; {ONCE} {{ {script}; }}"
            worker = setup.work("--", "sh", "-c", script, lock=short)
            setup.wait(setup.said)
            setup.stop(worker)
            with tenure.sync.connect(setup.url) as backend:
                queue = backend.queue("orders")
                setup.wait(lambda: queue.stats().locked == 0)  # claimable now
                assert not any(map(is_alive, map(int, setup.said())))
            os.kill(worker.pid, signal.SIGCONT)
            setup.work("--", "sh", "-c", script, lock=short)
            setup.wait(lambda: setup.stats() == tenure.Stats())

    scripts = {"obedient": "sleep 600", "stubborn": "trap '' TERM; sleep 600; sleep 600"}
    with ThreadPoolExecutor() as pool:  # side by side, as each waits for the end of a lock
        list(pool.map(check, scripts, scripts.values()))


def test_a_command_that_outlasts_many_renewals_goes_on(setup: WorkerSetup, short: str) -> None:
    setup.send("one")
    script = f"sleep {1.5 * float(short):.3f}; echo $TENURE_DELIVERY_COUNT >> said"
    worker = setup.work("--until-empty", "--", "sh", "-c", script, lock=short)
    assert worker.wait(PATIENCE) == 0
    assert setup.said() == ["1"]
    assert setup.stats() == tenure.Stats()


def test_the_declared_lock_counts(setup: WorkerSetup, short: str) -> None:
    with tenure.sync.connect(setup.url) as backend:
        queue = backend.queue("orders", lock=min(float(short), 12.0))
        queue.send(b"one")
        worker = setup.work("--", "sh", "-c", "echo $$ >> said; sleep 600", lock="")
        setup.wait(setup.said)
        worker.kill()
        assert queue.receive(wait=25.0)  # not after the 30 s that a queue has by default


def test_a_killed_guard_ends_its_own_command_and_no_other(setup: WorkerSetup) -> None:
    setup.send("one", "two", "three")
    script = """
        body=$(cat); echo "$body $TENURE_DELIVERY_COUNT $$" >> said
        until [ -e go ]; do sleep 0.05; done; echo "$body done" >> said
    """
    setup.work("-c", "3", "--", "sh", "-c", script)
    setup.wait(lambda: len(setup.said()) == 3)
    [pid] = [line.split()[2] for line in setup.said() if line.startswith("one 1 ")]
    os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    setup.wait(lambda: any(line.startswith("one 2 ") for line in setup.said()))
    assert not is_alive(int(pid))
    (setup.folder / "go").touch()
    setup.wait(lambda: setup.stats() == tenure.Stats())
    assert sorted(line.rpartition(" ")[0] for line in setup.said()) == sorted(
        ["one 1", "one 2", "one", "two 1", "two", "three 1", "three"]
    )


def test_the_command_of_a_stopped_worker_has_ended_before_its_session_is_free(setup: WorkerSetup, short: str) -> None:
    with tenure.sync.connect(setup.url) as backend:
        backend.queue("orders").send(b"one", session="a")
        worker = setup.work("--sessions", "--", "sh", "-c", "echo $$ >> said; sleep 600", lock=short)
        setup.wait(setup.said)
        setup.stop(worker)
        queue = backend.queue("orders")
        queue.declare(lock=float(LONG))
        with queue.session("a", wait=PATIENCE) as session:
            assert not any(map(is_alive, map(int, setup.said())))
            assert float(short) < session.remaining() < float(LONG)
            [message] = session.receive()
            message.complete()
        os.kill(worker.pid, signal.SIGCONT)
