"""One run of ``tenure work``: receive messages, run the command under guard, settle by its exit code."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any

import tenure
from tenure._cli import codes, footer, guard
from tenure._cli.child import Child, Outcome, environment
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import never_used
from tenure._cli.output import log_to_stderr, notice, seconds, stderr_written_by, warn
from tenure._cli.stderr import CommandStderr, Stderr
from tenure._cli.tally import Tally

STOP_GRACE = 2.0
"""Seconds from TERM to the end of a command that is stopped; fewer if its lock ends earlier."""

LOOKS = 4
"""How often, between two renewals, the guard gets the new end of the lock."""

TIMEOUT = 3_600.0

LAST_LINE = 200
"""Characters of the last line of a command's stderr that are part of its failure's message."""


class CommandFailed(Exception):
    """How a command failed, when it may be retried; kept with the message as its last error."""


@dataclass(frozen=True)
class Order:
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


class Working:
    """One run of ``tenure work``."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._timeout = TIMEOUT if order.timeout is None else order.timeout
        self._signalled = False
        self._hurry = asyncio.Event()  # a second signal has come
        self._tally = Tally(order.queue, order.verbosity)
        self._looking: asyncio.Task[None] | None = None  # checks whether the queue exists
        self._consumer: tenure.Consumer
        self._shown_url = ""

    @cached_property
    def _stderr(self) -> Stderr:
        return Stderr()

    async def run(self) -> None:
        """Consume until a signal comes, or with --until-empty until the queue is empty."""
        order = self._order
        if order.command:  # an adopting process must reap: processes that a function starts are its own
            guard.adopt_orphans()  # if a guard is killed, its processes become our children
        log_to_stderr(order.verbosity)
        handler = _function(order.handler) if order.handler else self._serve
        with stderr_written_by(self._stderr.tell):
            try:
                await self._consume(handler)
            except BaseException:
                if not self._tally.is_empty:
                    await self._sum_up()
                raise
            await self._sum_up()

    async def _consume(self, handler: Callable[[Any], Awaitable[object] | object]) -> None:
        order = self._order
        async with tenure.connect(order.url, on_event=self._tally.on_event) as backend:
            self._shown_url = str(backend.url)
            queue = backend.queue(order.queue, **order.settings)
            self._consumer = consumer = queue.consumer(self._tally.counted(handler), **self._options())
            await self._begin(backend, queue)
            with self._bar(queue):
                await consumer.run()

    def _bar(self, queue: tenure.Queue) -> AbstractContextManager[None]:
        if self._order.until_empty and self._order.verbosity >= 0 and footer.has_room():
            return footer.shown(queue, self._tally)
        return nullcontext()

    async def _sum_up(self) -> None:
        self._notice(self._tally.summary())
        waiting = asyncio.create_task(self._stderr.written(self._order.grace))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({waiting, hurry}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        hurry.cancel()

    def _options(self) -> dict[str, Any]:
        order = self._order
        return {
            "concurrency": order.concurrency,
            "sessions": order.sessions,
            "prefetch": order.concurrency,
            "max_hold": self._timeout + 2 * STOP_GRACE if order.command else math.inf,
            "grace": order.grace,
            "retry": order.retry,
            "on_error": self._tally.note_failure,
            "until_empty": order.until_empty,
            "sigterm": False,
            "wait": order.wait,
        }

    def _notice(self, text: str) -> None:
        if self._order.verbosity >= 0:
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
        order = self._order
        if order.verbosity < 0:
            return
        try:
            # The queue doesn't exist yet: only a warning, as a worker may start before the first sender.
            if unused := await never_used(backend, order.queue):
                await queue.stats()  # fails where only listing is permitted: then the consumer reports the error
                warn(unused)
        except tenure.Unavailable:
            if order.wait == 0:
                return  # the consumer reports the error, too
        except tenure.TenureError:
            return
        what = "session" if order.sessions else "message"
        plural = "s" if order.concurrency > 1 else ""
        notice(f"{order.queue}: consuming from {self._shown_url}, {order.concurrency} {what}{plural} at once")

    def _on_signal(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._signalled:
            self._hurry.set()
        elif running := self._tally.running:
            grace = seconds(self._order.grace)
            self._notice(
                f"{self._order.queue}: ending; {running} running, with {grace} to finish; signal again to stop now"
            )
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
                said = f"the command ended with code {codes.describe(code)}"
                failed = _with_stderr(CommandFailed(f"{said}: {last[:LAST_LINE]}" if last else said), stderr)
                if code not in self._order.rejects:
                    return failed
                rejected = tenure.Reject(f"exit {code}", str(failed))
                rejected.__cause__ = failed
                return rejected
            case Outcome(kind="failed", code=number):
                return CommandFailed(f"{self._order.command[0]!r} could not be run: {os.strerror(number)}")
            case TimeoutError():
                return _with_stderr(outcome, stderr)
        lost = f"the lock on message {message.id!r} was about to end, unrenewed; the command was stopped"
        return _with_stderr(tenure.LockLost(lost), stderr)

    async def _run(self, message: tenure.Message, body: IO[bytes], stderr: CommandStderr) -> Outcome | TimeoutError:
        """Run the command to its end, and return how it ended, or that it ran too long. Cancelled, stop it first."""
        consumer, timing = self._consumer, self._consumer.timing
        grace = min(STOP_GRACE, timing.grace)
        give_up = guard.now() + self._timeout

        def end() -> float:
            now = guard.now()  # before we ask what remains: never too late
            return min(give_up + grace, now + consumer.remaining(message))

        env = self._environment(message)
        try:
            child = Child.start(self._order.command, env, end(), grace, stdin=body.fileno(), stderr=stderr.writing)
        finally:
            stderr.started()
        cancelled: asyncio.CancelledError | None = None
        while not child.outcome.done():
            try:
                await asyncio.wait([child.outcome], timeout=timing.renew_every / LOOKS)
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
        return environment(self._order.url, self._shown_url, env)


def _with_stderr(error: Exception, stderr: str) -> Exception:
    """Add *stderr* to *error*, in the place of a traceback."""
    if stderr:
        error.add_note(stderr.removesuffix("\n"))
    return error


def _function(named: str) -> Callable[[Any], Awaitable[object] | object]:
    """Import the handler that ``--handler`` names.

    Raises:
        Failure: There is none; the message says what was found.
    """
    module_name, colon, function_name = named.partition(":")
    if not colon or not module_name or not function_name:
        raise Failure(Exit.USAGE, f"--handler {named!r} is not of the form module:function")
    sys.path.insert(0, os.getcwd())  # as python -m does: the handler is usually in a file of this folder
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise Failure(Exit.NOT_FOUND, f"--handler {named!r}: the module can't be imported: {error}") from error
    except Exception as error:  # any error of the module
        what = "".join(traceback.format_exception_only(error)).strip()
        raise Failure(Exit.CONFIG, f"--handler {named!r}: the module {module_name!r} raised {what}") from error
    for part in function_name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        what = "has no such function" if found is None else f"has a {type(found).__name__} there, not a function"
        raise Failure(Exit.NOT_FOUND, f"--handler {named!r}: the module {module_name!r} {what}")
    handler: Callable[[Any], Awaitable[object] | object] = found
    return handler
