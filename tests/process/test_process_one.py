"""``tenure run`` as process 1, in a namespace of processes: it reaps what its processes leave behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import tenure.sync
from tests.absent import skip_or_fail
from tests.durations import PATIENCE, wait_until
from tests.process_states import children_of, is_alive
from tests.servers import Postgres, Redis, private

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

ORPHANS = 40
"""Processes that are left by handlers."""

WORKER = """
import os, subprocess
import tenure

service = tenure.Service()

@service.handler("orders", concurrency=4)
async def leave_a_process(number: int) -> None:
    if number < 0:
        os.kill(os.getpid(), 9)
    subprocess.run(["sh", "-c", "true & exit 0"], check=True)
"""


NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def why_not() -> str | None:
    """Return why no namespace of processes can be made here, or None."""
    if shutil.which("unshare") is None:
        return "unshare is not installed (Debian: apt-get install util-linux)"
    made = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, check=False)
    return f"no namespace of processes can be made here: {made.stderr.strip()}" if made.returncode else None


class ProcessOne:
    """One ``tenure run`` as process 1 of a namespace, which ends with it; its events have the numbers of there."""

    def __init__(self, url: str, folder: Path) -> None:
        (folder / "worker.py").write_text(WORKER)
        self._events = folder / "events"
        with self._events.open("wb") as out:
            self._process = subprocess.Popen(
                [
                    *NAMESPACE,
                    sys.executable,
                    "-m",
                    "tenure",
                    "run",
                    "worker:service",
                    "--json",
                    "--processes",
                    "2",
                ],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TENURE_URL": url},
            )

    def shown(self) -> str:
        return self._events.read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in self.shown().splitlines() if line.startswith("{")]
        return [event for event in events if event["event"] == kind]

    @property
    def pid(self) -> int:
        """The process 1, by its number outside."""
        wait_until(lambda: children_of(self._process.pid), self.shown)
        [pid] = children_of(self._process.pid)
        return pid

    def unreaped(self) -> list[int]:
        """Return the children of process 1 that have ended, and are not reaped."""
        return [pid for pid in children_of(self.pid) if not is_alive(pid)]

    def ended(self) -> int:
        os.kill(self.pid, signal.SIGTERM)
        return self._process.wait(PATIENCE)

    def close(self) -> None:
        self._process.kill()  # the namespace ends with it
        self._process.wait(PATIENCE)


@contextmanager
def store(kind: str, folder: Path) -> Iterator[str]:
    with ExitStack() as stack:
        if kind == "sqlite":
            yield f"sqlite:///{folder / 'work.db'}"
        elif kind == "redis":
            yield stack.enter_context(private(Redis)).url
        else:
            url = stack.enter_context(private(Postgres)).url
            with tenure.sync.connect(url) as backend:
                backend.migrate()
            yield url


@pytest.mark.parametrize("kind", ["sqlite", "redis", "postgres"])
def test_it_reaps_the_processes_that_handlers_leave(kind: str, tmp_path: Path) -> None:
    if (why := why_not()) is not None:
        skip_or_fail(why)
    with store(kind, tmp_path) as url, tenure.sync.connect(url) as backend:
        orders = backend.queue("orders")
        one = ProcessOne(url, tmp_path)
        try:
            wait_until(lambda: len(one.events("begun")) == 2, one.shown)
            for number in range(ORPHANS):
                orders.send(json=number)
            wait_until(lambda: orders.stats().backlog == 0, one.shown)
            wait_until(lambda: not one.unreaped(), lambda: f"{len(one.unreaped())} were not reaped")
            orders.send(json=-1)  # the exit code of its own process is not lost
            wait_until(lambda: one.events("crashed"), one.shown)
            assert "ended by signal 9" in one.events("crashed")[0]["text"]
            assert one.ended() == 0
        finally:
            one.close()
