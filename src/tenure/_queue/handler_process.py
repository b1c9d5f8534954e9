"""The code of a handler's process, and the format of its pipe: ends of locks, messages, answers."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue

from tenure._queue.failures import text_of, traceback_of
from tenure._queue.outcomes import NeverBegins, NotBegun
from tenure._queue.reply import Reply
from tenure._queue.retry import Reject, Retry
from tenure._queue.tracebacks import ThereTraceback, place_of
from tenure._runtime.clock import SystemClock

CLOCK = SystemClock()
"""The clock for the time at which a process must end: all processes of a machine share it."""

MOMENT = struct.Struct("d")
"""The end of a lock by :data:`CLOCK`: it precedes each message, and goes alone when it has moved."""

EXIT_WITHIN = 5.0
"""Seconds for a process to end after its pipe is closed."""

CHECK_EVERY = 0.5
"""Seconds between checks that a process still runs: its end need not close its pipe."""


def serve(pipe: Connection) -> None:
    """Handle each message that comes through *pipe*, until it is closed."""
    _leave_group()
    if sys.platform != "win32":  # a child that outlives us must not hold our end of the pipe
        os.set_inheritable(pipe.fileno(), False)
        os.register_at_fork(after_in_child=pipe.close)
    watch = _Watch(pipe)
    with suppress(OSError):  # the consumer has ended; or the handler forked this process, and returned
        pipe.send_bytes(b"")
        while (work := watch.work.get()) is not None:
            answer = _handle(work)
            watch.is_busy = False
            pipe.send_bytes(answer)


def _leave_group() -> None:
    """Leave the consumer's process group, and ignore signals that are sent to all processes of a service."""
    if os.name == "posix":
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):  # the consumer decides what they mean
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which the handler's children would inherit


class _Watch:
    """A thread that reads from the consumer, and ends the process, with all that it has started, in two cases.

    First, the lock is over: the consumer may be suspended, and then neither renews nor kills. Second, the consumer has
    ended, so nothing keeps the lock. The end of the pipe shows that at once; if it doesn't come, as a process that the
    consumer forked holds the other end, our parent process has changed.
    """

    def __init__(self, pipe: Connection) -> None:
        self.work: SimpleQueue[bytes | None] = SimpleQueue()
        self.is_busy = False
        self._pipe = pipe
        self._until = 0.0
        parent = multiprocessing.parent_process()
        assert parent is not None
        self._parent = parent
        threading.Thread(target=self._run, name="tenure-watch", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                left = self._left()
                while left <= 0 and self._pipe.poll(0):
                    # A handler that held the GIL may have kept this thread from reading an extension of the lock.
                    if not self._read_pipe(0):
                        return
                    left = self._left()
                if left <= 0 or not self._read_pipe(min(left, CHECK_EVERY)):
                    return
        finally:  # in any case: no other thread watches the lock
            _end_group()

    def _left(self) -> float:
        """Return the seconds until the next check."""
        return self._until - CLOCK.now() if self.is_busy else CHECK_EVERY

    def _read_pipe(self, seconds: float) -> bool:
        """Read what the consumer sends within *seconds*; return False if the process must end."""
        ready = wait([self._pipe, self._parent.sentinel], seconds)
        if self._parent.sentinel in ready or (os.name == "posix" and os.getppid() != self._parent.pid):
            return False
        if self._pipe in ready:
            try:
                data = self._pipe.recv_bytes()
            except (EOFError, OSError):
                return self._close()
            if self.is_busy or len(data) > MOMENT.size:  # else it is about a message already handled
                self._until = MOMENT.unpack_from(data)[0]
            if len(data) > MOMENT.size:
                self.is_busy = True
                self.work.put(data[MOMENT.size :])
        return True

    def _close(self) -> bool:
        """Let the process end by itself, if no message is being handled."""
        if not self.is_busy:
            self.work.put(None)
            wait([self._parent.sentinel], EXIT_WITHIN)
        return False


def _end_group() -> None:
    if os.name == "posix":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


# --- answers ---------------------------------------------------------------------------------------------------------


def _handle(work: bytes) -> bytes:
    """Return the answer to *work*: the handler's result, its exception, or why it could not be started."""
    written, message = pickle.loads(work)
    try:
        handler = pickle.loads(written)
    except Exception as error:
        kind = NotBegun if isinstance(error, (OSError, MemoryError)) else NeverBegins
        return pickle.dumps((kind, None, None, f"{type(error).__name__}: {text_of(error)}", traceback_of(error), ""))
    try:
        result = handler(message)
        if inspect.isawaitable(result):
            raise TypeError(f"the handler returned {result!r:.80}, which can't be awaited in a process")
        # The consumer uses no other result, and not every object can be pickled.
        used = result if issubclass(type(result), (Reject, Reply, Retry)) else None
        return pickle.dumps((None, used, None, "", "", ""))
    except Exception as error:
        is_bare = isinstance(error, (Reject, Retry)) and error.__cause__ is None and error.__context__ is None
        text = "" if is_bare else traceback_of(error)
        name = f"{type(error).__qualname__}: {text_of(error)}"
        try:
            return pickle.dumps((None, None, pickle.dumps(error), name, text, place_of(error)))
        except Exception:  # not every exception can be pickled
            return pickle.dumps((None, None, b"", name, text, place_of(error)))


def result_of(answer: bytes) -> object:
    """Return the result in *answer*, or raise its exception."""
    not_begun, result, error, name, text, place = pickle.loads(answer)
    if not_begun is not None:
        raise not_begun(
            f"a process can't load the handler: {name}; define it at the top of a module that can be imported "
            "without running this script"
        ) from ThereTraceback(text, place)
    if error is None:
        return result
    try:
        raised = pickle.loads(error)
    except BaseException:  # unpickling runs the exception's own code
        raised = None
    if not isinstance(raised, BaseException):
        raised = RuntimeError(f"{name} (the exception can't be sent from the handler's process to this one)")
    raise raised from (ThereTraceback(text, place) if text else None)
