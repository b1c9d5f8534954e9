"""A folder, a queue in it, and the workers of ``tenure work`` that were started there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import tenure
import tenure.sync
from tests import warm
from tests.durations import wait_until
from tests.process_states import stop

LONG = "120"

ONCE = "[ $(wc -l < said) -gt 1 ] ||"
"""A shell prefix: only the first command that has written its line runs the rest."""


class WorkerSetup:
    """A folder, a queue in it, and the workers that were started there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder / 'work.db'}"
        self.workers: list[warm.Process] = []

    def work(self, *line: str, lock: str = LONG, stderr: int = subprocess.PIPE) -> warm.Process:
        worker = warm.start(
            ["work", "orders", *(["--lock", lock] if lock else []), *line],
            cwd=self.folder,
            env={**os.environ, "TENURE_URL": self.url},
            stdin=0,
            stdout=1,
            stderr=stderr,
        )
        self.workers.append(worker)
        return worker

    def send(self, *bodies: str) -> None:
        with tenure.sync.connect(self.url) as backend:
            backend.queue("orders").send_batch([tenure.Outgoing(body.encode(), id=body) for body in bodies])

    def stats(self) -> tenure.Stats:
        with tenure.sync.connect(self.url) as backend:
            return backend.queue("orders").stats()

    def reasons(self) -> dict[str, str]:
        """Return the reason of each dead letter, by its id."""
        with tenure.sync.connect(self.url) as backend:
            return {letter.id: letter.reason for letter in backend.queue("orders").dead_letters.peek()}

    def tenure(self, *line: str) -> str:
        """Run another command of tenure; return its output."""
        ended = warm.run([*line, "--on", self.url])
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def said(self) -> list[str]:
        path = self.folder / "said"
        return path.read_text().splitlines() if path.exists() else []

    def wait(self, condition: Callable[[], object]) -> None:
        wait_until(condition, lambda: f"it did not happen: {self.said()}")

    def stop(self, worker: warm.Process) -> None:
        stop(worker.pid, self.folder / "work.db")

    def close(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                worker.kill()
            worker.communicate()
