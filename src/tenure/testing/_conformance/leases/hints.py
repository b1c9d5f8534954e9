"""Requests to resign, and hints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tenure._election.store import LeaseStore
from tenure._lease import Grant, Granted, Vacant
from tenure.testing._conformance.harness import LeaseHarness
from tenure.testing._conformance.leases.steps import (
    LeaseSuite,
    claim,
    holder,
    win,
)


class HintTests(LeaseSuite):
    """The answer to a renewal reports a request to resign, and every change gives a hint."""

    async def test_the_holder_reads_that_it_was_asked_to_resign(self, harness: LeaseHarness, name: str) -> None:
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        assert await bob.ask_to_resign(name) is True
        assert await bob.ask_to_resign(name) is True
        assert await ann.renew([grant], harness.ttl) == [Granted(grant, resign_asked=True)]
        assert await ann.acquire(name, "ann#1", harness.ttl) == Granted(grant, resign_asked=True)
        assert await holder(bob, name) == "ann#1"

    async def test_a_vacant_name_has_no_holder_to_resign(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        assert await store.ask_to_resign(name) is False
        await store.release(await claim(store, name, "ann#1", harness.ttl))
        assert await store.ask_to_resign(name) is False
        assert await store.inspect(name) != Vacant(name, 0)

    async def test_the_next_term_was_not_asked_to_resign(self, harness: LeaseHarness, name: str) -> None:
        store = await harness.open()
        grant = await claim(store, name, "ann#1", harness.ttl)
        await store.ask_to_resign(name)
        await store.release(grant)
        next_grant = await claim(store, name, "ann#2", harness.ttl)
        assert await store.renew([next_grant], harness.ttl) == [Granted(next_grant)]
        await store.ask_to_resign(name)
        await harness.outlast_lease()
        last_grant = await win(harness, store, name, "ann#3")
        assert await store.renew([last_grant], harness.ttl) == [Granted(last_grant)]

    async def test_every_change_gives_a_hint(self, harness: LeaseHarness, name: str) -> None:
        self.needs_hints(harness)
        ann, bob = await harness.open(), await harness.open()
        hints = [ann.hints(name), bob.hints(name)]
        grant = await claim(ann, name, "ann#1", harness.ttl)
        for each in hints:
            await hint(each, lambda: holds(bob, name, "ann#1"))
        await bob.ask_to_resign(name)
        for each in hints:
            await hint(each, lambda: reads_resign_asked(ann, grant, harness.ttl))
        await ann.release(grant)
        for each in hints:
            await hint(each, lambda: holds(bob, name, None))

    async def test_a_hint_wakes_every_listener(self, harness: LeaseHarness, name: str) -> None:
        self.needs_hints(harness)
        stores = [await harness.open() for _ in range(4)]
        grant = await claim(stores[0], name, "ann#1", harness.ttl)
        waiting = [asyncio.ensure_future(hint(s.hints(name), lambda: holds(stores[0], name, None))) for s in stores]
        await asyncio.sleep(0)
        await stores[0].release(grant)
        await asyncio.gather(*waiting)

    async def test_a_cancelled_wait_for_a_hint_can_be_taken_up_again(self, harness: LeaseHarness, name: str) -> None:
        self.needs_hints(harness)
        ann, bob = await harness.open(), await harness.open()
        hints = bob.hints(name)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(exhaust(hints), 0.05)
        await claim(ann, name, "ann#1", harness.ttl)
        await hint(hints, lambda: holds(bob, name, "ann#1"))

    @staticmethod
    def needs_hints(harness: LeaseHarness) -> None:
        """Skip the test if this store gives no hints."""
        if not harness.traits.hints:
            pytest.skip("this store gives no hints")


async def holds(store: LeaseStore, name: str, expected: str | None) -> bool:
    """Return whether the holder of *name* is *expected*; None: whether it has none."""
    return await holder(store, name) == expected


async def reads_resign_asked(store: LeaseStore, grant: Grant, ttl: float) -> bool:
    """Return whether the answer to a renewal reports the request to resign."""
    (answer,) = await store.renew([grant], ttl)
    return isinstance(answer, Granted) and answer.resign_asked


async def hint(hints: AsyncIterator[object], change: Callable[[], Awaitable[bool]], *, within: float = 30.0) -> None:
    """Wait for a hint after which *change* is seen; earlier ones may be spurious."""
    async with asyncio.timeout(within):
        async for _ in hints:
            if await change():
                return
    raise AssertionError("the hints ended")


async def exhaust(hints: AsyncIterator[object]) -> None:
    """Take hints for ever."""
    async for _ in hints:
        pass
