"""Queues in SQLite: tenure beside a loop written by hand, huey, litequeue and persist-queue, all durable, in one run.

Run by hand: ``python -m benchmarks queue [--seconds 3] [--only tenure,huey] [--folder /var/tmp]``. It prints a table
with ratios to tenure. The disk dominates the figures: compare within one run only, on an
idle machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from benchmarks.contenders import BODY, Contender, contenders, size_of

SPAWN = multiprocessing.get_context("spawn")
WAITING = 100_000
PACED = 300


@dataclass
class Figures:
    """The figures of one contender; None for what it can't do."""

    contender: Contender
    singly: float | None = None
    batches: float | None = None
    drained: dict[int, float | None] = field(default_factory=dict)
    shares: list[float] = field(default_factory=list)
    cpu: float | None = None
    latency: tuple[float, float] | None = None
    wake: float | None = None
    memory: float | None = None
    disk: float | None = None


# --- in processes of their own -----------------------------------------------------------------------------------


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def _apart(results: Any, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        results.put(work(*arguments))
    except BaseException:
        results.put(RuntimeError(traceback.format_exc()))


def apart(work: Callable[..., Any], *rows: Sequence[Any]) -> list[Any]:
    """Run *work* once for each of *rows*, in a process each, at the same time; return the results in any order."""
    results = SPAWN.Queue()
    processes = [SPAWN.Process(target=_apart, args=(results, work, row)) for row in rows]
    for process in processes:
        process.start()
    answers = [results.get() for _ in processes]
    for process in processes:
        process.join()
    for answer in answers:
        if isinstance(answer, RuntimeError):
            raise answer
    return answers


def _send_singly(contender: Contender, path: Path, seconds: float) -> float:
    begin = time.monotonic()
    sent = contender.send_singly(path, begin + seconds, 10_000_000)
    return sent / (time.monotonic() - begin)


def _send_batches(contender: Contender, path: Path, seconds: float, size: int) -> float:
    begin = time.monotonic()
    sent = contender.send_batches(path, begin + seconds, 10_000_000, size)
    return sent / (time.monotonic() - begin)


def _fill(contender: Contender, path: Path, count: int) -> tuple[int, int]:
    before = _resident()
    contender.fill(path, count)
    return _resident() - before, size_of(path)


def _drain(contender: Contender, path: Path, barrier: Barrier, seconds: float) -> tuple[int, float, float, float]:
    spent = 0.0

    def go() -> None:
        nonlocal spent
        barrier.wait()
        spent = _cpu()

    count, begin, last = contender.drain(path, go, seconds)
    return count, begin, last, _cpu() - spent


def _listen(contender: Contender, path: Path, ready: Any, count: int) -> list[float]:
    return contender.listen(path, ready.set, count)


def _send_paced(contender: Contender, path: Path, ready: Any, count: int, every: float) -> None:
    ready.wait()
    contender.send_paced(path, count, every)


def _send_or_listen(contender: Contender, path: Path, ready: Any, row: Sequence[Any]) -> Any:
    role, count, every = row
    if role == "listen":
        return _listen(contender, path, ready, count)
    return _send_paced(contender, path, ready, count, every)


# --- measuring ---------------------------------------------------------------------------------------------------


class Run:
    """One run of all contenders."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._seconds = seconds
        self._number = 0

    def measure(self, contender: Contender) -> Figures:
        """Measure everything of *contender*."""
        figures = Figures(contender)
        figures.singly = apart(_send_singly, (contender, self._file(), self._seconds))[0]
        if contender.sends_batches:
            figures.batches = apart(_send_batches, (contender, self._file(), self._seconds, 100))[0]
        for processes in (1, 2, 4):
            if processes <= contender.processes_max:
                self._drain(figures, processes)
        if type(contender).listen is not Contender.listen:
            ages = self._ages(contender, PACED, 0.01)
            figures.latency = statistics.median(ages), statistics.quantiles(ages, n=100)[98]
            figures.wake = statistics.median(self._ages(contender, 40, 0.05))
        return figures

    def _file(self) -> Path:
        self._number += 1
        path = self._folder / f"{self._number}" / "bench.db"
        path.parent.mkdir()
        return path

    def _drain(self, figures: Figures, processes: int) -> None:
        contender, path = figures.contender, self._file()
        count = max(contender.waiting, int((figures.drained.get(1) or 0) * self._seconds * 1.5))
        resident, size = apart(_fill, (contender, path, count))[0]
        if count == WAITING and figures.memory is None:
            figures.memory, figures.disk = resident / 2**20, size / 2**20
        barrier = SPAWN.Barrier(processes)
        rows = [(contender, path, barrier, self._seconds) for _ in range(processes)]
        answers = apart(_drain, *rows)
        total = sum(answer[0] for answer in answers)
        took = max(answer[2] for answer in answers) - min(answer[1] for answer in answers)
        figures.drained[processes] = total / took if total else None
        if processes == 1:
            figures.cpu = answers[0][3] / max(total, 1) * 1e6
        if processes == 4 and total:
            figures.shares = sorted(answer[0] / total for answer in answers)
        shutil.rmtree(path.parent)

    def _ages(self, contender: Contender, count: int, every: float) -> list[float]:
        path = self._file()
        ready = SPAWN.Event()
        rows = [(contender, path, ready, (role, count, every)) for role in ("listen", "send")]
        answers = apart(_send_or_listen, *rows)
        return next(answer for answer in answers if answer is not None)


# --- showing -----------------------------------------------------------------------------------------------------


def _rate(value: float | None, of: float | None) -> str:
    if value is None:
        return "—"
    return f"{value:>9,.0f}" + (f" ({value / of:4.2f}×)" if of else "")


def _milliseconds(value: float | None) -> str:
    return "—" if value is None else f"{value * 1e3:.2f}"


def rows_of(figures: Figures, first: Figures) -> list[str]:
    """Return the table row of one contender."""
    drained, reference = figures.drained, first.drained
    p50, p99 = figures.latency or (None, None)
    return [
        figures.contender.name,
        _rate(figures.singly, first.singly),
        _rate(figures.batches, first.batches),
        *(_rate(drained.get(number), reference.get(number)) for number in (1, 2, 4)),
        " ".join(f"{share:.0%}" for share in figures.shares) or "—",
        "—" if figures.cpu is None else f"{figures.cpu:.1f}",
        _milliseconds(p50),
        _milliseconds(p99),
        _milliseconds(figures.wake),
        "—" if figures.memory is None else f"{figures.memory:.1f}",
        "—" if figures.disk is None else f"{figures.disk:.0f}",
    ]


HEADS = [
    "",
    "sent singly /s",
    "sent by 100 /s",
    "drained /s, 1 process",
    "2 processes",
    "4 processes",
    "shares of 4",
    "CPU µs",
    "p50 ms",
    "p99 ms",
    "wake ms",
    "RAM MB",
    "disk MB",
]


def show(table: Sequence[Sequence[str]]) -> None:
    """Print *table* in columns."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks queue", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="duration of each measurement of sending and draining"
    )
    parser.add_argument("--only", default="", help="names of contenders, or their beginnings, separated by commas")
    parser.add_argument("--folder", type=Path, default=None, help="where to keep the files (default: as tempfile does)")
    options = parser.parse_args()
    chosen = [one for one in contenders() if one.name.startswith(tuple(options.only.split(",")))]
    print(
        f"Python {sys.version.split()[0]}, SQLite {sqlite3.sqlite_version}, synchronous=FULL, bodies of {BODY} bytes; "
        f"ratios are to {chosen[0].name}"
    )
    found: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="tenure-bench-", dir=options.folder) as folder:
        run = Run(Path(folder), options.seconds)
        for contender in chosen:
            print(f"  {contender.name}: {contender.remark}", flush=True)
            found.append(run.measure(contender))
    print()
    show([HEADS, *(rows_of(figures, found[0]) for figures in found)])
    print()
    print("drained: claimed, passed to a handler that does nothing, settled")
    print("CPU: user and system, for each message of one process")
    print("p50, p99: from before the send to the handler, at 100 messages/s · wake: the same at 20/s")
    print(f"RAM: of the process that has sent {WAITING:,} · disk: of the file and its log, while these wait")


if __name__ == "__main__":
    main()
