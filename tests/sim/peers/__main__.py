"""Show one run, try many, or count messages.

::

    python -m tests.sim.peers --seed 17 [--mutant half_is_enough]
    python -m tests.sim.peers --seeds 0:2000 [--strategy ring] [--quorum none]
    python -m tests.sim.peers --messages
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from tenure.peers.fleet import Strategy
from tests.sim.peers.mutants import MUTANTS
from tests.sim.peers.simulation import HEAD, Count, Simulation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.peers")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", help="FROM:TO")
    parser.add_argument("--mutant", choices=MUTANTS)
    parser.add_argument("--strategy", choices=["lowest", "bully", "ring"])
    parser.add_argument("--quorum", choices=["majority", "none"])
    parser.add_argument("--size", type=int, choices=range(2, 8))
    parser.add_argument("--faults", help="such as forget,kill", type=lambda told: tuple(told.split(",")))
    parser.add_argument("--messages", action="store_true", help="count the messages of elections in calm")
    args = parser.parse_args()
    given: dict[str, Any] = {"strategy": args.strategy, "quorum": args.quorum, "size": args.size, "faults": args.faults}
    if args.mutant:
        machine, confined = MUTANTS[args.mutant]
        given |= confined | {"machine": machine, "mutant": args.mutant}
    if args.messages:
        return messages()
    if args.seeds:
        first, _, last = args.seeds.partition(":")
        return many(range(int(first), int(last)), given)
    report = Simulation(args.seed or 0, trace=True, **given).run()
    print("\n".join(report.trace))
    print(report)
    return bool(report.violations)


def many(seeds: range, given: dict[str, Any]) -> int:
    begun, elections, wrong, worst = time.monotonic(), 0, 0, 0.0
    for seed in seeds:
        report = Simulation(seed, **given).run()
        elections += report.elections
        worst = max(worst, report.recovery / report.bound)
        if report.violations:
            wrong += 1
            print(report, flush=True)
    print(
        f"{len(seeds)} seeds, {elections} elections, {wrong} with violations; slowest recovery {worst:.0%} of its "
        f"bound; {time.monotonic() - begun:.0f} s"
    )
    return bool(wrong)


def messages() -> int:
    strategies: tuple[Strategy, ...] = ("lowest", "bully", "ring")
    print(HEAD)
    for strategy in strategies:
        for size in (3, 5, 9, 25):
            print(Count.of(strategy, size), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
