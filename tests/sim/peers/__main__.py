"""Show one run, try many, or count messages.

::

    python -m tests.sim.peers --seed 17 [--mutant half_is_enough]
    python -m tests.sim.peers --seeds 0:2000 [--strategy ring] [--quorum none]
    python -m tests.sim.peers --messages
"""

from __future__ import annotations

import argparse
import time
from functools import partial

from tenure._backends.peers.fleet import Strategy
from tenure.testing._sim.seeds import many
from tests.sim.peers import MUTANTS, FleetReport, Given, run
from tests.sim.peers.counting import HEAD, Count


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.peers")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", help="FROM:TO")
    parser.add_argument("--mutant", choices=MUTANTS)
    parser.add_argument("--strategy", choices=["lowest", "bully", "ring"])
    parser.add_argument("--quorum", choices=["majority", "none"])
    parser.add_argument("--size", type=int, choices=range(2, 8))
    parser.add_argument("--faults", help="such as forget,kill", default=(), type=lambda text: tuple(text.split(",")))
    parser.add_argument("--messages", action="store_true", help="count the messages of elections without faults")
    args = parser.parse_args()
    if args.messages:
        return messages()
    given = Given(args.strategy, args.quorum, args.size, args.faults)
    if args.seeds:
        first, _, last = args.seeds.partition(":")
        return search(range(int(first), int(last)), args.mutant, given)
    report = run(args.seed or 0, mutant=args.mutant, trace=True, given=given)
    print("\n".join(report.trace))
    print(report)
    return not report.ok


def search(seeds: range, mutant: str | None, given: Given) -> int:
    begun, elections, wrong, worst = time.monotonic(), 0, 0, 0.0
    for report in many(partial(run, mutant=mutant, given=given), seeds, None, FleetReport.unit, None):
        elections += report.elections
        worst = max(worst, report.recovery / report.bound)
        if not report.ok:
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
