"""What one test costs: read off the process, its main thread and its descendants, on Linux."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
TICKS = os.sysconf("SC_CLK_TCK")
SAMPLE_EVERY = 0.05
SCAN_EVERY = 0.25
"""How often the processes of the system are read at most: that takes some milliseconds."""


@dataclass
class Cost:
    """Seconds that one test took."""

    wall: float = 0.0
    own: float = 0.0
    children_user: float = 0.0
    children_system: float = 0.0
    """CPU time of processes below this one: those that the test began, and servers."""

    waited: float = 0.0
    """Wall time in which neither the main thread had or wanted a core, nor did its children have one."""

    places: dict[str, float] = field(default_factory=dict)
    """Where the main thread was blocked: the line of ours that waited, and for what."""


@dataclass(frozen=True)
class Reading:
    """The meters at one moment."""

    at: float
    own: float
    main: float
    delayed: float
    children: tuple[float, float]

    @classmethod
    def now(cls, children: tuple[float, float]) -> Reading:
        main, delayed = schedule_of_main_thread()
        return cls(time.monotonic(), time.process_time(), main, delayed, children)


class Meter:
    """Measures one test after the other, in the process that runs them."""

    def __init__(self) -> None:
        self._sampler = Sampler()
        self._scanned_at = time.monotonic()
        self._begun = Reading.now(cpu_of_descendants())

    def begin(self) -> None:
        self._sampler.places.clear()
        self._begun = Reading.now(self._begun.children)

    def end(self, *, last_of_file: bool) -> Cost:
        """Return what was used since ``begin``.

        The children of a short test count for the next one of its file.
        """
        before, children = self._begun, self._begun.children
        if last_of_file or time.monotonic() - self._scanned_at > SCAN_EVERY:
            children, self._scanned_at = cpu_of_descendants(), time.monotonic()
        after = self._begun = Reading.now(children)
        user, system = (max(0.0, now - then) for now, then in zip(after.children, before.children, strict=True))
        wall = after.at - before.at
        busy = (after.main - before.main) + (after.delayed - before.delayed) + user + system
        return Cost(
            wall=wall,
            own=after.own - before.own,
            children_user=user,
            children_system=system,
            waited=max(0.0, wall - busy),
            places={place: count * SAMPLE_EVERY for place, count in self._sampler.places.items() if place},
        )


def schedule_of_main_thread() -> tuple[float, float]:
    """Return for how long the main thread had a core, and for how long it wanted one in vain."""
    had, wanted, _ = Path(f"/proc/self/task/{os.getpid()}/schedstat").read_text().split()
    return int(had) / 1e9, int(wanted) / 1e9


def cpu_of_descendants() -> tuple[float, float]:
    """Return the user and system time of all processes below this one, ended ones included."""
    processes = dict(read_processes())
    below, usage = {os.getpid()}, resource.getrusage(resource.RUSAGE_CHILDREN)
    user, system = usage.ru_utime, usage.ru_stime
    while found := {pid for pid, (parent, _, _) in processes.items() if parent in below and pid not in below}:
        below |= found
    for pid in below - {os.getpid()}:
        user += processes[pid][1]
        system += processes[pid][2]
    return user, system


def read_processes() -> Iterator[tuple[int, tuple[int, float, float]]]:
    """Yield the id of each process, with its parent, and with its user and system time, those of dead children too."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path("/proc", name, "stat").read_text()
            except OSError:
                continue  # it has just ended
            fields = stat.rpartition(")")[2].split()
            user, system, dead_user, dead_system = (int(ticks) / TICKS for ticks in fields[11:15])
            yield int(name), (int(fields[1]), user + dead_user, system + dead_system)


class Sampler:
    """Looks at the main thread again and again, and notes where it is blocked."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self._main = threading.main_thread().ident or 0
        threading.Thread(target=self._run, name="suite-times", daemon=True).start()

    def _run(self) -> None:
        clock = time.pthread_getcpuclockid(self._main)
        used = time.clock_gettime(clock)
        while True:
            time.sleep(SAMPLE_EVERY)
            then, used = used, time.clock_gettime(clock)
            if used - then < SAMPLE_EVERY / 5:
                with suppress(Exception):  # the main thread goes on meanwhile: what is looked at may have changed
                    self.places[place_of(sys._current_frames().get(self._main))] += 1


def place_of(frame: FrameType | None) -> str:
    """Return the innermost line of ours at which a thread stands, and what it calls there."""
    frames: list[tuple[CodeType, int]] = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno))
        if frame.f_code.co_name == "run_until_complete":
            frames = [*reversed(list(awaited_by(frame.f_locals.get("future")))), *frames]
            break
        frame = frame.f_back
    for inner, (code, line) in enumerate(frames):
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT) and path.parts[len(ROOT.parts)] in ("src", "tests"):
            callee = frames[inner - 1][0].co_name if inner else ""
            return f"{path.relative_to(ROOT)}:{line} {code.co_name}{' → ' + callee if callee else ''}"
    return ""


def awaited_by(waiting: Any) -> Iterator[tuple[CodeType, int]]:
    """Yield the frames of a task, the outermost first, down to the one that waits."""
    while waiting is not None:
        if isinstance(waiting, asyncio.Task):
            waiting = waiting.get_coro()
        elif type(waiting).__name__ == "FutureIter":  # what a coroutine that awaits a future shows of it
            waiting = next((one for one in gc.get_referents(waiting) if isinstance(one, asyncio.Future)), None)
        elif isinstance(waiting, asyncio.Future):  # asyncio.gather makes one that has the others
            waiting = next((one for one in getattr(waiting, "_children", ()) if not one.done()), None)
        else:
            kind = next((kind for kind in ("cr", "gi", "ag") if getattr(waiting, f"{kind}_frame", None)), None)
            if kind is None:
                return
            frame = getattr(waiting, f"{kind}_frame")
            if frame is None:  # it has ended meanwhile: this is another thread
                return
            yield frame.f_code, frame.f_lineno
            waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
