"""A store of leases under faults: lost answers, cut connections, late requests, restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tenure._election.driver import Driver
from tenure._election.elector import Election
from tenure._election.store import LeaseStore, LeaseTraits
from tenure._election.term import Term
from tenure._lease import Grant, Granted, HeldBy, Lost, NoAnswer, Released, Vacant
from tenure._runtime.clock import SystemClock
from tenure._runtime.renewal_thread import RenewalThread
from tenure._timing import Timing
from tenure.errors import TenureError, Unavailable
from tenure.events import CampaignFailed, Event, RenewalMissed, TermBegan, TermEnding
from tenure.events import Renewed as Extended
from tenure.testing import until
from tenure.testing._conformance.harness import FaultyLeaseStore, LeaseHarness, needs_fault
from tenure.testing._conformance.leases.hints_after_cut import HintAfterCutTests
from tenure.testing._conformance.leases.one_way import OneWayTests
from tenure.testing._conformance.leases.slow_answers import SlowAnswerTests
from tenure.testing._conformance.leases.steps import claim, holder, is_refused, look, win

BACK_WITHIN = 20.0  # seconds after a fault has ended


class LeaseFaultSuite(SlowAnswerTests, HintAfterCutTests, OneWayTests):
    """A request without an answer is neither a yes nor a no, and can be repeated."""

    # --- the answer is lost, after the command was carried out ---

    async def test_acquire_can_be_repeated(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        ann, bob = await harness.open(), await harness.open()
        for _ in range(2):
            async with harness.lose_answer(ann):
                with pytest.raises(Unavailable):
                    await ann.acquire(name, "ann#1", harness.ttl)
        seen = await bob.inspect(name)
        assert isinstance(seen, HeldBy)
        assert (await claim(ann, name, "ann#1", harness.ttl)).token == seen.token

    async def test_a_lost_acquisition_expires(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        ann, bob = await harness.open(), await harness.open()
        async with harness.lose_answer(ann):
            with pytest.raises(Unavailable):
                await ann.acquire(name, "ann#1", harness.ttl)
        seen = await bob.acquire(name, "bob#1", harness.ttl)
        assert isinstance(seen, HeldBy)
        await harness.outlast_lease()
        assert (await win(harness, bob, name, "bob#1")).token > seen.token

    async def test_renew_can_be_repeated(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        await look(bob, name)
        await harness.pass_time(harness.ttl * 0.6)
        async with harness.lose_answer(ann):
            with pytest.raises(Unavailable):
                await ann.renew([grant], harness.ttl)
        if harness.keeps_unanswered:
            await harness.pass_time(harness.ttl * 0.6)
            assert isinstance(await bob.acquire(name, "bob#1", harness.ttl), HeldBy)  # the renewal did count
        assert await ann.renew([grant], harness.ttl) == [Granted(grant)]

    async def test_release_can_be_repeated(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "lose_answer")
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        async with harness.lose_answer(ann):
            with pytest.raises(Unavailable):
                await ann.release(grant)
        assert await bob.inspect(name) == Vacant(name, grant.token)
        new = await claim(bob, name, "bob#1", harness.ttl)
        assert await ann.release(grant) == Lost(grant)  # asked again, late: it does not touch the next one
        assert await bob.renew([new], harness.ttl) == [Granted(new)]

    # --- a cut connection ---

    async def test_an_unreachable_store_is_reported_in_time(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "cut")
        store = await harness.open()
        grant = await claim(store, name, "ann#1", harness.ttl)
        async with harness.cut(store):
            for ask in (
                lambda: store.acquire(f"{name}-other", "ann#1", harness.ttl),
                lambda: store.renew([grant], harness.ttl),
                lambda: store.release(grant),
            ):
                asked_at = time.monotonic()
                with pytest.raises(Unavailable):
                    await ask()
                assert time.monotonic() - asked_at < harness.answer_within
        assert list(await store.renew([grant], harness.ttl)) == [Granted(grant)]
        await claim(store, f"{name}-other", "ann#1", harness.ttl)

    async def test_many_are_inspected_without_a_connection_in_time_or_not_at_all(
        self, harness: LeaseHarness, name: str
    ) -> None:
        needs_fault(harness, "cut")
        store = await harness.open()
        names = [f"{name}-{number}" for number in range(3)]
        await claim(store, names[1], "ann#1", harness.ttl)
        async with harness.cut(store):
            asked_at = time.monotonic()
            assert await holders_if_answered(store, names) in (None, [None, "ann#1", None])
            assert time.monotonic() - asked_at < harness.answer_within
            assert await holders_if_answered(store, []) == []  # there is nothing to ask
        assert await holders_if_answered(store, names) == [None, "ann#1", None]

    async def test_many_are_inspected_all_or_none(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "cut_one")
        store = await harness.open()
        names = [f"{name}-{number}" for number in range(3)]
        for each in names:
            await claim(store, each, "ann#1", harness.ttl)
        for cut in names:
            async with harness.cut_one(store, cut):
                assert await holders_if_answered(store, names) in (None, ["ann#1"] * 3)
        assert await holders_if_answered(store, names) == ["ann#1"] * 3

    async def test_a_cut_does_not_prolong_a_lease(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "cut")
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        async with harness.cut(ann):
            with pytest.raises(Unavailable):
                await ann.renew([grant], harness.ttl)
        await harness.outlast_lease()
        assert (await win(harness, bob, name, "bob#1")).token > grant.token
        assert await ann.renew([grant], harness.ttl) == [Lost(grant)]

    async def test_one_unreachable_grant_costs_the_others_nothing(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "cut_one")
        ann, bob = await harness.open(), await harness.open()
        cut = f"{name}-cut"
        others = [other for number in range(30) if harness.stored_apart(cut, other := f"{name}-{number}")]
        grants = [await claim(ann, one, "ann#1", harness.ttl) for one in (others[0], cut, others[1])]
        await look(bob, *(grant.name for grant in grants))
        await harness.pass_time(harness.ttl * 0.6)
        async with harness.cut_one(ann, grants[1].name):
            for asked in (grants, grants[::-1]):
                answers = list(await ann.renew(asked, harness.ttl))
                assert isinstance(answers.pop(1), NoAnswer)
                assert answers == [Granted(asked[0]), Granted(asked[2])]
            with pytest.raises(Unavailable):
                await ann.release(grants[1])
        await harness.pass_time(harness.ttl * 0.6)
        assert await holder(bob, grants[0].name) == "ann#1"
        assert await holder(bob, grants[2].name) == "ann#1"
        if harness.traits.expiry == "store clock":
            assert list(await ann.renew(grants, harness.ttl)) == [
                Granted(grants[0]),
                Lost(grants[1]),
                Granted(grants[2]),
            ]

    # --- given up, and carried out late ---

    @pytest.mark.parametrize("verb", ["renew", "acquire"])
    async def test_a_late_extension_does_not_shorten_a_lease(self, harness: LeaseHarness, name: str, verb: str) -> None:
        needs_fault(harness, "late")
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant)]
        async with harness.late(ann) as give_up:
            shorter = harness.ttl / 2
            await give_up(ann.renew([grant], shorter) if verb == "renew" else ann.acquire(name, "ann#1", shorter))
            await harness.pass_time(harness.ttl * 0.6)
            assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant)]
        await look(bob, name)
        await harness.pass_time(harness.ttl * 0.8)
        refused = await bob.acquire(name, "bob#1", harness.ttl)
        assert isinstance(refused, HeldBy)
        assert (refused.holder, refused.token) == ("ann#1", grant.token)
        assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant)]

    async def test_a_late_renewal_does_not_touch_the_next_term(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "late")
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant)]
        async with harness.late(ann) as give_up:
            await give_up(ann.renew([grant], harness.ttl))
            assert await ann.release(grant) == Released(grant)
            new = await claim(bob, name, "bob#1", harness.ttl)
        await is_still_held(bob, new, harness)

    async def test_a_late_acquisition_is_refused_beside_another_leader(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "late")
        ann, bob = await harness.open(), await harness.open()
        await ann.release(await claim(ann, name, "ann#1", harness.ttl))
        async with harness.late(ann) as give_up:
            await give_up(ann.acquire(name, "ann#1", harness.ttl))
            new = await claim(bob, name, "bob#1", harness.ttl)
        await is_still_held(bob, new, harness)

    async def test_a_late_acquisition_of_a_free_name_expires(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "late")
        ann, bob = await harness.open(), await harness.open()
        await ann.release(await claim(ann, name, "ann#1", harness.ttl))
        old = await claim(bob, name, "bob#1", harness.ttl)
        async with harness.late(ann) as give_up:
            await give_up(ann.acquire(name, "ann#1", harness.ttl))
            await bob.release(old)
        seen = await bob.inspect(name)
        if isinstance(seen, HeldBy):
            assert seen.holder == "ann#1"
            assert seen.token > old.token
        else:  # it was not carried out, or called off
            assert seen.token >= old.token
        await harness.outlast_lease()
        assert (await win(harness, bob, name, "bob#1")).token > seen.token

    async def test_a_late_release_does_not_end_the_next_term(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "late")
        ann, bob = await harness.open(), await harness.open()
        old = await claim(ann, name, "ann#1", harness.ttl)
        async with harness.late(ann) as give_up:
            await give_up(ann.release(old))
            await harness.outlast_lease()
            new = await win(harness, ann, name, "ann#1")
            assert new.token > old.token
        assert isinstance(await bob.acquire(name, "bob#1", harness.ttl), HeldBy)
        await is_still_held(ann, new, harness)

    # --- the schema is missing for a while ---

    async def test_the_store_is_used_again_when_it_is_back(self, harness: LeaseHarness, name: str) -> None:
        """Also by the clients that had failures; a candidate that has worked before asks again after any failure."""
        needs_fault(harness, "away")
        ann, bob = await harness.open(), await harness.open()
        grant = await claim(ann, name, "ann#1", harness.ttl)
        async with harness.away():
            for ask in (
                lambda: ann.renew([grant], harness.ttl),
                lambda: bob.acquire(name, "bob#1", harness.ttl),
                lambda: bob.inspect(name),
                lambda: bob.inspect_many([name, f"{name}-other"]),
            ):
                with pytest.raises(TenureError):
                    pytest.fail(f"the store is away, and answers: {await ask()}")
        assert list(await ann.renew([grant], harness.ttl)) == [Granted(grant)]
        assert await holder(bob, name) == "ann#1"
        refused = await bob.acquire(name, "bob#1", harness.ttl)
        assert isinstance(refused, HeldBy)
        assert refused.token == grant.token

    async def test_candidates_go_on_when_the_store_is_back(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "away")
        candidates = Candidates(name, harness.traits.ttl_min)
        try:
            leader = await candidates.candidate(await harness.open())
            await until(lambda: candidates.events_of(TermBegan))
            other = await candidates.candidate(await harness.open())
            async with harness.away():
                await until(
                    lambda: (
                        candidates.events_of(TermEnding)
                        or (candidates.events_of(RenewalMissed) and candidates.events_of(CampaignFailed))
                    )
                )
            assert not candidates.events_of(TermEnding)
            renewals = len(candidates.events_of(Extended))
            await until(lambda: len(candidates.events_of(Extended)) > renewals, within=BACK_WITHIN)
            assert len(candidates.events_of(TermBegan)) == 1
            leader.cancel()
            await until(lambda: len(candidates.events_of(TermBegan)) == 2)
            assert not other.done()
        finally:
            await candidates.close()

    # --- a restart ---

    async def test_tokens_and_leases_survive_a_restart(self, harness: LeaseHarness, name: str) -> None:
        needs_fault(harness, "restart")
        if not harness.traits.survives_restart:
            pytest.skip("this store loses its data when it is restarted")
        store = await harness.open()
        held = await claim(store, f"{name}-held", "ann#1", harness.ttl)
        free = await claim(store, f"{name}-free", "ann#1", harness.ttl)
        await store.release(free)
        await harness.restart()
        store = store if harness.has_sessions else await harness.open()
        assert await holder(store, held.name) == "ann#1"
        await is_refused(store, held.name, "bob#1", harness.ttl)
        assert list(await store.renew([held], harness.ttl)) == [Granted(held)]
        assert (await claim(store, free.name, "bob#1", harness.ttl)).token > free.token
        await store.release(held)
        assert (await claim(store, held.name, "bob#1", harness.ttl)).token > held.token


class _WithoutHints(FaultyLeaseStore):
    """A store without hints, so that a candidate polls."""

    @property
    def traits(self) -> LeaseTraits:
        return replace(self.store.traits, hints=False)


class Candidates:
    """Candidates for one name, each with a store of its own, all on the running loop."""

    def __init__(self, name: str, ttl_min: float) -> None:
        self._name = name
        self._timing = Timing(max(ttl_min, 10.0), renew_every=0.2, retry_every=0.1)
        self._drivers: list[Driver] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._events: list[Event] = []

    async def candidate(self, store: LeaseStore) -> asyncio.Task[None]:
        """Add a candidate, on a store that has worked before."""
        await store.inspect(self._name)
        driver = Driver(_WithoutHints(store), SystemClock())
        election = Election(
            self._name, self._timing, driver=driver, renewal_thread=RenewalThread.here(), on_event=self._events.append
        )
        self._drivers.append(driver)
        self._tasks.append(asyncio.create_task(election.run(_for_ever)))
        return self._tasks[-1]

    def events_of(self, kind: type[Event]) -> list[Event]:
        """Return the events of this *kind*, in order."""
        return [event for event in self._events if isinstance(event, kind)]

    async def close(self) -> None:
        """Stop all candidates."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for driver in self._drivers:
            await driver.close()


async def _for_ever(term: Term) -> None:
    await asyncio.Event().wait()


async def is_still_held(store: LeaseStore, grant: Grant, harness: LeaseHarness) -> None:
    seen = await store.inspect(grant.name)
    assert isinstance(seen, HeldBy)
    assert (seen.holder, seen.token) == (grant.holder, grant.token)
    assert list(await store.renew([grant], harness.ttl)) == [Granted(grant)]


async def holders_if_answered(store: LeaseStore, names: Sequence[str]) -> list[str | None] | None:
    """Return the holders of *names*; None if the store was unavailable."""
    try:
        seen = await store.inspect_many(names)
    except Unavailable:
        return None
    return [one.holder if isinstance(one, HeldBy) else None for one in seen]
