"""The outcomes of the deliveries of one ``tenure work``: counted, and with ``-v`` printed one by one."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import tenure
from tenure._cli.output import notice, seconds, warn
from tenure.errors import refuse_generator
from tenure.events import MessageDied

Handler = Callable[[Any], Awaitable[object] | object]


class DeliveryCounter:
    """Counts deliveries by their outcome. Handlers may run in threads.

    Args:
        queue: The queue's name.
        verbosity: Above 0, each start and each end is printed.

    Attributes:
        done: Handlers that succeeded, including those whose verdict came too late: see *lost*.
        failed: Deliveries that failed, rejected ones included.
        dead: Messages that became dead letters meanwhile.
        lost: Deliveries whose lock was lost.
    """

    def __init__(self, queue: str, verbosity: int) -> None:
        self.done = self.failed = self.dead = self.lost = 0
        self._queue = queue
        self._verbosity = verbosity
        self._begun = 0
        self._ended = 0
        # Cancelled and not failed, as sequence and delivery: at the end only.
        self._stopped: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._began_at = time.monotonic()

    @property
    def is_empty(self) -> bool:
        """Whether no handler was called."""
        return not self._begun

    @property
    def running(self) -> int:
        """The number of running handlers."""
        return self._begun - self._ended

    def counted(self, handler: Handler) -> Handler:
        """Return *handler*, with its calls counted.

        Raises:
            ConfigError: It can't be a handler.
        """
        refuse_generator("handler", handler)
        if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):

            @functools.wraps(handler)
            async def serve_async(message: Any) -> object:
                began_at = self._begin(message)
                try:
                    outcome = await handler(message)  # type: ignore[misc]
                except BaseException as error:
                    self._end(message, began_at, error)
                    raise
                self._end(message, began_at, outcome)
                return outcome

            return serve_async

        @functools.wraps(handler)
        def serve(message: Any) -> object:
            began_at = self._begin(message)
            try:
                outcome = handler(message)
            except BaseException as error:
                self._end(message, began_at, error)
                raise
            self._end(message, began_at, outcome)
            return outcome

        return serve

    def _begin(self, message: Any) -> float:
        with self._lock:
            self._begun += 1
        self._print_line(message, "started")
        return time.monotonic()

    def _end(self, message: Any, began_at: float, outcome: object) -> None:
        what = "done"
        with self._lock:
            self._ended += 1
            if isinstance(outcome, asyncio.CancelledError):
                what = "stopped"
                self._stopped.add((message.sequence, message.delivery_count))
            elif isinstance(outcome, BaseException):
                what = "failed"
            else:
                self.done += 1
        self._print_line(message, f"{what} after {seconds(time.monotonic() - began_at)}")

    def _print_line(self, message: Any, what: str) -> None:
        if self._verbosity > 0:
            notice(f"{self._queue}: message {message.id!r}, delivery {message.delivery_count}: {what}")

    def note_failure(self, message: Any, error: BaseException) -> None:
        """Count a failure: the error hook of the consumer."""
        with self._lock:  # the message failed, and is not given back
            self._stopped.discard((message.sequence, message.delivery_count))
        if isinstance(error, tenure.LockLost):
            self.lost += 1
            if self._verbosity >= 0:
                warn(str(error))  # failures and dead letters are in the log
        else:
            self.failed += 1

    def on_event(self, event: tenure.Event) -> None:
        """Count dead letters, which only events report."""
        if isinstance(event, MessageDied):
            self.dead += 1

    def summary(self) -> str:
        """Return the counts as text."""
        counts = [f"{self.done} done", f"{self.failed} failed", f"{len(self._stopped)} given back"]
        for count, what in (
            (self.dead, "dead-lettered"),
            (self.lost, "with a lost lock"),
            (self.running, "still running"),
        ):
            if count:
                counts.append(f"{count} {what}")
        return f"{self._queue}: {', '.join(counts)}, in {seconds(time.monotonic() - self._began_at)}"
