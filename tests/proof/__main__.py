"""
``make proof``: the long runs, by hand. Elections and queues simulated, decoders fed with what others may have written,
processes killed, coordinators with faults, leadership handed over to foreign clients and back, all passwords and
certificates replaced, hours under load.

Each part resumes where an earlier run, also an interrupted one, has left it in the folder of ``--state``; remove the
folder to start over. It ends with a table and, for each failure, the line that replays it.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.proof import coordinators
from tests.proof.fuzz import fuzzed
from tests.proof.interop import interop, wanted
from tests.proof.kills import consumers, kill, leaders, tried
from tests.proof.rotation import rotate
from tests.proof.simulated import election, queue, simulate
from tests.proof.soak import soak
from tests.proof.state import Part, State

PRINT_EVERY = 5.0


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    state = State(options.state)
    if options.round is not None:
        found = [tried(course, options.round, options.state) for course in (leaders, consumers)]
        print("\n".join(filter(None, found)) or f"round {options.round}: every promise was kept")
        return 1 if any(found) else 0
    if options.faults is not None:
        _, failure = coordinators.tried(options.faults, options.state)
        print(failure or f"seed {options.faults}: every promise was kept")
        return 1 if failure else 0
    elections, messages = state.part("elections", "elections"), state.part("queues", "messages")
    inputs = state.part("fuzz", "inputs")
    kills, soaked = state.part("kills", "processes killed"), state.part("soak", "seconds")
    foreign = state.part("interop", "hand-overs")
    stores = state.part("coordinators", "fail-overs")
    rotated = state.part("rotation", "seconds")
    try:
        follow("elections", options.elections, state, simulate(election, elections, options.elections, options.jobs))
        follow("queues", options.queues, state, simulate(queue, messages, options.queues, options.jobs))
        follow("fuzz", options.fuzz, state, simulate(fuzzed, inputs, options.fuzz, options.jobs))
        follow("kills", options.kills, state, kill(kills, options.kills, options.state))
        follow("interop", wanted(options.interop), state, interop(foreign, wanted(options.interop), options.state))
        follow(
            "coordinators", options.coordinators, state, coordinators.elect(stores, options.coordinators, options.state)
        )
        follow("rotation", options.rotation, state, rotate(rotated, options.rotation, options.state / "rotation"))
        follow("soak", options.soak, state, soak(soaked, options.soak, options.state / "soak"))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes here", file=sys.stderr)
        table(state)
        return 130
    return table(state)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="make proof", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--elections", type=int, default=100_000, metavar="N", help="simulated elections (%(default)s)")
    made.add_argument("--queues", type=int, default=200_000, metavar="N", help="simulated messages (%(default)s)")
    made.add_argument("--fuzz", type=int, default=1_000_000, metavar="N", help="inputs of decoders (%(default)s)")
    made.add_argument("--kills", type=int, default=100, metavar="N", help="processes to kill (%(default)s)")
    made.add_argument(
        "--interop", type=int, default=100, metavar="N", help="hand-overs per client each way (%(default)s)"
    )
    made.add_argument("--coordinators", type=int, default=500, metavar="N", help="names that fail over (%(default)s)")
    made.add_argument(
        "--rotation", type=int, default=600, metavar="S", help="seconds in which all logins are replaced (%(default)s)"
    )
    made.add_argument("--soak", type=int, default=600, metavar="S", help="seconds under load (%(default)s)")
    made.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that simulate and decode"
    )
    made.add_argument("--round", type=int, metavar="N", help="replay one round of kills, and nothing else")
    made.add_argument("--faults", type=int, metavar="N", help="replay one seed of coordinators, and nothing else")
    made.add_argument("--state", type=Path, default=Path("build/proof"), metavar="DIR", help="state (%(default)s)")
    return made


def follow(name: str, enough: int, state: State, steps: Iterator[None]) -> None:
    """Take the *steps* of a part; save its state and print its progress repeatedly, and at the end."""
    part = state.parts[name]
    print(f"{name}: {part.done} of {enough} {part.unit}", flush=True)
    before, begun = part.seconds, time.monotonic()
    printed = begun
    try:
        for _ in steps:
            part.seconds = before + time.monotonic() - begun
            if time.monotonic() - printed >= PRINT_EVERY:
                printed = time.monotonic()
                state.save()
                print(f"{name}: {part.done} of {enough} {part.unit}, {len(part.failures)} failures", flush=True)
    finally:
        state.save()


def table(state: State) -> int:
    """Print counts and failures; return 1 if anything failed."""
    print(f"\n{'part':<12}{'count':>12} {'unit':<18}{'seeds':>10}{'seconds':>10}{'failures':>10}")
    for name, part in state.parts.items():
        print(
            f"{name:<12}{part.done:>12} {part.unit:<18}{seeds(part):>10}{part.seconds:>10.0f}{len(part.failures):>10}"
        )
        if part.notes:
            print(f"{'':<12}{', '.join(f'{what}: {value}' for what, value in part.notes.items())}")
        for what, took in part.took.items():
            if took:
                p50, p99 = (sorted(took)[math.ceil(share * len(took)) - 1] for share in (0.5, 0.99))
                print(f"{'':<12}{what}: {len(took)}, p50 {p50:.2f} s, p99 {p99:.2f} s")
    failures = [(name, failure) for name, part in state.parts.items() for failure in part.failures]
    for name, failure in failures:
        print(f"\n{name}: {failure['what']}\n  replay: {failure['replay']}")
    return 1 if failures else 0


def seeds(part: Part) -> str:
    return f"0-{part.next_seed - 1}" if part.next_seed else "none"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
