"""A simulator of queues: one seed draws producers, consumers, clocks, handlers and faults, and decides every race.

It runs the real machines, :class:`tenure._queue.pump.Pump` and :class:`tenure._queue.locks.Locks`, and
the memory backend's broker; the network, the clocks, the threads and the handlers are simulated. Promises are judged
from outside: the broker's in :mod:`tenure.testing._sim.queues.oracle`, the consumers' in
:mod:`tenure.testing._sim.queues.consumer_checkers`. In some runs, messages are sent with sessions, for consumers of
sessions, which run :class:`tenure._queue.session_pump.SessionPump`; see ``session_oracle`` and ``session_checkers``
beside these. ::

    from tenure.testing.sim import queues

    print(queues.run(42))  # one seed
    print("\\n".join(queues.run(42, trace=True).trace))  # the same, line by line
    for report in queues.campaign(messages=20_000, processes=2):  # many seeds, in order, on two cores
        if not report.ok:
            print(report)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from tenure._public import publish_all
from tenure.testing._sim.planted import Mutant, parts_of
from tenure.testing._sim.queues.mutants import MUTANTS, SURVIVORS
from tenure.testing._sim.queues.parts import Parts
from tenure.testing._sim.queues.simulation import Simulation
from tenure.testing._sim.report import QueueReport, Violation
from tenure.testing._sim.seeds import many

__all__ = ["MUTANTS", "SURVIVORS", "Mutant", "QueueReport", "Violation", "campaign", "run"]


def run(seed: int, *, mutant: str | None = None, trace: bool = False) -> QueueReport:
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
    messages: int | None = None,
    mutant: str | None = None,
    processes: int | None = None,
) -> Iterator[QueueReport]:
    """Simulate many seeds and yield their reports, in the order of the seeds, however many processes work on them.

    Args:
        seeds: Which; all from 0 on if None, and then *messages* says when it is enough.
        messages: Stop after the seed with which so many messages were sent and settled.
        mutant: The name of a planted bug, from ``MUTANTS`` or ``SURVIVORS``.
        processes: How many work at a time; as many as there are cores if None. 1 stays in this process.

    Raises:
        ConfigError: There is no such planted bug, or no end: neither *seeds* nor *messages* was given.
    """
    _parts(mutant)  # an unknown name is refused here, and not by every process
    return many(partial(run, mutant=mutant), seeds, messages, QueueReport.unit, processes)


def _parts(mutant: str | None) -> Parts:
    return parts_of(mutant, {**MUTANTS, **SURVIVORS}, Parts())


publish_all(__name__)
