"""``tenure run`` at work: starts processes of a service, feeds the supervisor with what they do, performs its effects.

It decides nothing: see :mod:`tenure._supervisor.machine`. It imports neither the service nor a store, so neither an
error there nor a lost connection ends it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tenure._cli.exits import Exit
from tenure._cli.group import BROKEN_PIPE
from tenure._cli.hung import show_stack_of
from tenure._cli.orphans import Orphans
from tenure._cli.output import notice, print_json, timestamp, warn
from tenure._foreign import Unreadable, a_count, a_flag, a_list, a_text, read_object, read_or
from tenure._supervisor import machine
from tenure._supervisor.awake import READ_EVERY, AwakeTime
from tenure._supervisor.scaling import Backlog
from tenure._telemetry.families import Snapshot, combined, lasting, unpacked

LINE_MAX = 1 << 24
"""Bytes of a report, at most: the metrics of 200 queues with long names have some six million."""

ASK_WITHIN = 1.5
"""Seconds for a process to answer a question."""

ALARMING = frozenset({"crashed", "killed", "hung", "recovered"})


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The command line of ``tenure run``."""

    service: str
    settings: machine.Settings
    until_empty: bool
    reload: bool
    uvloop: bool
    as_json: bool
    verbosity: int
    url: str | None = field(repr=False, default=None)
    http: socket.socket | None = None
    """Where requests for probes and metrics are answered."""


def _read_backlog(value: object) -> Backlog:
    match a_list(value):
        case [messages, concurrency]:
            return Backlog(a_count(messages), a_count(concurrency))
    raise Unreadable("it is no backlog")


class Child:
    """One process of the service."""

    def __init__(
        self, number: int, process: asyncio.subprocess.Process, control: int, transport: asyncio.ReadTransport
    ) -> None:
        self.number = number
        self.process = process
        self.has_finished = False
        self.has_begun = False
        self.reported_at = 0.0
        self.is_live = True
        self.is_ready = False
        self.is_ending = False
        self.measured: Snapshot = {}
        """Its metrics, as it has last told them."""
        self._answers: dict[str, asyncio.Future[Any]] = {}  # to questions, by question
        self._control = control
        self._transport = transport
        self._is_closed = False

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, order: str) -> None:
        """Send an order. A process that has ended, or reads none, is noticed otherwise."""
        if self._is_closed:
            return
        with suppress(OSError):
            os.write(self._control, f"{order}\n".encode())

    async def ask(self, question: str) -> Any:
        """Return the answer to a question, or None if there is none in time."""
        if question not in self._answers:
            self._answers[question] = asyncio.get_running_loop().create_future()
            self.tell(question)
        answer = self._answers[question]
        try:
            async with asyncio.timeout(ASK_WITHIN):
                return await asyncio.shield(answer)
        except TimeoutError:
            if self._answers.get(question) is answer:  # asked again next time
                del self._answers[question]
            return None

    def answered(self, question: str, answer: Any) -> None:
        """Take note of an answer; a late one has only its metrics, and so have the last words of a process."""
        if question == "measure":
            self.measured = read_or(unpacked, answer, self.measured)
        if (asked := self._answers.pop(question, None)) is not None and not asked.done():
            asked.set_result(answer)

    def kill(self) -> None:
        """Kill the process, and all in its group. It may take a while to end: it takes no messages meanwhile."""
        self.is_ending = True
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes; a process that still runs takes that for the death of its supervisor."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self._control)
            self._transport.close()


