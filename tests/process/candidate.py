"""A candidate as a process of its own: it acts and writes while it leads, and misbehaves as MODE says.

Started as ``python candidate.py FOLDER MODE``. Everything it does is recorded in files of FOLDER:

- ``acts``: a line per event, in true order (each is one write to a file opened for appending); also for each act that a
  ``term.check()`` has allowed, with the time before the check, on the clock that all processes share;
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
from tenure.backends.sqlite import Fence

TTL = float(os.environ.get("CANDIDATE_TTL", "1"))
PAUSE = 0.01


class Log:
    """The acts of all processes, in the order in which they happened."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "acts", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, what: str, token: int, at: float | None = None) -> None:
        when = "" if at is None else f" {at!r}"
        os.write(self._file, f"{what} {token} {os.getpid()}{when}\n".encode())


class Resource:
    """What the leader works on: every write goes through the fence, in the same transaction."""

    def __init__(self, folder: Path) -> None:
        self._connection = sqlite3.connect(folder / "resource.db", isolation_level=None, timeout=10)
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
        self.log = Log(folder)
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
            self.log.note("blocking", term.token)
            self.wait_for_go_on()
            self.log.note("unblocked", term.token)
        elif self.mode in ("stubborn", "overrun-exit"):
            self.mode = "good"
            await self.ignore_cancellation(term)
        while True:
            self.act(term)
            await asyncio.sleep(PAUSE)

    def act(self, term: tenure.Term) -> None:
        at = time.monotonic()  # a process that is delayed after the check may write later than the next leader
        try:
            term.check()
        except tenure.TermLost:
            self.log.note("lost", term.token)
            raise
        self.log.note("act", term.token, at)
        self.resource.write(term.token)

    def wait_for_go_on(self) -> None:
        """Block the event loop until the test lets it go on."""
        while not (self.folder / "go-on").exists():
            time.sleep(PAUSE)

    def stop(self, term: tenure.Term) -> None:
        """Stop this process at the worst moment: right before a check, or between the check and its write."""
        where = self.mode
        if where == "stop-before-write":
            term.check()  # on a slow machine the term may be over by now: then the next one is stopped
        self.mode = "good"
        # A process that is stopped in the middle of a renewal holds the file's write lock, and blocks all others:
        # a limit of SQLite. While the lock is held here, no renewal is under way.
        with closing(sqlite3.connect(self.folder / "leases.db", isolation_level=None, timeout=10)) as leases:
            leases.execute("BEGIN IMMEDIATE")
            leases.execute("ROLLBACK")
        self.log.note("stopping", term.token)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.log.note("continued", term.token)
        if where == "stop-before-write":
            try:
                self.resource.write(term.token)
            except tenure.TermLost:
                self.log.note("refused", term.token)

    async def ignore_cancellation(self, term: tenure.Term) -> None:
        """Ignore every cancellation, and go on acting for as long as check() allows it, and a while longer."""
        while term.remaining() > 0.0:
            try:
                with suppress(tenure.TermLost):  # it may end between the two checks
                    self.act(term)
                await asyncio.sleep(PAUSE)
            except asyncio.CancelledError:
                self.log.note("ignored", term.token)
        while not (self.folder / "go-on").exists():
            try:
                await asyncio.sleep(PAUSE)
            except asyncio.CancelledError:
                continue
        self.log.note("gave-up", term.token)


if __name__ == "__main__":
    asyncio.run(Candidate(Path(sys.argv[1]), sys.argv[2]).stand())
