"""The processes of a run: starts them, reads their reports, kills some, and ends all of them."""

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
from tenure._demo.instance import InstanceConfig
from tenure._demo.report import Report
from tenure._demo.state import InstanceState

STOP_TIMEOUT = 5.0
"""Seconds that an instance has to end after it was asked to stop."""


class Failed(Exception):
    """The run could not be completed."""


@dataclass(slots=True)
class InstanceProcess:
    """An instance: its process, and its state as seen from outside."""

    instance: InstanceState
    process: Process
    reader: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Stop it (SIGSTOP)."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would: no signal handler runs, no lease is released."""
        self.process.kill()
        self.instance.state = "killed"


class Processes:
    """All processes of a run.

    Args:
        directory: The folder for their standard error.
        on_report: Called with every report of an instance.
    """

    def __init__(self, directory: Path, on_report: Callable[[InstanceProcess, Report], None]) -> None:
        self.instances: list[InstanceProcess] = []
        self._directory = directory
        self._on_report = on_report
        self._ending = False
        self._plain: Process | None = None
        self._plain_output: asyncio.Task[bytes] | None = None

    async def start_plain(self, ledger: Path) -> None:
        """Start the plain run, for the comparison."""
        self._plain = await self._spawn("plain", str(ledger), log="plain.log")
        assert self._plain.stdout is not None
        self._plain_output = asyncio.create_task(self._plain.stdout.read())

    async def start(self, config: InstanceConfig) -> InstanceState:
        """Start an instance."""
        process = await self._spawn("instance", config.as_dict(), log=f"instance-{config.number}.log")
        child = InstanceProcess(InstanceState(config.number, process.pid), process)
        child.reader = asyncio.create_task(self._read_reports(child))
        self.instances.append(child)
        return child.instance

    async def stop_all(self) -> None:
        """Stop all instances: first those that stand by, so that no further leader is elected."""
        leading = [child for child in self.instances if child.instance.state == "leading"]
        for group in ([child for child in self.instances if child not in leading], leading):
            for child in group:
                _request_stop(child.process)
            if group:
                await asyncio.wait([child.reader for child in group if child.reader], timeout=STOP_TIMEOUT)

    async def plain(self) -> bytes:
        """Wait for the plain run, and return its output."""
        assert self._plain is not None
        assert self._plain_output is not None
        output = await self._plain_output
        if code := await self._plain.wait():
            raise Failed(f"the plain run ended with code {code}{self.last_errors()}")
        return output

    @property
    def is_plain_over(self) -> bool:
        """Whether the plain run has ended."""
        return self._plain_output is not None and self._plain_output.done()

    async def end(self) -> None:
        """End every process that still runs."""
        self._ending = True
        processes = [child.process for child in self.instances]
        processes += [self._plain] if self._plain else []
        for process in processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
        for process in processes:
            await process.wait()
        tasks: list[asyncio.Task[None] | asyncio.Task[bytes] | None] = [self._plain_output]
        tasks += [child.reader for child in self.instances]
        await asyncio.gather(*(task for task in tasks if task), return_exceptions=True)

    def last_errors(self) -> str:
        """Return the last line of each process's standard error."""
        errors = []
        for log in sorted(self._directory.glob("*.log")):
            lines = log.read_text(errors="replace").strip().splitlines()
            errors += [f"{log.stem}: {lines[-1]}"] if lines else []
        return "; " + "; ".join(errors) if errors else ""

    async def _spawn(self, module: str, first_line: object, *, log: str) -> Process:
        with (self._directory / log).open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-W", "ignore", "-m", f"tenure._demo.{module}"),
                stdin=PIPE,  # for parent_watch
                preexec_fn=parent_watch.die_with_parent,
                stdout=PIPE,
                stderr=errors,
                # A group of its own: Ctrl-C reaches only the parent, which then ends the others.
                process_group=0,
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(first_line).encode() + b"\n")
        return process

    async def _read_reports(self, child: InstanceProcess) -> None:
        """Read an instance's reports, until it ends."""
        assert child.process.stdout is not None
        async for line in child.process.stdout:
            self._on_report(child, Report.read(line))
        code = await child.process.wait()
        if code and not self._ending and child.instance.state not in ("killed", "failed"):
            self._on_report(child, Report("failed", why=f"it ended with code {code}", at=time.monotonic()))
        elif child.instance.state != "killed":
            child.instance.state = "ended"


def _request_stop(process: Process) -> None:
    if process.returncode is None and process.stdin is not None:
        with suppress(ConnectionError):
            process.stdin.write(b"stop\n")
