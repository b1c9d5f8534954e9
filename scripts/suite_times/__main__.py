"""
Run tests and print what they cost, by folder, by file and for the fifty dearest tests::

    python -m scripts.suite_times                             # all tests, on five workers
    python -m scripts.suite_times -n 5 --dist loadfile tests/application
    python -m scripts.suite_times --read build/suite_times.jsonl

Arguments are pytest's. *own* is the CPU time of the process that runs the tests; *children* that of processes below it,
servers included; *waited* the wall time in which neither had or wanted a core: a sleep, a poll, a lease that must run
out, a server that starts. The last table has the lines at which the tests were blocked. Each of the workers runs one
test at a time, so the sums are those of all workers. Linux only.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from scripts.suite_times.meter import ROOT, Cost
from scripts.suite_times.plugin import WRITES_TO

USUAL = ["-n", "5", "--dist", "loadfile", "--no-loadscope-reorder", "-q"]
RECORDS = ROOT / "build" / "suite_times.jsonl"
DEAREST = 50


def main(arguments: list[str]) -> int:
    if not sys.platform.startswith("linux"):
        print("scripts.suite_times reads /proc, so it needs Linux.", file=sys.stderr)
        return 2
    if arguments[:1] == ["--read"]:
        if len(arguments) != 2 or not Path(arguments[1]).is_file():
            print("--read needs the file of an earlier run, such as build/suite_times.jsonl.", file=sys.stderr)
            return 2
        report(Path(arguments[1]))
        return 0
    RECORDS.parent.mkdir(exist_ok=True)
    begun, started = time.monotonic(), time.time()
    status = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "scripts.suite_times.plugin", *(arguments or USUAL)],
        cwd=ROOT,
        env=os.environ | {WRITES_TO: str(RECORDS)},
        check=False,
    ).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not RECORDS.exists() or RECORDS.stat().st_mtime < started:
        print("No test was measured.", file=sys.stderr)
        return status
    report(RECORDS)
    print(
        f"\nThe run, with collecting: {time.monotonic() - begun:.0f} s; CPU {used.ru_utime + used.ru_stime:.0f} s"
        f" (user {used.ru_utime:.0f}, system {used.ru_stime:.0f}); records in {RECORDS.relative_to(ROOT)}"
    )
    return status


def report(path: Path) -> None:
    costs: list[tuple[str, Cost]] = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        costs.append((record.pop("test"), Cost(**record)))
    print_table("folder", costs, lambda test: str(Path(test.partition("::")[0]).parent))
    print_table("file", costs, lambda test: test.partition("::")[0])
    print_table("test", costs, lambda test: test, limit=DEAREST)
    places: Counter[str] = Counter()
    for _, cost in costs:
        places.update(cost.places)
    print(f"\n{'blocked':>9}  at the line")
    for place, seconds in places.most_common(DEAREST):
        print(f"{seconds:9.1f}  {place}")


def print_table(
    title: str, costs: Iterable[tuple[str, Cost]], key: Callable[[str], str], limit: int | None = None
) -> None:
    """Print the sums of the costs under each key, the longest first."""
    groups: dict[str, list[Cost]] = defaultdict(list)
    for test, cost in costs:
        groups[key(test)].append(cost)
    rows = [(name, len(group), *sums(group)) for name, group in groups.items()]
    rows.sort(key=lambda row: -row[2])
    print(f"\n{'tests':>6}{'wall':>9}{'own':>9}{'children':>9}{'(system)':>9}{'waited':>9}  {title}")
    for name, tests, wall, own, user, system, waited in rows[:limit]:
        print(f"{tests:6}{wall:9.1f}{own:9.1f}{user + system:9.1f}{system:9.1f}{waited:9.1f}  {name}")
    if limit is None:
        every = sums([cost for group in groups.values() for cost in group])
        wall, own, user, system, waited = every
        tests = sum(len(group) for group in groups.values())
        print(f"{tests:6}{wall:9.1f}{own:9.1f}{user + system:9.1f}{system:9.1f}{waited:9.1f}  in all")


def sums(costs: list[Cost]) -> tuple[float, float, float, float, float]:
    return (
        sum(cost.wall for cost in costs),
        sum(cost.own for cost in costs),
        sum(cost.children_user for cost in costs),
        sum(cost.children_system for cost in costs),
        sum(cost.waited for cost in costs),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
