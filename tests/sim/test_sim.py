"""Elections by the ten thousand, under one seed each: no promise is broken, planted bugs are found, runs repeat.

``make test`` runs the first seeds, ``make full`` those that come after them.
"""

from __future__ import annotations

import itertools
import os

import pytest

from tenure import ConfigError
from tenure._timing import Timing
from tenure.testing._sim.elections.plan import FAULTS, USER_FAULTS
from tenure.testing.sim import MUTANTS, SURVIVORS, Report, campaign, leader_within, run
from tests.sim.planted_seeds import shown_by
from tests.sim.proof import assert_found, assert_repeats, assert_same_elsewhere, assert_survives, kept_seeds

FEW = range(190)
"""The seeds of a short campaign."""

ELECTIONS = int(os.environ.get("TENURE_SIM_ELECTIONS", "10000"))
"""How many elections are held; ``make proof`` holds ten times as many, and a release asks it for a million."""

KEPT = kept_seeds("seeds.txt")
SHOWN_BY = shown_by("elections")

# Only what hangs is to end by the clock: on a machine that is busy, all takes many times longer.
pytestmark = pytest.mark.timeout(600 + ELECTIONS // 20)


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    """Hold all the elections once, for several tests to look at."""
    return list(campaign(itertools.count(FEW.stop), elections=ELECTIONS))


@pytest.mark.sim
def test_a_few_runs_break_no_promise() -> None:
    reports = list(campaign(FEW, processes=1))
    assert sum(report.elections for report in reports) > 10 * len(FEW)
    assert not [str(report) for report in reports if not report.ok]
    assert all(report.recovery < report.bound for report in reports)


@pytest.mark.sim
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
    assert_found(run, name, MUTANTS[name], first=(*SHOWN_BY.get(name, ()), *KEPT))


@pytest.mark.parametrize("name", SURVIVORS)
def test_what_breaks_no_promise_is_not_found(name: str) -> None:
    assert_survives(run, name, range(60))


def test_a_seed_is_the_same_run_every_time() -> None:
    assert_repeats(run)


def test_other_processes_run_the_same() -> None:
    assert_same_elsewhere(run, range(100, 112))


def test_a_trace_tells_what_happened() -> None:
    log = "\n".join(run(1, trace=True).trace)
    for word in ("Acquire(", "StartWork(", "Granted(", "store", "fault", "no more"):
        assert word in log


def test_every_fault_is_drawn() -> None:
    log = "\n".join("\n".join(run(seed, trace=True).trace) for seed in range(40))
    assert not [fault for fault in (*FAULTS, *USER_FAULTS) if f"fault   {fault.replace('_', ' ')}" not in log]


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
    assert leader_within(Timing(), latency=0.01, ignores=0.0, watched=False, half_cut=True) > usual
