"""A simulator of elections: one seed draws candidates, clocks, faults and work, and decides every race between them.

What runs in it is the real :class:`tenure.election.machine.Machine`; the store, the network, the clocks and the work
are simulated. Promises are judged from outside, see :mod:`tenure.testing.sim.checkers`. A seed that breaks one breaks
it again: ``run(4217)`` is the same run every time, everywhere. ::

    from tenure.testing.sim import campaign, run

    print(run(4217))  # one seed
    print("\\n".join(run(4217, trace=True).trace))  # the same, told line by line
    for report in campaign(elections=20_000, processes=2):  # many seeds, in order, on two cores
        if not report.ok:
            print(report)
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from tenure.errors import ConfigError
from tenure.testing.sim.mutants import MUTANTS, SURVIVORS, Mutant
from tenure.testing.sim.report import Report, Violation
from tenure.testing.sim.simulation import Parts, Simulation, leader_within

__all__ = ["MUTANTS", "SURVIVORS", "Mutant", "Report", "Violation", "campaign", "leader_within", "run"]

CHUNK = 10
"""How many seeds a process takes at a time."""


def run(seed: int, *, mutant: str | None = None, trace: bool = False) -> Report:
    """Simulate one seed.

    Args:
        mutant: The name of a planted bug, from ``MUTANTS`` or ``SURVIVORS``.
        trace: Whether the report tells what happened, line by line.

    Raises:
        ConfigError: There is no such planted bug.
    """
    return Simulation(seed, parts=_parts(mutant), mutant=mutant, trace=trace).run()


def campaign(
    seeds: Iterable[int] | None = None,
    *,
    elections: int | None = None,
    mutant: str | None = None,
    processes: int | None = None,
) -> Iterator[Report]:
    """Simulate many seeds and yield their reports, in the order of the seeds, however many processes work on them.

    Args:
        seeds: Which; all from 0 on if None, and then *elections* says when it is enough.
        elections: Stop after the seed with which so many elections were held.
        mutant: The name of a planted bug, from ``MUTANTS`` or ``SURVIVORS``.
        processes: How many work at a time; as many as there are cores if None. 1 stays in this process.

    Raises:
        ConfigError: There is no such planted bug, or no end: neither *seeds* nor *elections* was given.
    """
    if seeds is None and elections is None:
        raise ConfigError("a campaign needs an end: say which seeds, or how many elections")
    _parts(mutant)
    jobs = ((seed, mutant) for seed in (itertools.count() if seeds is None else seeds))
    return _enough(_reports(jobs, processes or os.cpu_count() or 1), elections)


def _enough(reports: Iterator[Report], elections: int | None) -> Iterator[Report]:
    held = 0
    for report in reports:
        yield report
        held += report.elections
        if elections is not None and held >= elections:
            return


def _reports(jobs: Iterator[tuple[int, str | None]], processes: int) -> Iterator[Report]:
    if processes == 1:
        yield from map(_job, jobs)
        return
    # A fresh interpreter each: nothing that this process has loaded, or holds open, gets into a run.
    with multiprocessing.get_context("spawn").Pool(processes, _leave_interrupts_to_the_parent) as pool:
        while chunk := list(itertools.islice(jobs, CHUNK * processes * 4)):
            yield from pool.imap(_job, chunk, CHUNK)


def _leave_interrupts_to_the_parent() -> None:
    # Ctrl-C reaches every process of a terminal, and each would print how it was interrupted.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _job(job: tuple[int, str | None]) -> Report:
    seed, mutant = job
    return run(seed, mutant=mutant)


def _parts(mutant: str | None) -> Parts:
    if mutant is None:
        return Parts()
    known = {**MUTANTS, **SURVIVORS}
    if mutant not in known:
        close = get_close_matches(mutant, known, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
        raise ConfigError(f"there is no planted bug {mutant!r}{hint}")
    return known[mutant].parts
