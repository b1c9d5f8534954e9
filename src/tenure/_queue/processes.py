"""Processes for handlers: one message at a time in each, and each can be stopped at any moment."""

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
"""The clock by which a process is told when to end: all processes of a machine share it."""

NOTABLE = 0.01
"""Seconds by which the end of a lock moves on at least, if it does."""

_MOMENT = struct.Struct("d")

NAME = "tenure-handler"
"""What the processes are called."""

UNGUARDED = 78
"""The exit code of a process that was about to consume, because the script it imports does so."""

DYING = 5.0
"""Seconds for a process to end whose pipe is closed."""

LOOK_AGAIN = 0.5
"""Seconds between looks at whether a process has ended: not everything that ends closes its pipe."""


class HandlerDied(Exception):
    """The process of a handler has ended without an answer: killed, crashed, or by its own exit."""


class NotBegun(Exception):
    """The handler could not be begun, which is no fault of the message."""


class NeverBegins(NotBegun):
    """The handler can't be begun now or later: that has to be mended by whoever wrote it."""


class Lock(NamedTuple):
    """What a handler's process has to know of the lock of its message.

    Args:
        until: Returns the moment, by :data:`CLOCK`, at which a handler that still runs is to be ended.
        every: Seconds between looks at whether that has moved on.
    """

    until: Callable[[], float]
    every: float


class Processes:
    """As many processes as messages are handled at once, made as they are needed, kept for the next message.

    A message has a process to itself as long as it is handled: if the process dies, it is known of which message.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._guard = threading.Lock()
        self._idle: list[_Process] = []
        self._is_closed = False

    def task(self, message: object, lock: Lock) -> Task:
        """Return what handles *message* when it is called, in a thread, and no longer than *lock* says."""
        return Task(self, self._handler, message, lock)

    def take(self) -> _Process:
        """Return a process that nobody else uses.

        Raises:
            NotBegun: There is none, and none can be made.
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
            raise NotBegun(f"no process could be made for the handler, for {what}") from error

    def put_back(self, process: _Process) -> None:
        """Keep *process* for another message."""
        with self._guard:
            if not self._is_closed:
                self._idle.append(process)
                return
        process.close()

    def close(self) -> None:
        """End the processes that are idle, and each other one as soon as it is."""
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
            with self._guard:  # from here on, it may be another message's
                self._process = None
                is_killed = self._is_stopped
            if process.is_usable and not is_killed:
                self._processes.put_back(process)
            else:
                process.close()

    def stop(self) -> None:
        """Kill the process, and what it has started."""
        with self._guard:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()


