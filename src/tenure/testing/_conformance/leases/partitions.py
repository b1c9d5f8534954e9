"""Partitions shared by members, one of which has a link that works one way: the others own its share in time.

Its requests arrive, and their answers don't; or nothing arrives. The members are the real ones, each on a client of its
own. Their clock is turned together with the store's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, cast, get_args

import pytest

from tenure._election.driver import Driver
from tenure._election.effects import Tick
from tenure._election.store import LeaseStore, LeaseTraits
from tenure._lease import NO_METADATA, Granted, HeldBy, Metadata
from tenure._partitions.machine import PartitionMachine
from tenure._partitions.partitions import Partitions, PartitionTerm
from tenure._partitions.plan import SLOT, Layout, checked_partitions
from tenure._runtime.renewal_thread import RenewalThread
from tenure._timing import Timing
from tenure.errors import Unavailable
from tenure.testing import ManualClock
from tenure.testing._conformance.client_time import LATE_SHARE, ClientTime, LateAnswers
from tenure.testing._conformance.harness import FaultyLeaseStore, LeaseHarness
from tenure.testing._conformance.leases.steps import LeaseSuite

T = TypeVar("T")

PARTITIONS = 4
LEASES = 10
"""For how many leases a link works one way."""
BALANCED_AFTER_LEASES = 2.0
"""The leases within which all members own their shares, once every link is whole."""
LOOKS_SHARE = 1.2
"""The share of ``renew_every`` within which a member looks again that has nothing to do."""
STEP_SHARE = 0.5
"""The share of ``retry_every`` that passes at least, whenever time passes."""
ANSWERED_WITHIN = 60.0
"""Seconds in which a busy store answers, or a test ends."""
QUIET = 30
"""The iterations of the loop without a request after which no member has anything to do at this time."""

HalfCut = Literal["lose_answer", "cut"]

Act = Literal["claims a slot", "asks for a partition", "claims a partition"]


class PartitionSuite(LeaseSuite):
    """A member whose link works one way keeps no partition from the others, and works on none beside them."""

    @pytest.mark.parametrize("fault", ["lose_answer", "cut"])
    async def test_the_share_of_a_member_that_is_half_cut_off_is_owned_by_the_others(
        self, harness: LeaseHarness, name: str, fault: HalfCut
    ) -> None:
        """Requests that arrive extend its leases as long as its work may run, and its membership no longer."""
        async with group(harness, name) as members:
            for one in ("ann", "bob", "cat"):
                await members.join(one)
            await members.balance()
            assert members.works_on("ann")
            async with members.half_cut("ann", fault):
                lasts = members.longest(fault)
                await members.pass_time(lasts)
                await members.hold_on(["bob", "cat"], LEASES * members.timing.ttl - lasts)
            await members.balance()
            assert members.works_on("ann")

    @pytest.mark.parametrize("fault", ["lose_answer", "cut"])
    @pytest.mark.parametrize("act", get_args(Act))
    async def test_a_newcomer_that_is_half_cut_off_keeps_nothing_from_the_others(
        self, harness: LeaseHarness, name: str, act: Act, fault: HalfCut
    ) -> None:
        """The others may count it as a member, and wait for it to claim what they gave."""
        async with group(harness, name) as members:
            await members.join("bob")
            await members.balance()
            async with members.half_cut("ann", fault, when_it=act):
                await members.join("ann")
                await members.until_half_cut("ann")
                await members.pass_time(members.longest(fault))
                await members.hold_on(["bob"], members.timing.ttl)
            await members.balance()
            assert members.works_on("ann")

    async def test_a_member_whose_answers_are_late_owns_its_share_and_keeps_it(
        self, harness: LeaseHarness, name: str
    ) -> None:
        async with group(harness, name) as members:
            await members.join("bob")
            await members.balance()
            await members.join("ann", late=True)
            await members.pass_time(members.timing.ttl)  # the balance of before holds until they have seen each other
            await members.balance()
            assert members.works_on("ann")
            await members.hold_on(["ann", "bob"], LEASES * members.timing.ttl)

    async def test_a_member_whose_answers_are_late_follows_one_that_is_dead(
        self, harness: LeaseHarness, name: str
    ) -> None:
        async with group(harness, name) as members:
            await members.join("ann", late=True)
            await members.join("bob")
            await members.balance()
            assert members.works_on("bob")
            async with members.half_cut("bob", "cut"):
                await members.pass_time(members.longest("cut") + members.late_by(2))
                await members.hold_on(["ann"], members.timing.ttl)


class Group:
    """Members that share partitions. Time passes only in its methods, for all of them and for the store."""

    def __init__(self, harness: LeaseHarness, name: str) -> None:
        ttl = harness.ttl
        self.timing = Timing(ttl, retry_every=ttl / 5)  # long: a member that gets no answer looks as often
        self._step_min = STEP_SHARE * self.timing.retry_every
        # Where a store doesn't tell when a lease ends, only a look finds that, or the last renewal.
        noticed_within = 0.0 if harness.traits.tells_remaining else LOOKS_SHARE * self.timing.renew_every
        self._followed_within = noticed_within + self.timing.retry_every + harness.ends_within + self._step_min
        self._harness = harness
        self._layout = Layout(name, checked_partitions(PARTITIONS))
        self._time = ClientTime(harness)
        self._clock = self._time.clock
        self._links: dict[str, Link] = {}
        self._members: dict[str, Member] = {}
        self._tokens: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._begun = 0

    async def join(self, name: str, *, late: bool = False) -> None:
        """Let a member take part, whose answers may be late."""
        work = partial(self._work, name)
        link = await self._link(name, late_by=LATE_SHARE * self.timing.retry_every if late else 0.0)
        self._members[name] = Member(self._layout, self.timing, link, self._clock, name, work)
        await self._settle()

    @asynccontextmanager
    async def half_cut(self, name: str, fault: HalfCut, *, when_it: Act | None = None) -> AsyncIterator[None]:
        """Inside the block, a member's link works one way: at once, or from an act on; it may not have joined yet."""
        link = await self._link(name)
        with link.half_cut(fault, when_it):
            yield

    async def until_half_cut(self, name: str) -> None:
        """Let time pass until a member's link works one way."""
        until_at, link = self._clock.now() + BALANCED_AFTER_LEASES * self.timing.ttl, self._links[name]
        while not link.is_half_cut:
            left = until_at - self._clock.now()
            assert left > 0, f"{name} has not done what cuts it off: {self}"
            await self._step(left)

    def longest(self, fault: HalfCut) -> float:
        """Return the seconds within which others own the partitions of a member whose link works one way.

        Requests that arrive extend its leases as long as it may still trust them: nearly a ttl.
        """
        return self.timing.ttl * (2 if fault == "lose_answer" else 1) + self._followed_within

    def late_by(self, answers: int) -> float:
        """Return the seconds by which so many answers are late that a member waits for one after the other."""
        return answers * LATE_SHARE * self.timing.retry_every

    async def _link(self, name: str, *, late_by: float = 0.0) -> Link:
        if name not in self._links:
            self._links[name] = Link(await self._harness.open(), LateAnswers(self._clock, late_by))
        return self._links[name]

    def works_on(self, name: str) -> set[str]:
        """Return the partitions that a member works on."""
        return set(self._members[name].works)

    async def balance(self) -> None:
        """Let time pass until each member works on its share; fail if that takes too long."""
        until_at = self._clock.now() + BALANCED_AFTER_LEASES * self.timing.ttl
        while not self._is_balanced:
            left = until_at - self._clock.now()
            assert left > 0, f"no balance after {BALANCED_AFTER_LEASES:g} leases: {self}"
            await self._step(left)

    @property
    def _is_balanced(self) -> bool:
        members = self._members.values()
        return (
            self._covered == set(self._layout.partitions)
            and all(one.machine.member is not None and len(one.works) == one.machine.share for one in members)
            and sum(one.machine.share for one in members) == PARTITIONS
        )

    @property
    def _covered(self) -> set[str]:
        return {partition for one in self._members.values() for partition in one.works}

    async def pass_time(self, seconds: float) -> None:
        """Let so many seconds pass."""
        until_at = self._clock.now() + seconds
        while (left := until_at - self._clock.now()) > 0:
            await self._step(left)

    async def hold_on(self, names: list[str], seconds: float) -> None:
        """Let so many seconds pass, in which these members work on all partitions, and none moves."""
        until_at, begun = self._clock.now() + seconds, self._begun
        while True:
            covered = {partition for name in names for partition in self.works_on(name)}
            assert covered == set(self._layout.partitions), f"{' and '.join(names)} work on too few: {self}"
            assert self._begun == begun, f"partitions moved: {self}"
            left = until_at - self._clock.now()
            if left <= 0:
                return
            await self._step(left)

    async def _step(self, most: float) -> None:
        """Let time pass until any member has something to do, but no more than *most* seconds."""
        due = min(*(one.due for one in self._members.values()), *(one.answers.due for one in self._links.values()))
        wait = min(max(due - self._clock.now(), self._step_min), most)
        await self._time.pass_time(wait)
        for link in self._links.values():
            link.answers.let_through()
        await self._settle()
        for one in self._members.values():
            one.go_on()
            await self._settle()

    async def _settle(self) -> None:
        """Wait until every request is answered, and nobody sends another one at this time."""
        quiet = 0
        while quiet < QUIET:
            quiet += 1
            for link in self._links.values():
                if not link.requests.all_answered.is_set():
                    async with asyncio.timeout(ANSWERED_WITHIN):
                        await link.requests.all_answered.wait()
                    quiet = 0
            await asyncio.sleep(0)
        for name, one in self._members.items():
            if one.has_ended:
                self._wrong.append(f"{name} has ended")
        assert not self._wrong, f"{self._wrong}: {self}"

    async def _work(self, name: str, term: PartitionTerm) -> None:
        """Work on a partition until the term ends, and note whoever works on it too."""
        partition, me = term.partition, self._members[name]
        others = [other for other, one in self._members.items() if partition in one.works]
        self._wrong += [f"{other} and {name} work on {partition}" for other in others]
        if term.token <= self._tokens[partition]:
            self._wrong.append(f"the token of {partition} fell from {self._tokens[partition]} to {term.token}")
        self._tokens[partition] = term.token
        self._begun += 1
        me.works[partition] = asyncio.current_task()
        try:
            await asyncio.Event().wait()
        finally:
            del me.works[partition]

    def __str__(self) -> str:
        return ", ".join(
            f"{name} works on {sorted(one.works)} of a share of {one.machine.share}"
            for name, one in self._members.items()
        )

    async def close(self) -> None:
        """End all members; what they hold is left to run out."""
        for link in self._links.values():
            link.answers.end()
        for one in self._members.values():
            await one.close()


