"""The command of a term, for ``tenure lead``: two pipes to its guard, and the fallback if the guard fails."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import tenure
from tenure._cli import guard
from tenure._cli.exits import Exit, Failure
from tenure._cli.output import warn

LAST_RESORT = 0.5
"""The share of the time that the guard keeps after KILL, after which we stop waiting for the guard."""

KILL_WITHIN = 1.0
"""Seconds that the guard has to kill the command, before we kill the guard ourselves."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a command: by itself (or by a signal passed on), stopped with its term, or never started."""

    kind: str  # "ended", "lost", "late" or "failed"
    code: int = 0  # its exit code, 128 + n for signal n; for "failed", the errno


def environment(url: tenure.Url, variables: Mapping[str, str | None]) -> dict[str, str]:
    """Return our environment for a command, with *variables* added; None removes one.

    The store's *url* is added as TENURE_URL if it has no secret, because the command, or its children, may log their
    environment.
    """
    written = url.written.reveal()
    environment = dict(os.environ)
    for name, value in {"TENURE_URL": written if written == url.shown else None, **variables}.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def _read_report(text: bytes) -> dict[str, int]:
    """Return the number of each line of a guard; other lines are left out, as its end must be noted in any case."""
    found = re.findall(rb"^(running|stuck|ended|lost|late|failed) (\d{1,10})$", text, re.MULTILINE)
    return {verb.decode(): int(number) for verb, number in found}


class Child:
    """A command and its guard. Used on the event loop on which it was started."""

    _guards: ClassVar[set[int]] = set()
    """The running guards of all commands: their descendants are stopped by them, not by us."""

    def __init__(self, process: subprocess.Popen[bytes], control: int, report: int, grace: float) -> None:
        self._process = process
        self._guards.add(process.pid)
        self._control = control
        self._report = report
        self._grace = grace
        self._received = b""  # the guard's report
        self._loop = asyncio.get_running_loop()
        self._deadline = -1.0
        self._last_fallback: asyncio.TimerHandle | None = None
        self._kill_by: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._gave_up = False
        self.outcome: asyncio.Future[Outcome] = self._loop.create_future()
        os.set_blocking(control, False)
        self._loop.add_reader(report, self._read)

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        env: Mapping[str, str],
        deadline: float,
        grace: float,
        stdin: int | None = None,
        stderr: int | None = None,
    ) -> Child:
        """Start *command* in a term that is trusted until *deadline*; *stdin* and *stderr*: ours unless given.

        The deadline is a time of :func:`tenure._cli.guard.now`, which is read before the remaining time: so it is never
        too late, even if this process is stopped in between.

        Raises:
            Failure: The system could not start a process or open a pipe.
        """
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            control_end, control, report, report_end = pipes
            ends = str(control_end), str(report_end)
            line = [sys.executable, "-I", "-S", guard.__file__, *ends, repr(deadline), repr(grace)]
            # A session of its own: a terminal's Ctrl-C reaches only us, and is passed on once.
            process = subprocess.Popen(
                [*line, *command],
                env=dict(env),
                stdin=stdin,
                stderr=stderr,
                pass_fds=(control_end, report_end),
                start_new_session=True,
            )
        except OSError as error:
            for pipe in pipes:
                os.close(pipe)
            raise Failure(Exit.NO_PROCESS, f"the command could not be started: {error}") from error
        os.close(control_end)
        os.close(report_end)
        child = cls(process, control, report, grace)
        child.trust(deadline)
        return child

    # --- to the guard ---

    def trust(self, deadline: float) -> None:
        """Let the command run on: its term is now trusted until *deadline*, as in :meth:`start`."""
        if self.outcome.done():  # a timer set now would never be cancelled
            return
        if abs(deadline - self._deadline) < 0.001:
            return
        self._deadline = deadline
        self._send(f"deadline {deadline!r}")
        if self._last_fallback:
            self._last_fallback.cancel()
        wait = deadline - guard.now() - self._grace * guard.KILL_SHARE * LAST_RESORT
        self._last_fallback = self._loop.call_later(max(0.0, wait), self._fallback)

    def signal(self, number: int) -> None:
        """Pass a signal on to the command."""
        self._send(f"signal {number}")

    def stop(self) -> None:
        """Stop the command, because its term is lost."""
        self._send("stop")

    def kill(self) -> None:
        """Stop the command at once."""
        self._send("kill")
        # The fallback timer moves with every renewal, so it does not suffice: the guard may be stopped.
        if self._kill_by is None and not self.outcome.done():
            self._kill_by = self._loop.call_later(KILL_WITHIN, self._process.kill)

    def _send(self, line: str) -> None:
        if not self.outcome.done():
            # If the guard doesn't read (it is stopped, or has ended), the fallback remains.
            with suppress(OSError):
                os.write(self._control, f"{line}\n".encode())

    # --- from the guard ---

    def _read(self) -> None:
        chunk = os.read(self._report, 4096)
        self._received += chunk
        if b"stuck" in chunk:
            warn("some processes of the command could not be killed yet; its guard keeps trying")
        if not chunk:
            self._loop.remove_reader(self._report)
            self._ending = self._loop.create_task(self._finish())

    async def _finish(self) -> None:
        """The guard has ended, usually last; if it was killed, end the rest of the command here."""
        report = _read_report(self._received)
        command = report.pop("running", 0)
        report.pop("stuck", None)
        self._guards.discard(self._process.pid)
        if not report:
            guard.send(9, group=command)
            # Its processes are our children now. But so are the guards of other commands, which continue.
            held = os.getpid(), self._process.pid, self._guards
            pause = guard.KILL_AGAIN
            guard.reap()
            while guard.living(*held):
                guard.kill_all(*held)
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, guard.CHECK_EVERY)
                guard.reap()
        self._process.wait()
        guard.reap()  # the processes adopted from the guard
        os.close(self._report)
        os.close(self._control)
        for timer in (self._last_fallback, self._kill_by):
            if timer:
                timer.cancel()
        if report:
            self.outcome.set_result(Outcome(*report.popitem()))
        else:
            self.outcome.set_result(Outcome("lost" if self._gave_up else "ended", Exit.SIGNAL + 9))

    def _fallback(self) -> None:
        """The term ends, and the guard has not ended the command: the guard is stopped, or the machine is too busy."""
        if self.outcome.done():
            return
        self._gave_up = True
        # Then the kernel kills the command, and we adopt the rest: see _finish().
        self._process.kill()
