"""The cost of requests about leases: it doesn't grow with other leases."""

from __future__ import annotations

import asyncio

from tenure._election.store import LeaseStore
from tenure._lease import Granted, HeldBy, Released, Vacant
from tenure.testing._conformance.cost import Meter
from tenure.testing._conformance.harness import LeaseHarness
from tenure.testing._conformance.leases.steps import LeaseSuite, claim, withdraw

AT_ONCE = 20  # concurrent requests of the set-up


class LeaseCostSuite(LeaseSuite):
    """Each test measures beside a few leases, and again beside ten times as many."""

    async def test_beside_many_leases(self, harness: LeaseHarness, name: str) -> None:
        meter = Meter.of(harness)
        store = await harness.open()
        for depth in meter.small_depths():
            await lead(store, harness, name, depth)
            await use(meter, store, harness, f"{name}-new-{depth}")
        meter.require_flat()

    async def test_beside_many_that_have_expired(self, harness: LeaseHarness, name: str) -> None:
        meter = Meter.of(harness)
        store = await harness.open()
        for depth in meter.small_depths():
            await lead(store, harness, name, depth)
            await harness.outlast_lease()
            await use(meter, store, harness, f"{name}-new-{depth}")
            await use(meter, store, harness, f"{name}-0", about="one of them: ")
        meter.require_flat()

    async def test_after_many_terms(self, harness: LeaseHarness, name: str) -> None:
        meter = Meter.of(harness)
        store = await harness.open()
        for depth in meter.small_depths():
            for term in range(depth):
                assert isinstance(await store.release(await claim(store, name, f"ann#{term}", harness.ttl)), Released)
            await use(meter, store, harness, name)
        meter.require_flat()


async def lead(store: LeaseStore, harness: LeaseHarness, name: str, depth: int) -> None:
    """Acquire *depth* leases."""
    free = asyncio.Semaphore(AT_ONCE)

    async def acquire(number: int) -> None:
        async with free:
            await store.acquire(f"{name}-{number}", "crowd#1", harness.ttl)

    await asyncio.gather(*map(acquire, range(depth)))


async def use(meter: Meter, store: LeaseStore, harness: LeaseHarness, name: str, about: str = "") -> None:
    """Measure every verb on one lease."""
    answer = await meter.ask(f"{about}acquire", store.acquire, name, "ann#1", harness.ttl)
    assert isinstance(answer, Granted)
    grant = answer.grant
    assert isinstance(await meter.ask(f"{about}acquire a held name", store.acquire, name, "bob#1", harness.ttl), HeldBy)
    if store.traits.queued:
        await meter.ask(f"{about}withdraw", withdraw, store, name, "bob#1")
    assert list(await meter.ask(f"{about}renew", store.renew, [grant], harness.ttl)) == [Granted(grant)]
    assert isinstance(await meter.ask(f"{about}inspect", store.inspect, name), HeldBy)
    several = [name, *(f"{name}-{number}" for number in range(4))]  # for more, a store may list all that it has
    found = await meter.ask(f"{about}inspect several", store.inspect_many, several)
    assert isinstance(found[0], HeldBy)
    assert await meter.ask(f"{about}ask to resign", store.ask_to_resign, name)
    assert isinstance(await meter.ask(f"{about}release", store.release, grant), Released)
    assert isinstance(await meter.ask(f"{about}inspect a free name", store.inspect, name), Vacant)
