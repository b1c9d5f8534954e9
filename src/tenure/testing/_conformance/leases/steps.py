"""Fixtures and steps for the suites of leases."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable
from typing import ClassVar, cast

import pytest
import pytest_asyncio

from tenure._election.store import LeaseStore, QueuedLeaseStore
from tenure._lease import Grant, Granted, HeldBy
from tenure.errors import Unavailable
from tenure.testing import until
from tenure.testing._conformance.harness import LeaseHarness

ROUNDED = 0.01  # seconds by which a store may round its times
LAST = 2**-10  # the share of a ttl that is left a moment before its end; no sum with it is rounded


class LeaseSuite:
    """Gives each test a harness and a name."""

    harness: ClassVar[type[LeaseHarness]]
    """The harness of the store under test: a class, made anew for each test."""
    pytestmark: ClassVar[pytest.MarkDecorator] = pytest.mark.asyncio

    @pytest_asyncio.fixture(name="harness")
    async def _open_harness(self) -> AsyncIterator[LeaseHarness]:
        """Open a fresh storage for one test."""
        harness = self.harness()
        await harness.start()
        try:
            yield harness
        finally:
            await harness.close()

    @pytest.fixture
    def name(self) -> str:
        """Give a name that no other test uses: the storage may be shared."""
        return f"conformance-{secrets.token_hex(6)}"


async def claim(store: LeaseStore, name: str, holder: str, ttl: float) -> Grant:
    """Acquire a name that must be free."""
    await catch_up(store, name)
    answer = await store.acquire(name, holder, ttl)
    assert isinstance(answer, Granted), answer
    assert not answer.resign_asked
    assert answer.age < ttl, "the claim is over already"
    return answer.grant


async def catch_up(store: LeaseStore, name: str) -> None:
    """Let the server that is asked next know what all others do.

    One that is behind answers a candidate in its queue by an older state, until it gives it a hint. It may be slow to
    answer on a busy machine.
    """

    async def has_answered() -> bool:
        try:
            await store.inspect(name)
        except Unavailable:
            return False
        return True

    if store.traits.queued:
        await until(has_answered)


async def look(store: LeaseStore, *names: str) -> None:
    """Let the client of *store* see the leases of *names* as they are now.

    Where expiry is observed, a lease ends its own ttl after a client saw it last changed. A client that looks only at
    the end of a test sees every lease as one that was renewed just now, and so would pass any test that it is still
    held. So it looks before a change, and again after it.
    """
    await store.inspect_many(names)


async def is_refused(store: LeaseStore, name: str, holder: str, ttl: float) -> HeldBy:
    """Ask for a name that must be held, without waiting for it; return the answer."""
    answer = await store.acquire(name, holder, ttl)
    assert isinstance(answer, HeldBy), answer
    if store.traits.queued:
        await withdraw(store, name, holder)
    return answer


async def withdraw(store: LeaseStore, name: str, holder: str) -> None:
    """Give up the place of *holder* in the queue of a store that has one."""
    await cast(QueuedLeaseStore, store).withdraw(name, holder)


async def win(harness: LeaseHarness, store: LeaseStore, name: str, holder: str) -> Grant:
    """Acquire a name whose lease is over; a store whose expiry is observed needs some requests first."""
    answer = await store.acquire(name, holder, harness.ttl)
    for _ in range(3 if store.traits.expiry == "observed" else 0):
        if isinstance(answer, Granted):
            break
        await harness.outlast_lease()
        answer = await store.acquire(name, holder, harness.ttl)
    assert isinstance(answer, Granted), f"{name!r} did not become free: {answer}"
    return answer.grant


async def holder(store: LeaseStore, name: str) -> str | None:
    """Return the holder of *name*."""
    answer = await store.inspect(name)
    return answer.holder if isinstance(answer, HeldBy) else None


async def asked_and_cancelled(question: Awaitable[object], steps: int) -> None:
    """Start a call, and cancel it after so many steps of the loop."""
    task = asyncio.ensure_future(question)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
