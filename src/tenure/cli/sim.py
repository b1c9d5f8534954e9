"""``tenure sim``: simulate elections under seeds, and find or replay a run that breaks a promise."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import click

from tenure.cli.exits import Exit
from tenure.cli.group import json_option
from tenure.cli.output import say, say_json

if TYPE_CHECKING:
    from tenure.testing.sim import Report

ELECTIONS = 20_000


def seed_range(text: str) -> range:
    """Read ``A-B``, both included; to be used as the type of an option."""
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal()) or int(first) > int(last):
        raise click.BadParameter(f"{text!r} is not a range of seeds; write the first and the last, as in 0-999")
    return range(int(first), int(last) + 1)


@click.command("sim")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Simulate this one seed.")
@click.option("--trace", is_flag=True, help="With --seed: tell what happens, line by line.")
@click.option("--seeds", type=seed_range, metavar="A-B", help="Simulate these seeds.")
@click.option("--elections", type=click.IntRange(min=1), metavar="N", help="Simulate seeds from 0 on until so many "
              f"elections were held. [default: {ELECTIONS}]")  # fmt: skip
@click.option("--mutant", metavar="NAME", help="Plant this bug, to see it found.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Use so many processes. [default: one per core]")
@json_option
@click.pass_context
def command(ctx: click.Context, seed: int | None, trace: bool, seeds: range | None, elections: int | None,
            mutant: str | None, jobs: int | None, as_json: bool) -> int:  # fmt: skip
    """Simulate elections: candidates, clocks, network, store and faults, all drawn from a seed, judged from outside.

    The same seed is the same run, everywhere. At the first seed that breaks a promise, it shows how, prints the one
    line that replays it, and ends with 1.
    """
    if seed is not None and (seeds or elections):
        raise click.UsageError("--seed is one run; leave out --seeds and --elections", ctx)
    if seed is not None and jobs:
        raise click.UsageError("--seed is one run, in one process; leave out --jobs", ctx)
    if trace and seed is None:
        raise click.UsageError("--trace tells of one run; say which with --seed", ctx)
    from tenure.testing.sim import campaign, run

    if seed is not None:
        return _show_one(run(seed, mutant=mutant, trace=trace), as_json)
    if seeds is None and elections is None:
        elections = ELECTIONS
    return _search(campaign(seeds, elections=elections, mutant=mutant, processes=jobs), seeds, elections, as_json)


def _show_one(report: Report, as_json: bool) -> int:
    if as_json:
        say_json(dataclasses.asdict(report))
    else:
        for line in (*report.trace, str(report)):
            say(line)
    return Exit.DONE if report.ok else Exit.FOUND


def _search(reports: Iterator[Report], seeds: range | None, elections: int | None, as_json: bool) -> int:
    """Go through *reports* up to the first that is not ok."""
    began, runs, held, virtual = time.monotonic(), 0, 0, 0.0
    broken = None
    with _progress(elections or len(seeds or ()), "elections" if elections else "seeds") as bar:
        for report in reports:
            runs, held, virtual = runs + 1, held + report.elections, virtual + report.seconds
            bar.advance(report.elections if elections else 1)
            if not report.ok:
                broken = report
                break
    took = time.monotonic() - began
    if as_json:
        found = dataclasses.asdict(broken) | {"replay": broken.replay} if broken else None
        say_json({"seeds": runs, "elections": held, "virtual": virtual, "seconds": took, "broken": found})
    else:
        verdict = f"\n{broken}\nreplay: {broken.replay}" if broken else " every promise was kept"
        say(f"{held} elections in {runs} seeds, {virtual / 3600:.1f} virtual hours in {took:.1f} s:{verdict}")
    return Exit.FOUND if broken else Exit.DONE


# --- progress ----------------------------------------------------------------------------------------------------


class _Bar(Protocol):
    def advance(self, steps: int) -> None: ...


class _NoBar:
    def advance(self, steps: int) -> None:
        pass


@contextmanager
def _progress(total: int, unit: str) -> Iterator[_Bar]:
    """Show how far it is on a terminal's stderr; anywhere else nothing."""
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
