"""Processes for handlers: one message at a time in each; each process can be killed at any time."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from queue import SimpleQueue
from typing import Any, NamedTuple

from tenure._queue.failures import text_of, traceback_of
from tenure._queue.retry import Reject, Retry
from tenure._queue.tracebacks import ThereTraceback, place_of
from tenure._runtime.clock import SystemClock

Handler = Callable[[Any], Any]

CLOCK = SystemClock()
"""The clock for the time at which a process must end: all processes of a machine share it."""

EXTENSION_MIN = 0.01
"""Seconds: a smaller extension of a lock is not sent to the process."""

_MOMENT = struct.Struct("d")

NAME = "tenure-handler"
"""The name of the processes."""

UNGUARDED = 78
"""The exit code of a process whose imported script would start a consumer, as it has no ``__main__`` guard."""

EXIT_WITHIN = 5.0
"""Seconds for a process to end after its pipe is closed."""

CHECK_EVERY = 0.5
"""Seconds between checks that a process still runs: its end need not close its pipe."""


class HandlerDied(Exception):
    """The process of a handler has ended without an answer: it was killed, crashed or called exit."""


class NotBegun(Exception):
    """The handler could not be started, and the message is not the cause."""


class NeverBegins(NotBegun):
    """The handler can never be started: its code has to be corrected."""


class Lock(NamedTuple):
    """The lock of a message, as the process of its handler needs it.

    Args:
        until: Returns the moment, by :data:`CLOCK`, at which a handler that still runs must be ended.
        every: Seconds between checks whether this moment has changed.
    """

    until: Callable[[], float]
    every: float


class Processes:
    """One process per message handled at once, made when needed, kept for the next message.

    A process handles one message at a time: if it dies, the message that it handled is known.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._guard = threading.Lock()
        self._idle: list[_Process] = []
        self._is_closed = False

    def task(self, message: object, lock: Lock) -> Task:
        """Return a task that handles *message* when it is called, in a thread, no longer than *lock* lasts."""
        return Task(self, self._handler, message, lock)

    def take(self) -> _Process:
        """Return a process that is not in use.

        Raises:
            NotBegun: None is idle, and none can be started.
        """
        with self._guard:
            idle = self._idle.pop() if self._idle else None
        while idle is not None:
            if idle.is_alive:
                return idle
            idle.close()
            with self._guard:
                idle = self._idle.pop() if self._idle else None
        try:
            return _Process()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise NotBegun(f"no process could be started for the handler: {what}") from error

    def put_back(self, process: _Process) -> None:
        """Keep *process* for another message."""
        with self._guard:
            if not self._is_closed:
                self._idle.append(process)
                return
        process.close()

    def close(self) -> None:
        """End the idle processes now, and each other one when it becomes idle."""
        with self._guard:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            threading.Thread(target=process.close, name="tenure-ending", daemon=True).start()


class Task:
    """The handling of one message. Call it in a thread; :meth:`stop` it from any other."""

    def __init__(self, processes: Processes, handler: Handler, message: object, lock: Lock) -> None:
        self._processes = processes
        self._handler = handler
        self._message = message
        self._lock = lock
        self._guard = threading.Lock()
        self._process: _Process | None = None
        self._is_stopped = False

    def __call__(self) -> object:
        """Return what the handler returns, or raise what it raises."""
        process = self._processes.take()
        with self._guard:
            self._process = process
            if self._is_stopped:
                process.kill()
        try:
            return process.call(self._handler, self._message, self._lock)
        finally:
            with self._guard:  # from here on, another message may use it
                self._process = None
                is_killed = self._is_stopped
            if process.is_usable and not is_killed:
                self._processes.put_back(process)
            else:
                process.close()

    def stop(self) -> None:
        """Kill the process, and all that it has started."""
        with self._guard:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()


