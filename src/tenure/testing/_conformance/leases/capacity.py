"""A store of leases that is full."""

from __future__ import annotations

from tenure._lease import Granted, HeldBy, Released
from tenure.errors import Unavailable
from tenure.testing._conformance.harness import LeaseHarness, needs_fault
from tenure.testing._conformance.leases.steps import LeaseSuite, claim, holder


class LeaseCapacitySuite(LeaseSuite):
    """A full store refuses new data, and nothing else."""

    async def test_a_full_store_goes_on_with_its_leases(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "full")
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        async with harness.full():
            for _ in range(3):
                assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant)]
            try:
                assert isinstance(await bob.acquire(name, "bob#1", harness.ttl), HeldBy)
            except Unavailable:
                assert harness.traits.queued  # there is no room for his place
            try:
                assert isinstance(await bob.acquire(f"{name}-new", "bob#1", harness.ttl), Granted)
            except Unavailable:
                assert await holder(ann, f"{name}-new") is None  # and nothing of it was kept
            assert await ann.ask_to_resign(name)
            assert await ann.release(grant) == Released(grant)
            new = await claim(bob, name, "bob#1", harness.ttl)  # a known name can be led again
            assert new.token > grant.token
            assert list(await bob.renew([new], harness.ttl)) == [Granted(new)]
        assert list(await bob.renew([new], harness.ttl)) == [Granted(new)]
