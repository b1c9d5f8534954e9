"""Timing: valid settings are safe, others are refused with a setting that fits."""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tenure._jitter import later, sooner
from tenure._timing import ATTEMPTS_MIN, Timing
from tenure.errors import ConfigError

seconds = st.floats(min_value=0.001, max_value=1e5)
settings = st.fixed_dictionaries(
    {"ttl": seconds},
    optional={
        "renew_every": seconds,
        "retry_every": seconds,
        "drift": st.floats(min_value=0.0, max_value=1.5),
        "margin": st.floats(min_value=0.0, max_value=1e5),
        "grace": st.floats(min_value=0.0, max_value=1e5),
    },
)


def test_the_defaults_are_as_documented() -> None:
    timing = Timing()
    assert dataclasses.astuple(timing) == (15.0, 5.0, 2.0, 0.05, 0.75, 2.0)
    assert timing.window == pytest.approx(13.5)
    assert timing.work_window == pytest.approx(11.5)
    assert timing.attempts == 4


def test_an_unset_value_is_shown_as_none() -> None:
    times = inspect.signature(Timing).parameters
    assert [times[name].default for name in ("renew_every", "retry_every", "margin", "grace")] == [None] * 4


@given(seconds)
def test_any_ttl_alone_makes_a_timing(ttl: float) -> None:
    assert Timing(ttl).attempts >= ATTEMPTS_MIN


@given(settings)
def test_every_valid_timing_keeps_every_inequality(given: dict[str, float]) -> None:
    try:
        timing = Timing(**given)
    except ConfigError:
        return
    assert 0 <= timing.drift < 1
    assert 0 < timing.renew_every < timing.work_window <= timing.window <= timing.ttl
    assert timing.margin >= 0
    assert timing.grace >= 0
    # The last of three attempts is made while work still runs.
    last = timing.renew_every + (ATTEMPTS_MIN - 1) * timing.retry_every
    assert last <= timing.work_window * (1 + 1e-6)
    assert timing.attempts >= ATTEMPTS_MIN


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
@example(given={"ttl": 0.25, "renew_every": 1.0, "grace": 0.0, "margin": 0.0, "drift": 0.99999})
@example(given={"ttl": 1.0, "renew_every": 1.0, "grace": 0.0, "margin": 0.0, "drift": 0.9999999999999999})
@example(given={"ttl": 1.0, "renew_every": 0.949999, "grace": 0.0, "margin": 0.0})
@given(given=settings)
def test_the_suggestion_of_a_refusal_does_help(which: int, given: dict[str, float]) -> None:
    """Follow the suggestions one after the other: they soon lead to a timing that builds."""
    asked = dict(given)
    for _ in range(5):
        refusal = _refusal(asked)
        if refusal is None:
            return
        name, value = re.findall(r"(\w+)=([\d.e+-]+)", refusal)[which]
        asked[name] = float(value)
    raise AssertionError(f"the suggestions don't lead to a valid timing: {asked}")


def _refusal(given: dict[str, float]) -> str | None:
    try:
        Timing(**given)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ttl": 0}, "ttl must be more than 0 s, not 0"),
        ({"ttl": -1}, "ttl must be more than 0"),
        ({"ttl": math.inf}, "ttl must be a finite number of seconds, not inf"),
        ({"ttl": math.nan}, "ttl must be a finite number of seconds, not nan"),
        ({"ttl": "15"}, "ttl must be a finite number of seconds, not '15'"),
        ({"ttl": True}, "ttl must be a finite number of seconds, not True"),
        ({"ttl": None}, "ttl must be a finite number of seconds, not None"),
        ({"renew_every": math.nan}, "renew_every must be a finite number of seconds, not nan"),
        ({"ttl": 10**400}, r"ttl must be at most 2.5e\+11 s"),
        ({"grace": 1e308}, r"grace must be at most 2.5e\+11 s"),
        ({"margin": -(10**400)}, r"margin must be at most 2.5e\+11 s"),
        ({"retry_every": 1e-320}, "retry_every must be at least 1e-06, not 9.99989e-321"),
        ({"renew_every": 0}, "renew_every must be more than 0"),
        ({"retry_every": -2}, "retry_every must be more than 0"),
        ({"margin": -1}, "margin must be at least 0"),
        ({"grace": -1}, "grace must be at least 0"),
        ({"drift": 1.0}, r"drift \(1\) must be less than 1: .*; try drift=0.05"),
        ({"grace": 14}, r"grace \(14 s\) must be less than .* \(13.5 s\); try grace=2.7 or ttl=48"),
        ({"renew_every": 12}, r"renew_every \(12 s\) must be less than .* \(11.5 s\); try renew_every=5.7"),
        ({"retry_every": 4}, r"retry_every \(4 s\) leaves room for 2 attempts .* \(5 s\) .* \(11.5 s\), .*=3.2"),
    ],
)
def test_a_setting_that_can_not_work_is_refused_with_both_values(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Timing(**given)


@given(st.floats(min_value=0.0, max_value=1e6), st.integers(), st.floats(min_value=0.0, max_value=1.0))
def test_renewals_are_never_late_and_polls_never_early(duration: float, seed: int, share: float) -> None:
    rng = random.Random(seed)
    assert duration * (1 - share) <= sooner(duration, rng, share) <= duration
    assert duration <= later(duration, rng, share) <= duration * (1 + share)
