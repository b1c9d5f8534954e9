"""Hints that come by a connection that was cut, and made again."""

from __future__ import annotations

import pytest

from tenure._lease import Grant, Released
from tenure.errors import Unavailable
from tenure.testing import until
from tenure.testing._conformance.counted_hints import HINT_WITHIN, counted
from tenure.testing._conformance.harness import LeaseHarness, needs_fault
from tenure.testing._conformance.leases.steps import LeaseSuite, claim


class HintAfterCutTests(LeaseSuite):
    """A client that is connected again is told of every change again."""

    async def test_every_change_gives_a_hint_again_after_a_cut(self, harness: LeaseHarness, name: str) -> None:
        """A client may believe that the store still watches for it."""
        needs_fault(harness, "cut")
        if not harness.traits.hints:
            pytest.skip("this store gives no hints")
        ann, bob = await harness.open(), await harness.open()

        async def is_answered() -> bool:
            try:
                await bob.acquire(f"{name}-other", "bob#1", harness.ttl)
            except Unavailable:
                return False
            return True

        async with counted(bob.hints(name)) as hints:
            await hints.no_more()
            async with harness.cut(bob):
                assert not await is_answered()
            await until(is_answered, within=HINT_WITHIN)
            grant: Grant | None = None
            for what in ("claimed", "released", "claimed again"):  # the first hint may be one of the new connection
                await hints.no_more()
                if grant is None:
                    grant = await claim(ann, name, "ann#1", harness.ttl)
                else:
                    assert await ann.release(grant) == Released(grant)
                    grant = None
                await until(lambda: hints.count, within=HINT_WITHIN, what=f"a hint that it was {what}")
