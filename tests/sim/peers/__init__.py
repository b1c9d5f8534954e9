"""A simulator of fleets: one seed draws members, strategies, clocks and faults; built of the parts of the shipped ones.

It runs the real :class:`tenure._backends.peers.machine.Machine` and, over it, the real machines of
candidates.
"""

from __future__ import annotations

from tenure.testing._sim.planted import parts_of
from tests.sim.peers.mutants import MUTANTS
from tests.sim.peers.plan import ANYTHING, Given
from tests.sim.peers.simulation import FleetReport, Parts, Simulation

__all__ = ["MUTANTS", "FleetReport", "Given", "run"]


def run(seed: int, *, mutant: str | None = None, trace: bool = False, given: Given = ANYTHING) -> FleetReport:
    """Simulate one seed.

    Args:
        mutant: The name of a planted bug, from ``MUTANTS``; the settings in which it errs are not drawn, either.
        trace: Whether the report says what happened, line by line.
        given: The settings that are not drawn.
    """
    parts = parts_of(mutant, MUTANTS, Parts())
    return Simulation(seed, parts=parts, mutant=mutant, given=given, trace=trace).run()
