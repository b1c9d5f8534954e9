"""Fixtures and steps for the suites of leases."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import ClassVar

import pytest
import pytest_asyncio

from tenure._election.store import LeaseStore
from tenure._lease import Grant, Granted, HeldBy
from tenure.testing._conformance.harness import LeaseHarness

LATE = 1.05  # by which share longer than a ttl to wait before it is surely over
ROUNDED = 0.01  # seconds by which a store may round its times
LAST = 2**-10  # the share of a ttl that is left a moment before its end; no sum with it is rounded


class LeaseSuite:
    """Gives each test a harness and a name."""

    harness: ClassVar[type[LeaseHarness]]
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
    answer = await store.acquire(name, holder, ttl)
    assert isinstance(answer, Granted), answer
    assert not answer.resign_asked
    return answer.grant


async def win(harness: LeaseHarness, store: LeaseStore, name: str, holder: str) -> Grant:
    """Acquire a name that is or will be free; a store whose expiry is observed needs some requests first."""
    for _ in range(4):
        answer = await store.acquire(name, holder, harness.ttl)
        if isinstance(answer, Granted):
            return answer.grant
        await harness.pass_time(harness.ttl * LATE)
    raise AssertionError(f"{name!r} never became free")


async def holder(store: LeaseStore, name: str) -> str | None:
    """Return the holder of *name*."""
    answer = await store.inspect(name)
    return answer.holder if isinstance(answer, HeldBy) else None
