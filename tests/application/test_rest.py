"""The cost at rest for hours: leaders, candidates, observers and members, with hints and without, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from tenure._backends.memory import Memory, MemoryLeases
from tenure._election.store import Hint, LeaseStore, LeaseTraits
from tenure._timing import Timing
from tenure.testing._conformance.leases.rest import Crowd
from tenure.testing.conformance import FaultyLeaseStore
from tenure.testing.loop import VirtualLoop, run

NAMES, MEMBERS = 12, 2
TTL = 30.0
TTLS = 3
"""For how many leases they are at rest."""


class Usual(FaultyLeaseStore):
    """Its hints come."""


class Absent(FaultyLeaseStore):
    """Its hints are absent, as on a store that may not be watched."""

    async def hints(self, name: str) -> AsyncIterator[Hint]:
        yield "absent"
        await asyncio.Event().wait()


class Hintless(FaultyLeaseStore):
    """It never gives hints, as Azure Storage between machines."""

    @property
    def traits(self) -> LeaseTraits:
        return replace(super().traits, hints=False)


class Ending(FaultyLeaseStore):
    """Its hints end whenever they are asked for."""

    async def hints(self, name: str) -> AsyncIterator[Hint]:
        for _ in ():
            yield None


class Timed(FaultyLeaseStore):
    """The planted bug: a timer stands in for hints."""

    async def hints(self, name: str) -> AsyncIterator[Hint]:
        while True:
            yield None
            await asyncio.sleep(2.0)


class Returning(FaultyLeaseStore):
    """Its hints are absent for a while, and come again."""

    async def hints(self, name: str) -> AsyncIterator[Hint]:
        yield "absent"
        await asyncio.sleep(TTL / 2)
        yield None
        async for hint in self.store.hints(name):
            yield hint


@dataclass(frozen=True)
class Cost:
    """What is asked for each lease, or each member, during a lease of it."""

    leader: float
    candidate: float
    observer: float
    member: float


def cost(kind: type[FaultyLeaseStore]) -> Cost:
    """Let all roles rest on stores of this *kind*."""

    async def main() -> Cost:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        clock, memory = loop.clock(), Memory()

        async def open_client() -> LeaseStore:
            return kind(MemoryLeases(clock, memory))

        async with Crowd(open_client, "job", names=NAMES, ttl=TTL, members=MEMBERS, retry_every=None) as crowd:
            await asyncio.sleep(2 * TTL)
            before = crowd.asked["member", "inspect_many"]
            asked, _ = await crowd.watch(TTLS * TTL)
            looks = crowd.asked["member", "inspect_many"] - before
        each = {role: asked[role] / NAMES / TTLS for role in ("leader", "candidate", "observer")}
        return Cost(**each, member=looks / MEMBERS / TTLS)

    if kind not in _COSTS:
        _COSTS[kind] = run(main(), seed=1, limit=1e6)
    return _COSTS[kind]


_COSTS: dict[type[FaultyLeaseStore], Cost] = {}


def findings(kind: type[FaultyLeaseStore]) -> set[str]:
    """Return the roles that ask too often: leaders, which renew thrice, members, and those who wait for hints."""
    found, every = cost(kind), TTL / Timing(TTL).retry_every
    most = Cost(leader=3.6, candidate=1.05 * every, observer=1.05 * every, member=3.8)
    return {role for role, limit in vars(most).items() if getattr(found, role) > limit}


@pytest.mark.parametrize("kind", [Usual, Absent, Hintless, Ending, Returning])
def test_nobody_asks_more_often_than_in_its_own_time(kind: type[FaultyLeaseStore]) -> None:
    assert findings(kind) == set()


@pytest.mark.parametrize("kind", [Usual, Returning])
def test_hints_save_what_those_who_wait_ask(kind: type[FaultyLeaseStore]) -> None:
    assert cost(kind).candidate <= 2.0
    assert cost(kind).observer <= 2.0


def test_absent_hints_cost_what_a_store_without_any_does() -> None:
    """But for the requests at the two ends of the time in which they are counted, whose moments are random."""
    absent, none = cost(Absent), cost(Hintless)
    for role, expected in vars(none).items():
        assert getattr(absent, role) == pytest.approx(expected, rel=0.1, abs=1 / TTLS), role


def test_a_planted_timer_that_stands_in_for_hints_is_found() -> None:
    assert {"leader", "member"} <= findings(Timed)
