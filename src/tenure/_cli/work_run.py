"""One run of ``tenure work``: receive messages, run the command under guard, settle by its exit code."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any

import tenure
from tenure._cli import codes, guard, status_line
from tenure._cli.child import Child, Outcome, environment
from tenure._cli.delivery_counter import DeliveryCounter
from tenure._cli.entry_points import handler_named
from tenure._cli.group import never_used
from tenure._cli.output import log_to_stderr, notice, seconds, stderr_written_by, warn
from tenure._cli.stderr import CommandStderr, Stderr
from tenure._one_line import one_line

STOP_GRACE = 2.0
"""Seconds from TERM to the end of a command that is stopped; fewer if its lock ends earlier."""

UPDATES = 4
"""The number of times, between two renewals, that the guard gets the new end of the lock."""

TIMEOUT = 3_600.0

LAST_LINE = 200
"""Characters of the last line of a command's stderr that are part of its failure's message."""


VARIABLE_MAX: float = 32 * os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else math.inf
"""Bytes of one variable that a program can be started with, its name and its end included. Other systems have a limit
for all variables together only, which depends on the environment of this process."""


UNFIT_VARIABLE = "unfit_variable"
"""The reason of a dead letter that has something for a variable which no variable can hold."""


class CommandFailed(Exception):
    """A command failed, and may be retried; the error is kept with the message."""


@dataclass(frozen=True)
class WorkOptions:
    """The command line of ``tenure work``."""

    queue: str
    command: tuple[str, ...]
    handler: str | None
    url: str = field(repr=False)
    settings: dict[str, Any]  # of the queue, as given
    concurrency: int
    sessions: bool
    timeout: float | None
    grace: float
    until_empty: bool
    verbosity: int
    rejects: frozenset[int] = frozenset({codes.REJECT})
    retry: tenure.RetryPolicy = field(default_factory=tenure.RetryPolicy)
    wait: float | None = None


class WorkRun:
    """One run of ``tenure work``."""

    def __init__(self, options: WorkOptions) -> None:
        self._options = options
        self._timeout = TIMEOUT if options.timeout is None else options.timeout
        self._signalled = False
        self._stop_now = asyncio.Event()  # a second signal has come
        self._counter = DeliveryCounter(options.queue, options.verbosity)
        self._looking: asyncio.Task[None] | None = None  # checks whether the queue exists
        self._consumer: tenure.Consumer
        self._url = tenure.Url.parse(options.url)

    @cached_property
    def _stderr(self) -> Stderr:
        return Stderr()

    async def run(self) -> None:
        """Consume until a signal comes, or with --until-empty until the queue is empty."""
        options = self._options
        if options.command:  # an adopting process must reap: processes that a function starts are its own
            guard.adopt_orphans()  # if a guard is killed, its processes become our children
        log_to_stderr(options.verbosity)
        handler = handler_named(options.handler) if options.handler else self._serve
        with stderr_written_by(self._stderr.write_lines):
            try:
                await self._consume(handler)
            except BaseException:
                if not self._counter.is_empty:
                    await self._sum_up()
                raise
            await self._sum_up()

    async def _consume(self, handler: Callable[[Any], Awaitable[object] | object]) -> None:
        options = self._options
        async with tenure.connect(options.url, on_event=self._counter.on_event) as backend:
            queue = backend.queue(options.queue, **options.settings)
            self._consumer = consumer = queue.consumer(self._counter.counted(handler), **self._consumer_options())
            await self._begin(backend, queue)
            with self._bar(queue):
                await consumer.run()

    def _bar(self, queue: tenure.Queue) -> AbstractContextManager[None]:
        if self._options.until_empty and self._options.verbosity >= 0 and status_line.has_room():
            return status_line.shown(queue, self._counter)
        return nullcontext()

    async def _sum_up(self) -> None:
        self._notice(self._counter.summary())
        waiting = asyncio.create_task(self._stderr.written(self._options.grace))
        stop_now = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait({waiting, stop_now}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        stop_now.cancel()

    def _consumer_options(self) -> dict[str, Any]:
        options = self._options
        return {
            "concurrency": options.concurrency,
            "sessions": options.sessions,
            "prefetch": options.concurrency,
            "max_hold": self._timeout + 2 * STOP_GRACE if options.command else math.inf,
            "grace": options.grace,
            "retry": options.retry,
            "on_error": self._counter.note_failure,
            "until_empty": options.until_empty,
            "sigterm": False,
            "wait": options.wait,
        }

    def _notice(self, text: str) -> None:
        if self._options.verbosity >= 0:
            notice(text)

    async def _begin(self, backend: tenure.Backend, queue: tenure.Queue) -> None:
        """Handle signals from now on, and print which queue is consumed."""
        loop = asyncio.get_running_loop()
        self._looking = loop.create_task(self._report_queue(backend, queue))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        await asyncio.wait({self._looking})  # a signal ends it, so that a slow store does not delay the end
        if not self._looking.cancelled():
            self._looking.result()

    async def _report_queue(self, backend: tenure.Backend, queue: tenure.Queue) -> None:
        options = self._options
        if options.verbosity < 0:
            return
        try:
            # The queue doesn't exist yet: only a warning, as a worker may start before the first sender.
            if unused := await never_used(backend, options.queue):
                await queue.stats()  # fails where only listing is permitted: then the consumer reports the error
                warn(unused)
            elif queue.traits.limits != "impossible" and (await queue.settings()).paused:
                name = one_line(options.queue)
                warn(f"{name} is paused: nothing is received until it is resumed (tenure queue resume {name})")
        except tenure.Unavailable:
            if options.wait == 0:
                return  # the consumer reports the error, too
        except tenure.TenureError:
            return
        what = "session" if options.sessions else "message"
        plural = "s" if options.concurrency > 1 else ""
        notice(f"{options.queue}: consuming from {self._url}, {options.concurrency} {what}{plural} at once")

    def _on_signal(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._signalled:
            self._stop_now.set()
        elif running := self._counter.running:
            grace = seconds(self._options.grace)
            left = f"{running} running, with {grace} to finish"
            self._notice(f"{self._options.queue}: stopping; {left}; a second signal stops them at once")
        self._consumer.drain(0.0 if self._signalled else None)
        self._signalled = True

    async def _serve(self, message: tenure.Message) -> Exception | None:
        """Run the command for one message; return None to complete it, or the exception that decides about it."""
        await self._stderr.has_room()
        with tempfile.TemporaryFile() as body:
            body.write(message.body)
            body.seek(0)
            stderr = self._stderr.open()
            try:
                outcome = await self._run(message, body, stderr)
            finally:
                stderr.started()
                end = stderr.end()
        return self._outcome_of(message, outcome, end)

    def _outcome_of(self, message: tenure.Message, outcome: Outcome | TimeoutError, stderr: str) -> Exception | None:
        """Return the outcome of a command that ended like this, with *stderr* as the end of its output."""
        match outcome:
            case Outcome(kind="ended", code=0):
                return None
            case Outcome(kind="ended", code=code):
                last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
                text = f"the command ended with code {codes.describe(code)}"
                failed = _with_stderr(CommandFailed(f"{text}: {last[:LAST_LINE]}" if last else text), stderr)
                if code not in self._options.rejects:
                    return failed
                rejected = tenure.Reject(f"exit {code}", str(failed))
                rejected.__cause__ = failed
                return rejected
            case Outcome(kind="failed", code=number):
                return CommandFailed(f"{self._options.command[0]!r} could not be run: {os.strerror(number)}")
            case TimeoutError():
                return _with_stderr(outcome, stderr)
        lost = f"the lock on message {message.id!r} could not be renewed in time; the command was stopped"
        return _with_stderr(tenure.LockLost(lost), stderr)

    async def _run(self, message: tenure.Message, body: IO[bytes], stderr: CommandStderr) -> Outcome | TimeoutError:
        """Run the command to its end, and return how it ended, or that it ran too long. If cancelled, stop it first."""
        consumer, timing = self._consumer, self._consumer.timing
        grace = min(STOP_GRACE, timing.grace)
        give_up = guard.now() + self._timeout

        def end() -> float:
            now = guard.now()  # read before the remaining time, so that the result is never too late
            return min(give_up + grace, now + consumer.remaining(message))

        env = self._environment(message)
        try:
            child = Child.start(self._options.command, env, end(), grace, stdin=body.fileno(), stderr=stderr.writing)
        finally:
            stderr.started()
        cancelled: asyncio.CancelledError | None = None
        while not child.outcome.done():
            try:
                await asyncio.wait([child.outcome], timeout=timing.renew_every / UPDATES)
            except asyncio.CancelledError as error:
                # The message is lost, or the worker stops: either way the command must have ended before we return.
                cancelled = error
                child.trust(min(guard.now() + grace, end()))
                child.stop()
            else:
                if cancelled is None:
                    child.trust(end())
        if cancelled is not None:
            raise cancelled
        outcome = child.outcome.result()
        if outcome.kind in ("lost", "late") and guard.now() >= give_up:
            return TimeoutError(f"the command ran for longer than {self._timeout:g} s")
        return outcome

    def _environment(self, message: tenure.Message) -> dict[str, str]:
        """Return the environment of the command for *message*.

        Raises:
            Reject: The headers, or something else of the message, fit in no variable, at no delivery.
        """
        env = {
            "TENURE_QUEUE": message.queue,
            "TENURE_MESSAGE_ID": message.id,
            "TENURE_SEQUENCE": str(message.sequence),
            "TENURE_DELIVERY_COUNT": str(message.delivery_count),
            "TENURE_SESSION": message.session,
            "TENURE_CORRELATION_ID": message.correlation_id,
            "TENURE_REPLY_TO": message.reply_to,
            "TENURE_HEADERS": json.dumps(dict(message.headers)) if message.headers else None,
        }
        for name, value in env.items():
            if value is not None:
                _require_fit(name, value)
        return environment(self._url, env)


def _require_fit(name: str, value: str) -> None:
    """Raise ``Reject`` if no variable of this *name* can have this *value*."""
    size, room = len(os.fsencode(value)), VARIABLE_MAX - len(f"{name}=") - 1
    if size <= room and "\0" not in value:
        return
    found = f"{size:,} bytes, and can have {room:,.0f}" if size > room else "a NUL, and can have none"
    raise tenure.Reject(
        UNFIT_VARIABLE,
        f"the variable {name} of the command would have {found}; send another one, or receive the message by a "
        "function (--handler)",
    )


def _with_stderr(error: Exception, stderr: str) -> Exception:
    """Add *stderr* to *error*, in the place of a traceback."""
    if stderr:
        error.add_note(stderr.removesuffix("\n"))
    return error
