"""Many runs, on several processes, their reports in the order of the seeds."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from tenure.errors import ConfigError
from tenure.testing._sim.report import Outcome

R = TypeVar("R", bound=Outcome)

CHUNK = 10
"""How many seeds a process takes at a time."""


def many(
    run: Callable[[int], R], seeds: Iterable[int] | None, enough: int | None, unit: str, processes: int | None
) -> Iterator[R]:
    """Yield the reports of *run* for *seeds*, in order, until their amounts come to *enough*.

    Args:
        run: Simulates one seed; passed to other processes, so it must be known to them by name.
        seeds: Which; all from 0 on if None.
        enough: None if *seeds* alone say when it ends.
        unit: The unit of the amounts.
        processes: How many work at a time; as many as there are cores if None. 1 stays in this process.

    Raises:
        ConfigError: There is no end: neither *seeds* nor *enough* was given.
    """
    if seeds is None and enough is None:
        raise ConfigError(f"a campaign needs an end: say which seeds, or how many {unit}")
    return _until(enough, _reports(run, seeds, processes or os.cpu_count() or 1))


def _reports(run: Callable[[int], R], seeds: Iterable[int] | None, processes: int) -> Iterator[R]:
    left = iter(itertools.count() if seeds is None else seeds)
    if processes == 1:
        yield from map(run, left)
        return
    # A fresh interpreter each: nothing that this process has loaded, or holds open, gets into a run.
    with multiprocessing.get_context("spawn").Pool(processes, _leave_interrupts_to_the_parent) as pool:
        while chunk := list(itertools.islice(left, CHUNK * processes * 4)):
            yield from pool.imap(run, chunk, CHUNK)


def _until(enough: int | None, found: Iterator[R]) -> Iterator[R]:
    amount = 0
    for report in found:
        yield report
        amount += report.amount
        if enough is not None and amount >= enough:
            return


def _leave_interrupts_to_the_parent() -> None:
    # Ctrl-C reaches every process of a terminal, and each would print how it was interrupted.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
