"""A process of ``tenure run``: it runs the service, obeys its supervisor, and reports to it.

Rules:

- The supervisor writes a line for each order to the control pipe: ``retire``, ``drain``, ``hurry``, ``look``. If the
  pipe closes, the supervisor has died: the process drains, and is killed by a thread of its own if that takes longer
  than the grace.
- It writes a JSON object for each report to the report pipe, at once when it has begun, then each second: how many
  handlers run, whether it leads, its memory; and, when it is asked, the backlog of each queue.
- SIGTERM to this process alone drains it, and a second one lets it hurry; the supervisor then starts another.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import tenure
from tenure._cli.entry_points import service_named
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import exit_of
from tenure._cli.output import log_to_stderr, print_error
from tenure.errors import TenureError

REPORT_EVERY = 1.0
BEGIN_LOOK_EVERY = 0.02
"""Seconds between looks whether the service has begun."""

LOOK_WITHIN = 4.0
"""Seconds that the store has to tell the backlog."""

NO_LIMIT = 1e9
"""The grace of a process that is retired: more than thirty years."""

KILL_AFTER = 5.0
"""Seconds from the end of the grace to the end of a process whose supervisor has died."""


class ServiceProcess:
    """The process of a service, on its event loop."""

    def __init__(self, service: tenure.Service, control: int, reports: int, grace: float) -> None:
        self._service = service
        self._control = control
        self._reports = reports
        self._grace = grace
        self._loop = asyncio.get_running_loop()
        self._is_told = False  # to end
        self._looking: asyncio.Task[None] | None = None

    async def run(self, until_empty: bool) -> None:
        """Run the service until it ends, by itself or as it is told."""
        threading.Thread(target=self._read_control, name="tenure-control", daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled)
        serving = asyncio.create_task(self._service.serve(until_empty=until_empty, sigterm=False))
        reporting = asyncio.create_task(self._report())
        try:
            await asyncio.wait({serving, reporting}, return_when=asyncio.FIRST_COMPLETED)
            await serving
        finally:
            reporting.cancel()
        if not self._is_told:
            self._send({"finished": True})

    async def _report(self) -> None:
        while not (status := await self._service.status()).handlers and not status.leaders:  # noqa: ASYNC110  # it is told by nothing
            await asyncio.sleep(BEGIN_LOOK_EVERY)
        while True:
            self._send(
                {
                    "running": sum(one.running for one in status.handlers),
                    "leads": any(one.state == "leading" for one in status.leaders),
                    "memory": resident_memory(),
                }
            )
            await asyncio.sleep(REPORT_EVERY)
            status = await self._service.status()

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(LOOK_WITHIN):
                self._send({"backlogs": [await self._backlog(one) for one in (await self._service.status()).handlers]})
        except (TenureError, TimeoutError):
            self._send({"backlogs": None})

    async def _backlog(self, handler: tenure.HandlerStatus) -> tuple[int, int]:
        """Return how many messages of its queue are ready or locked, and how many this process handles at once."""
        stats = await self._service.backend.queue(handler.queue).stats()
        return stats.ready + stats.locked, handler.concurrency

    def _send(self, report: dict[str, Any]) -> None:
        with suppress(OSError):  # the supervisor has died, or does not read: the control pipe tells
            os.write(self._reports, (json.dumps(report) + "\n").encode())

    def _read_control(self) -> None:
        """Pass on the orders; when the supervisor has died, drain, and end the process after that at the latest."""
        with os.fdopen(self._control) as control:
            for line in control:
                self._call(line.strip())
        self._call("drain")
        threading.Event().wait(self._grace + KILL_AFTER)
        os.kill(os.getpid(), signal.SIGKILL)

    def _call(self, order: str) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the process ends
            self._loop.call_soon_threadsafe(self._obey, order)

    def _obey(self, order: str) -> None:
        if order == "look":
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
            return
        self._is_told = True
        self._service.stop({"retire": NO_LIMIT, "drain": None, "hurry": 0.0}[order])

    def _signalled(self) -> None:
        self._obey("hurry" if self._is_told else "drain")


def resident_memory() -> int:
    """Return the bytes of resident memory of this process; elsewhere than on Linux, the most it ever had."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(arguments: Sequence[str]) -> int:
    """Run the service that *arguments* name; return the exit code."""
    named, control, reports, grace, until_empty, verbosity = arguments
    log_to_stderr(int(verbosity))
    try:
        service = service_named(named)

        async def run() -> None:
            await ServiceProcess(service, int(control), int(reports), float(grace)).run(until_empty == "1")

        asyncio.run(run())
    except (Failure, TenureError) as error:
        code, message = exit_of(error)
        print_error(message)
        return code
    except Exception as error:  # of the service's own code
        traceback.print_exception(error)
        return Exit.BROKEN
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
