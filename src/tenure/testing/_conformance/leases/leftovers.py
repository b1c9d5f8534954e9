"""What a term leaves behind."""

from __future__ import annotations

import pytest

from tenure._lease import Granted, Released
from tenure.testing._conformance.harness import LATE, LeaseHarness
from tenure.testing._conformance.leases.steps import LeaseSuite, claim, look

LONGER = 2.5
"""How many times as long as its successor a lease is."""


class LeftoverTests(LeaseSuite):
    """Nothing that a term has noted, here or in the store, outlives it."""

    @pytest.mark.parametrize("successor", ["ann#1", "ann#2"])
    async def test_a_longer_lease_before_it_prolongs_no_lease(
        self, harness: LeaseHarness, name: str, successor: str
    ) -> None:
        ann, bob = await harness.open(), await harness.open()
        long = min(harness.traits.ttl_max, harness.ttl * LONGER)
        short = max(harness.traits.ttl_min, long / LONGER)
        if short == long:
            pytest.skip("all leases last equally long here")
        old = await claim(ann, name, "ann#1", long)
        assert list(await ann.renew([old], long)) == [Granted(old)]
        await look(bob, name)
        assert await ann.release(old) == Released(old)
        new = await claim(ann, name, successor, short)
        assert list(await ann.renew([new], short)) == [Granted(new)]
        await look(bob, name)
        await harness.pass_time(short * LATE + harness.ends_within)
        assert (await claim(bob, name, "bob#1", harness.ttl)).token > new.token
