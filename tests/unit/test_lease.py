"""Leases: plain values, and the time until which one is trusted."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Leader, Vacant, trusted_until

times = st.floats(min_value=0.0, max_value=1e6)


def test_a_claim_is_trusted_from_before_the_request() -> None:
    assert trusted_until(100.0, 15.0, 0.05, 0.75) == 100.0 + 15.0 - 0.75 - 0.75


@given(times, st.floats(min_value=0.1, max_value=1e4), st.floats(min_value=0.0, max_value=0.5), times)
def test_it_is_never_trusted_longer_than_the_store_keeps_it(asked: float, ttl: float, drift: float, m: float) -> None:
    assert trusted_until(asked, ttl, drift, m) <= asked + ttl
    # Even by a clock that runs slower than the store's by that share, counted from the earliest start.
    assert (trusted_until(asked, ttl, drift, m) - asked) / (1 - drift) <= ttl * (1 + 1e-6) + 1e-6


def test_values_are_values() -> None:
    grant = Grant("name", "ann#1", 7)
    assert Granted(grant) == Granted(Grant("name", "ann#1", 7))
    assert Granted(grant) != Granted(Grant("name", "ann#1", 8))
    assert len({grant, Grant("name", "ann#1", 7)}) == 1
    assert hash(HeldBy("name", "ann#1", 7, None, {"a": "b"})) == hash(HeldBy("name", "ann#1", 7, None))
    assert Leader("ann#1", 7).metadata is NO_METADATA
    assert Vacant("name").token == 0


@pytest.mark.parametrize("age", [-1e-9, -5.0, math.inf, math.nan])
def test_a_claim_has_a_possible_age(age: float) -> None:
    with pytest.raises(ValueError, match=r"age \(.*\) must be seconds, 0 or more; the claim on 'name' is refused"):
        Granted(Grant("name", "ann#1", 7), age=age)
    assert Granted(Grant("name", "ann#1", 7), age=3.0) == Granted(Grant("name", "ann#1", 7))


@pytest.mark.parametrize("token", [-1, 2**63, True, 7.0, math.nan, "7", None])
def test_a_token_is_a_whole_number_of_63_bits(token: Any) -> None:
    for make in (
        lambda: Grant("name", "ann#1", token),
        lambda: HeldBy("name", "ann#1", token, None),
        lambda: Vacant("name", token),
    ):
        with pytest.raises(
            ValueError, match="the token of 'name' must be a whole number from 0 to 9223372036854775807"
        ):
            make()
    assert Grant("name", "ann#1", 2**63 - 1) == Grant("name", "ann#1", 2**63 - 1)
    assert Vacant("name", 0) == Vacant("name")


@pytest.mark.parametrize("remaining", [-5.0, "5", True, math.inf, -math.inf, math.nan, 1e300])
def test_the_time_left_is_a_possible_one(remaining: Any) -> None:
    with pytest.raises(
        ValueError, match=r"remaining \(.*\) must be seconds from 0 to 2.5e\+11, or None; so the holder"
    ):
        HeldBy("name", "ann#1", 7, remaining)
    assert HeldBy("name", "ann#1", 7, 0.0) == HeldBy("name", "ann#1", 7, 0)
    assert HeldBy("name", "ann#1", 7, -1e-9).remaining == 0.0, "it ended just now"


@pytest.mark.parametrize("holder", [None, 7, b"ann#1", ["ann#1"]])
def test_a_holder_is_text(holder: Any) -> None:
    with pytest.raises(ValueError, match="the holder of 'name' must be text, not "):
        HeldBy("name", holder, 7, None)


@pytest.mark.parametrize("vacant_for", [math.inf, -math.inf, math.nan, 1e300])
def test_the_time_without_a_holder_is_a_possible_one(vacant_for: float) -> None:
    with pytest.raises(ValueError, match=r"vacant_for \(.*\) must be seconds, or None"):
        Vacant("name", 7, vacant_for)
