"""Fleets under a simulator: the promises with a majority, those without one, and bugs that must be found.

``make test`` runs the first seeds, ``make full`` those that come after them. ``TENURE_LONG=1`` makes it long.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tenure._backends.peers.fleet import Quorum, Strategy
from tests.long import LONG
from tests.sim.peers import MUTANTS, Given, run
from tests.sim.peers.counting import Count, failover
from tests.sim.planted_seeds import shown_by
from tests.sim.proof import assert_found, assert_repeats, assert_same_elsewhere

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

FEW = range(4)
"""The seeds of a short campaign, for each strategy and rule."""

SEEDS = range(FEW.stop, FEW.stop + int(os.environ.get("TENURE_SIM_SEEDS", "300" if LONG else "15")))
"""Those of a long one."""

SHOWN_BY = shown_by("peers")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"
STRATEGIES: tuple[Strategy, ...] = ("lowest", "bully", "ring")


QUORUMS: tuple[Quorum, ...] = ("majority", "none")


def assert_no_promise_is_broken(given: Given, seeds: range) -> None:
    elections = 0
    for seed in seeds:
        report = run(seed, given=given)
        assert report.ok, str(report)
        elections += report.elections
    assert elections > len(seeds)  # it was not for want of leaders


def with_lost_promises(strategy: Strategy) -> Given:
    return Given(strategy, "majority", 3, ("forget", "kill"))


@pytest.mark.parametrize("quorum", QUORUMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_promises_hold_under_all_faults_in_a_few_runs(strategy: Strategy, quorum: Quorum) -> None:
    assert_no_promise_is_broken(Given(strategy, quorum), FEW)


@pytest.mark.parametrize("quorum", QUORUMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_promises_hold_under_all_faults(strategy: Strategy, quorum: Quorum) -> None:
    assert_no_promise_is_broken(Given(strategy, quorum), SEEDS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_in_a_few_runs_a_restarted_member_does_not_vote_against_its_lost_promises(strategy: Strategy) -> None:
    assert_no_promise_is_broken(with_lost_promises(strategy), FEW)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_restarted_member_does_not_vote_against_its_lost_promises(strategy: Strategy) -> None:
    assert_no_promise_is_broken(with_lost_promises(strategy), SEEDS)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = MUTANTS[name]
    assert_found(run, name, bug, first=SHOWN_BY.get(name, ()), without=partial(run, given=bug.parts.given))


def test_a_seed_is_the_same_run_every_time() -> None:
    assert_repeats(run)


def test_other_processes_run_the_same() -> None:
    assert_same_elsewhere(run, range(100, 103))


def test_a_confined_run_is_replayed_with_its_settings() -> None:
    given = Given("ring", "majority", 3, ("forget", "kill"))
    confined = "--strategy ring --quorum majority --size 3 --faults forget,kill"
    assert run(0, given=given).replay == f"python -m tests.sim.peers --seed 0 {confined}"


@pytest.mark.parametrize("size", [3, 5, 9])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_election_without_faults_takes_as_many_messages_as_the_papers_and_the_page_say(
    strategy: Strategy, size: int
) -> None:
    """The leader is killed; all others want the name at about the same time, and one election of theirs is enough."""
    count = Count.of(strategy, size)
    assert count.choose[-1] <= count.allowed
    # At most one claim that comes a moment too early, is taken back, and is made again; both are asked again of the
    # dead one until it is given up.
    assert count.votes[-1] <= 4 * (size - 1)
    assert str(count) in PAGE.read_text()


def test_a_successor_leads_when_the_lease_is_over_and_an_election_later() -> None:
    for strategy in STRATEGIES:
        _, _, seconds = failover(1, strategy, 5)
        assert seconds <= 15.0 + 0.2 + 2.0
