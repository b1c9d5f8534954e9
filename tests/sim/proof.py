"""What every simulator has to prove: that its runs repeat, and that it finds planted bugs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tenure.testing._sim.planted import Mutant
from tenure.testing._sim.report import Outcome
from tenure.testing._sim.seeds import many

SEEDS_PER_BUG = 200


class Run(Protocol):
    """Simulates one seed."""

    def __call__(self, seed: int, *, mutant: str | None = None, trace: bool = False) -> Outcome: ...

    def __hash__(self) -> int: ...


def kept_seeds(file: str) -> list[int]:
    """Return the seeds of a list beside the tests; each line says what its seed once found."""
    lines = Path(__file__).with_name(file).read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line[:1].isdigit()]


def assert_found(
    run: Run,
    name: str,
    bug: Mutant[Any],
    *,
    first: Sequence[int] = (),
    without: Callable[[int], Outcome] | None = None,
) -> None:
    """Check that some seed shows the planted *bug* as the violation that must show it, and nothing *without* the bug.

    Args:
        first: Seeds to try before all others.
        without: Simulates one seed without the bug, if that is not *run* alone.
    """
    seed = seed_that_shows(run, name, bug, first=first)
    report = run(seed, mutant=name)
    assert (without or run)(seed).ok, "the seed finds something without the planted bug, too"
    assert report.replay == f"{report.command} --seed {seed} --mutant {name}"
    assert f"replay: {report.replay}" in str(report)


def seed_that_shows(run: Run, name: str, bug: Mutant[Any], *, first: Sequence[int] = ()) -> int:
    """Return a seed that shows the planted *bug* as the violation that must show it; search from *first* on."""
    seeds: list[int] = [*first, *range(SEEDS_PER_BUG)]
    for seed in seeds:
        if bug.shows in {violation.kind for violation in run(seed, mutant=name).violations}:
            return seed
    raise AssertionError(f"{bug.about}: not shown as {bug.shows!r} by {SEEDS_PER_BUG} seeds")


def assert_survives(run: Run, name: str, seeds: range) -> None:
    """Check that a change which breaks no promise is not found, though it changes the runs."""
    reports = [run(seed, mutant=name) for seed in seeds]
    assert not [str(report) for report in reports if not report.ok]
    assert [report.digest for report in reports] != digests_of(run, seeds), "it changes nothing at all"


@cache
def digests_of(run: Run, seeds: range) -> list[str]:
    """Return the digests of *seeds* without a planted bug, for each test that compares its own with them."""
    return [run(seed).digest for seed in seeds]


def assert_repeats(run: Run) -> None:
    """Check that a seed is the same run every time, looked at or not."""
    for seed in (0, 7, 4217):
        once, again = run(seed, trace=True), run(seed, trace=True)
        assert once == again
        assert once.trace
        assert run(seed).digest == once.digest, "looking changes the run"


def assert_same_elsewhere(run: Run, seeds: range) -> None:
    """Check that *seeds* are the same runs in other processes, whose hashes of strings are others."""
    elsewhere = [report.digest for report in many(run, seeds, None, "runs", 2)]
    assert elsewhere == [run(seed).digest for seed in seeds]
