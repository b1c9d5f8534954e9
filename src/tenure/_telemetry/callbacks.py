"""A thread for log handlers and hooks, next to the renewal thread: they may block, and must delay no renewal."""

from __future__ import annotations

import contextvars
import logging
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from tenure._one_line import Indented, one_line

BACKLOG_MAX = 10_000
"""Calls that wait while one blocks. Further calls are dropped, and counted."""

END_TIMEOUT = 1.0
"""Seconds that the process waits at its end for the remaining calls."""

_Call = tuple[contextvars.Context, Callable[..., object], tuple[Any, ...]]


class OneLineFilter(logging.Filter):
    """Keeps what others wrote on the line of its record, for every handler and formatter.

    Names, reasons and the texts of exceptions may be of others. A traceback in a record's ``exc_info`` is written by
    the formatter, on lines of its own.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Escape what could end the line of *record*, and let it pass."""
        record.msg = _escaped(record.msg)
        if isinstance(record.args, tuple):
            record.args = tuple(map(_escaped, record.args))
        elif isinstance(record.args, Mapping):
            record.args = {name: _escaped(one) for name, one in record.args.items()}
        return True


def _escaped(value: object) -> Any:
    if isinstance(value, (int, float, Indented)):
        return value
    try:
        return one_line(str(value))
    except Exception:  # the handler meets it again, and reports it
        return value


logger: logging.Logger = logging.getLogger("tenure")
"""The one logger of tenure: every record passes its filter, also where a module asks for it by name."""
logger.addFilter(OneLineFilter())

_current = threading.local()


class CallbackThread:
    """Calls functions one after another in a daemon thread, each with the context variables of its caller."""

    def __init__(self) -> None:
        self.dropped = 0
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        """Start the thread, with this *name*."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def serve_current_thread(self) -> None:
        """Make :func:`run_callback`, called on the current thread, submit its calls here."""
        _current.callbacks = self

    def submit(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call *function* soon, in the thread; never blocks, never fails."""
        if self._calls.qsize() >= BACKLOG_MAX:
            self.dropped += 1
        else:
            self._calls.put((contextvars.copy_context(), function, arguments))

    @property
    def backlog(self) -> int:
        """How many calls wait."""
        return self._calls.qsize()

    def end(self) -> None:
        """End the thread after the calls that wait; wait for that briefly, and on that thread itself not at all."""
        self._calls.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(END_TIMEOUT)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            context, function, arguments = call
            try:
                context.run(function, *arguments)
            except BaseException:  # also an exit: a log handler must not end this thread
                with suppress(BaseException):
                    traceback.print_exc()
            del call, context, function, arguments  # otherwise they would live until the next call
            if self.dropped:
                dropped, self.dropped = self.dropped, 0
                self.submit(logger.error, "%d log records and events were dropped, because a handler blocked", dropped)


def backlog() -> int:
    """Return how many calls wait behind one that blocks; 0 where :func:`run_callback` calls at once."""
    callbacks: CallbackThread | None = getattr(_current, "callbacks", None)
    return callbacks.backlog if callbacks is not None else 0


def run_callback(function: Callable[..., object], *arguments: Any) -> None:
    """Call *function* here; or, on the renewal thread, submit it to the callback thread."""
    callbacks: CallbackThread | None = getattr(_current, "callbacks", None)
    if callbacks is None:
        function(*arguments)
    else:
        callbacks.submit(function, *arguments)
