"""Daemon threads for function calls: they never keep the process from ending, and work until it ends."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class DaemonThreads(ThreadPoolExecutor):
    """A pool of up to *most* daemon threads, started as they are needed.

    A pool of ``concurrent.futures`` takes no calls once the main thread has ended, though other threads, and their
    loops, may go on for days; and the interpreter waits for its threads: one function that never returns keeps the
    process from ending, whatever signal it gets. These threads are daemons.

    It is a subclass of ``ThreadPoolExecutor`` only because asyncio accepts no other executor for a loop.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._taken = 0  # jobs that wait or run: the number of threads that are needed
        self._lock = threading.Lock()
        self._made: list[threading.Thread] = []
        self._is_shut = False

    def submit(self, function: Callable[P, T], /, *arguments: P.args, **options: P.kwargs) -> Future[T]:
        """Call *function* in a thread; return the future of its result.

        Raises:
            RuntimeError: It was shut down, or the system gives not even one thread.
        """
        outcome: Future[T] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError(f"the threads {self._name} were shut down")
            self._taken += 1
            self._jobs.put((outcome, function, arguments, options))
            if len(self._made) < min(self._taken, self._most):
                name = f"{self._name}_{len(self._made)}" if self._most > 1 else self._name
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    if not self._made:
                        outcome.cancel()  # the caller gets an error, so the job must not run later
                        raise
                else:
                    self._made.append(thread)
        return outcome

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no further calls: threads end when all jobs are done, or cancelled."""
        with self._lock:
            if not self._is_shut:
                self._is_shut = True
                if cancel_futures:
                    self._cancel_all()
                for _ in self._made:
                    self._jobs.put(None)
        if wait:
            for thread in self._made:
                thread.join()

    def _cancel_all(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return
            if job is not None:
                job[0].cancel()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._perform(*job)
            del job  # otherwise its message would live until the next job

    def _perform(
        self, outcome: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if not outcome.set_running_or_notify_cancel():
            self._done()
            return
        try:
            result = function(*arguments, **options)
        except BaseException as error:  # any error is passed to the caller that waits
            self._done()
            outcome.set_exception(error)
        else:
            self._done()
            outcome.set_result(result)
        finally:
            del outcome, arguments  # an error's traceback holds this frame, and would hold them until it is collected

    def _done(self) -> None:
        """Count this thread as free, before the outcome is set and its receiver submits more."""
        with self._lock:
            self._taken -= 1


def in_thread(name: str, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Call *function* in a thread of its own, with the caller's context variables; return the future of its result.

    ``asyncio.to_thread`` uses a shared pool of ``concurrent.futures``.
    """
    thread = DaemonThreads(1, name)
    try:
        run = contextvars.copy_context().run
        return asyncio.get_running_loop().run_in_executor(thread, run, function, *arguments)
    finally:
        thread.shutdown(wait=False)
