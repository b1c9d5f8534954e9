"""Fleets under a simulator: what a majority promises, what the absence of one doesn't, and bugs that must be found."""

from __future__ import annotations

import os

import pytest

from tenure.peers.fleet import Quorum, Strategy
from tests.sim.peers.mutants import MUTANTS
from tests.sim.peers.simulation import Simulation, failover

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

SEEDS = int(os.environ.get("TENURE_SIM_SEEDS", "30"))
"""Runs for each strategy and rule."""

MUTANT_SEEDS = 200
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
def test_an_election_in_calm_takes_as_many_messages_as_the_papers_say(size: int) -> None:
    """The leader is killed; all others want the name at about the same time, and one election of theirs is enough."""
    live = size - 1
    for seed in range(5):
        found = {strategy: failover(seed, strategy, size) for strategy in STRATEGIES}
        choose = {strategy: messages for strategy, (messages, _, _) in found.items()}
        assert choose["lowest"] == 0
        assert choose["bully"] <= live**2 - live  # and as many claims as there are others: n² − 1
        assert choose["ring"] <= live * (live + 1) / 2 + live
        # One claim with its votes, asked again twice of the dead one; then the first renewal.
        assert all(votes <= 4 * live for _, votes, _ in found.values()), found


def test_a_successor_leads_when_the_lease_is_over_and_an_election_later() -> None:
    for strategy in STRATEGIES:
        _, _, seconds = failover(1, strategy, 5)
        assert seconds <= 15.0 + 0.2 + 2.0
