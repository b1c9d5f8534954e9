"""A simulator of elections: one seed draws candidates, clocks, faults and work, and decides every race between them.

It runs the real :class:`tenure._election.machine.Machine`; the store, the network, the clocks and the work
are simulated. Promises are judged from outside, see :mod:`tenure.testing._sim.elections.checkers`. A seed that
breaks one breaks it again: ``run(4217)`` is the same run every time, everywhere. ::

    from tenure.testing.sim import campaign, run

    print(run(4217))  # one seed
    print("\\n".join(run(4217, trace=True).trace))  # the same, line by line
    for report in campaign(elections=20_000, processes=2):  # many seeds, in order, on two cores
        if not report.ok:
            print(report)

The same for queues: :mod:`tenure.testing.sim.queues`. Both simulators share modules of ``tenure.testing._sim``:
``world``, ``process``, ``network``, ``client``, ``server``, ``nemesis``, ``report``, ``seeds`` and ``planted``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from tenure._public import publish_all
from tenure.testing._sim.elections.mutants import MUTANTS, SURVIVORS
from tenure.testing._sim.elections.parts import Parts
from tenure.testing._sim.elections.simulation import Simulation, leader_within
from tenure.testing._sim.planted import Mutant, parts_of
from tenure.testing._sim.report import Report, Violation
from tenure.testing._sim.seeds import many

__all__ = ["MUTANTS", "SURVIVORS", "Mutant", "Report", "Violation", "campaign", "leader_within", "run"]


def run(seed: int, *, mutant: str | None = None, trace: bool = False) -> Report:
    """Simulate one seed.

    Args:
        mutant: The name of a planted bug, from ``MUTANTS`` or ``SURVIVORS``.
        trace: Whether the report says what happened, line by line.

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
    _parts(mutant)  # an unknown name is refused here, and not by every process
    return many(partial(run, mutant=mutant), seeds, elections, Report.unit, processes)


def _parts(mutant: str | None) -> Parts:
    return parts_of(mutant, {**MUTANTS, **SURVIVORS}, Parts())


publish_all(__name__)
