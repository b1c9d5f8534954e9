"""Planted bugs: each swaps one small part of a run for a wrong one. A checker that cannot find them proves nothing.

Most of them were found in the field, in other projects. ``MUTANTS`` must be found; ``SURVIVORS`` break no promise.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tenure.testing._sim.planted import Mutant
from tenure.testing._sim.queues.mutants import broker, locks, pump, sessions, user_code
from tenure.testing._sim.queues.parts import Parts

MUTANTS: Mapping[str, Mutant[Parts]] = MappingProxyType(
    {**locks.MUTANTS, **pump.MUTANTS, **broker.MUTANTS, **user_code.MUTANTS, **sessions.MUTANTS}
)
"""Bugs that must be found, by name."""

SURVIVORS: Mapping[str, Mutant[Parts]] = pump.SURVIVORS
"""Changes that look like bugs and break no promise: a checker that finds them is wrong itself."""
