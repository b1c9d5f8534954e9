"""Candidates as real processes on one SQLite file, and checks of what they did."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tests.durations import PATIENCE

HERE = Path(__file__).parent


class CandidateSetup:
    """A folder, the processes that compete in it, and what they have written there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        with closing(sqlite3.connect(folder / "resource.db")) as connection:
            # Not by the processes: of several that switch to WAL at once, SQLite refuses all but one, without a wait.
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE IF NOT EXISTS deed (seq INTEGER PRIMARY KEY, token INTEGER NOT NULL)")

    def start(self, mode: str = "good", **environment: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"stderr-{len(self.processes)}").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "candidate.py"), str(self.folder), mode],
                env={**os.environ, **environment},
                stderr=errors,
            )
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    def rows(self) -> list[list[str]]:
        path = self.folder / "acts"
        text = path.read_text() if path.exists() else ""
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]  # the last may be half written

    def lines(self) -> list[tuple[str, int, int]]:
        return [(what, int(token), int(pid)) for what, token, pid, *_ in self.rows()]

    def wait(self, condition: Callable[[list[tuple[str, int, int]]], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition(self.lines()):
            assert time.monotonic() < deadline, f"it did not happen: {self.lines()[-5:]}, {self.errors()}"
            time.sleep(0.01)

    def errors(self) -> str:
        return "".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("stderr-*")))

    def go_on(self) -> None:
        (self.folder / "go-on").touch()

    def token_of(self, what: str) -> int:
        """Wait until *what* has happened; return the token of its term."""
        self.wait(lambda lines: any(happened == what for happened, _, _ in lines))
        return next(token for happened, token, _ in self.lines() if happened == what)

    def newest(self) -> int:
        return max((token for what, token, _ in self.lines() if what == "act"), default=0)

    def wait_for_newer(self, token: int, acts: int = 3) -> None:
        self.wait(lambda lines: sum(what == "act" and newer > token for what, newer, _ in lines) >= acts)

    def wait_for_more(self, count: int) -> None:
        seen = len(self.lines())
        self.wait(lambda lines: len(lines) >= seen + count)

    def check_order(self) -> None:
        """Check that no check() of an old leader allowed an act after a newer leader's, and the fence no write."""
        acts = sorted((float(at[0]), int(token)) for what, token, _, *at in self.rows() if what == "act")
        assert [token for _, token in acts] == sorted(token for _, token in acts)
        with closing(sqlite3.connect(self.folder / "resource.db")) as connection:
            deeds = [token for (token,) in connection.execute("SELECT token FROM deed ORDER BY seq")]
        assert deeds == sorted(deeds)
        holders = {(token, pid) for what, token, pid in self.lines() if what == "act"}
        assert len(holders) == len({token for token, _ in holders}), "one token, two holders"
        assert "Traceback" not in self.errors()
