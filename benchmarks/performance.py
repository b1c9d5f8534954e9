"""What users wait for: one send, the wake-up of an idle consumer, a backlog; tenure beside others, in one run.

Run by hand: ``python -m benchmarks performance [--stores SQLite,Redis] [--rounds 5] [--write]``. Each contender has
processes of its own, and the contenders of a store take turns, so that a slow moment of the machine meets all of them;
the median of the rounds counts. With ``--write``, the tables of docs/performance.md and the graphs in docs/images are
written anew. Libraries that are not installed are left out. Ratios are to the loop written by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from benchmarks.waiting import STORES, Contender, prepare
from tests.servers import Postgres, Redis, private

PAGE = Path("docs/performance.md")
IMAGES = Path("docs/images")
COLD = """
import asyncio, sys, tenure
async def main():
    async with tenure.connect("sqlite:///" + sys.argv[1]) as backend:
        await backend.queue("bench").send(b"x")
asyncio.run(main())
"""
"""A process that imports tenure, connects and sends."""
BARE = """
import asyncio, sqlite3, sys
async def main():
    connection = sqlite3.connect(sys.argv[1])
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE message (body BLOB)")
    connection.execute("INSERT INTO message VALUES (?)", (b"x",))
    connection.commit()
asyncio.run(main())
"""
"""The same by hand."""


class Process:
    """A sender or a listener."""

    def __init__(self, store: str, contender: Contender, url: str, role: str) -> None:
        line = [sys.executable, "-m", "benchmarks.waiting", store, contender.name, url, role]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.read() == "ready"

    def read(self) -> str:
        """Return the next line of its output."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a contender has ended: {self._process.args}")
        return line.strip()

    def ask(self, line: str) -> str:
        """Write *line* to its input, and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.read()

    def end(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def running(store: str, contender: Contender, url: str, role: str) -> Iterator[Process]:
    process = Process(store, contender, url, role)
    try:
        yield process
    finally:
        process.end()


@dataclass
class Figures:
    """The figures of one contender, of each round; times in seconds."""

    sends: list[float] = field(default_factory=list)
    wakes: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """By the messages in a second: the median and the 99th percentile."""
    drained: list[float] = field(default_factory=list)

    def as_values(self) -> dict[str, float]:
        """Return the medians, in milliseconds and messages a second."""
        values = {}
        if self.sends:
            values["send"] = statistics.median(self.sends) * 1e3
        for rate, found in self.wakes.items():
            values[f"wake {rate}"] = statistics.median(p50 for p50, _ in found) * 1e3
            values[f"wake {rate} p99"] = statistics.median(p99 for _, p99 in found) * 1e3
        if self.drained:
            values["drain"] = statistics.median(self.drained)
        return values


# --- measuring ---------------------------------------------------------------------------------------------------


def measure_sends(store: str, contenders: Sequence[Contender], url: str, rounds: int, found: list[Figures]) -> None:
    """Let each contender send for a moment, in turns; the first turn doesn't count."""
    senders = [Process(store, contender, url, "send") for contender in contenders]
    try:
        for turn in range(3 * rounds + 1):
            for sender, figures in zip(senders, found, strict=True):
                count, took = map(float, sender.ask("for 0.3").split())
                if turn:
                    figures.sends.append(took / count)
    finally:
        for sender in senders:
            sender.end()


def measure_wakes(store: str, contender: Contender, url: str, figures: Figures) -> None:
    """Send at a steady pace to a listener that waits."""
    with running(store, contender, url, "listen") as listener, running(store, contender, url, "send") as sender:
        time.sleep(1.0)
        drain(listener, sender, 20, "paced 20 0.02")
        for rate, count in ((100, 300), (20, 60)):
            ages = sorted(age for age, _ in drain(listener, sender, count, f"paced {count} {1 / rate}"))
            cuts = statistics.quantiles(ages, n=100)
            figures.wakes.setdefault(rate, []).append((cuts[49], cuts[98]))


def measure_drain(store: str, contender: Contender, url: str, figures: Figures) -> None:
    """Start a listener when messages wait."""
    with running(store, contender, url, "send") as sender:
        sender.ask(f"fill {contender.waiting}")
    with running(store, contender, url, "listen") as listener:
        moments = sorted(moment for _, moment in collect(listener, contender.waiting))
        figures.drained.append((len(moments) - 1) / (moments[-1] - moments[0]))


