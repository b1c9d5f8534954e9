"""A fleet of some hundred candidates: no peak is far above the rate at rest, and fail-over keeps its bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenure._election.acquire_times import AcquireTimes
from tenure._election.machine import Machine
from tests.sim.fleet import Figures, Fleet, Shape, measure

SHAPES = [Shape(400, 40, per_name, hints) for per_name in (0, 3) for hints in (True, False)]


@pytest.fixture(scope="module")
def figures() -> dict[Shape, Figures]:
    """Run each shape once, for several tests to look at."""
    return {shape: measure(shape, kills=5) for shape in SHAPES}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_peak_is_far_above_the_rate_at_rest(figures: dict[Shape, Figures], shape: Shape) -> None:
    assert figures[shape].findings == []


def test_hints_save_most_questions(figures: dict[Shape, Figures]) -> None:
    one_name = [figures[shape] for shape in SHAPES if shape.per_name == 0]
    with_hints, without = (next(one for one in one_name if one.shape.hints is hints) for hints in (True, False))
    assert with_hints.rest < without.rest / 4


def test_the_runs_see_what_can_go_wrong(figures: dict[Shape, Figures]) -> None:
    for shape, found in figures.items():
        assert len(found.failover) >= 5
        assert max(found.failover) > shape.ttl / 2
        assert found.away > 0
        assert found.message > shape.consumers / 2 or not shape.hints
        assert found.connections_peak > shape.candidates / 10 or not shape.hints


def test_a_seed_is_the_same_run_every_time() -> None:
    shape = Shape(90, 10, per_name=3, seed=7)
    assert str(measure(shape, kills=3)) == str(measure(shape, kills=3))


def rate_of_ten(make_machine: type[Machine] = Machine) -> float:
    """Return the requests in a second of ten candidates for one name, at rest for an hour."""
    rates = []
    for seed in range(10):
        fleet = Fleet(Shape(10, 0, seed=seed), make_machine)
        fleet.start(within=1.0)
        fleet.until(5 * fleet.timing.ttl)
        begin, end = fleet.now, fleet.now + 3_600.0
        fleet.until(end)
        rates.append(fleet.requests.rate(begin, end))
    return sum(rates) / len(rates)


def test_ten_candidates_ask_less_than_once_a_second() -> None:
    """Their leader renews 0.21 times a second; each of the others asks once in its ttl at least."""
    assert 0.21 + 9 / 15 < rate_of_ten() < 0.97


# --- planted bugs -----------------------------------------------------------------------------------------------------


class _NoJitter(AcquireTimes):
    def _spread(self, wait: float, remaining: float) -> float:
        return wait


class _WaitsForTheSameMoment(AcquireTimes):
    def _spread(self, wait: float, remaining: float) -> float:
        return wait + 0.1 * self._timing.retry_every * self._rng.random()


class _AsksAsOftenInAnOutage(AcquireTimes):
    def _is_away(self, now: float) -> bool:
        return False


class _FollowsTheHintOfAnotherWin(AcquireTimes):
    def refused(self, remaining: float | None, now: float) -> None:
        super().refused(remaining, now)
        self._ends_at = float("inf")


class _AsksLateAfterTheEnd(AcquireTimes):
    def _spread(self, wait: float, remaining: float) -> float:
        return wait + 2 * self._timing.retry_every


class _AlwaysAsksBeforeTheEnd(AcquireTimes):
    def refused(self, remaining: float | None, now: float) -> None:
        self._is_together = True
        super().refused(remaining, now)


def test_a_planted_request_long_before_the_end_of_each_lease_is_found() -> None:
    class Planted(Machine):
        TIMES = _AlwaysAsksBeforeTheEnd

    assert rate_of_ten(Planted) > 1.05


TOGETHER, APART = Shape(200, 20), Shape(90, 10, per_name=3)

BUGS: list[tuple[type[AcquireTimes], Shape, str]] = [
    (_NoJitter, TOGETHER, "at rest"),
    (_NoJitter, replace(TOGETHER, hints=False), "killed"),
    (_WaitsForTheSameMoment, TOGETHER, "at rest"),
    (_AsksAsOftenInAnOutage, TOGETHER, "back"),
    (_FollowsTheHintOfAnotherWin, TOGETHER, "killed"),
    (_AsksLateAfterTheEnd, replace(APART, hints=False), "fail-over"),
]


@pytest.mark.parametrize(("times", "shape", "shows"), BUGS, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_bug_is_found(times: type[AcquireTimes], shape: Shape, shows: str) -> None:
    class Planted(Machine):
        TIMES = times

    kills = 30 if shape.per_name else 3
    assert measure(shape, kills=kills).findings == [], "it finds something without the planted bug, too"
    found = measure(shape, kills=kills, make_machine=Planted).findings
    assert shows in {finding.partition(":")[0] for finding in found}, found
