"""A process with fifty candidates on an Azurite whose clock runs some times faster, and on a loop that does, too.

Started as ``python candidate.py URL FOLDER NAMES SPEED``. The acts of its leaders after a successful ``term.check()``
are in the file ``acts`` of FOLDER, in true order over all processes; what they write goes through a fence, in
``resource.db``.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tenure
from tenure._backend import Backend
from tenure._runtime.clock import SystemClock
from tenure._runtime.renewal_thread import RenewalThread
from tenure.backends.sqlite import Fence

SPEED = float(sys.argv[4])
TTL = 60.0
PAUSE = 5.0
PAUSE_MAX = 0.1  # real seconds between a check and its act; on a busy machine it may be longer than a margin


class FastSelector(selectors.DefaultSelector):
    """Waits for a fraction of the requested time."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout / SPEED if timeout else timeout)


class FastClock:
    def now(self) -> float:
        return SystemClock().now() * SPEED


class FastLoop(asyncio.SelectorEventLoop):
    """A loop on which time, also for the driver's timeouts, runs faster."""

    def __init__(self) -> None:
        super().__init__(FastSelector())

    def time(self) -> float:
        return super().time() * SPEED


class ActLog:
    """The files in which all processes record their acts."""

    def __init__(self, folder: Path) -> None:
        self._acts = os.open(folder / "acts", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._connection = sqlite3.connect(folder / "resource.db", isolation_level=None, timeout=30)
        self._connection.execute("PRAGMA synchronous=OFF")
        self._fence = Fence(self._connection)

    def note(self, what: str, name: str, token: int) -> None:
        os.write(self._acts, f"{what} {name} {token} {os.getpid()}\n".encode())

    def act(self, term: tenure.Term) -> None:
        began = time.monotonic()
        term.check()
        self.note("act", term.name, term.token)
        if time.monotonic() - began > PAUSE_MAX:
            self.note("paused", term.name, term.token)
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._fence.check(term.name, term.token)
            self._connection.execute("INSERT INTO deed (name, token) VALUES (?, ?)", (term.name, term.token))
        except tenure.TermLost:
            self._connection.execute("ROLLBACK")
            self.note("refused", term.name, term.token)
            raise
        self._connection.execute("COMMIT")


async def lead(log: ActLog, term: tenure.Term) -> None:
    while True:
        log.act(term)
        await asyncio.sleep(PAUSE)


async def main(url: str, folder: Path, names: list[str]) -> None:
    log = ActLog(folder)

    def work(term: tenure.Term) -> object:
        return lead(log, term)

    async with Backend(url, renewal_thread=RenewalThread.here(), clock=FastClock()) as backend:
        await asyncio.gather(*(stand(backend, name, work) for name in names))


async def stand(backend: Backend, name: str, work: Callable[[tenure.Term], object]) -> None:
    # Fewer requests than usual: fifty names and three processes share two cores with the server.
    election = backend.election(name, ttl=TTL, renew_every=20.0, retry_every=16.0)
    await election.run(work)  # type: ignore[arg-type]


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=FastLoop) as runner:
        runner.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(",")))
