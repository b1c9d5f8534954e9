"""Renewing leases."""

from __future__ import annotations

import asyncio

from tenure._lease import Grant, Granted, HeldBy, Lost
from tenure.testing._conformance.harness import LeaseHarness
from tenure.testing._conformance.leases.steps import (
    LeaseSuite,
    claim,
    look,
    win,
)


class RenewalTests(LeaseSuite):
    """A renewal extends the lease of the exact grant, and keeps its token."""

    async def test_renewal_keeps_the_token(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        grant = await claim(store, name, "ann#1", harness.ttl)
        for _ in range(3):
            assert await store.renew([grant], harness.ttl) == [Granted(grant)]
        answer = await store.inspect(name)
        assert isinstance(answer, HeldBy)
        assert answer.token == grant.token

    async def test_renewal_extends(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await look(bob, name)
        for _ in range(3):
            await harness.pass_time(harness.ttl * 0.6)
            assert isinstance(await bob.acquire(name, "bob#1", harness.ttl), HeldBy)
            assert await ann.renew([grant], harness.ttl) == [Granted(grant)]
        await harness.outlast_lease()
        assert (await win(harness, bob, name, "bob#1")).token > grant.token

    async def test_many_are_renewed_at_once_each_with_its_own_answer(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        first, second, third = [await claim(store, f"{name}-{n}", "ann#1", harness.ttl) for n in range(3)]
        await store.release(second)
        fourth = await claim(store, f"{name}-1", "ann#2", harness.ttl)
        asked = [
            third,
            second,
            Grant(first.name, first.holder, first.token + 1),
            first,
            Grant(first.name, "bob#1", first.token),
            Grant(f"{name}-unknown", "ann#1", 1),
            fourth,
            first,
        ]
        kept = {third, first, fourth}
        assert list(await store.renew(asked, harness.ttl)) == [
            Granted(grant) if grant in kept else Lost(grant) for grant in asked
        ]

    async def test_three_hundred_are_renewed_at_once(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        names = [f"{name}-{number}" for number in range(300)]
        ttl = min(2 * harness.ttl, harness.traits.ttl_max)
        grants: list[Grant] = []
        for some in (names[first : first + 10] for first in range(0, 300, 10)):
            grants += await asyncio.gather(*(claim(store, each, "ann#1", ttl) for each in some))
            if len(grants) % 150 == 0:  # not only at the end: that may be too late for the first, on a busy machine
                assert list(await store.renew(grants[::-1], ttl)) == [Granted(grant) for grant in grants[::-1]]

    async def test_a_lease_that_is_not_renewed_ends_beside_others_of_its_process(
        self, harness: LeaseHarness, name: str
    ) -> None:
        ann, bob = await harness.open(), await harness.open()
        kept, stalled = [await claim(ann, f"{name}-{which}", "ann#1", harness.ttl) for which in ("kept", "stalled")]
        asked: list[Granted | HeldBy] = []
        while not asked or isinstance(asked[-1], HeldBy):
            assert len(asked) < 8, "it never ended"
            await harness.pass_time(harness.ttl * 0.4 + (harness.ends_within / 2 if len(asked) > 1 else 0))
            assert list(await ann.renew([kept], harness.ttl)) == [Granted(kept)]
            asked.append(await bob.acquire(stalled.name, "bob#1", harness.ttl))
        assert len(asked) > 2, "it ended early"
        assert asked[-1].grant.token > stalled.token
        assert list(await ann.renew([kept, stalled], harness.ttl)) == [Granted(kept), Lost(stalled)]

    async def test_renewing_no_grants_is_allowed(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        assert list(await store.renew([], harness.ttl)) == []

    async def test_a_renewal_never_shortens_a_lease(self, harness: LeaseHarness, name: str) -> None:
        """As when the candidate's ttl was made shorter meanwhile; renewed alone, with another, or granted again."""
        ann, bob = await harness.open(), await harness.open()
        ttl, short = harness.ttl, max(harness.traits.ttl_min, harness.ttl / 2)
        grants = await asyncio.gather(*(claim(ann, f"{name}-{number}", "ann#1", ttl) for number in range(4)))
        names = [grant.name for grant in grants]
        await look(bob, *names)
        assert list(await ann.renew(grants[:1], short)) == [Granted(grants[0])]
        assert list(await ann.renew(grants[1:3], short)) == [Granted(grant) for grant in grants[1:3]]
        assert await ann.acquire(grants[3].name, "ann#1", short) == Granted(grants[3])
        await look(bob, *names)
        await harness.pass_time(ttl * 0.65)  # together, as time may go on by itself here
        seen = await asyncio.gather(*(bob.acquire(each, "bob#1", ttl) for each in names))
        assert [type(one) for one in seen] == [HeldBy] * 4
        assert list(await ann.renew(grants, short)) == [Granted(grant) for grant in grants]