class _Process:
    def __init__(self) -> None:
        # Spawned: forking a process that has threads, as ours does, can hang the child.
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end,), name=NAME)
        try:
            self._process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            child_end.close()
        # The interpreter waits for it at exit, unless it is killed first.
        self._finalizer = Finalize(self, _kill, args=(self._process,), exitpriority=10)
        self._guard = threading.Lock()
        self._is_collected = False  # or about to be: then another process may get its pid
        self._code: int | None = None
        self._is_ready = False
        self.is_usable = True

    @property
    def is_alive(self) -> bool:
        return _state(self._process) is _State.RUNNING

    def call(self, handler: Handler, message: object, lock: Lock) -> object:
        try:
            work = pickle.dumps((pickle.dumps(handler), message))
        except Exception as error:  # although the handler could be pickled when the consumer was made
            raise NotBegun(
                f"the handler can't be sent to a process: {type(error).__name__}: {text_of(error)}"
            ) from error
        self.is_usable = False
        try:
            if not self._is_ready:
                self._receive()
                self._is_ready = True
        except (EOFError, OSError) as error:
            raise self._died_early() from error
        until = lock.until()
        if until <= CLOCK.now():
            self.is_usable = True
            raise NotBegun("the lock of the message ended before a process was ready")
        try:  # the process gets the message, which may kill it: from here on the delivery counts, or it would repeat
            self._pipe.send_bytes(_MOMENT.pack(until) + work)
            answer = self._receive(lock, until)
        except (EOFError, OSError) as error:
            how = self._end(with_group=True)
            raise HandlerDied(f"the process of the handler ended without an answer, {how}") from error
        self.is_usable = True
        return _result_of(answer)

    def _receive(self, lock: Lock | None = None, until: float = 0.0) -> bytes:
        """Return the next answer of the process; meanwhile, send it each extension of the *lock* beyond *until*.

        Raises:
            EOFError: The process has ended, even if a process that it forked keeps its end of the pipe open.
        """
        pause = CHECK_EVERY if lock is None else min(CHECK_EVERY, lock.every)
        while not self._pipe.poll(pause):
            if not self.is_alive and not self._pipe.poll(0):
                raise EOFError
            if lock is not None and (later := lock.until()) > until + EXTENSION_MIN:
                until = later
                with suppress(OSError):  # the process has just ended, perhaps after an answer
                    self._pipe.send_bytes(_MOMENT.pack(until))
        return self._pipe.recv_bytes()

    def _died_early(self) -> NotBegun:
        how = self._end(with_group=True)
        if self._code == UNGUARDED:
            return NeverBegins(
                "each process for handlers runs the script again, and would start a consumer, too; "
                "put the code that starts the script under: if __name__ == '__main__':"
            )
        return NotBegun(f"a process for handlers ended before it was ready, {how}; see its output on stderr")

    def kill(self) -> None:
        """Kill the process and all that it has started, and wake the thread that waits for it."""
        with self._guard:
            if not self._is_collected:
                _kill(self._process)
                _shut(self._pipe)

    def close(self) -> None:
        """Close the pipe, and wait for the process to end by itself."""
        self._end()

    def _end(self, *, with_group: bool = False) -> str:
        """Make sure that the process has ended, and return how it ended.

        Args:
            with_group: Also kill the processes that it has started. Always done if it has to be killed.
        """
        with self._guard:
            self._pipe.close()
        if not self._is_collected:
            has_ended = _has_ended_within(self._process, EXIT_WITHIN)
            with self._guard:
                if with_group or not has_ended:
                    _kill(self._process)
                self._is_collected = True
            self._process.join()
            self._code = self._process.exitcode
            self._finalizer.cancel()
            with suppress(ValueError):  # another thread has collected the process
                self._process.close()
        code = self._code or 0
        return f"killed by signal {-code} ({_name(-code)})" if code < 0 else f"with exit code {code}"


class _State(Enum):
    RUNNING = "running"
    ENDED = "ended"  # and not collected: no other process can have its pid
    COLLECTED = "collected"


def _state(process: SpawnProcess) -> _State:
    """Return the state of *process* without collecting it: until it is collected, its group is safe to kill."""
    if sys.platform == "win32" or not hasattr(os, "waitid"):
        return _State.RUNNING if process.exitcode is None else _State.COLLECTED
    assert process.pid is not None
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return _State.COLLECTED
    return _State.RUNNING if found is None else _State.ENDED


def _has_ended_within(process: SpawnProcess, seconds: float) -> bool:
    # Not by its sentinel: that is a pipe, and a process that it forked may hold an end of it.
    give_up = time.monotonic() + seconds
    pause = 0.001
    while _state(process) is _State.RUNNING:
        if time.monotonic() >= give_up:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    return True


def _kill(process: SpawnProcess) -> None:
    """Kill *process* with all that it has started; none of them can refuse."""
    with suppress(ValueError):  # as the interpreter exits, another thread may collect and close it meanwhile
        if process.pid is None or _state(process) is _State.COLLECTED:
            return
        if sys.platform != "win32":
            with suppress(ProcessLookupError, PermissionError):  # it has no group of its own yet
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def _shut(pipe: Connection) -> None:
    """Shut *pipe* down, so that readers and writers at both ends notice, whichever process holds them."""
    if sys.platform != "win32":
        with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as one:
            one.shutdown(socket.SHUT_RDWR)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


# --- answers, from process to process --------------------------------------------------------------------------------


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
        return pickle.dumps((None, result if isinstance(result, (Reject, Retry)) else None, None, "", "", ""))
    except Exception as error:
        is_bare = isinstance(error, (Reject, Retry)) and error.__cause__ is None and error.__context__ is None
        text = "" if is_bare else traceback_of(error)
        name = f"{type(error).__qualname__}: {text_of(error)}"
        try:
            return pickle.dumps((None, None, pickle.dumps(error), name, text, place_of(error)))
        except Exception:  # not every exception can be pickled
            return pickle.dumps((None, None, b"", name, text, place_of(error)))


def _result_of(answer: bytes) -> object:
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


# --- in the process --------------------------------------------------------------------------------------------------


def _serve(pipe: Connection) -> None:
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
            if self.is_busy or len(data) > _MOMENT.size:  # else it is about a message already handled
                self._until = _MOMENT.unpack_from(data)[0]
            if len(data) > _MOMENT.size:
                self.is_busy = True
                self.work.put(data[_MOMENT.size :])
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
