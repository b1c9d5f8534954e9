"""Candidates that wait in the queue of a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from tenure._election.store import LeaseStore
from tenure._lease import Grant, Granted, HeldBy, Lost, Released, Vacant
from tenure.errors import ConfigError, Unavailable
from tenure.testing._conformance.harness import LeaseHarness, needs_fault
from tenure.testing._conformance.leases.faults import is_still_held
from tenure.testing._conformance.leases.hints import exhaust, hint
from tenure.testing._conformance.leases.steps import (
    LeaseSuite,
    asked_and_cancelled,
    catch_up,
    claim,
    holder,
    win,
    withdraw,
)


class LeaseQueueSuite(LeaseSuite):
    """A queued store grants a name in the order in which candidates asked, and no place outlives its candidate."""

    async def test_the_first_to_ask_is_the_first_to_be_granted(self, harness: LeaseHarness, name: str) -> None:
        stores = {each: await harness.open() for each in ("ann#1", "bob#1", "cat#1", "dan#1")}
        grants = [await claim(stores["ann#1"], name, "ann#1", harness.ttl)]
        for each in ("bob#1", "cat#1", "dan#1"):
            await waits(stores[each], name, each, harness)
        for first, later in (("bob#1", ("dan#1", "cat#1")), ("cat#1", ("dan#1",)), ("dan#1", ())):
            for each in (*later, *later, first):  # asking more often, or earlier, doesn't help
                await waits(stores[each], name, each, harness)
            last = grants[-1]
            assert await stores[last.holder].release(last) == Released(last)
            for each in later:
                assert (await waits(stores[each], name, each, harness)).holder == first
            grants.append(await claim(stores[first], name, first, harness.ttl))
        tokens = [grant.token for grant in grants]
        assert tokens == sorted(set(tokens))

    async def test_a_holder_whose_turn_comes_has_the_name_before_it_asks(
        self, harness: LeaseHarness, name: str
    ) -> None:
        ann, bob, cat = [await harness.open() for _ in range(3)]
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await waits(bob, name, "bob#1", harness)
        await ann.release(grant)
        assert await holder(ann, name) == "bob#1"
        assert (await waits(cat, name, "cat#1", harness)).holder == "bob#1"
        assert (await claim(bob, name, "bob#1", harness.ttl)).token > grant.token

    async def test_metadata_of_a_holder_whose_turn_came_are_shown_once_it_has_asked(
        self, harness: LeaseHarness, name: str
    ) -> None:
        ann, bob, cat = [await harness.open() for _ in range(3)]
        metadata = {"url": "http://bob"}
        grant = await claim(ann, name, "ann#1", harness.ttl)
        assert isinstance(await bob.acquire(name, "bob#1", harness.ttl, metadata), HeldBy)
        await ann.release(grant)
        for store in (cat, cat, cat, cat, cat, bob):
            assert await holder(store, name) == "bob#1"  # its metadata may be missing
        assert isinstance(await bob.acquire(name, "bob#1", harness.ttl, metadata), Granted)
        seen = await cat.inspect(name)
        assert isinstance(seen, HeldBy)
        assert seen.metadata == metadata

    async def test_a_holder_that_withdrew_is_passed_over(self, harness: LeaseHarness, name: str) -> None:
        ann, bob, cat = [await harness.open() for _ in range(3)]
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await waits(bob, name, "bob#1", harness)
        await waits(cat, name, "cat#1", harness)
        await withdraw(bob, name, "bob#1")
        assert await holder(cat, name) == "ann#1"
        assert await ann.renew([grant], harness.ttl) == [Granted(grant)]
        await ann.release(grant)
        assert await holder(bob, name) == "cat#1"
        new = await claim(cat, name, "cat#1", harness.ttl)
        await withdraw(bob, name, "bob#1")  # again: nothing changes
        assert list(await cat.renew([new], harness.ttl)) == [Granted(new)]
        await cat.release(new)
        assert await bob.inspect(name) == Vacant(name, new.token)

    async def test_a_holder_that_withdrew_may_ask_again_at_the_end_of_the_queue(
        self, harness: LeaseHarness, name: str
    ) -> None:
        ann, bob, cat = [await harness.open() for _ in range(3)]
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await waits(bob, name, "bob#1", harness)
        await waits(cat, name, "cat#1", harness)
        await withdraw(bob, name, "bob#1")
        await waits(bob, name, "bob#1", harness)
        await ann.release(grant)
        new = await claim(cat, name, "cat#1", harness.ttl)
        await cat.release(new)
        assert (await claim(bob, name, "bob#1", harness.ttl)).token > new.token

    async def test_withdrawing_frees_what_was_granted_meanwhile(self, harness: LeaseHarness, name: str) -> None:
        ann, bob, cat = [await harness.open() for _ in range(3)]
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await waits(bob, name, "bob#1", harness)
        await ann.release(grant)  # bob has the name, and wasn't told
        await withdraw(bob, name, "bob#1")
        grant = await claim(cat, name, "cat#1", harness.ttl)
        await waits(bob, name, "bob#2", harness)
        await cat.release(grant)
        new = await claim(bob, name, "bob#2", harness.ttl)  # he was told, after he had given up waiting for the answer
        await withdraw(bob, name, "bob#2")
        assert list(await bob.renew([new], harness.ttl)) == [Lost(new)]
        assert (await claim(cat, name, "cat#2", harness.ttl)).token > new.token

    async def test_withdrawing_without_a_place_does_nothing(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        await withdraw(ann, name, "ann#1")
        assert await ann.inspect(name) == Vacant(name, 0)
        assert name not in await ann.names()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await waits(bob, name, "bob#1", harness)
        await withdraw(ann, name, "nobody#1")
        await withdraw(bob, name, "bob#2")
        assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant)]
        await ann.release(grant)
        await withdraw(ann, name, "ann#1")  # its claim is over
        await claim(bob, name, "bob#1", harness.ttl)

    @pytest.mark.parametrize("is_held", [True, False])
    @pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])  # from 1: the request has begun
    async def test_withdrawing_beside_the_request_leaves_no_place(
        self, harness: LeaseHarness, name: str, steps: int, is_held: bool
    ) -> None:
        ann, bob, cat = [await harness.open() for _ in range(3)]
        grant = await claim(ann, name, "ann#1", harness.ttl)
        if not is_held:
            await ann.release(grant)
        asking = asyncio.ensure_future(bob.acquire(name, "bob#1", harness.ttl))
        for _ in range(steps):
            await asyncio.sleep(0)
        await withdraw(bob, name, "bob#1")
        await asyncio.gather(asking, return_exceptions=True)  # any answer
        if is_held:
            await ann.release(grant)
        assert (await claim(cat, name, "cat#1", harness.ttl)).token > grant.token

    async def test_asking_again_beside_the_request_takes_nothing_from_it(
        self, harness: LeaseHarness, name: str
    ) -> None:
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        for _ in range(2):
            first, *others = await asyncio.gather(
                *(bob.acquire(name, "bob#1", harness.ttl) for _ in range(5)), return_exceptions=True
            )
            assert isinstance(first, HeldBy)
            assert all(isinstance(one, HeldBy | Unavailable) for one in others)
        await ann.release(grant)
        await claim(bob, name, "bob#1", harness.ttl)

    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8])
    async def test_a_cancelled_request_or_withdrawal_leaves_no_place(
        self, harness: LeaseHarness, name: str, steps: int
    ) -> None:
        ann, bob, cat = [await harness.open() for _ in range(3)]
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await asked_and_cancelled(bob.acquire(name, "bob#1", harness.ttl), steps)
        await withdraw(bob, name, "bob#1")
        await waits(bob, name, "bob#2", harness)
        await asked_and_cancelled(withdraw(bob, name, "bob#2"), steps)
        await withdraw(bob, name, "bob#2")
        await ann.release(grant)
        await claim(cat, name, "cat#1", harness.ttl)

    async def test_two_holders_of_one_process_have_two_places(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        for each in ("bob#1", "bob#2", "bob#3"):
            await waits(bob, name, each, harness)
        await ann.release(grant)
        assert (await waits(bob, name, "bob#2", harness)).holder == "bob#1"
        first = await claim(bob, name, "bob#1", harness.ttl)
        await withdraw(bob, name, "bob#2")
        assert list(await bob.renew([first], harness.ttl)) == [Granted(first)]
        await bob.release(first)
        last = await claim(bob, name, "bob#3", harness.ttl)
        assert await bob.release(first) == Lost(first)
        assert list(await bob.renew([first, last], harness.ttl)) == [Lost(first), Granted(last)]

    async def test_the_same_holder_waits_for_each_name_apart(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        grants = [await claim(ann, f"{name}-{number}", "ann#1", harness.ttl) for number in range(2)]
        for grant in grants:
            await waits(bob, grant.name, "bob#1", harness)
        await withdraw(bob, grants[0].name, "bob#1")
        for grant in grants:
            await ann.release(grant)
        assert await holder(ann, grants[0].name) is None
        assert await holder(ann, grants[1].name) == "bob#1"

    async def test_a_place_ends_unless_its_holder_asks_again(self, harness: LeaseHarness, name: str) -> None:
        """Of two candidates in one process, one asks again; the other has failed, and its place is the first."""
        ann, bob, cat = [await harness.open() for _ in range(3)]
        grants = [await claim(ann, f"{name}-{number}", "ann#1", harness.ttl) for number in range(2)]
        for each in ("gone#1", "bob#1"):
            await waits(bob, grants[0].name, each, harness)
        await waits(bob, grants[1].name, "gone#1", harness)
        for share in (0.4, 0.4, 0.4):
            await harness.pass_time(harness.ttl * share + harness.ends_within / 3)
            assert list(await ann.renew(grants, harness.ttl)) == [Granted(grant) for grant in grants]
            await waits(bob, grants[0].name, "bob#1", harness)
            await waits(cat, grants[0].name, "cat#1", harness)  # comes later, and can't overtake
        for grant in grants:
            await ann.release(grant)
        assert await holder(ann, grants[0].name) == "bob#1"
        assert (await claim(bob, grants[0].name, "bob#1", harness.ttl)).token > grants[0].token
        assert (await claim(ann, grants[1].name, "ann#2", harness.ttl)).token > grants[1].token

    async def test_a_turn_that_nobody_takes_ends(self, harness: LeaseHarness, name: str) -> None:
        ann, bob, cat = [await harness.open() for _ in range(3)]
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await waits(bob, name, "gone#1", harness)
        await waits(cat, name, "cat#1", harness)
        await ann.release(grant)
        await harness.pass_time(harness.ttl * 0.6)
        assert (await waits(cat, name, "cat#1", harness)).holder == "gone#1"
        await harness.outlast_lease(0.4)
        assert (await claim(cat, name, "cat#1", harness.ttl)).token > grant.token

    async def test_a_request_to_resign_is_for_the_leader_only(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await waits(bob, name, "bob#1", harness)
        assert await bob.ask_to_resign(name) is True
        await waits(bob, name, "bob#1", harness)
        assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant, resign_asked=True)]
        await ann.release(grant)
        new = await claim(bob, name, "bob#1", harness.ttl)
        assert list(await bob.renew([new], harness.ttl)) == [Granted(new)]

    async def test_the_next_in_the_queue_gets_a_hint(self, harness: LeaseHarness, name: str) -> None:
        """When the leader releases, and when the first of the queue withdraws."""
        if not harness.traits.hints:
            pytest.skip("this store gives no hints")
        ann, bob, cat, dan = [await harness.open() for _ in range(4)]
        grant = await claim(ann, name, "ann#1", harness.ttl)
        for store, each in ((bob, "bob#1"), (cat, "cat#1"), (dan, "dan#1")):
            await waits(store, name, each, harness)
        bobs, cats, dans = bob.hints(name), cat.hints(name), dan.hints(name)
        await ann.release(grant)
        await hint(bobs, lambda: is_granted(bob, name, "bob#1", harness))
        await take_pending(cats)
        await withdraw(bob, name, "bob#1")
        await hint(cats, lambda: is_granted(cat, name, "cat#1", harness))
        await take_pending(dans)
        await cat.release(await claim(cat, name, "cat#1", harness.ttl))
        await hint(dans, lambda: is_granted(dan, name, "dan#1", harness))

    @pytest.mark.parametrize("bad", ["", "nul\0inside"], ids=ascii)
    async def test_an_invalid_name_is_not_withdrawn(self, harness: LeaseHarness, name: str, bad: str) -> None:
        store = await harness.open()
        for each in ((bad, "ann#1"), (name, bad)):
            with pytest.raises(ConfigError):
                await withdraw(store, *each)

    # --- faults ---

    async def test_withdraw_can_be_repeated(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        ann, bob, cat = [await harness.open() for _ in range(3)]
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await waits(bob, name, "bob#1", harness)
        for _ in range(2):
            async with harness.lose_answer(bob):
                with pytest.raises(Unavailable):
                    await withdraw(bob, name, "bob#1")
        await withdraw(bob, name, "bob#1")
        await ann.release(grant)
        await claim(cat, name, "cat#1", harness.ttl)

    async def test_a_place_whose_answer_was_lost_is_kept(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        ann, bob, cat = [await harness.open() for _ in range(3)]
        grant = await claim(ann, name, "ann#1", harness.ttl)
        async with harness.lose_answer(bob):
            with pytest.raises(Unavailable):
                await bob.acquire(name, "bob#1", harness.ttl)
        await waits(cat, name, "cat#1", harness)
        await waits(bob, name, "bob#1", harness)
        await ann.release(grant)
        new = await claim(bob, name, "bob#1", harness.ttl)
        await bob.release(new)
        assert (await claim(cat, name, "cat#1", harness.ttl)).token > new.token  # there is no second place of bob's

    async def test_withdrawing_without_a_connection_is_reported_in_time(self, harness: LeaseHarness, name: str) -> None:
        """And the place ends, whether it is repeated or not."""
        needs_fault(harness, "cut")
        ann, bob, cat = [await harness.open() for _ in range(3)]
        grants = [await claim(ann, f"{name}-{number}", "ann#1", harness.ttl) for number in range(2)]
        for grant in grants:
            await waits(bob, grant.name, "bob#1", harness)
        async with harness.cut(bob):
            asked_at = time.monotonic()
            with pytest.raises(Unavailable):
                await withdraw(bob, grants[0].name, "bob#1")
            assert time.monotonic() - asked_at < harness.answer_within
            for grant in grants:
                await ann.release(grant)
            await harness.outlast_lease()
            assert (await win(harness, cat, grants[0].name, "cat#1")).token > grants[0].token
        await withdraw(bob, grants[1].name, "bob#1")
        await claim(cat, grants[1].name, "cat#1", harness.ttl)

    async def test_a_late_request_leaves_a_place_for_a_while_at_most(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "late")
        ann, bob, cat = [await harness.open() for _ in range(3)]
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await waits(bob, name, "bob#1", harness)
        await withdraw(bob, name, "bob#1")
        async with harness.late(bob) as give_up:
            await give_up(bob.acquire(name, "bob#1", harness.ttl))
        await ann.release(grant)
        await harness.outlast_lease()
        assert (await win(harness, cat, name, "cat#1")).token > grant.token

    async def test_a_late_withdrawal_does_not_touch_the_next_holder(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "late")
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await waits(bob, name, "bob#1", harness)
        async with harness.late(bob) as give_up:
            await give_up(withdraw(bob, name, "bob#1"))
            await waits_at_last(bob, name, "bob#2", harness)
            await waits_at_last(ann, name, "cat#1", harness)
        await ann.release(grant)
        await withdraw(bob, name, "bob#1")  # if it was not carried out
        new = await claim(bob, name, "bob#2", harness.ttl)
        await is_still_held(bob, new, harness)


async def waits(store: LeaseStore, name: str, holder: str, harness: LeaseHarness) -> HeldBy:
    """Ask for a name that must be held, and take or keep a place in the queue; return the answer."""
    await catch_up(store, name)
    answer = await store.acquire(name, holder, harness.ttl)
    assert isinstance(answer, HeldBy), answer
    return answer


async def waits_at_last(store: LeaseStore, name: str, holder: str, harness: LeaseHarness) -> None:
    """Ask again after no answer, as a candidate does: the client may still have to leave a silent connection."""
    give_up = time.monotonic() + harness.answer_within
    while True:
        try:
            await waits(store, name, holder, harness)
        except Unavailable:
            assert time.monotonic() < give_up
        else:
            return


async def take_pending(hints: AsyncIterator[object]) -> None:
    """Take the hints about what has happened so far; later ones are about what comes next."""
    with suppress(TimeoutError):
        await asyncio.wait_for(exhaust(hints), 0.05)


async def is_granted(store: LeaseStore, name: str, holder: str, harness: LeaseHarness) -> bool:
    """Ask for a name; return whether it is granted."""
    answer = await store.acquire(name, holder, harness.ttl)
    return isinstance(answer, Granted) and answer.grant == Grant(name, holder, answer.grant.token)
