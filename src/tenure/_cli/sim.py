"""``tenure sim``: simulate elections or queues under seeds, and find or replay a run that breaks a promise."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import click

from tenure._cli.examples import Command
from tenure._cli.exits import Exit
from tenure._cli.group import json_option
from tenure._cli.output import print_json, print_line

if TYPE_CHECKING:
    from tenure.testing._sim.report import Outcome

ELECTIONS = 20_000
MESSAGES = 100_000


def seed_range(text: str) -> range:
    """Read ``A-B``, both included; to be used as the type of an option."""
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal()) or int(first) > int(last):
        raise click.BadParameter(f"{text!r} is not a range of seeds; write the first and the last, as in 0-999")
    return range(int(first), int(last) + 1)


@click.command("sim", cls=Command)
@click.option("--queues", is_flag=True, help="Simulate queues, and not elections.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Simulate this one seed.")
@click.option("--trace", is_flag=True, help="With --seed: print what happens, line by line.")
@click.option("--seeds", type=seed_range, metavar="A-B", help="Simulate these seeds.")
@click.option("--elections", type=click.IntRange(min=1), metavar="N", help="Simulate seeds from 0 on until so many "
              f"elections were held. [default: {ELECTIONS}]")  # fmt: skip
@click.option("--messages", type=click.IntRange(min=1), metavar="N", help="With --queues: simulate seeds from 0 on "
              f"until so many messages were settled. [default: {MESSAGES}]")  # fmt: skip
@click.option("--mutant", metavar="NAME", help="Plant this bug, to see that it is found.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Use so many processes. [default: one per core]")
@json_option
@click.pass_context
def command(ctx: click.Context, queues: bool, seed: int | None, trace: bool, seeds: range | None,
            elections: int | None, messages: int | None, mutant: str | None, jobs: int | None,
            as_json: bool) -> int:  # fmt: skip
    """Simulate elections: candidates, clocks, network, store and faults, all drawn from a seed, checked from outside.

    With --queues: producers, consumers, their handlers and a broker; in some runs, sessions.

    The same seed gives the same run on every machine. At the first seed that breaks a promise, the command prints how,
    and the command line that replays it, and ends with 1.
    """
    if (elections if queues else messages) is not None:
        raise click.UsageError("--elections are counted without --queues, --messages with it", ctx)
    amount = messages if queues else elections
    if seed is not None and (seeds or amount):
        raise click.UsageError("--seed is one run; leave out --seeds, --elections and --messages", ctx)
    if seed is not None and jobs:
        raise click.UsageError("--seed is one run, in one process; leave out --jobs", ctx)
    if trace and seed is None:
        raise click.UsageError("--trace prints one run; name it with --seed", ctx)
    from tenure.testing import sim
    from tenure.testing.sim import queues as sim_queues

    if seed is not None:
        run = sim_queues.run if queues else sim.run
        return _show_one(run(seed, mutant=mutant, trace=trace), as_json)
    if seeds is None and amount is None:
        amount = MESSAGES if queues else ELECTIONS
    reports: Iterator[Outcome]
    if queues:
        reports = sim_queues.campaign(seeds, messages=amount, mutant=mutant, processes=jobs)
    else:
        reports = sim.campaign(seeds, elections=amount, mutant=mutant, processes=jobs)
    return _search(reports, seeds, amount, "messages" if queues else "elections", as_json)


def _show_one(report: Outcome, as_json: bool) -> int:
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        for line in (*report.trace, str(report)):
            print_line(line)
    return Exit.DONE if report.ok else Exit.BROKEN


def _search(reports: Iterator[Outcome], seeds: range | None, amount: int | None, unit: str, as_json: bool) -> int:
    """Go through *reports* up to the first that is not ok."""
    began, runs, done, virtual, sessions = time.monotonic(), 0, 0, 0.0, 0
    broken = None
    with _progress(amount or len(seeds or ()), unit if amount else "seeds") as bar:
        for report in reports:
            runs, done, virtual = runs + 1, done + report.amount, virtual + report.seconds
            sessions += getattr(report, "sessions", 0)
            bar.advance(report.amount if amount else 1)
            if not report.ok:
                broken = report
                break
    took = time.monotonic() - began
    if as_json:
        found = dataclasses.asdict(broken) | {"replay": broken.replay} if broken else None
        counted = {"sessions": sessions} if unit == "messages" else {}
        print_json({"seeds": runs, unit: done, **counted, "virtual": virtual, "seconds": took, "broken": found})
    else:
        verdict = f"\n{broken}\nreplay: {broken.replay}" if broken else " every promise was kept"
        in_sessions = f" and {sessions} sessions" if sessions else ""
        print_line(
            f"{done} {unit}{in_sessions} in {runs} seeds, {virtual / 3600:.1f} virtual hours in {took:.1f} s:{verdict}"
        )
    return Exit.BROKEN if broken else Exit.DONE


# --- progress ----------------------------------------------------------------------------------------------------


class _Bar(Protocol):
    def advance(self, steps: int) -> None: ...


class _NoBar:
    def advance(self, steps: int) -> None:
        pass


@contextmanager
def _progress(total: int, unit: str) -> Iterator[_Bar]:
    """Show the progress on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield _NoBar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)

        class Bar:
            def advance(self, steps: int) -> None:
                progress.advance(task, steps)

        yield Bar()
