"""The stage: starts processes, hears what they report, kills some, and sees to it that none stays behind."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tenure._demo import parent_watch
from tenure._demo.instance import Station
from tenure._demo.report import Report
from tenure._demo.setup import Player

LEAVE_WITHIN = 5.0
"""Seconds that an instance has to end when it is told to."""


class Failed(Exception):
    """The run came to no good end."""


@dataclass(slots=True)
class Actor:
    """An instance: its process, and what it looks like from outside."""

    player: Player
    process: Process
    listening: asyncio.Task[None] | None = None

    def halt(self) -> None:
        """Stop it where it is."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would: no signal handler, no farewell, no lease handed back."""
        self.process.kill()
        self.player.state = "killed"


class Stage:
    """All processes of a run.

    Args:
        place: The folder for what they write to standard error.
        on_report: Called with every report of an instance.
    """

    def __init__(self, place: Path, on_report: Callable[[Actor, Report], None]) -> None:
        self.actors: list[Actor] = []
        self._place = place
        self._on_report = on_report
        self._ending = False
        self._plain: Process | None = None
        self._plain_says: asyncio.Task[bytes] | None = None

    async def start_plain(self, ledger: Path) -> None:
        """Start the run to compare with."""
        self._plain = await self._spawn("plain", str(ledger), log="plain.log")
        assert self._plain.stdout is not None
        self._plain_says = asyncio.create_task(self._plain.stdout.read())

    async def start(self, station: Station) -> Player:
        """Start an instance."""
        process = await self._spawn("instance", station.orders(), log=f"instance-{station.number}.log")
        actor = Actor(Player(station.number, process.pid), process)
        actor.listening = asyncio.create_task(self._listen(actor))
        self.actors.append(actor)
        return actor.player

    async def dismiss(self) -> None:
        """Tell all instances to stop: first those who stand by, so that nobody is elected for nothing."""
        leading = [actor for actor in self.actors if actor.player.state == "leading"]
        for group in ([actor for actor in self.actors if actor not in leading], leading):
            for actor in group:
                _say_stop(actor.process)
            if group:
                await asyncio.wait([actor.listening for actor in group if actor.listening], timeout=LEAVE_WITHIN)

    async def plain(self) -> bytes:
        """Wait for the plain run, and return what it says."""
        assert self._plain is not None
        assert self._plain_says is not None
        said = await self._plain_says
        if code := await self._plain.wait():
            raise Failed(f"the plain run ended with code {code}{self.last_words()}")
        return said

    @property
    def is_plain_over(self) -> bool:
        """Whether the plain run has nothing more to say."""
        return self._plain_says is not None and self._plain_says.done()

    async def end(self) -> None:
        """End every process that is still there, whatever happened."""
        self._ending = True
        processes = [actor.process for actor in self.actors]
        processes += [self._plain] if self._plain else []
        for process in processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
        for process in processes:
            await process.wait()
        tasks: list[asyncio.Task[None] | asyncio.Task[bytes] | None] = [self._plain_says]
        tasks += [actor.listening for actor in self.actors]
        await asyncio.gather(*(task for task in tasks if task), return_exceptions=True)

    def last_words(self) -> str:
        """Return what the processes wrote to standard error last."""
        said = []
        for log in sorted(self._place.glob("*.log")):
            lines = log.read_text(errors="replace").strip().splitlines()
            said += [f"{log.stem}: {lines[-1]}"] if lines else []
        return "; " + "; ".join(said) if said else ""

    async def _spawn(self, module: str, orders: object, *, log: str) -> Process:
        with (self._place / log).open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-W", "ignore", "-m", f"tenure._demo.{module}"),
                stdin=PIPE,  # the parent_watch
                preexec_fn=parent_watch.tie,
                stdout=PIPE,
                stderr=errors,
                # A group of its own: Ctrl-C is for the director, who then ends the others.
                process_group=0,
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(orders).encode() + b"\n")
        return process

    async def _listen(self, actor: Actor) -> None:
        """Take an instance's reports, and its end."""
        assert actor.process.stdout is not None
        async for line in actor.process.stdout:
            self._on_report(actor, Report.read(line))
        code = await actor.process.wait()
        if code and not self._ending and actor.player.state not in ("killed", "failed"):
            self._on_report(actor, Report("failed", why=f"it ended with code {code}", at=time.monotonic()))
        elif actor.player.state != "killed":
            actor.player.state = "ended"


def _say_stop(process: Process) -> None:
    if process.returncode is None and process.stdin is not None:
        with suppress(ConnectionError):
            process.stdin.write(b"stop\n")
