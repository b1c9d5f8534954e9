"""The seed that shows each planted bug: tried first, so that the tests need not search for it.

A change of a machine or of a simulator may make a seed another run. The tests then search, which costs time and finds
the bug as before; this keeps what they find::

    python -m tests.sim.planted_seeds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tenure.testing import sim
from tenure.testing._sim.planted import Mutant
from tenure.testing.sim import queues
from tests.sim import peers
from tests.sim.proof import Run, kept_seeds, seed_that_shows

FILE = Path(__file__).with_name("planted_seeds.txt")
SIMULATORS: Mapping[str, tuple[Run, Mapping[str, Mutant[Any]], Sequence[int]]] = {
    "elections": (sim.run, sim.MUTANTS, kept_seeds("seeds.txt")),
    "peers": (peers.run, peers.MUTANTS, ()),
    "queues": (queues.run, queues.MUTANTS, kept_seeds("queue_seeds.txt")),
}
"""What simulates one seed, its planted bugs, and seeds that are likely to show one."""


def shown_by(simulator: str) -> dict[str, list[int]]:
    """Return the kept seeds for each planted bug of a *simulator*; rare bugs have more than one."""
    lines = [line.split() for line in FILE.read_text().splitlines() if not line.startswith("#")]
    return {bug: [int(seed) for seed in seeds] for of, bug, *seeds in lines if of == simulator}


def main() -> None:
    """Search for the bugs that their first seed no longer shows, and write the list."""
    lines = [line for line in FILE.read_text().splitlines() if line.startswith("#")]
    for simulator, (run, bugs, likely) in SIMULATORS.items():
        kept = shown_by(simulator)
        for name, bug in sorted(bugs.items()):
            seeds = kept.get(name, [])
            seed = seed_that_shows(run, name, bug, first=(*seeds, *likely))
            others = [one for one in seeds if one != seed] if len(seeds) > 1 else []
            lines.append(" ".join(map(str, [simulator, name, seed, *others])))
    FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
