"""Queues by the ten thousand messages, under one seed each: no promise is broken, planted bugs are found.

``make test`` runs the first seeds, ``make full`` those that come after them.
"""

from __future__ import annotations

import itertools
import os

import pytest

from tenure import ConfigError
from tenure.testing._sim.queues.plan import FAULTS, NATURES, STORE_FAULTS, USER_FAULTS, USER_NATURES, LimitPlan
from tenure.testing.sim.queues import MUTANTS, SURVIVORS, QueueReport, campaign, run
from tests.sim.planted_seeds import shown_by
from tests.sim.proof import assert_found, assert_repeats, assert_same_elsewhere, assert_survives, kept_seeds

FEW = range(20)
"""The seeds of a short campaign."""

MESSAGES = int(os.environ.get("TENURE_SIM_MESSAGES", "10000"))
"""How many messages are settled; a release asks for a million."""

KEPT = kept_seeds("queue_seeds.txt")
SHOWN_BY = shown_by("queues")

# Only what hangs is to end by the clock: on a machine that is busy, all takes many times longer.
pytestmark = pytest.mark.timeout(600 + MESSAGES // 20)


@pytest.fixture(scope="module")
def reports() -> list[QueueReport]:
    """Settle all the messages once, for several tests to look at."""
    return list(campaign(itertools.count(FEW.stop), messages=MESSAGES))


@pytest.mark.sim
def test_a_few_runs_break_no_promise() -> None:
    reports = list(campaign(FEW, processes=1))
    assert sum(report.messages for report in reports) > 100 * len(FEW)
    assert not [str(report) for report in reports if not report.ok]
    assert all(report.recovery < report.bound for report in reports)


@pytest.mark.sim
def test_no_promise_is_broken(reports: list[QueueReport]) -> None:
    assert sum(report.messages for report in reports) >= MESSAGES
    assert not [str(report) for report in reports if not report.ok]


@pytest.mark.sim
def test_all_is_settled_soon_after_the_faults(reports: list[QueueReport]) -> None:
    shares = sorted(report.recovery / report.bound for report in reports)
    assert shares[-1] < 1.0
    # A bound that nobody comes near would not notice a consumer that has become slower.
    assert shares[-1] > 0.2


@pytest.mark.sim
def test_the_runs_are_of_many_kinds(reports: list[QueueReport]) -> None:
    assert len({report.setting for report in reports}) > len(reports) / 2
    assert len({report.digest for report in reports}) == len(reports)
    assert sum(report.deliveries for report in reports) > 1.2 * MESSAGES, "hardly anything went wrong"
    with_sessions = [report for report in reports if report.sessions]
    assert 0.2 < len(with_sessions) / len(reports) < 0.6
    limited = [report for report in reports if LimitPlan.__name__ in report.setting]
    assert 0.1 < len(limited) / len(reports) < 0.5


@pytest.mark.parametrize("seed", KEPT)
def test_a_kept_seed_stays_well(seed: int) -> None:
    report = run(seed)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    assert_found(run, name, MUTANTS[name], first=SHOWN_BY.get(name, ()))


@pytest.mark.parametrize("name", SURVIVORS)
def test_a_change_that_breaks_no_promise_is_not_found(name: str) -> None:
    assert_survives(run, name, range(20))


def test_a_seed_is_the_same_run_every_time() -> None:
    assert_repeats(run)


def test_other_processes_run_the_same() -> None:
    assert_same_elsewhere(run, range(100, 106))


def test_every_fault_and_every_nature_is_drawn() -> None:
    log = "\n".join("\n".join(run(seed, trace=True).trace) for seed in range(30))
    assert not [
        fault for fault in (*FAULTS, *STORE_FAULTS, *USER_FAULTS) if f"fault   {fault.replace('_', ' ')}" not in log
    ]
    assert not [nature for nature in (*NATURES, *USER_NATURES) if f".{nature}/" not in log]
    verbs = ("Complete:", "Abandon:", "GiveBack:", "DeadLetter:", "renewed", "lapsed", "max_hold", "killed by")
    for verb in (*verbs, "accept #", "release #", "write state #"):
        assert verb in log


def test_a_campaign_needs_an_end_and_a_known_bug() -> None:
    with pytest.raises(ConfigError, match="say which seeds, or how many messages"):
        campaign()
    with pytest.raises(ConfigError, match="did you mean 'no-margin'"):
        campaign(range(3), mutant="no-margins")
