"""Let decoders read what others may have written, from seeds.

::

    python -m tests.fuzz [NAME…] [--rounds N]
    python -m tests.fuzz NAME --seed S
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.fuzz.decoder import given_by, round_of
from tests.fuzz.decoders import DECODERS

ROUNDS = 10_000
SHOWN_MAX = 5
"""Failures of one decoder that are shown."""


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    names = options.names or list(DECODERS)
    if options.seed is not None and options.rounds is None:
        return replay(names, options.seed)
    first, rounds, has_failed = options.seed or 0, options.rounds or ROUNDS, False
    for name in names:
        decoder, began = DECODERS[name], time.process_time()
        seeds = range(first, first + max(1, int(rounds * decoder.share)))
        found = [text for seed in seeds if (text := round_of(decoder, seed))]
        has_failed |= bool(found)
        print(f"{name}: {len(seeds)} rounds, {time.process_time() - began:.1f} s, {len(found)} failures", flush=True)
        print("".join(f"\n{text}\n" for text in found[:SHOWN_MAX]), end="")
    return 1 if has_failed else 0


def replay(names: list[str], seed: int) -> int:
    found = [(name, round_of(DECODERS[name], seed)) for name in names]
    for name, text in found:
        print(text or f"{name}, seed {seed}: it was read, or refused as documented")
        print(f"given, in full: {given_by(DECODERS[name], seed)!a}")
    return 1 if any(text for _, text in found) else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("names", nargs="*", metavar="NAME", type=a_name, help=f"a decoder: {', '.join(DECODERS)}")
    made.add_argument("--seed", type=int, metavar="S", help="replay this one; with --rounds, begin with it")
    made.add_argument("--rounds", type=int, metavar="N", help=f"rounds of each decoder ({ROUNDS})")
    return made


def a_name(text: str) -> str:
    if text not in DECODERS:
        raise argparse.ArgumentTypeError(f"there is no decoder {text!r}")
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