class _Process:
    def __init__(self) -> None:
        # Spawned: forking a process that has threads, and we have, can hang the child.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name=NAME)
        try:
            self._process.start()
        except BaseException:
            self._pipe.close()
            raise
        finally:
            theirs.close()
        # Unless killed first, it would be waited for when the interpreter ends.
        self._finalizer = Finalize(self, _kill, args=(self._process,), exitpriority=10)
        self._guard = threading.Lock()
        self._is_collected = False  # or about to be: its number may become another's
        self._code: int | None = None
        self._is_ready = False
        self.is_usable = True

    @property
    def is_alive(self) -> bool:
        return _state(self._process) is _State.RUNNING

    def call(self, handler: Handler, message: object, lock: Lock) -> object:
        try:
            work = pickle.dumps((pickle.dumps(handler), message))
        except Exception as error:  # it could be, when the consumer was made
            raise NotBegun(
                f"the handler can't be sent to a process, for {type(error).__name__}: {text_of(error)}"
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
            raise NotBegun("its lock was over before a process was ready")
        try:  # from here on it has the message: a body may be what it dies of, and an uncounted try would be endless
            self._pipe.send_bytes(_MOMENT.pack(until) + work)
            answer = self._receive(lock, until)
        except (EOFError, OSError) as error:
            how = self._end(with_group=True)
            raise HandlerDied(f"the process of the handler ended without an answer, {how}") from error
        self.is_usable = True
        return _read(answer)

    def _receive(self, lock: Lock | None = None, until: float = 0.0) -> bytes:
        """Return what it sends; meanwhile, tell it how the end of the *lock* moves on from *until*.

        Raises:
            EOFError: It has ended, even if something that it has forked keeps its end of the pipe open.
        """
        pause = LOOK_AGAIN if lock is None else min(LOOK_AGAIN, lock.every)
        while not self._pipe.poll(pause):
            if not self.is_alive and not self._pipe.poll(0):
                raise EOFError
            if lock is not None and (later := lock.until()) > until + NOTABLE:
                until = later
                with suppress(OSError):  # it has just ended, maybe after an answer
                    self._pipe.send_bytes(_MOMENT.pack(until))
        return self._pipe.recv_bytes()

    def _died_early(self) -> NotBegun:
        how = self._end(with_group=True)
        if self._code == UNGUARDED:
            return NeverBegins(
                "each process for handlers runs the script once more, and would consume as well; "
                "put what starts the script under: if __name__ == '__main__':"
            )
        return NotBegun(f"a process for handlers ended too soon, {how}; see its words on stderr")

    def kill(self) -> None:
        """Kill it, with all that it has started, and let whoever waits for it know."""
        with self._guard:
            if not self._is_collected:
                _kill(self._process)
                _shut(self._pipe)

    def close(self) -> None:
        """Let it end by itself, as there is no further message to read; wait for that."""
        self._end()

    def _end(self, *, with_group: bool = False) -> str:
        """Make sure that it has ended, and say how it did.

        Args:
            with_group: Kill what it has left behind, too. That is always done if it has to be killed.
        """
        with self._guard:
            self._pipe.close()
        if not self._is_collected:
            has_ended = _has_ended_within(self._process, DYING)
            with self._guard:
                if with_group or not has_ended:
                    _kill(self._process)
                self._is_collected = True
            self._process.join()
            self._code = self._process.exitcode
            self._finalizer.cancel()
            with suppress(ValueError):  # somebody else has collected it
                self._process.close()
        code = self._code or 0
        return f"killed by signal {-code} ({_name(-code)})" if code < 0 else f"with exit code {code}"


class _State(Enum):
    RUNNING = "running"
    ENDED = "ended"  # and not collected: its number is still its own
    COLLECTED = "collected"


def _state(process: SpawnProcess) -> _State:
    """Say how far *process* is, without collecting it: its group can be killed safely as long as nobody has."""
    if sys.platform == "win32" or not hasattr(os, "waitid"):
        return _State.RUNNING if process.exitcode is None else _State.COLLECTED
    assert process.pid is not None
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return _State.COLLECTED
    return _State.RUNNING if found is None else _State.ENDED


def _has_ended_within(process: SpawnProcess, seconds: float) -> bool:
    # Not by its sentinel: that is a pipe, of which something that it has forked may hold an end.
    give_up = time.monotonic() + seconds
    pause = 0.001
    while _state(process) is _State.RUNNING:
        if time.monotonic() >= give_up:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    return True


def _kill(process: SpawnProcess) -> None:
    """Kill *process* with all that it has started; none of it has a say."""
    with suppress(ValueError):  # as the interpreter exits, another thread may collect and close it meanwhile
        if process.pid is None or _state(process) is _State.COLLECTED:
            return
        if sys.platform != "win32":
            with suppress(ProcessLookupError, PermissionError):  # it has no group of its own yet
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def _shut(pipe: Connection) -> None:
    """Let whoever reads from *pipe* or writes to it notice that this is over, whoever has the other end."""
    if sys.platform != "win32":
        with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as one:
            one.shutdown(socket.SHUT_RDWR)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "of no name"


# --- answers, from process to process --------------------------------------------------------------------------------


def _worked_off(work: bytes) -> bytes:
    """Return the answer to *work*: what the handler returned, what it raised, or why it could not be begun."""
    written, message = pickle.loads(work)
    try:
        handler = pickle.loads(written)
    except Exception as error:
        kind = NotBegun if isinstance(error, (OSError, MemoryError)) else NeverBegins
        return pickle.dumps((kind, None, None, f"{type(error).__name__}: {text_of(error)}", traceback_of(error), ""))
    try:
        result = handler(message)
        if inspect.isawaitable(result):
            raise TypeError(f"the handler returned {result!r:.80}, which nobody awaits in a process")
        # Nothing else is of any use to the consumer, and not everything can be carried over.
        return pickle.dumps((None, result if isinstance(result, (Reject, Retry)) else None, None, "", "", ""))
    except Exception as error:
        is_bare = isinstance(error, (Reject, Retry)) and error.__cause__ is None and error.__context__ is None
        text = "" if is_bare else traceback_of(error)
        name = f"{type(error).__qualname__}: {text_of(error)}"
        try:
            return pickle.dumps((None, None, pickle.dumps(error), name, text, place_of(error)))
        except Exception:  # not every exception can be carried over
            return pickle.dumps((None, None, b"", name, text, place_of(error)))


def _read(answer: bytes) -> object:
    hindrance, result, error, name, text, place = pickle.loads(answer)
    if hindrance is not None:
        raise hindrance(
            f"a process can't load the handler, for {name}; define it at the top of a module that can be imported "
            "without this script's being run as such"
        ) from ThereTraceback(text, place)
    if error is None:
        return result
    try:
        raised = pickle.loads(error)
    except BaseException:  # an exception's own code does this
        raised = None
    if not isinstance(raised, BaseException):
        raised = RuntimeError(f"{name} (it can't be carried from the handler's process to this one)")
    raise raised from (ThereTraceback(text, place) if text else None)


# --- in the process --------------------------------------------------------------------------------------------------


def _serve(pipe: Connection) -> None:
    """Handle what comes through *pipe*, until it is closed."""
    _stand_alone()
    if sys.platform != "win32":  # what we start, and what lives longer than we, must not seem to be us
        os.set_inheritable(pipe.fileno(), False)
        os.register_at_fork(after_in_child=pipe.close)
    watch = _Watch(pipe)
    with suppress(OSError):  # nobody is left who would read it; or we were forked by the handler, and it returned
        pipe.send_bytes(b"")
        while (work := watch.work.get()) is not None:
            answer = _worked_off(work)
            watch.is_busy = False
            pipe.send_bytes(answer)


def _stand_alone() -> None:
    """Listen to nobody but the consumer."""
    if os.name == "posix":
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM):  # sent to all of a service: the consumer decides what it means
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which what the handler starts would inherit