class Member:
    """One process: what a backend gives its user, on the loop and the clock of the test."""

    def __init__(
        self,
        layout: Layout,
        timing: Timing,
        link: Link,
        clock: ManualClock,
        label: str,
        work: Callable[[PartitionTerm], Awaitable[None]],
    ) -> None:
        self.works: dict[str, asyncio.Task[None] | None] = {}
        """The tasks that work now, by partition."""
        self._clock = clock
        self._driver = Driver(link, clock)
        self._partitions = Partitions(
            layout, timing, driver=self._driver, renewal_thread=RenewalThread.here(), options={"label": label}
        )
        self._running = asyncio.create_task(self._partitions.run(work, sigterm=False))

    @property
    def machine(self) -> PartitionMachine:
        """What decides for it."""
        assert self._partitions._owner is not None
        return self._partitions._owner.machine

    @property
    def has_ended(self) -> bool:
        """Whether it takes part no more, though nobody has ended it."""
        return self._running.done()

    @property
    def due(self) -> float:
        """When it has something to do next."""
        return min([self.machine.wake_at, *(one.machine.wake_at for one in self._driver.candidacies)])

    def go_on(self) -> None:
        """Do what is due now."""
        assert self._partitions._owner is not None
        self._partitions._owner._changed.set()
        for candidacy in list(self._driver.candidacies):
            if candidacy.machine.wake_at <= self._clock.now():
                candidacy.feed(Tick())

    async def close(self) -> None:
        """End it, whatever is unanswered."""
        self._running.cancel()
        async with asyncio.timeout(ANSWERED_WITHIN):
            while not self._running.done():
                await asyncio.sleep(0)  # it ends its work, and begins to release its leases
                for candidacy in list(self._driver.candidacies):
                    candidacy.fail(Unavailable("the test is over"))
                for work in self.works.values():
                    if work is not None:
                        work.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._driver.close()


