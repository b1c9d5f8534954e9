"""Seeds by the thousand: elections and queues, simulated on all cores."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tenure.testing import sim
from tenure.testing.sim import queues
from tests.proof.state import Part

AT_ONCE = 400
CHUNK = 10


@dataclass(frozen=True)
class Seed:
    """The result of one seed; *found* is empty if every promise was kept."""

    number: int
    amount: int
    found: str
    replay: str


def election(seed: int) -> Seed:
    try:
        report = sim.run(seed)
    except Exception as error:  # a bug of the simulator; the other seeds are run
        return Seed(seed, 0, repr(error), f"tenure sim --seed {seed}")
    return Seed(seed, report.amount, "; ".join(map(str, report.violations)), report.replay)


def queue(seed: int) -> Seed:
    try:
        report = queues.run(seed)
    except Exception as error:
        return Seed(seed, 0, repr(error), f"tenure sim --queues --seed {seed}")
    return Seed(seed, report.amount, "; ".join(map(str, report.violations)), report.replay)


def simulate(run: Callable[[int], Seed], part: Part, enough: int, jobs: int) -> Iterator[None]:
    """Run seeds from ``part.next_seed`` on until *enough* were counted; yield after each that is entered in *part*."""
    if part.done >= enough:
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _ignore_interrupts) as pool:
        for start in itertools.count(part.next_seed, AT_ONCE):
            for seed in pool.imap(run, range(start, start + AT_ONCE), CHUNK):
                part.done += seed.amount
                part.next_seed = seed.number + 1
                if seed.found:
                    part.failed(f"seed {seed.number}: {seed.found}", seed.replay)
                yield
                if part.done >= enough:
                    return


def _ignore_interrupts() -> None:
    # Ctrl-C reaches every process of a terminal; the parent ends its children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