class _Watch:
    """A thread that listens to the consumer, and ends the process, with all that it has started, when it has to.

    That is when the lock is over, of which the consumer need not be able to tell any more: stopped, it neither renews
    nor kills. And when the consumer has ended: then, nobody keeps the lock. The end of the pipe says so at once; if it
    doesn't come, as something that the consumer forked holds the other end, we are somebody else's child.
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
                    # A handler that held the GIL kept us from hearing that the lock was renewed meanwhile.
                    if not self._listen(0):
                        return
                    left = self._left()
                if left <= 0 or not self._listen(min(left, LOOK_AGAIN)):
                    return
        finally:  # whatever has happened: nobody would watch
            _end_group()

    def _left(self) -> float:
        """Return for how many seconds there is nothing to be done."""
        return self._until - CLOCK.now() if self.is_busy else LOOK_AGAIN

    def _listen(self, seconds: float) -> bool:
        """Take in what the consumer says in so many *seconds*; False if it is over."""
        ready = wait([self._pipe, self._parent.sentinel], seconds)
        if self._parent.sentinel in ready or (os.name == "posix" and os.getppid() != self._parent.pid):
            return False
        if self._pipe in ready:
            try:
                said = self._pipe.recv_bytes()
            except (EOFError, OSError):
                return self._close()
            if self.is_busy or len(said) > _MOMENT.size:  # or it is about what has ended by itself
                self._until = _MOMENT.unpack_from(said)[0]
            if len(said) > _MOMENT.size:
                self.is_busy = True
                self.work.put(said[_MOMENT.size :])
        return True

    def _close(self) -> bool:
        """Let the process end by itself, if nothing is to be done any more."""
        if not self.is_busy:
            self.work.put(None)
            wait([self._parent.sentinel], DYING)
        return False


def _end_group() -> None:
    if os.name == "posix":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