class Link(FaultyLeaseStore):
    """The link of one client, which can be made to work one way.

    No hints come, and no renewals of others are followed: they would come at times of their own.
    """

    def __init__(self, store: LeaseStore, answers: LateAnswers) -> None:
        self.requests = Requests(store)
        self.answers = answers
        super().__init__(cast(LeaseStore, self.requests))
        self._fault: HalfCut | None = None
        self._when_it: Act | None = None

    @property
    def traits(self) -> LeaseTraits:
        """The traits of the store, without what comes unasked."""
        return replace(self.store.traits, hints=False, follows_renewals=False)

    @property
    def is_half_cut(self) -> bool:
        """Whether it works one way now."""
        return self._losing or self._is_cut

    @contextmanager
    def half_cut(self, fault: HalfCut, when_it: Act | None) -> Iterator[None]:
        """Inside the block, it works one way: at once, or from an act on."""
        self._fault, self._when_it = fault, when_it
        self._before(None)
        try:
            yield
        finally:
            self._fault = None
            self._losing = self._is_cut = False

    def _before(self, act: Act | None) -> None:
        if self._fault is not None and act == self._when_it:
            self._losing, self._is_cut = self._fault == "lose_answer", self._fault == "cut"

    async def _before_answer(self) -> None:
        await self.answers.hold_back()
        await super()._before_answer()

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        """Pass the request on."""
        self._before("claims a slot" if name.rpartition(".")[2].startswith(SLOT) else "claims a partition")
        return await super().acquire(name, holder, ttl, metadata)

    async def ask_to_resign(self, name: str) -> bool:
        """Pass the request on."""
        self._before("asks for a partition")
        return await super().ask_to_resign(name)


class Requests:
    """The requests of one client to its store, of which it is known whether all are answered."""

    def __init__(self, store: LeaseStore) -> None:
        self.all_answered = asyncio.Event()
        self.all_answered.set()
        self._store = store
        self._unanswered = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return found if name == "traits" else partial(self._ask, found)

    async def _ask(self, request: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        self._unanswered += 1
        self.all_answered.clear()
        try:
            return await request(*arguments)
        finally:
            self._unanswered -= 1
            if not self._unanswered:
                self.all_answered.set()


@asynccontextmanager
async def group(harness: LeaseHarness, name: str) -> AsyncIterator[Group]:
    """Yield a group that nobody has joined."""
    members = Group(harness, name)
    try:
        yield members
    finally:
        await members.close()