def drain(listener: Process, sender: Process, count: int, line: str) -> list[tuple[float, float]]:
    """Let *sender* do *line*; return the ages and times of the *count* messages, when all are handled."""
    assert sender.ask(line) == "sent"
    return collect(listener, count)


def collect(listener: Process, count: int) -> list[tuple[float, float]]:
    give_up = time.monotonic() + 120
    while int(listener.ask("count")) < count and time.monotonic() < give_up:
        time.sleep(0.1)
    pairs = (one.split("/") for one in listener.ask("ages").split())
    return [(float(age), float(moment)) for age, moment in pairs]


def measure(store: str, rounds: int, only: Sequence[str]) -> dict[str, dict[str, float]]:
    """Measure the contenders of *store*; return their figures by name."""
    chosen = [
        one
        for one in STORES[store]
        if find_spec(one.package) and (not only or one.name in ("tenure", "by hand", *only))
    ]
    found = [Figures() for _ in chosen]
    with store_of(store) as url:
        asyncio.run(prepare(store, url))
        measure_sends(store, chosen, url, rounds, found)
    with store_of(store) as url:  # without the messages that were sent, and that nobody takes
        asyncio.run(prepare(store, url))
        for _ in range(rounds):
            for contender, figures in zip(chosen, found, strict=True):
                measure_wakes(store, contender, url, figures)
        for _ in range(min(rounds, 3)):
            for contender, figures in zip(chosen, found, strict=True):
                measure_drain(store, contender, url, figures)
    return {contender.name: figures.as_values() for contender, figures in zip(chosen, found, strict=True)}


@contextmanager
def store_of(name: str) -> Iterator[str]:
    """Yield the URL of a fresh store: durable, as SQLite and PostgreSQL are by default, and Redis with a log."""
    if name == "SQLite":
        with tempfile.TemporaryDirectory(prefix="tenure-bench-", dir=FOLDER) as folder:
            yield f"sqlite:///{folder}/bench.db"
    elif name == "PostgreSQL":
        with private(Postgres, durable=True) as server:
            yield server.url
    else:
        with private(Redis, options=[("appendonly", "yes"), ("appendfsync", "everysec")]) as redis:
            yield redis.url


FOLDER: str | None = None
"""Where files of SQLite are kept; None for the folder of temporary files."""


