"""One run of ``tenure lead``: campaign, run the command while leading, pass signals on, end in order."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import tenure
from tenure._cli import codes, guard, lead_sockets
from tenure._cli.child import Child, Outcome, environment
from tenure._cli.exits import Exit, Failure
from tenure._cli.output import log_to_stderr, notice, seconds, short, warn
from tenure._cli.status_server import answering
from tenure.events import StandingBy, TermBegan

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
PASSED_ON = (*STOPPING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)

EXIT_WITHIN = 1.0
"""Seconds to wait for the store's answer at the end, when there is no command to wait for."""

QUICK = 10.0
"""A command that ran for fewer seconds is not started again at once."""

PAUSE_FIRST, PAUSE_MOST = 1.0, 60.0

_EXITS = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), Exit.NOT_FOUND),
    **dict.fromkeys((errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE), Exit.NO_PROCESS),
}


@dataclass(frozen=True)
class LeadOptions:
    """The command line of ``tenure lead``."""

    name: str
    command: tuple[str, ...]
    url: str = field(repr=False)
    settings: dict[str, Any]  # of the election, as given
    again: bool
    stop_timeout: float | None
    socket_dir: str | None
    verbosity: int


class LeadRun:
    """One run of ``tenure lead``.

    Safety doesn't depend on this class being quick, or alive: the guard of each command knows the deadline.
    """

    def __init__(self, options: LeadOptions) -> None:
        self._options = options
        self._child: Child | None = None
        self._term: tenure.Term | None = None
        self._outcome: Outcome | None = None  # of the newest command
        self._ran_for = 0.0  # the newest command's run time, in seconds
        self._signal = 0  # the first that asks this process to end
        self._hung_up = False
        self._has_stood_by = False  # and has reported it, since the last term
        self._stop = (
            asyncio.Event()
        )  # campaign no more: a signal came, or the command has ended and is not started again

    async def run(self) -> int:
        """Return the exit code."""
        loop = asyncio.get_running_loop()
        guard.adopt_orphans()  # if a guard is killed, its processes become our children
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or & in a script
                loop.add_signal_handler(number, self._on_signal, number)
        log_to_stderr(self._options.verbosity)
        async with tenure.connect(self._options.url, on_event=self._on_event) as backend:
            election = backend.election(self._options.name, **self._options.settings)
            variables = environment(backend.url, {"TENURE_NAME": self._options.name})
            async with AsyncExitStack() as stack:
                await self._answer_probes(stack, election)
                await self._campaign(election, variables)
        if self._outcome is not None and self._outcome.kind in ("ended", "lost"):
            return self._outcome.code
        return Exit.SIGNAL + self._signal

    async def _answer_probes(self, stack: AsyncExitStack, election: tenure.Election) -> None:
        """Answer `tenure status --me` until *stack* is closed."""
        if not lead_sockets.IS_SUPPORTED:
            return
        try:
            listening = stack.enter_context(lead_sockets.listening(self._options.name, self._options.socket_dir))
        except Failure as error:
            if self._options.socket_dir is not None:
                raise
            if self._options.verbosity >= 0:  # nobody may need it: leading doesn't
                warn(f"tenure status --me can't ask this process: {error}")
            return
        await stack.enter_async_context(answering(listening, election.status))

    async def _campaign(self, election: tenure.Election, variables: Mapping[str, str]) -> None:
        pause = 0.0
        while True:
            await election.run(lambda term: self._serve(election, term, variables), stop=self._stop, sigterm=False)
            if self._stop.is_set():
                return
            pause = _next_pause(pause, self._ran_for)
            await self._rest(pause)

    # --- one term ---

    async def _serve(self, election: tenure.Election, term: tenure.Term, variables: Mapping[str, str]) -> None:
        """Run the command for one term, and return when all its processes have ended."""
        self._outcome = None
        if self._stop.is_set():
            return
        began = asyncio.get_running_loop().time()
        env = {**variables, "TENURE_TOKEN": str(term.token), "TENURE_HOLDER": term.holder}
        child = Child.start(self._options.command, env, _end_of(term), election.timing.grace)
        self._child, self._term = child, term
        if self._options.verbosity > 0:
            notice(f"{term.name}: the command was started, term {term.token}")
        try:
            outcome, was_stopped = await self._wait_for_end(child, term)
        finally:
            self._child = self._term = None
        self._ran_for = asyncio.get_running_loop().time() - began
        if self._options.verbosity > 0:
            notice(f"{term.name}: {_outcome_text(outcome)} after {seconds(self._ran_for)}, term {term.token}")
        match outcome.kind:
            case "failed":
                raise _not_runnable(self._options.command[0], outcome.code)
            case "late" | "lost" if not self._signal:
                if not was_stopped:  # the guard saw the deadline before we did
                    await election.resign(wait=False)
                    await asyncio.Event().wait()  # until the resignation cancels us
                return  # and campaign again
        self._outcome = outcome
        hung_up = self._hung_up and outcome.code == Exit.SIGNAL + signal.SIGHUP
        if hung_up or not self._options.again:
            self._stop.set()

    async def _wait_for_end(self, child: Child, term: tenure.Term) -> tuple[Outcome, bool]:
        """Wait for the command's end. If the term is lost meanwhile, stop the command; return whether it was."""
        was_stopped = False
        while not child.outcome.done():
            try:
                await asyncio.wait([child.outcome])
            except asyncio.CancelledError:
                # The term, and so the lease, must last until the command has ended: wait for it.
                if self._options.verbosity >= 0:
                    why, _, _ = term.loss_message().partition(";")
                    warn(f"{why}; the command is being stopped within {term.remaining():.1f} s")
                child.stop()
                was_stopped = True
        return child.outcome.result(), was_stopped

    def _on_event(self, event: tenure.Event) -> None:
        self._update_guard()
        if self._options.verbosity == 0:  # above that, the log reports it
            match event:
                case StandingBy(leader=leader, token=token):
                    self._has_stood_by = True
                    shown = short(leader) if sys.stderr and sys.stderr.isatty() else leader
                    notice(f"{event.name}: standing by; {shown} leads, term {token}")
                case TermBegan(token=token) if self._has_stood_by:
                    self._has_stood_by = False
                    notice(f"{event.name}: elected, term {token}; the command is started")

    def _update_guard(self) -> None:
        """Send the guard the time until which the term is trusted; called after every event."""
        if self._child and self._term:
            self._child.trust(_end_of(self._term))

    async def _rest(self, pause: float) -> None:
        """Let other candidates lead for a while, after a command that ended soon after its start."""
        try:
            async with asyncio.timeout(pause):
                await self._stop.wait()
        except TimeoutError:
            pass

    # --- signals ---

    def _on_signal(self, number: signal.Signals) -> None:
        if self._child is not None:
            self._pass_signal(self._child, number)
        elif number in (*STOPPING, signal.SIGHUP):
            # Ending during an unanswered request could leave the name without a leader for a whole lease, so we wait
            # for the answer, but not for long, and not after a second signal.
            if self._signal:
                os._exit(Exit.SIGNAL + number)
            self._end(number)
            asyncio.get_running_loop().call_later(EXIT_WITHIN, os._exit, Exit.SIGNAL + number)

    def _pass_signal(self, child: Child, number: signal.Signals) -> None:
        if number in STOPPING and self._signal:
            child.kill()
            return
        child.signal(number)
        if number not in STOPPING:
            self._hung_up = self._hung_up or number == signal.SIGHUP
            return
        self._end(number)
        if self._options.stop_timeout is not None:
            asyncio.get_running_loop().call_later(self._options.stop_timeout, child.kill)

    def _end(self, number: signal.Signals) -> None:
        self._signal = number
        self._stop.set()


def _end_of(term: tenure.Term) -> float:
    """Return the time until which *term* is trusted, by the clock of the guards."""
    now = guard.now()  # read before remaining(), so that the result is never too late
    return now + term.remaining()


def _outcome_text(outcome: Outcome) -> str:
    match outcome.kind:
        case "ended":
            return f"the command ended with code {codes.describe(outcome.code)}"
        case "lost":
            return "the command was stopped with its term"
    return "the command could not be started"


def _next_pause(before: float, ran_for: float) -> float:
    if ran_for >= QUICK:
        return 0.0
    longer = min(PAUSE_MOST, max(PAUSE_FIRST, before * 2))
    return longer * random.uniform(0.8, 1.0)


def _not_runnable(program: str, number: int) -> Failure:
    code = _EXITS.get(number, Exit.NOT_RUNNABLE)
    why = os.strerror(number)
    return Failure(code, f"{program!r} could not be run: {why}; the lease was released")
