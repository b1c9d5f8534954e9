"""A candidate as a process of its own: it acts and writes while it leads, and misbehaves when told to.

Started as ``python candidate.py FOLDER MODE``. Everything it does stands in files of FOLDER:

- ``acts``: a line per thing that happened, in true order (each is one write to a file opened for appending), and per
  act that a ``term.check()`` has allowed, with the moment before that on the clock of all processes;
- ``resource.db``: what it wrote under the fence.

MODE says what the first term's work does after its first act; later terms, and other processes, behave well.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import tenure
from tenure._backends.sqlite import Fence

TTL = float(os.environ.get("CANDIDATE_TTL", "1"))
PAUSE = 0.01


class Diary:
    """Who did what, in the order in which it happened, over all processes."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "acts", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, what: str, token: int, at: float | None = None) -> None:
        when = "" if at is None else f" {at!r}"
        os.write(self._file, f"{what} {token} {os.getpid()}{when}\n".encode())


class Resource:
    """What the leader works on: every write goes through the fence, in the same transaction."""

    def __init__(self, folder: Path) -> None:
        self._connection = sqlite3.connect(folder / "resource.db", isolation_level=None, timeout=10)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("CREATE TABLE IF NOT EXISTS deed (seq INTEGER PRIMARY KEY, token INTEGER NOT NULL)")
        self._fence = Fence(self._connection)

    def write(self, token: int) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._fence.check("deeds", token)
            self._connection.execute("INSERT INTO deed (token) VALUES (?)", (token,))
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


class Candidate:
    def __init__(self, folder: Path, mode: str) -> None:
        self.mode = mode
        self.folder = folder
        self.diary = Diary(folder)
        self.resource = Resource(folder)
        self.url = f"sqlite:///{folder / 'leases.db'}"

    async def stand(self) -> None:
        async with tenure.connect(self.url) as backend:
            overrun = "exit" if self.mode == "overrun-exit" else "report"
            await backend.election("chair", ttl=TTL, overrun=overrun).run(self.work)  # type: ignore[arg-type]

    async def work(self, term: tenure.Term) -> None:
        self.act(term)
        if self.mode in ("stop-before-check", "stop-before-write"):
            self.stop(term)
        elif self.mode == "block":
            self.mode = "good"
            self.diary.note("blocking", term.token)
            self.wait_until_told()
            self.diary.note("unblocked", term.token)
        elif self.mode in ("stubborn", "overrun-exit"):
            self.mode = "good"
            await self.be_stubborn(term)
        while True:
            self.act(term)
            await asyncio.sleep(PAUSE)

    def act(self, term: tenure.Term) -> None:
        at = time.monotonic()  # who is held up after the check may write later than the next leader
        try:
            term.check()
        except tenure.TermLost:
            self.diary.note("lost", term.token)
            raise
        self.diary.note("act", term.token, at)
        self.resource.write(term.token)

    def wait_until_told(self) -> None:
        """Block, loop and all, until the test has seen what it wanted to see."""
        while not (self.folder / "go-on").exists():
            time.sleep(PAUSE)

    def stop(self, term: tenure.Term) -> None:
        """Be stopped at the worst moment: right before a check, or between the check and the write it allowed."""
        where = self.mode
        if where == "stop-before-write":
            term.check()  # on a slow machine the term may be over by now: then the next one is stopped
        self.mode = "good"
        # Stopped in the middle of a renewal, we would hold the file's write lock, and nobody could get on: a limit of
        # SQLite, and not what is looked at here. To get the lock is to know that no renewal is under way.
        with closing(sqlite3.connect(self.folder / "leases.db", isolation_level=None, timeout=10)) as leases:
            leases.execute("BEGIN IMMEDIATE")
            leases.execute("ROLLBACK")
        self.diary.note("stopping", term.token)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.diary.note("continued", term.token)
        if where == "stop-before-write":
            try:
                self.resource.write(term.token)
            except tenure.TermLost:
                self.diary.note("refused", term.token)

    async def be_stubborn(self, term: tenure.Term) -> None:
        """Ignore every cancellation, and go on acting for as long as check() allows it, and a while longer."""
        while term.remaining() > 0.0:
            try:
                with suppress(tenure.TermLost):  # it may end between the two questions
                    self.act(term)
                await asyncio.sleep(PAUSE)
            except asyncio.CancelledError:
                self.diary.note("ignored", term.token)
        while not (self.folder / "go-on").exists():
            try:
                await asyncio.sleep(PAUSE)
            except asyncio.CancelledError:
                continue
        self.diary.note("gave-up", term.token)


if __name__ == "__main__":
    asyncio.run(Candidate(Path(sys.argv[1]), sys.argv[2]).stand())
