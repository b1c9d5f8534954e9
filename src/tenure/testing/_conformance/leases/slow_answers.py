"""Slow answers of a store of leases: a lease counts from before the request for it, however late its answer comes.

The time that passes while an answer is held back passes for the store and for the client. So a client that counts its
lease from the answer keeps a name from others, or trusts it beside them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from tenure._election.store import LeaseStore
from tenure._lease import Grant, Granted, HeldBy, Lost
from tenure.errors import Unavailable
from tenure.testing import until
from tenure.testing._conformance.harness import LeaseHarness, needs_fault
from tenure.testing._conformance.leases.steps import LeaseSuite, claim, is_refused, look

SLOW = 0.3
"""The share of a lease for which an answer is held back; after a third of it, some clients give a request up."""
OVER = 1.15
"""The share of a lease after which it is over: early enough that one that counts from a slow answer is not."""


class SlowAnswerTests(LeaseSuite):
    """What the answer to a request gives begins before the request was sent."""

    async def test_a_lease_does_not_begin_with_a_slow_answer(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "hold")
        ann, bob = await harness.open(), await harness.open()
        await ann.release(await claim(ann, name, "ann#1", harness.ttl))
        async with harness.hold(ann) as begin:
            asking = await begin(ann.acquire(name, "ann#2", harness.ttl))
            await look(bob, name)
            await harness.pass_time(harness.ttl * SLOW)
        answer = await asking
        assert isinstance(answer, Granted)
        await harness.pass_time(harness.ttl * (0.8 - SLOW))
        if answer.age < harness.ttl * 0.1:
            await is_refused(bob, name, "bob#1", harness.ttl)
        await harness.pass_time(harness.ttl * (OVER - 0.8) + harness.ends_within)
        new = await claim(bob, name, "bob#2", harness.ttl)
        assert new.token > answer.grant.token
        assert list(await ann.renew([answer.grant], harness.ttl)) == [Lost(answer.grant)]

    async def test_a_renewed_lease_does_not_begin_with_a_slow_answer(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "hold")
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        other = await claim(ann, f"{name}-other", "ann#1", harness.ttl)  # which keeps up a session of both
        await harness.pass_time(harness.ttl * 0.3)
        assert list(await ann.renew([other], harness.ttl)) == [Granted(other)]
        async with harness.hold(ann) as begin:
            asking = await begin(ann.renew([grant], harness.ttl))
            await look(bob, name)
            await harness.pass_time(harness.ttl * SLOW)
        [answer] = await asking
        assert answer == Granted(grant)
        await harness.pass_time(harness.ttl * (0.8 - SLOW))  # later than the first end
        assert list(await ann.renew([other], harness.ttl)) == [Granted(other)]
        if answer.age < harness.ttl * 0.1:
            await is_refused(bob, name, "bob#1", harness.ttl)
        await harness.pass_time(harness.ttl * (OVER - 0.8) + harness.ends_within)
        assert (await claim(bob, name, "bob#2", harness.ttl)).token > grant.token
        assert list(await ann.renew([grant], harness.ttl)) == [Lost(grant)]

    async def test_a_renewal_that_arrives_after_the_end_does_not_stand(self, harness: LeaseHarness, name: str) -> None:
        """The client has sent it in time, and waits for the answer; meanwhile, another candidate leads."""
        needs_fault(harness, "hold")
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await look(bob, name)
        await harness.pass_time(harness.ttl * 0.6)  # so that it is sent in time also on a busy machine
        async with harness.hold(ann, "up") as begin:
            asking = asyncio.ensure_future(absorbed(await begin(ann.renew([grant], harness.ttl))))
            await harness.pass_time(harness.ttl * (OVER - 0.6) + harness.ends_within)
            answer = await bob.acquire(name, "bob#1", harness.ttl)
            assert isinstance(answer, Granted) or harness.has_sessions  # one lasts until its client can end the claim
        assert await asking in ([Lost(grant)], None)
        assert list(await ann.renew([grant], harness.ttl)) == [Lost(grant)]
        if harness.has_sessions:  # the client never holds it again; the store may still have to learn that
            await until(lambda: _is_ended(bob, grant))
        new = await claim(bob, name, "bob#1", harness.ttl)
        assert new.token > grant.token

    async def test_what_another_holds_does_not_begin_with_a_slow_question(
        self, harness: LeaseHarness, name: str
    ) -> None:
        """A question that arrives late is answered by what is so then: the lease that it shows lasts from there."""
        needs_fault(harness, "hold")
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await look(bob, name)
        async with harness.hold(bob, "up") as begin:
            asking = await begin(bob.inspect(name))
            await harness.pass_time(harness.ttl * SLOW)
            assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant)]
        await asking
        await harness.pass_time(harness.ttl * (OVER - SLOW))
        await is_refused(bob, name, "bob#1", harness.ttl)
        assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant)]


async def absorbed(asking: Awaitable[object]) -> object:
    """Return an answer; None if it is not known."""
    try:
        return await asking
    except Unavailable:
        return None


async def _is_ended(store: LeaseStore, grant: Grant) -> bool:
    """Return whether the store has ended this claim."""
    found = await store.inspect(grant.name)
    return not isinstance(found, HeldBy) or found.token != grant.token
