"""A thread beside the one that renews, where log handlers and hooks run: they may block, and must delay no renewal."""

from __future__ import annotations

import contextvars
import logging
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

WAITING_MAX = 10_000
"""Calls that wait while one blocks. Further calls are left out, and counted."""

LAST_CALLS = 1.0
"""Seconds that the process waits at its end for what is left to be told."""

_Call = tuple[contextvars.Context, Callable[..., object], tuple[Any, ...]]

_log = logging.getLogger("tenure")
_thread = threading.local()


class Aside:
    """Calls functions one after another in a daemon thread, each with the context variables of its sender."""

    def __init__(self) -> None:
        self.left_out = 0
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._runner: threading.Thread | None = None

    def start(self, name: str) -> None:
        """Begin to call, in a thread of this *name*."""
        self._runner = threading.Thread(target=self._run, name=name, daemon=True)
        self._runner.start()

    def use_here(self) -> None:
        """Let :func:`aside` of the current thread send its calls here."""
        _thread.aside = self

    def send(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have *function* called soon; never blocks, never fails."""
        if self._calls.qsize() >= WAITING_MAX:
            self.left_out += 1
        else:
            self._calls.put((contextvars.copy_context(), function, arguments))

    @property
    def backlog(self) -> int:
        """How many calls wait."""
        return self._calls.qsize()

    def end(self) -> None:
        """End the thread once all is told; don't wait for long, and from that thread itself not at all."""
        self._calls.put(None)
        if self._runner is not None and self._runner is not threading.current_thread():
            self._runner.join(LAST_CALLS)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            context, function, arguments = call
            try:
                context.run(function, *arguments)
            except BaseException:  # also an exit: it is a log handler's, and nobody else's
                with suppress(BaseException):
                    traceback.print_exc()
            del call, context, function, arguments  # or they would live until the next call
            if self.left_out:
                left_out, self.left_out = self.left_out, 0
                self.send(_log.error, "%d log records and events were left out, as a handler blocked", left_out)


def backlog() -> int:
    """Return how many calls wait behind one that blocks, if :func:`aside` has them called on the thread beside."""
    beside: Aside | None = getattr(_thread, "aside", None)
    return beside.backlog if beside is not None else 0


def aside(function: Callable[..., object], *arguments: Any) -> None:
    """Call *function* here, or, on a thread that renews, have it called on the one beside."""
    beside: Aside | None = getattr(_thread, "aside", None)
    if beside is None:
        function(*arguments)
    else:
        beside.send(function, *arguments)
