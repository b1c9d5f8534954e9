"""Processes for handlers: one message at a time in each; each process can be killed at any time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from tenure._queue.failures import text_of
from tenure._queue.handler_process import (
    CHECK_EVERY,
    CLOCK,
    EXIT_WITHIN,
    MOMENT,
    result_of,
    serve,
)
from tenure._queue.outcomes import NeverBegins, NotBegun

Handler = Callable[[Any], Any]

EXTENSION_MIN = 0.01
"""Seconds: a smaller extension of a lock is not sent to the process."""

NAME = "tenure-handler"
"""The name of the processes."""

UNGUARDED = 78
"""The exit code of a process whose imported script would start a consumer, as it has no ``__main__`` guard."""


class HandlerDied(Exception):
    """The process of a handler has ended without an answer: it was killed, crashed or called exit."""


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
        """Keep *process* for another message, also one that is still being made."""
        process.is_given_up = False
        if not process.is_ready:
            self._finish(process)
            return
        with self._guard:
            if not self._is_closed:
                self._idle.append(process)
                return
        process.close()

    def _finish(self, process: _Process) -> None:
        """Go on making *process*, in a thread; else one whose making takes longer than a lock would never be made."""

        def make() -> None:
            try:
                process.make()
            except (EOFError, OSError):
                process.close()
            else:
                self.put_back(process)

        with self._guard:
            is_closed = self._is_closed
        if is_closed:
            process.kill()
            process.close()
        else:
            threading.Thread(target=make, name="tenure-making", daemon=True).start()

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
                process.stop()
        try:
            return process.call(self._handler, self._message, self._lock)
        finally:
            with self._guard:  # from here on, another message may use it
                self._process = None
            if process.is_usable:
                self._processes.put_back(process)
            else:
                process.close()

    def stop(self) -> None:
        """Kill the process, and all that it has started; one that is still being made is kept for another message."""
        with self._guard:
            self._is_stopped = True
            if self._process is not None:
                self._process.stop()


class _Process:
    def __init__(self) -> None:
        # Spawned: forking a process that has threads, as ours does, can hang the child.
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=serve, args=(child_end,), name=NAME)
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
        self._is_killed = False
        self._is_collected = False  # or about to be: then another process may get its pid
        self._code: int | None = None
        self.is_ready = False
        self.is_given_up = False
        """Whether its first message is over before it was ready."""
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
        try:
            self.make()
        except (EOFError, OSError) as error:
            self.is_usable = False
            raise self._died_early() from error
        until = lock.until()
        if self.is_given_up or until <= CLOCK.now():
            raise NotBegun("the lock of the message ended before a process was ready")
        self.is_usable = False
        try:  # the process gets the message, which may kill it: from here on the delivery counts, or it would repeat
            self._pipe.send_bytes(MOMENT.pack(until) + work)
            answer = self._receive(lock, until)
        except (EOFError, OSError) as error:
            how = self._end(with_group=True)
            raise HandlerDied(f"the process of the handler ended without an answer, {how}") from error
        with self._guard:
            self.is_usable = not self._is_killed
        return result_of(answer)

    def make(self) -> None:
        """Wait until it is ready for messages, or given up.

        Raises:
            EOFError: It has ended.
        """
        while not self.is_ready and not self.is_given_up:
            if self._pipe.poll(CHECK_EVERY):
                self._pipe.recv_bytes()
                with self._guard:
                    self.is_ready = True
            elif not self.is_alive:
                raise EOFError

    def _receive(self, lock: Lock, until: float) -> bytes:
        """Return the next answer of the process; meanwhile, send it each extension of the *lock* beyond *until*.

        Raises:
            EOFError: The process has ended, even if a process that it forked keeps its end of the pipe open.
        """
        pause = min(CHECK_EVERY, lock.every)
        while not self._pipe.poll(pause):
            if not self.is_alive and not self._pipe.poll(0):
                raise EOFError
            if (later := lock.until()) > until + EXTENSION_MIN:
                until = later
                with suppress(OSError):  # the process has just ended, perhaps after an answer
                    self._pipe.send_bytes(MOMENT.pack(until))
        return self._pipe.recv_bytes()

    def _died_early(self) -> NotBegun:
        how = self._end(with_group=True)
        if self._code == UNGUARDED:
            return NeverBegins(
                "each process for handlers runs the script again, and would start a consumer, too; "
                "put the code that starts the script under: if __name__ == '__main__':"
            )
        return NotBegun(f"a process for handlers ended before it was ready, {how}; see its output on stderr")

    def stop(self) -> None:
        """Kill it as *kill* does; if it is not ready yet, only let the thread that waits for it go on."""
        with self._guard:
            self.is_given_up = not self.is_ready
        if not self.is_given_up:
            self.kill()

    def kill(self) -> None:
        """Kill the process and all that it has started, and wake the thread that waits for it."""
        with self._guard:
            self._is_killed, self.is_usable = True, False
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
