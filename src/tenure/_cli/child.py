"""The command of a term as ``tenure lead`` sees it: two pipes to its guard, and the means if that fails."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from tenure._cli import guard
from tenure._cli.exits import Exit, Failure
from tenure._cli.output import warn

LAST_RESORT = 0.5
"""At which share of the time that the guard keeps after its KILL we stop waiting for the guard."""

KILL_WITHIN = 1.0
"""Seconds that the guard has, once it is told to kill the command, before we kill it ourselves."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended: by itself (or by a signal passed on), stopped with its term, or never begun."""

    kind: str  # "ended", "lost", "late" or "failed"
    code: int = 0  # its exit code, 128 + n for signal n; for "failed", the errno


def environment(url: str, shown_url: str, told: Mapping[str, str | None]) -> dict[str, str]:
    """Return our environment, for a command, with what it is *told*; None takes a variable out.

    The store's *url* goes in as TENURE_URL if it holds no password, that is, if it may be shown as it is: the command
    may log its environment, and so may those that it calls.
    """
    environment = dict(os.environ)
    for name, value in {"TENURE_URL": url if url == shown_url else None, **told}.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


class Child:
    """A command under guard. Everything here belongs to the event loop it was started on."""

    _guards: ClassVar[set[int]] = set()
    """The guards that have not ended, of all commands: what is below one is its own business, not ours."""

    def __init__(self, process: subprocess.Popen[bytes], control: int, report: int, grace: float) -> None:
        self._process = process
        self._guards.add(process.pid)
        self._control = control
        self._report = report
        self._grace = grace
        self._said = b""
        self._loop = asyncio.get_running_loop()
        self._deadline = -1.0
        self._last_resort: asyncio.TimerHandle | None = None
        self._kill_by: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._gave_up = False
        self.outcome: asyncio.Future[Outcome] = self._loop.create_future()
        os.set_blocking(control, False)
        self._loop.add_reader(report, self._hear)

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
        """Start *command* in a term that may be trusted until *deadline*; *stdin*, *stderr* are ours if not given.

        The deadline is a moment of :func:`tenure._cli.guard.now`, which is to be read before what remains is asked for:
        then it is never too late, however long we stand still in between.

        Raises:
            Failure: The system gave no process or no pipe.
        """
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            listens, control, report, says = pipes
            line = [sys.executable, "-I", "-S", guard.__file__, str(listens), str(says), repr(deadline), repr(grace)]
            # A session of its own: a terminal's Ctrl-C then reaches us alone, and is passed on once.
            process = subprocess.Popen(
                [*line, *command],
                env=dict(env),
                stdin=stdin,
                stderr=stderr,
                pass_fds=(listens, says),
                start_new_session=True,
            )
        except OSError as error:
            for pipe in pipes:
                os.close(pipe)
            raise Failure(Exit.NO_PROCESS, f"the command could not be started: {error}") from error
        os.close(listens)
        os.close(says)
        child = cls(process, control, report, grace)
        child.trust(deadline)
        return child

    # --- what the guard is told ---

    def trust(self, deadline: float) -> None:
        """Let the command run on: its term may now be trusted until *deadline*, as in :meth:`start`."""
        if self.outcome.done():  # a timer set now would be cancelled by nobody
            return
        if abs(deadline - self._deadline) < 0.001:
            return
        self._deadline = deadline
        self._tell(f"deadline {deadline!r}")
        if self._last_resort:
            self._last_resort.cancel()
        patience = deadline - guard.now() - self._grace * guard.KILL_SHARE * LAST_RESORT
        self._last_resort = self._loop.call_later(max(0.0, patience), self._resort)

    def signal(self, number: int) -> None:
        """Pass a signal on to the command."""
        self._tell(f"signal {number}")

    def stop(self) -> None:
        """Stop the command, because its term is lost."""
        self._tell("stop")

    def kill(self) -> None:
        """Stop the command at once."""
        self._tell("kill")
        # Not left to the last resort, which moves on with every renewal: the guard may be stopped.
        if self._kill_by is None and not self.outcome.done():
            self._kill_by = self._loop.call_later(KILL_WITHIN, self._process.kill)

    def _tell(self, line: str) -> None:
        if not self.outcome.done():
            # If it doesn't read (it is stopped, or has ended), the last resort is still ours.
            with suppress(OSError):
                os.write(self._control, f"{line}\n".encode())

    # --- what it says ---

    def _hear(self) -> None:
        chunk = os.read(self._report, 4096)
        self._said += chunk
        if b"stuck" in chunk:
            warn("some processes of the command could not be killed yet; its guard keeps trying")
        if not chunk:
            self._loop.remove_reader(self._report)
            self._ending = self._loop.create_task(self._finish())

    async def _finish(self) -> None:
        """The guard has ended. It ends last; if it was killed, end what is left of the command ourselves."""
        words = [line.split() for line in self._said.decode().splitlines()]
        said = {verb: int(argument) for verb, argument in words}
        command = said.pop("running", 0)
        said.pop("stuck", None)
        self._guards.discard(self._process.pid)
        if not said:
            guard.send(9, group=command)
            # What it held has come to us. But the guards of other commands are ours, too, and go on.
            held = os.getpid(), self._process.pid, self._guards
            patience = guard.KILL_AGAIN
            guard.reap()
            while guard.living(*held):
                guard.kill_all(*held)
                await asyncio.sleep(patience)
                patience = min(patience * 1.5, guard.LOOK_AGAIN)
                guard.reap()
        self._process.wait()
        guard.reap()  # what we adopted from the guard
        os.close(self._report)
        os.close(self._control)
        for timer in (self._last_resort, self._kill_by):
            if timer:
                timer.cancel()
        for kind, code in said.items():
            self.outcome.set_result(Outcome(kind, code))
        if not said:
            self.outcome.set_result(Outcome("lost" if self._gave_up else "ended", Exit.SIGNAL + 9))

    def _resort(self) -> None:
        """The term ends, and the guard has not ended the command: it is stopped itself, or the machine too busy."""
        if self.outcome.done():
            return
        self._gave_up = True
        # Then the kernel kills the command, and the rest comes to us: see _finish().
        self._process.kill()
