"""Many runs, on several processes, their reports in the order of the seeds; and planted bugs found by name."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import TypeVar

from tenure.errors import ConfigError
from tenure.testing.sim.report import Outcome

Job = tuple[int, str | None]
"""A seed, and the name of the planted bug."""
R = TypeVar("R", bound=Outcome)
M = TypeVar("M")

CHUNK = 10
"""How many seeds a process takes at a time."""


def reports(run: Callable[[Job], R], seeds: Iterable[int] | None, mutant: str | None, processes: int) -> Iterator[R]:
    """Yield what *run* makes of *seeds*, of all from 0 on if None, in their order, however many work on them."""
    jobs = ((seed, mutant) for seed in (itertools.count() if seeds is None else seeds))
    if processes == 1:
        yield from map(run, jobs)
        return
    # A fresh interpreter each: nothing that this process has loaded, or holds open, gets into a run.
    with multiprocessing.get_context("spawn").Pool(processes, _leave_interrupts_to_the_parent) as pool:
        while chunk := list(itertools.islice(jobs, CHUNK * processes * 4)):
            yield from pool.imap(run, chunk, CHUNK)


def until(enough: int | None, found: Iterator[R]) -> Iterator[R]:
    """Yield what is *found* up to the one with which their amounts have come to *enough*."""
    amount = 0
    for report in found:
        yield report
        amount += report.amount
        if enough is not None and amount >= enough:
            return


def _leave_interrupts_to_the_parent() -> None:
    # Ctrl-C reaches every process of a terminal, and each would print how it was interrupted.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def planted(name: str, known: Mapping[str, M]) -> M:
    """Return the planted bug called *name*.

    Raises:
        ConfigError: There is none; the message tells the nearest name.
    """
    if name not in known:
        close = get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
        raise ConfigError(f"there is no planted bug {name!r}{hint}")
    return known[name]
