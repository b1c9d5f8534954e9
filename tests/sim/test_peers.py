"""Fleets under a simulator: what a majority promises, what the absence of one doesn't, and bugs that must be found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tenure.peers.fleet import Quorum, Strategy
from tests.sim.peers.mutants import MUTANTS
from tests.sim.peers.simulation import Count, Simulation, failover

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

SEEDS = int(os.environ.get("TENURE_SIM_SEEDS", "30"))
"""Runs for each strategy and rule."""

MUTANT_SEEDS = 200
PAGE = Path(__file__).resolve().parents[2] / "docs" / "strategies.md"
STRATEGIES: tuple[Strategy, ...] = ("lowest", "bully", "ring")


@pytest.mark.parametrize("quorum", ["majority", "none"])
@pytest.mark.parametrize("strategy", ["lowest", "bully", "ring"])
def test_whatever_happens_the_promises_hold(strategy: Strategy, quorum: Quorum) -> None:
    elections = 0
    for seed in range(SEEDS):
        report = Simulation(seed, strategy=strategy, quorum=quorum).run()
        assert not report.violations, str(report)
        elections += report.elections
    assert elections > SEEDS  # it was not for want of leaders


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_was_started_anew_does_not_vote_against_what_it_has_forgotten(strategy: Strategy) -> None:
    elections = 0
    for seed in range(SEEDS):
        report = Simulation(seed, strategy=strategy, quorum="majority", size=3, faults=("forget", "kill")).run()
        assert not report.violations, str(report)
        elections += report.elections
    assert elections > SEEDS


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_is_found(mutant: str) -> None:
    machine, confined = MUTANTS[mutant]
    for seed in range(MUTANT_SEEDS):
        if Simulation(seed, machine=machine, mutant=mutant, **confined).run().violations:
            return
    raise AssertionError(f"{mutant} was not found in {MUTANT_SEEDS} seeds")


def test_the_same_seed_gives_the_same_run() -> None:
    assert Simulation(3).run() == Simulation(3).run()


@pytest.mark.parametrize("size", [3, 5, 9])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_election_in_calm_takes_as_many_messages_as_the_papers_and_the_page_say(
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