class Supervision:
    """One run of ``tenure run``."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._awake = AwakeTime(self._loop.time())
        self._machine = machine.Supervisor(options.settings, random.Random(), now=self._now())
        self._children: dict[int, Child] = {}
        self._timer: asyncio.TimerHandle | None = None  # for what the machine waits for
        self._reading: asyncio.TimerHandle | None = None  # of the time
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_unheard = False  # nobody reads our output
        self._crashes = 0
        self._past: Snapshot = {}  # metrics of processes that have ended
        self._orphans = Orphans(lambda: {child.pid for child in self._children.values()})

    async def run(self) -> int:
        """Run until all processes have ended; return the exit code."""
        async with self._answering():
            return await self._run()

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Answer requests for probes and metrics during the block, if there is an address for it."""
        if self._options.http is None:
            yield
            return
        from tenure._cli.fleet_source import FleetSource
        from tenure._cli.http_server import serving

        async with serving(
            FleetSource(self._begun, self._counts, silence=self._silence, crash_loop=self._crash_loop),
            self._options.http,
        ):
            yield

    def _begun(self) -> list[Child]:
        return [one for one in self._children.values() if one.has_begun]

    def _silence(self, number: int) -> float | None:
        return self._machine.silence(number, self._now())

    def _crash_loop(self) -> str:
        return self._machine.crash_loop(self._now())

    def _counts(self) -> Snapshot:
        states = Counter(one.state.value for one in self._machine.processes.values())
        found: Snapshot = {("tenure_processes", (state.value,)): float(states[state.value]) for state in machine.State}
        found["tenure_processes_crashed", ()] = float(self._crashes)
        return combined([found, self._past])

    async def _run(self) -> int:
        on_signal: dict[signal.Signals, machine.Input] = {
            signal.SIGTERM: machine.Stop(),
            signal.SIGINT: machine.Stop(),
            signal.SIGHUP: machine.Reload(),
            signal.SIGTTIN: machine.Move(1),
            signal.SIGTTOU: machine.Move(-1),
        }
        for number, event in on_signal.items():
            self._loop.add_signal_handler(number, self._feed, event)
        self._loop.add_signal_handler(signal.SIGCHLD, self._orphans.reap)
        if self._options.reload:
            self._begin(self._watch_files())
        try:
            self._read_clock()
            self._feed(machine.Tick())
            code = await self._ended
            return BROKEN_PIPE if self._is_unheard else code
        finally:
            for timer in (self._timer, self._reading):
                if timer is not None:
                    timer.cancel()
            for child in self._children.values():  # after an error of our own: they notice it, and drain
                child.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin *work* in a task of its own; an error of it ends the supervision."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _feed(self, event: machine.Input) -> None:
        if self._ended.done():
            return
        effects = self._machine.handle(event, self._now())
        self._wake_later()
        for effect in effects:
            self._perform(effect)

    def _wake_later(self) -> None:
        at = self._awake.clock_time(self._machine.wake_at)
        if self._timer is not None:
            if self._timer.when() == at:  # reports must not put off one that is due
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._tick) if at != machine.NEVER else None

    def _tick(self) -> None:
        self._timer = None
        self._feed(machine.Tick())

    def _now(self) -> float:
        return self._awake.read(self._loop.time())

    def _read_clock(self) -> None:
        self._now()
        self._reading = self._loop.call_later(READ_EVERY, self._read_clock)

    def _perform(self, effect: machine.Effect) -> None:
        match effect:
            case machine.Spawn(number):
                self._begin(self._run_child(number))
            case machine.Say():
                self._say(effect)
            case machine.Exit(code):
                self._ended.set_result(code)
            case machine.Examine(number):
                if (child := self._children.get(number)) is not None:
                    show_stack_of(child.process)
            case machine.Kill(number):
                if (child := self._children.get(number)) is not None:
                    child.kill()
            case machine.Retire(number) | machine.Drain(number) | machine.Hurry(number) | machine.Look(number):
                if (child := self._children.get(number)) is not None:
                    child.is_ending = child.is_ending or not isinstance(effect, machine.Look)
                    child.tell(type(effect).__name__.lower())

    # --- processes ---

    async def _run_child(self, number: int) -> None:
        """Start a process, pass on its reports, and report its end."""
        try:
            with self._orphans.starting():
                child, reports = await self._started(number)
                self._children[number] = child
        except OSError as error:  # the system gives no process
            warn(f"process {number} can't be started: {error.strerror}")
            self._feed(machine.Ended(number, Exit.NO_PROCESS, False))
            return
        self._catch_up(number, child)
        reading = asyncio.create_task(self._read(number, child, reports))
        code = await child.process.wait()
        self._orphans.reap()
        # Its children may hold the pipe open: what it has written itself is there by now.
        await asyncio.wait({reading}, timeout=0.2)
        reading.cancel()
        self._feed(machine.Ended(number, code, child.has_finished))
        del self._children[number]
        self._past = combined([self._past, lasting(child.measured)])
        child.close()

    def _catch_up(self, number: int, child: Child) -> None:
        """Tell a process what it missed while it was being started."""
        known = self._machine.processes.get(number)
        if known is None or not known.is_kept:
            child.tell("drain")
        if known is not None and known.is_killed:
            child.kill()

    async def _started(self, number: int) -> tuple[Child, asyncio.StreamReader]:
        options = self._options
        ours: list[int] = []
        theirs: list[int] = []
        try:
            control_read, control_write = os.pipe()
            theirs.append(control_read)
            ours.append(control_write)
            reports_read, reports_write = os.pipe()
            theirs.append(reports_write)
            ours.append(reports_read)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tenure._cli.service_process",
                options.service,
                str(control_read),
                str(reports_write),
                str(options.settings.grace),
                "1" if options.until_empty else "0",
                str(options.verbosity),
                "1" if options.http is not None else "0",
                "1" if options.uvloop else "0",
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(control_read, reports_write),
                process_group=0,  # a terminal's Ctrl-C comes here only, and not to it as well
                env=os.environ if options.url is None else {**os.environ, "TENURE_URL": options.url},
            )
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        reports = asyncio.StreamReader(limit=LINE_MAX)
        os.set_blocking(control_write, False)
        transport, _ = await self._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reports), os.fdopen(reports_read, "rb", buffering=0)
        )
        return Child(number, process, control_write, transport), reports

    async def _read(self, number: int, child: Child, reports: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await reports.readline()
            except ValueError:  # a line without an end: not ours
                continue
            if not line:
                return
            with suppress(Unreadable):  # something else wrote to the pipe
                self._note(number, child, read_object(line, LINE_MAX))

    def _note(self, number: int, child: Child, report: dict[str, Any]) -> None:
        if "finished" in report:
            child.has_finished = True
        elif "leaving" in report:
            child.is_ending = True
            self._feed(machine.Leaving(number))
        elif "answer" in report:
            child.answered(a_text(report.get("to")), report["answer"])
        elif "backlogs" in report:
            found = report["backlogs"]
            self._feed(machine.Looked(None if found is None else [_read_backlog(one) for one in a_list(found)]))
        else:
            running, memory = a_count(report.get("running")), a_count(report.get("memory"))
            leads, is_live, is_ready = (a_flag(report.get(one)) for one in ("leads", "live", "ready"))
            child.has_begun, child.reported_at = True, self._loop.time()
            child.is_live, child.is_ready = is_live, is_ready
            self._feed(machine.Reported(number, running, leads, memory))

    # --- events ---

    def _say(self, said: machine.Say) -> None:
        self._crashes += said.event == "crashed"
        child = self._children.get(said.number) if said.number is not None else None
        pid = child.pid if child is not None else None
        if self._options.as_json:
            event = {"at": timestamp(), "event": said.event, "process": said.number, "pid": pid, "text": said.text}
            try:
                if not self._is_unheard:
                    print_json(event, lines=True)
            except (OSError, ValueError):  # the reader of our output has ended: so do we, gracefully
                self._is_unheard = True
                self._loop.call_soon(self._feed, machine.Stop())
            return
        if self._options.verbosity < 0 and said.event not in ALARMING:
            return
        who = "" if said.number is None else f"process {said.number}{'' if pid is None else f' (pid {pid})'} "
        tell: Callable[[str], None] = warn if said.event in ALARMING else notice
        tell(f"{who}{said.event}{f': {said.text}' if said.text else ''}")

    async def _watch_files(self) -> None:
        """Replace all processes when a file of Python below this folder changes."""
        import watchfiles

        async for changes in watchfiles.awatch(".", watch_filter=watchfiles.PythonFilter()):
            names = sorted({path for _, path in changes})
            notice(f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''} changed")
            self._feed(machine.Reload())
