"""Threads for handlers, which never keep the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Threads:
    """Up to *most* threads, made as they are needed.

    Those of ``concurrent.futures`` are waited for when the interpreter ends: one handler that never returns, and the
    process never ends, however often it is told to. These are daemons.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call *function* in a thread; return what will hold its result. Called on one thread only."""
        outcome: Future[Any] = Future()
        self._jobs.put((outcome, function, arguments))
        if not self._idle.acquire(blocking=False) and self._count < self._most:
            thread = threading.Thread(target=self._work, name=f"{self._name}_{self._count}", daemon=True)
            thread.start()
            self._count += 1
        return outcome

    def close(self) -> None:
        """Call nothing more: what waits is cancelled, threads end as they become free."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                break
            if job is not None:
                job[0].cancel()
        for _ in range(self._count):
            self._jobs.put(None)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                self._idle.release()
                job = self._jobs.get()
            if job is None:
                return
            _perform(*job)
            del job  # or the message would live as long as nothing else is to do


def _perform(outcome: Future[Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        result = function(*arguments)
    except BaseException as error:  # whatever it is, it is for whoever waits
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
