"""Show one run, or many: ``python -m tests.sim.peers --seed 17 [--mutant NAME]``, ``… --seeds 0:2000``."""

from __future__ import annotations

import argparse

from tests.sim.peers.simulation import Simulation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.peers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutant")
    args = parser.parse_args()
    report = Simulation(args.seed, mutant=args.mutant, trace=True).run()
    print("\n".join(report.trace))
    print(report)
    return bool(report.violations)


if __name__ == "__main__":
    raise SystemExit(main())