def measure_cold(rounds: int) -> dict[str, float]:
    """Return the milliseconds of a process from its start to its end: bare, by hand, and with tenure."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="tenure-bench-", dir=FOLDER) as folder:
        for number in range(2 * rounds + 1):
            for name, code in (("python alone", ""), ("by hand", BARE), ("tenure", COLD)):
                begun = time.perf_counter()
                subprocess.run([sys.executable, "-c", code, f"{folder}/{name} {number}.db"], check=True)
                if number:
                    found.setdefault(name, []).append(time.perf_counter() - begun)
    return {name: statistics.median(took) * 1e3 for name, took in found.items()}


# --- showing -----------------------------------------------------------------------------------------------------

COLUMNS = (
    ("send", "one send, ms", "{:.2f}"),
    ("wake 100", "wake-up, 100/s, p50 ms", "{:.1f}"),
    ("wake 100 p99", "p99 ms", "{:.1f}"),
    ("wake 20", "20/s, p50 ms", "{:.1f}"),
    ("wake 20 p99", "p99 ms", "{:.1f}"),
    ("drain", "drained /s", "{:,.0f}"),
)


def table_of(figures: dict[str, dict[str, float]]) -> list[str]:
    """Return a table in Markdown; ratios to the loop by hand in brackets, where less than 1 is faster or slower."""
    lines = ["| | " + " | ".join(head for _, head, _ in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    by_hand = figures["by hand"]
    for name, values in figures.items():
        cells = []
        for key, _, form in COLUMNS:
            value = values.get(key)
            ratio = "" if value is None or name == "by hand" else f" ({value / by_hand[key]:.2f} ×)"
            cells.append("—" if value is None else form.format(value) + ratio)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def draw(stores: dict[str, dict[str, dict[str, float]]], key: str, title: str, file: str) -> None:
    """Draw one bar for each contender, a part for each store."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tenure", "font.family": "sans-serif"})
    names = [(store, name) for store, found in stores.items() for name, values in found.items() if key in values]
    figure, axes = pyplot.subplots(
        len(stores), 1, figsize=(7.5, 0.3 * len(names) + 1.0), sharex=False, layout="constrained",
        gridspec_kw={"height_ratios": [sum(key in values for values in found.values()) for found in stores.values()]},
    )  # fmt: skip
    grey = "#808080"  # readable on white and on black
    for axis, (store, found) in zip([axes] if len(stores) == 1 else axes, stores.items(), strict=True):
        shown = {name: values[key] for name, values in reversed(found.items()) if key in values}
        colours = ["#3b82c4" if name.startswith("tenure") else "#a0a0a0" for name in shown]
        bars = axis.barh(list(shown), list(shown.values()), color=colours)
        form = next(form for one, _, form in COLUMNS if one == key)
        axis.bar_label(bars, [form.format(value) for value in shown.values()], padding=3, color=grey, fontsize=8)
        axis.set_title(store, loc="left", fontsize=9, color=grey)
        axis.set_xlim(0, 1.18 * max(shown.values()))
        axis.tick_params(colors=grey, labelsize=8, length=0)
        axis.set_xticks([])
        axis.spines[:].set_visible(False)
    figure.suptitle(title, fontsize=10, color=grey)
    figure.savefig(IMAGES / file, transparent=True, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def write(stores: dict[str, dict[str, dict[str, float]]], cold: dict[str, float], about: str) -> None:
    """Write the tables into the page, and draw the graphs."""
    parts = {"about": [about]}
    parts |= {store: table_of(found) for store, found in stores.items()}
    parts["cold"] = [
        "| python alone | by hand | tenure |",
        "|---|---|---|",
        "| " + " | ".join(f"{cold[name]:.0f} ms" for name in ("python alone", "by hand", "tenure")) + " |",
    ]
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in parts.items():
        mark = re.escape(f"<!-- measured: {name} -->")
        text, count = re.subn(
            rf"({mark}\n).*?(<!-- end -->)",
            lambda found, lines=lines: found[1] + "\n" + "\n".join(lines) + "\n\n" + found[2],  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise SystemExit(f"{PAGE} needs one place for {name!r}, and has {count}")
    PAGE.write_text(text, encoding="utf-8")
    draw(stores, "send", "One send after another, ms: less is better", "performance-send.svg")
    draw(stores, "wake 100", "From the send to the handler of an idle consumer, 100/s, median ms: less is better",
         "performance-wake.svg")  # fmt: skip
    draw(stores, "drain", "Drained by one process, messages a second: more is better", "performance-drain.svg")


def about() -> str:
    """Describe the run in a sentence."""
    packages = (
        "asyncpg",
        "redis",
        "uvloop",
        "huey",
        "litequeue",
        "pgqueuer",
        "procrastinate",
        "saq",
        "taskiq",
        "streaq",
    )
    versions = ", ".join(f"{name} {version(name)}" for name in packages if find_spec(name))
    return (
        f"Measured on {time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors ({platform.machine()}), Python "
        f"{platform.python_version()}, SQLite {sqlite3.sqlite_version}, {versions}."
    )


def main() -> None:
    arguments = argparse.ArgumentParser(
        prog="python -m benchmarks performance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    arguments.add_argument("--stores", default=",".join(STORES), help="some of %(default)s")
    arguments.add_argument("--only", default="", help="names of contenders beside tenure and by hand; all if unset")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--folder", help="where the files of SQLite are kept (default: as tempfile does)")
    arguments.add_argument("--write", action="store_true", help=f"write {PAGE} and its graphs anew")
    given = arguments.parse_args()
    names = given.stores.split(",")
    if unknown := [name for name in names if name not in STORES]:
        arguments.error(f"there is no store {unknown[0]!r} here; there are {', '.join(STORES)}")
    if given.write and set(names) != set(STORES):
        arguments.error("--write needs all stores in one run; leave --stores out")
    global FOLDER
    FOLDER = given.folder
    print(f"{about()} Load {os.getloadavg()[0]:.1f}.", flush=True)
    cold = measure_cold(given.rounds)
    print("a process that sends one message to SQLite:", json.dumps({k: round(v) for k, v in cold.items()}), flush=True)
    stores = {}
    for name in names:
        stores[name] = measure(name, given.rounds, [one for one in given.only.split(",") if one])
        print(f"\n{name}\n" + "\n".join(table_of(stores[name])), flush=True)
    if given.write:
        write(stores, cold, about())


if __name__ == "__main__":
    main()
