"""Who gets a name, and with which token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from itertools import pairwise

import pytest

from tenure._lease import Granted, HeldBy, Vacant
from tenure.testing._conformance.harness import LeaseHarness
from tenure.testing._conformance.leases.steps import (
    LATE,
    LeaseSuite,
    claim,
    holder,
    win,
)


class AcquisitionTests(LeaseSuite):
    """One candidate at a time gets a name, with a token that is higher than all before."""

    async def test_a_free_name_is_granted(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        grant = await claim(store, name, "ann#1", house.ttl)
        assert (grant.name, grant.holder) == (name, "ann#1")
        assert grant.token >= 1

    async def test_a_held_name_is_not_granted_to_another(self, house: LeaseHarness, name: str) -> None:
        ann, bob = await house.open(), await house.open()
        grant = await claim(ann, name, "ann#1", house.ttl)
        for store in (bob, ann):
            answer = await store.acquire(name, "bob#1", house.ttl)
            assert isinstance(answer, HeldBy)
            assert (answer.name, answer.holder, answer.token) == (name, "ann#1", grant.token)
            assert answer.remaining is None or 0 < answer.remaining <= house.ttl

    async def test_names_do_not_touch_each_other(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        names = [name, name.upper(), f"{name} ", f"{name}/", f"{name}/{name}"]
        grants = [await claim(store, each, f"holder of {each}", house.ttl) for each in names]
        await store.release(grants[0])
        for grant in grants[1:]:
            assert await holder(store, grant.name) == grant.holder
        assert await holder(store, name) is None

    async def test_of_twenty_who_ask_at_once_one_wins(self, house: LeaseHarness, name: str) -> None:
        stores = [await house.open() for _ in range(20)]
        answers = await asyncio.gather(
            *(store.acquire(name, f"candidate-{number}#1", house.ttl) for number, store in enumerate(stores))
        )
        winners = [answer.grant for answer in answers if isinstance(answer, Granted)]
        assert len(winners) == 1
        assert {answer.holder for answer in answers if isinstance(answer, HeldBy)} == {winners[0].holder}

    async def test_of_ten_who_wait_for_the_end_one_wins(self, house: LeaseHarness, name: str) -> None:
        stores = [await house.open() for _ in range(10)]
        old = await claim(stores[0], name, "old#1", house.ttl)
        await asyncio.gather(
            *(store.acquire(name, f"candidate-{number}#1", house.ttl) for number, store in enumerate(stores))
        )
        await house.pass_time(house.ttl * LATE)
        answers = await asyncio.gather(
            *(store.acquire(name, f"candidate-{number}#1", house.ttl) for number, store in enumerate(stores))
        )
        winners = [answer.grant for answer in answers if isinstance(answer, Granted)]
        assert len(winners) == 1
        assert winners[0].token > old.token

    async def test_who_asks_again_gets_the_same_grant(self, house: LeaseHarness, name: str) -> None:
        store, again = await house.open(), await house.open()
        grant = await claim(store, name, "ann#1", house.ttl)
        assert await store.acquire(name, "ann#1", house.ttl) == Granted(grant)
        assert await again.acquire(name, "ann#1", house.ttl) == Granted(grant)

    async def test_asking_again_extends(self, house: LeaseHarness, name: str) -> None:
        ann, bob = await house.open(), await house.open()
        grant = await claim(ann, name, "ann#1", house.ttl)
        await house.pass_time(house.ttl * 0.6)
        assert await ann.acquire(name, "ann#1", house.ttl) == Granted(grant)
        await house.pass_time(house.ttl * 0.6)
        assert isinstance(await bob.acquire(name, "bob#1", house.ttl), HeldBy)

    async def test_tokens_rise_with_every_acquisition(self, house: LeaseHarness, name: str) -> None:
        ann, bob = await house.open(), await house.open()
        grants = [await claim(ann, name, "ann#1", house.ttl)]
        await ann.release(grants[-1])
        grants.append(await claim(bob, name, "bob#1", house.ttl))  # another holder, after a release
        await bob.release(grants[-1])
        grants.append(await claim(bob, name, "bob#2", house.ttl))  # the same process again
        await bob.release(grants[-1])
        grants.append(await claim(bob, name, "bob#2", house.ttl))  # even the same holder again
        await house.pass_time(house.ttl * LATE)
        grants.append(await win(house, ann, name, "ann#2"))  # after the end of a lease
        await house.pass_time(house.ttl * LATE)
        grants.append(await win(house, ann, name, "ann#2"))  # the same holder, after the end of its own
        tokens = [grant.token for grant in grants]
        assert all(earlier < later for earlier, later in pairwise(tokens)), tokens

    async def test_the_newest_token_is_told_when_nobody_holds_the_name(self, house: LeaseHarness, name: str) -> None:
        store = await house.open()
        assert await store.inspect(name) == Vacant(name, 0)
        grant = await claim(store, name, "ann#1", house.ttl)
        await store.release(grant)
        assert await store.inspect(name) == Vacant(name, grant.token)

    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
    async def test_cancelled_questions_leave_nothing_wedged(self, house: LeaseHarness, name: str, steps: int) -> None:
        ann, bob = await house.open(), await house.open()
        await asked_and_cancelled(ann.acquire(name, "ann#1", house.ttl), steps)
        grant = await claim(ann, name, "ann#1", house.ttl)  # whether it was done or not, asking again is right
        await asked_and_cancelled(ann.renew([grant], house.ttl), steps)
        assert await ann.renew([grant], house.ttl) == [Granted(grant)]
        await asked_and_cancelled(ann.inspect(name), steps)
        assert await holder(bob, name) == "ann#1"
        await asked_and_cancelled(ann.release(grant), steps)
        await ann.release(grant)
        assert (await claim(bob, name, "bob#1", house.ttl)).token > grant.token


async def asked_and_cancelled(question: Awaitable[object], steps: int) -> None:
    """Ask, and cancel the question after so many turns of the loop."""
    task = asyncio.ensure_future(question)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
