"""A thread that owns a connection, for use from asyncio."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from tenure._backends.sqlite.client import PATIENCE, Database
from tenure._runtime.threads import DaemonThreads
from tenure.errors import ConfigError, TenureError, Unavailable

T = TypeVar("T")

_LEFT_BY_FORK: list[object] = []  # connections inherited by a fork, kept: closing them would not be safe either


class Worker:
    """A thread that owns a ``Database`` and runs one job after the other; started again after a fork.

    Args:
        make: Makes the database; called for the first job.
    """

    def __init__(self, make: Callable[[], Database]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._parts: tuple[DaemonThreads, Database] | None = None
        self._closed = False

    async def run(self, job: Callable[[Database], T], unwanted: Callable[[Database], object] | None = None) -> T:
        """Return the result of *job*, which runs in the thread. A caller that is cancelled only stops waiting.

        Args:
            job: The work.
            unwanted: Runs in the thread, some time after *job*, if the caller doesn't get its result. The job may not
                have run at all.

        Raises:
            Unavailable: The file could not be used now, or the answer did not come in time.
            ConfigError: The file can't be used as it is, or the worker is closed.
        """
        thread, database = self._running()
        busy = database.options.busy
        until = time.monotonic() + busy  # counted from the call, so that jobs that queue behind a lock give up together

        def work() -> T:
            database.until = until
            return job(database)

        try:
            async with asyncio.timeout(busy + PATIENCE):
                return await asyncio.get_running_loop().run_in_executor(thread, work)
        except BaseException as error:
            if unwanted is not None:
                _do_after(thread, database, unwanted)
            if isinstance(error, TimeoutError):
                raise Unavailable(
                    f"{database.path} gave no answer within {busy + PATIENCE:g} s; the disk may hang. "
                    "The request may still be executed"
                ) from error
            raise

    async def close(self) -> None:
        """Finish the queued jobs, then close the connection and end the thread."""
        self._closed = True
        with self._lock:
            parts, self._parts = self._parts, None
        if parts is None or self._pid != os.getpid():
            return
        thread, database = parts
        with suppress(TimeoutError):
            async with asyncio.timeout(database.options.busy + PATIENCE):
                await asyncio.get_running_loop().run_in_executor(thread, database.close)
        thread.shutdown(wait=False)

    def _running(self) -> tuple[DaemonThreads, Database]:
        if self._pid != os.getpid():
            # The parent's thread doesn't exist here; its connection must not be used, nor its lock, which may be held.
            _LEFT_BY_FORK.append(self._parts)
            self._lock, self._parts, self._pid = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._closed:
                raise ConfigError("this backend was closed; connect again")
            if self._parts is None:
                self._parts = (DaemonThreads(1, "tenure-sqlite"), self._make())
            return self._parts


def _do_after(thread: DaemonThreads, database: Database, job: Callable[[Database], object]) -> None:
    """Run *job* after all queued jobs, also if the worker is closed meanwhile, without waiting for it."""

    def work() -> None:
        database.until = time.monotonic() + database.options.busy
        with suppress(TenureError):
            job(database)

    with suppress(RuntimeError):  # shut down: the jobs before it are done, and the connection is closed
        thread.submit(work)
