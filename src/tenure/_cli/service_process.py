"""A process of ``tenure run``: it runs the service, obeys its supervisor, and reports to it.

Rules:

- The supervisor writes a line for each order to the control pipe: ``retire``, ``drain``, ``hurry``, ``look``. A thread
  reads them from the first moment, also while the service is imported. If the pipe closes, the supervisor has died: the
  process drains, and that thread kills it, with its group, if that takes longer than the grace.
- It writes a JSON object for each report to the report pipe, at once when it has begun, then each second: how many
  handlers run, whether it leads, whether it is live and ready, its memory; ``leaving`` when it only has to end; and,
  when it is asked, the backlog of each queue, its metrics (``measure``) or the numbers of its queues (``stats``). If
  much waits to be read, a report is dropped: a supervisor that does not read blocks no handler.
- SIGTERM to this process alone drains it, and a second one, some time later, lets it hurry. The supervisor then starts
  another. A service manager may signal all processes at once: that is no second request.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any

import tenure
from tenure._cli.entry_points import service_named
from tenure._cli.exits import Exit, Failure
from tenure._cli.group import exit_of, explained_by
from tenure._cli.hung import show_stack_on_signal
from tenure._cli.output import lead_on, log_to_stderr, print_error
from tenure._http.source import add_handlers
from tenure._supervisor.machine import KILL_AFTER
from tenure._telemetry.families import packed
from tenure.errors import TenureError
from tenure.telemetry import Metrics

REPORT_EVERY = 1.0
WAITING_MAX = 1 << 20
"""Bytes of reports that may wait to be read."""

FLUSH_WITHIN = 1.0
"""Seconds for the last reports to be read."""

BEGIN_LOOK_EVERY = 0.02
"""Seconds between looks whether the service has begun."""

LOOK_WITHIN = 4.0
"""Seconds that the store has to tell the backlog."""

NO_LIMIT = 1e9
"""The grace of a process that is retired: more than thirty years."""

GRACES = {"retire": NO_LIMIT, "drain": None, "hurry": 0.0}
"""The orders to end, and the grace of each; None is the service's own."""

SECOND_SIGNAL_AFTER = 1.0
"""Seconds after a first signal from which another one is a second request."""


class Orders:
    """The orders of the supervisor, read by a thread; those that come before there is a loop are kept."""

    def __init__(self, control: int, grace: float) -> None:
        self._control = control
        self._grace = grace
        self._lock = threading.Lock()
        self._early: list[str] = []
        self._obey: Callable[[str], None] | None = None
        threading.Thread(target=self._read, name="tenure-control", daemon=True).start()

    def obeyed_by(self, obey: Callable[[str], None]) -> None:
        """Pass all orders on to *obey*, on the thread that reads them; the early ones now."""
        with self._lock:
            for order in self._early:
                obey(order)
            self._obey = obey

    def _read(self) -> None:
        with os.fdopen(self._control, errors="replace") as control:
            for line in control:
                self._pass_on(line.strip())
        self._pass_on("drain")
        threading.Event().wait(self._grace + KILL_AFTER)
        os.killpg(0, signal.SIGKILL)

    def _pass_on(self, order: str) -> None:
        with self._lock:
            if self._obey is None:
                self._early.append(order)
            else:
                self._obey(order)


