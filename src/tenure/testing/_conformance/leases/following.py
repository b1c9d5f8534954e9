"""Following the renewals of others, where the end of a lease is observed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import cast

import pytest

from tenure._election.store import FollowedLeaseStore, LeaseStore
from tenure._lease import Granted, HeldBy, Vacant
from tenure.errors import Unavailable
from tenure.testing import until
from tenure.testing._conformance.harness import LeaseHarness, needs_fault
from tenure.testing._conformance.leases.steps import LeaseSuite, claim, is_refused, look

HEARD_AFTER = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Real seconds to wait, one attempt after the other, until a renewal was told."""
BACK_WITHIN = 20.0


class FollowingTests(LeaseSuite):
    """A lease whose renewals are followed ends a ttl after the last one, however rarely this client looks."""

    async def test_a_followed_renewal_counts_from_when_it_was_told(self, harness: LeaseHarness, name: str) -> None:
        self.needs_following(harness)
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, f"{name}.one", "ann#1", harness.ttl)
        await look(bob, grant.name)

        async def renew() -> str:
            assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant)]
            return grant.name

        async with following(bob, f"{name}."):
            await self.is_told(harness, bob, renew)

    async def test_what_is_followed_need_not_be_known_before(self, harness: LeaseHarness, name: str) -> None:
        self.needs_following(harness)
        ann, bob = await harness.open(), await harness.open()
        names = [f"{name}.{number}" for number in range(len(HEARD_AFTER))]

        async def one_more() -> str:
            return (await claim(ann, names.pop(), "ann#1", harness.ttl)).name

        async with following(bob, f"{name}."):
            await self.is_told(harness, bob, one_more)

    async def test_what_is_followed_ends_no_sooner(self, harness: LeaseHarness, name: str) -> None:
        self.needs_following(harness)
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, f"{name}.one", "ann#1", harness.ttl)
        await look(bob, grant.name)
        async with following(bob, f"{name}."):
            for pause in HEARD_AFTER[:4]:  # told, or not yet
                assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant)]
                await asyncio.sleep(pause)
                await harness.pass_time(harness.ttl * 0.9)
                await is_refused(bob, grant.name, "bob#1", harness.ttl)

    async def test_what_was_not_told_during_a_cut_ends_no_sooner(self, harness: LeaseHarness, name: str) -> None:
        self.needs_following(harness)
        needs_fault(harness, "cut")
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, f"{name}.one", "ann#1", harness.ttl)
        await look(bob, grant.name)

        async def is_answered() -> bool:
            with suppress(Unavailable):
                await is_refused(bob, grant.name, "bob#1", harness.ttl)
                return True
            return False

        async with following(bob, f"{name}."):
            assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant)]
            async with harness.cut(bob):
                await harness.pass_time(harness.ttl * 0.7)
                assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant)]
                await harness.pass_time(harness.ttl * 0.7)
            await until(is_answered, within=BACK_WITHIN)

    def needs_following(self, harness: LeaseHarness) -> None:
        """Skip the test of a store that follows no renewals."""
        if not harness.traits.follows_renewals:
            pytest.skip("this store follows no renewals")

    async def is_told(self, harness: LeaseHarness, store: LeaseStore, change: Callable[[], Awaitable[str]]) -> None:
        """Repeat a *change* of a lease until *store* counts it from then, and not from its next look.

        A machine may be busy, so each attempt leaves more time to be told.
        """
        for pause in HEARD_AFTER:
            name = await change()
            await asyncio.sleep(pause)
            await harness.pass_time(harness.ttl * 0.6)
            assert isinstance(await store.inspect(name), HeldBy)
            await harness.pass_time(harness.ttl * 0.5)
            if isinstance(await store.inspect(name), Vacant):
                return
        pytest.fail("the client that follows was never told")


@asynccontextmanager
async def following(store: LeaseStore, prefix: str) -> AsyncIterator[None]:
    """Follow the renewals of all names that begin with *prefix*."""

    async def follow() -> None:
        async for _ in cast(FollowedLeaseStore, store).follow_renewals(prefix):
            pass

    task = asyncio.ensure_future(follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
