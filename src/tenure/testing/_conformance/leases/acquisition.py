"""Acquiring a name, and its tokens."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from tenure._lease import Granted, HeldBy, Vacant
from tenure.testing._conformance.harness import LeaseHarness
from tenure.testing._conformance.leases.steps import (
    LeaseSuite,
    asked_and_cancelled,
    claim,
    holder,
    is_refused,
    look,
    win,
)


class AcquisitionTests(LeaseSuite):
    """One candidate at a time gets a name, with a token that is higher than all before."""

    async def test_a_free_name_is_granted(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        grant = await claim(store, name, "ann#1", harness.ttl)
        assert (grant.name, grant.holder) == (name, "ann#1")
        assert grant.token >= 1

    async def test_a_held_name_is_not_granted_to_another(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        for store in (bob, ann):
            answer = await is_refused(store, name, "bob#1", harness.ttl)
            assert (answer.name, answer.holder, answer.token) == (name, "ann#1", grant.token)
            assert answer.remaining is None or 0 < answer.remaining <= harness.ttl

    async def test_names_do_not_touch_each_other(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        names = [name, name.upper(), f"{name} ", f"{name}/", f"{name}/{name}"]
        if harness.traits.names == "dns":
            names = [name, f"{name}0", f"{name}-0", f"{name}.0", f"{name}.{name}"]
        grants = [await claim(store, each, f"holder of {each}", harness.ttl) for each in names]
        await store.release(grants[0])
        for grant in grants[1:]:
            assert await holder(store, grant.name) == grant.holder
        assert await holder(store, name) is None

    async def test_of_twenty_candidates_at_once_one_wins(self, harness: LeaseHarness, name: str) -> None:
        stores = [await harness.open() for _ in range(20)]
        answers = await asyncio.gather(
            *(store.acquire(name, f"candidate-{number}#1", harness.ttl) for number, store in enumerate(stores))
        )
        winners = [answer.grant for answer in answers if isinstance(answer, Granted)]
        assert len(winners) == 1
        assert {answer.holder for answer in answers if isinstance(answer, HeldBy)} == {winners[0].holder}

    async def test_of_ten_candidates_after_an_expiry_one_wins(self, harness: LeaseHarness, name: str) -> None:
        stores = [await harness.open() for _ in range(10)]
        old = await claim(stores[0], name, "old#1", harness.ttl)
        await asyncio.gather(
            *(store.acquire(name, f"candidate-{number}#1", harness.ttl) for number, store in enumerate(stores))
        )
        await harness.outlast_lease()
        answers = await asyncio.gather(
            *(store.acquire(name, f"candidate-{number}#1", harness.ttl) for number, store in enumerate(stores))
        )
        winners = [answer.grant for answer in answers if isinstance(answer, Granted)]
        assert len(winners) == 1
        assert winners[0].token > old.token

    async def test_acquiring_again_gives_the_same_grant(self, harness: LeaseHarness, name: str) -> None:
        store, again = await harness.open(), await harness.open()
        grant = await claim(store, name, "ann#1", harness.ttl)
        assert await store.acquire(name, "ann#1", harness.ttl) == Granted(grant)
        if not harness.has_sessions:
            assert await again.acquire(name, "ann#1", harness.ttl) == Granted(grant)

    async def test_acquiring_again_extends(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await look(bob, name)
        await harness.pass_time(harness.ttl * 0.6)
        assert await ann.acquire(name, "ann#1", harness.ttl) == Granted(grant)
        await harness.pass_time(harness.ttl * 0.6)
        assert isinstance(await bob.acquire(name, "bob#1", harness.ttl), HeldBy)

    async def test_tokens_rise_with_every_acquisition(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        grants = [await claim(ann, name, "ann#1", harness.ttl)]
        await ann.release(grants[-1])
        grants.append(await claim(bob, name, "bob#1", harness.ttl))  # another holder, after a release
        await bob.release(grants[-1])
        grants.append(await claim(bob, name, "bob#2", harness.ttl))  # the same process again
        await bob.release(grants[-1])
        grants.append(await claim(bob, name, "bob#2", harness.ttl))  # even the same holder again
        await harness.outlast_lease()
        grants.append(await win(harness, ann, name, "ann#2"))  # after the end of a lease
        await harness.outlast_lease()
        grants.append(await win(harness, ann, name, "ann#2"))  # the same holder, after the end of its own
        tokens = [grant.token for grant in grants]
        assert all(earlier < later for earlier, later in pairwise(tokens)), tokens

    async def test_a_vacant_name_shows_its_newest_token(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        assert await store.inspect(name) == Vacant(name, 0)
        grant = await claim(store, name, "ann#1", harness.ttl)
        await store.release(grant)
        assert await store.inspect(name) == Vacant(name, grant.token)

    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
    async def test_cancelled_calls_leave_nothing_blocked(self, harness: LeaseHarness, name: str, steps: int) -> None:
        ann, bob = await harness.open(), await harness.open()
        await asked_and_cancelled(ann.acquire(name, "ann#1", harness.ttl), steps)
        grant = await claim(ann, name, "ann#1", harness.ttl)  # whether it was carried out or not, it can be repeated
        await asked_and_cancelled(ann.renew([grant], harness.ttl), steps)
        assert await ann.renew([grant], harness.ttl) == [Granted(grant)]
        await asked_and_cancelled(ann.inspect(name), steps)
        assert await holder(bob, name) == "ann#1"
        await asked_and_cancelled(ann.release(grant), steps)
        await ann.release(grant)
        assert (await claim(bob, name, "bob#1", harness.ttl)).token > grant.token
