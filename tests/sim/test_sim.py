"""Elections by the ten thousand, under one seed each: no promise is broken, planted bugs are found, runs repeat."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tenure import ConfigError
from tenure.pacing import Timing
from tenure.testing.sim import MUTANTS, SURVIVORS, Report, campaign, leader_within, run
from tenure.testing.sim.faults import FAULTS

ELECTIONS = int(os.environ.get("TENURE_SIM_ELECTIONS", "20000"))
"""How many elections are held; a release asks for a million."""

SEEDS_PER_BUG = 200
KEPT = [
    int(line.split()[0])
    for line in Path(__file__).with_name("seeds.txt").read_text().splitlines()
    if line[:1].isdigit()
]


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    """Hold all the elections once, for several tests to look at."""
    return list(campaign(elections=ELECTIONS))


@pytest.mark.sim
@pytest.mark.timeout(60 + ELECTIONS // 100)
def test_no_promise_is_broken(reports: list[Report]) -> None:
    assert sum(report.elections for report in reports) >= ELECTIONS
    assert not [str(report) for report in reports if not report.ok]


@pytest.mark.sim
def test_somebody_leads_soon_after_the_faults(reports: list[Report]) -> None:
    shares = sorted(report.recovery / report.bound for report in reports)
    waited = [share for share in shares if share > 0]
    assert len(waited) > len(shares) / 4, "too few runs had to wait for a leader: the bound was hardly tried"
    assert shares[-1] < 1.0
    # A bound that nobody comes near would not notice a machine that has become slower.
    assert shares[-1] > 0.25


@pytest.mark.sim
def test_the_runs_are_of_many_kinds(reports: list[Report]) -> None:
    assert len({report.setting for report in reports}) > 100
    assert len({report.digest for report in reports}) == len(reports)


@pytest.mark.parametrize("seed", KEPT)
def test_a_kept_seed_stays_well(seed: int) -> None:
    report = run(seed)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = MUTANTS[name]
    for report in campaign(range(SEEDS_PER_BUG), mutant=name, processes=1):
        if bug.shows in {violation.kind for violation in report.violations}:
            assert run(report.seed).ok, "the seed finds something without the planted bug, too"
            assert report.replay == f"tenure sim --seed {report.seed} --mutant {name}"
            return
    pytest.fail(f"{bug.about}: not shown as {bug.shows!r} by {SEEDS_PER_BUG} seeds")


@pytest.mark.parametrize("name", SURVIVORS)
def test_what_breaks_no_promise_is_not_found(name: str) -> None:
    reports = list(campaign(range(60), mutant=name, processes=1))
    assert not [str(report) for report in reports if not report.ok]
    assert [report.digest for report in reports] != [run(seed).digest for seed in range(60)], (
        "it changes nothing at all"
    )


def test_a_seed_is_the_same_run_every_time() -> None:
    for seed in (0, 7, 4217):
        once, again = run(seed, trace=True), run(seed, trace=True)
        assert once == again
        assert once.trace == again.trace
        assert run(seed).digest == once.digest, "looking changes the run"


def test_other_processes_run_the_same() -> None:
    seeds = range(100, 112)
    alone = [report.digest for report in campaign(seeds, processes=1)]
    assert [report.digest for report in campaign(seeds, processes=2)] == alone


def test_a_trace_tells_what_happened() -> None:
    told = "\n".join(run(1, trace=True).trace)
    for word in ("Acquire(", "StartWork(", "Granted(", "store", "fault", "no more"):
        assert word in told


def test_every_fault_is_drawn() -> None:
    told = "\n".join("\n".join(run(seed, trace=True).trace) for seed in range(40))
    assert not [fault for fault in FAULTS if f"fault   {fault.replace('_', ' ')}" not in told]


def test_a_violation_says_how_to_see_it_again() -> None:
    report = run(0, mutant="shared-identity")
    assert not report.ok
    assert "replay: tenure sim --seed 0 --mutant shared-identity" in str(report)
    assert "two leaders at" in str(report)


def test_a_campaign_needs_an_end_and_a_known_bug() -> None:
    with pytest.raises(ConfigError, match="say which seeds, or how many elections"):
        campaign()
    with pytest.raises(ConfigError, match="did you mean 'no-margin'"):
        campaign(range(3), mutant="no-margins")
    with pytest.raises(ConfigError, match="there is no planted bug"):
        run(1, mutant="zzz")


def test_the_bound_grows_with_what_it_is_made_of() -> None:
    usual = leader_within(Timing(), latency=0.01, ignores=0.0, watched=False)
    assert 15.0 < usual < 60.0
    assert leader_within(Timing(), latency=1.0, ignores=0.0, watched=False) > usual
    assert leader_within(Timing(), latency=0.01, ignores=9.0, watched=False) > usual
    assert leader_within(Timing(), latency=0.01, ignores=0.0, watched=True) > usual
