"""The end of a lease."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from tenure._lease import Granted, HeldBy, Lost, Released, Vacant
from tenure.testing._conformance.harness import LATE, LeaseHarness
from tenure.testing._conformance.leases.steps import (
    LAST,
    ROUNDED,
    LeaseSuite,
    claim,
    holder,
    is_refused,
    look,
    win,
)


class EndingTests(LeaseSuite):
    """A lease ends when its time is over or when it is released, for every verb."""

    async def test_a_lease_ends_by_itself_and_not_before(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        claimed = await ann.acquire(name, "ann#1", harness.ttl)
        assert isinstance(claimed, Granted)
        assert isinstance(await bob.acquire(name, "bob#1", harness.ttl), HeldBy)
        await harness.pass_time((harness.ttl - claimed.age) * 0.8)
        assert isinstance(await bob.acquire(name, "bob#1", harness.ttl), HeldBy)
        await harness.outlast_lease(0.2)
        assert (await win(harness, bob, name, "bob#1")).holder == "bob#1"

    @pytest.mark.parametrize("verb", ["renew", "release", "inspect", "ask_to_resign", "acquire"])
    async def test_at_its_exact_end_a_lease_is_over_for_every_verb(
        self, harness: LeaseHarness, name: str, verb: str
    ) -> None:
        if not harness.is_exact:
            pytest.skip("time goes on by itself here")
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await harness.pass_time(harness.ttl * (1 - LAST))
        await is_refused(bob, name, "bob#1", harness.ttl)
        assert await holder(bob, name) == "ann#1"
        await harness.pass_time(harness.ttl * LAST)
        match verb:
            case "renew":
                assert list(await ann.renew([grant], harness.ttl)) == [Lost(grant)]
            case "release":
                assert await ann.release(grant) == Lost(grant)
            case "inspect":
                assert await bob.inspect(name) == Vacant(name, grant.token)
            case "ask_to_resign":
                assert await bob.ask_to_resign(name) is False
            case _:
                assert (await claim(ann, name, "ann#1", harness.ttl)).token > grant.token
                return
        assert (await claim(bob, name, "bob#1", harness.ttl)).token > grant.token

    async def test_an_expired_grant_is_lost(self, harness: LeaseHarness, name: str) -> None:
        if harness.traits.expiry != "store clock":
            pytest.skip("only the processes that watch the lease know whether it has ended")
        store = await harness.open()
        grant = await claim(store, name, "ann#1", harness.ttl)
        await harness.outlast_lease()
        assert await store.renew([grant], harness.ttl) == [Lost(grant)]
        assert await store.release(grant) == Lost(grant)
        assert await store.inspect(name) == Vacant(name, grant.token)
        assert await store.ask_to_resign(name) is False

    async def test_release_frees_the_name_at_once(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        assert await ann.release(grant) == Released(grant)
        assert await bob.inspect(name) == Vacant(name, grant.token)
        assert (await claim(bob, name, "bob#1", harness.ttl)).token > grant.token

    async def test_the_time_left_is_told_where_the_traits_say_so(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        await claim(ann, name, "ann#1", harness.ttl)
        seen = await bob.inspect(name)
        assert isinstance(seen, HeldBy)
        assert (seen.remaining is not None) == bob.traits.tells_remaining
        assert seen.remaining is None or 0 < seen.remaining <= harness.ttl + ROUNDED

    async def test_a_vacancy_is_never_overstated(self, harness: LeaseHarness, name: str) -> None:
        store, began = await harness.open(), monotonic()
        assert vacant_for(await store.inspect(name)) is None
        grant = await claim(store, name, "ann#1", harness.ttl)
        assert await store.release(grant) == Released(grant)
        first = vacant_for(await store.inspect(name))
        assert (first is not None) == store.traits.tells_vacancy
        if first is None:
            pytest.skip("this store does not know since when a name is vacant")
        assert 0.0 <= first <= monotonic() - began + ROUNDED
        await harness.pass_time(harness.ttl)
        second = vacant_for(await store.inspect(name))
        assert second is not None
        assert harness.ttl - ROUNDED <= second - first <= harness.ttl + monotonic() - began + ROUNDED
        began = monotonic()
        await claim(store, name, "bob#1", harness.ttl)  # and crashes
        await harness.outlast_lease()
        crashed = vacant_for(await store.inspect(name))
        late = harness.ttl * (LATE - 1) + harness.ends_within
        assert crashed is None or crashed <= late + monotonic() - began + ROUNDED

    async def test_a_released_grant_is_lost(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        grant = await claim(store, name, "ann#1", harness.ttl)
        await store.release(grant)
        assert await store.release(grant) == Lost(grant)
        assert await store.renew([grant], harness.ttl) == [Lost(grant)]

    async def test_late_verbs_of_an_old_grant_do_not_touch_a_new_one(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        old = await claim(ann, name, "ann#1", harness.ttl)
        await harness.outlast_lease()
        new = await win(harness, bob, name, "bob#1")
        assert await ann.renew([old], harness.ttl) == [Lost(old)]
        assert await ann.release(old) == Lost(old)
        assert await holder(ann, name) == "bob#1"
        assert await bob.renew([new], harness.ttl) == [Granted(new)]

    async def test_an_old_grant_of_the_same_holder_does_not_touch_its_new_one(
        self, harness: LeaseHarness, name: str
    ) -> None:
        store = await harness.open()
        old = await claim(store, name, "ann#1", harness.ttl)
        await store.release(old)
        new = await claim(store, name, "ann#1", harness.ttl)
        assert await store.release(old) == Lost(old)
        assert list(await store.renew([old, new], harness.ttl)) == [Lost(old), Granted(new)]

    async def test_an_old_grant_of_the_same_holder_does_not_extend_its_new_one(
        self, harness: LeaseHarness, name: str
    ) -> None:
        ann, bob = await harness.open(), await harness.open()
        other = await claim(ann, f"{name}-other", "ann#1", harness.ttl)
        old = await claim(ann, name, "ann#1", harness.ttl)
        await ann.release(old)
        new = await claim(ann, name, "ann#1", harness.ttl)
        await look(bob, name, other.name)
        await harness.pass_time(harness.ttl * 0.6)
        assert list(await ann.renew([other, old], harness.ttl)) == [Granted(other), Lost(old)]
        await harness.outlast_lease(0.4)
        assert (await claim(bob, name, "bob#1", harness.ttl)).token > new.token
        assert await holder(bob, other.name) == "ann#1"

    async def test_no_verb_of_an_old_grant_changes_a_later_lease(self, harness: LeaseHarness, name: str) -> None:
        """Each verb is called after the lease was released or has ended, and after another holder has it."""
        ann, bob = await harness.open(), await harness.open()
        verbs, ttl = ("renew", "release", "acquire"), harness.ttl
        is_judged = harness.traits.expiry == "store clock"
        ended = {verb: await claim(ann, f"{name}-ended-{verb}", "ann#1", ttl) for verb in verbs}
        taken = {verb: await claim(ann, f"{name}-taken-{verb}", "ann#1", ttl) for verb in verbs}
        await harness.outlast_lease()
        successors = dict(
            zip(
                verbs,
                await asyncio.gather(*(win(harness, bob, old.name, "bob#1") for old in taken.values())),
                strict=True,
            )
        )
        free = {verb: await claim(ann, f"{name}-free-{verb}", "ann#1", ttl) for verb in verbs}
        passed = {verb: await claim(ann, f"{name}-passed-{verb}", "ann#1", ttl) for verb in verbs}
        for old in (*free.values(), *passed.values()):
            assert await ann.release(old) == Released(old)
        next_grants = {verb: await claim(bob, old.name, "bob#1", ttl) for verb, old in passed.items()}
        for olds, news in ((taken, successors), (passed, next_grants)):
            assert list(await ann.renew([olds["renew"]], ttl)) == [Lost(olds["renew"])]
            assert await ann.release(olds["release"]) == Lost(olds["release"])
            refused = await ann.acquire(olds["acquire"].name, "ann#1", ttl)
            assert isinstance(refused, HeldBy)
            assert (refused.holder, refused.token) == ("bob#1", news["acquire"].token)
            assert all(news[verb].token > olds[verb].token for verb in verbs)
            grants = list(news.values())
            assert list(await bob.renew(grants, ttl)) == [Granted(grant) for grant in grants]
        for olds in (ended, free) if is_judged else (free,):
            assert list(await ann.renew([olds["renew"]], ttl)) == [Lost(olds["renew"])]
            assert await ann.release(olds["release"]) == Lost(olds["release"])
            assert (await claim(ann, olds["acquire"].name, "ann#1", ttl)).token > olds["acquire"].token
            for verb in ("renew", "release"):
                assert await holder(bob, olds[verb].name) is None


def vacant_for(found: HeldBy | Vacant) -> float | None:
    """Return for how long a vacant name has been vacant."""
    assert isinstance(found, Vacant)
    return found.vacant_for