class ServiceProcess:
    """The process of a service, on its event loop."""

    def __init__(
        self, service: tenure.Service, orders: Orders, reports: asyncio.StreamWriter, metrics: Metrics | None
    ) -> None:
        self._service = service
        self._reports = reports
        self._metrics = metrics
        self._answering: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._is_serving = False
        self._told: str | None = None  # to end, and how
        self._signalled_at: float | None = None
        self._looking: asyncio.Task[None] | None = None
        orders.obeyed_by(self._pass_on)
        service.on_shutdown(self._report_end)  # the last one declared is called first

    async def run(self, until_empty: bool) -> None:
        """Run the service until it ends, by itself or as it is told."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled)
        await asyncio.sleep(0)  # orders that came early
        if self._told is not None:
            return
        serving = asyncio.create_task(self._service.serve(until_empty=until_empty, sigterm=False))
        await asyncio.sleep(0)  # from its first step on, it can be stopped
        self._begin_obeying()
        reporting = asyncio.create_task(self._report())

        def end_with(reporting: asyncio.Task[None]) -> None:
            if not reporting.cancelled() and reporting.exception() is not None:
                serving.cancel()  # a process that reports no more would be taken for one that hangs

        reporting.add_done_callback(end_with)
        try:
            await serving
        except BaseException as error:
            if reporting.done() and not reporting.cancelled() and (why := reporting.exception()) is not None:
                raise why from error  # what its end has raised follows from that
            raise
        finally:
            reporting.cancel()
            if self._metrics is not None:
                self._send({"to": "measure", "answer": packed(self._metrics.snapshot())})
        if self._told is None:
            self._send({"finished": True})

    async def _report(self) -> None:
        has_begun = False
        with suppress(TenureError):  # the backend is being closed
            while True:
                status = await self._service.status()
                has_begun = has_begun or bool(status.handlers or status.leaders)
                if has_begun:
                    running = sum(one.running for one in status.handlers)
                    leads = any(one.state == "leading" for one in status.leaders)
                    self._send(
                        {
                            "running": running,
                            "leads": leads,
                            "memory": resident_memory(),
                            "live": status.is_live,
                            "ready": status.is_ready,
                        }
                    )
                await asyncio.sleep(REPORT_EVERY if has_begun else BEGIN_LOOK_EVERY)

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(LOOK_WITHIN):
                self._send({"backlogs": [await self._backlog(one) for one in (await self._service.status()).handlers]})
        except (TenureError, TimeoutError):
            self._send({"backlogs": None})

    async def _backlog(self, handler: tenure.HandlerStatus) -> tuple[int, int]:
        """Return how many messages of its queue can be worked on, and how many this process handles at once."""
        queue = self._service.backend.queue(handler.queue)
        backlog, settings = (await queue.stats()).backlog, await queue.settings()
        return int(min(backlog, settings.max_locked)), handler.concurrency

    async def _answer(self, question: str) -> None:
        """Answer a question of the supervisor."""
        answer: Any = None
        if question == "measure" and self._metrics is not None:
            found = self._metrics.snapshot()
            with suppress(TenureError):
                add_handlers(found, (await self._service.status()).handlers)
            answer = packed(found)
        elif question == "stats":
            with suppress(TenureError, TimeoutError):
                async with asyncio.timeout(LOOK_WITHIN):
                    queues = {one.queue for one in (await self._service.status()).handlers}
                    backend = self._service.backend
                    answer = {name: astuple(await backend.queue(name).stats()) for name in sorted(queues)}
        self._send({"to": question, "answer": answer})

    def _send(self, report: dict[str, Any]) -> None:
        transport = self._reports.transport
        if transport.get_write_buffer_size() < WAITING_MAX and not transport.is_closing():
            transport.write((json.dumps(report) + "\n").encode())

    def _pass_on(self, order: str) -> None:
        with suppress(RuntimeError):  # the loop is closed, and the process ends
            self._loop.call_soon_threadsafe(self._obey, order)

    def _obey(self, order: str) -> None:
        if order in ("measure", "stats"):
            task = asyncio.create_task(self._answer(order))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
            return
        if order == "look":
            if self._is_serving and (self._looking is None or self._looking.done()):
                self._looking = asyncio.create_task(self._look())
            return
        if order in GRACES:
            self._told = order
            if self._is_serving:
                self._stop(order)

    def _begin_obeying(self) -> None:
        self._is_serving = True
        if self._told is not None:
            self._stop(self._told)

    def _stop(self, order: str) -> None:
        self._service.stop(GRACES[order])

    def _signalled(self) -> None:
        now = self._loop.time()
        is_second = self._signalled_at is not None and now - self._signalled_at > SECOND_SIGNAL_AFTER
        if self._signalled_at is None:
            self._signalled_at = now
        if self._told is None or is_second:
            self._obey("hurry" if is_second else "drain")
            self._report_end()

    def _report_end(self) -> None:
        """Tell the supervisor that this process has only to end: its handlers have, or it was stopped."""
        self._send({"leaving": True})


def resident_memory() -> int:
    """Return the bytes of resident memory of this process; elsewhere than on Linux, the most it ever had."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(arguments: Sequence[str]) -> int:
    """Run the service that *arguments* name; return the exit code."""
    named, control, reports, grace, until_empty, verbosity, is_measured, is_on_uvloop = arguments
    log_to_stderr(int(verbosity))
    show_stack_on_signal()
    orders = Orders(int(control), float(grace))
    try:
        service = service_named(named)
        metrics = Metrics() if is_measured == "1" else None
        if metrics is not None:
            service.observe(metrics)

        async def run() -> None:
            writer = await _writer(int(reports))
            try:
                await ServiceProcess(service, orders, writer, metrics).run(until_empty == "1")
            finally:
                await _flush(writer)

        with asyncio.Runner(loop_factory=_uvloop() if is_on_uvloop == "1" else None) as runner:
            runner.run(run())
    except (Failure, TenureError) as error:
        code, message = exit_of(error)
        print_error(message)
        lead_on(explained_by(error))
        return code
    except Exception as error:  # of the service's own code
        traceback.print_exception(error)
        return Exit.BROKEN
    return Exit.DONE


def _uvloop() -> Callable[[], asyncio.AbstractEventLoop]:
    import uvloop

    return uvloop.new_event_loop


async def _writer(descriptor: int) -> asyncio.StreamWriter:
    """Return a writer to a pipe; what there is no room for waits in memory."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(descriptor, "wb", buffering=0)
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _flush(writer: asyncio.StreamWriter) -> None:
    """Wait until all was written, for a moment."""
    writer.transport.set_write_buffer_limits(high=0)
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(FLUSH_WITHIN):
            await writer.drain()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
