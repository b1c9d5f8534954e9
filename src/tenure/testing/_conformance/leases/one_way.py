"""Links that work one way: one candidate is half cut off for many leases, and the others lead in time all the same.

Its requests arrive, and their answers don't; or they don't arrive; or the answers are late. The candidates are the real
ones. Their clock is turned together with the store's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tenure._election.driver import Candidacy, Driver
from tenure._election.effects import Resign, Stop, Tick, WorkEnded
from tenure._election.machine import Machine
from tenure._election.store import LeaseStore
from tenure._lease import NO_METADATA, Grant, Metadata
from tenure._runtime.renewal_thread import LoopProbe
from tenure._timing import Timing
from tenure.errors import ConfigError
from tenure.events import Event, Reason
from tenure.testing import ManualClock, until
from tenure.testing._conformance.client_time import LATE_SHARE, LateAnswers
from tenure.testing._conformance.harness import FaultyLeaseStore, LeaseHarness
from tenure.testing._conformance.leases.steps import LeaseSuite

LEASED = 100.0
"""Seconds for which a link works one way, after another candidate leads: ten of most leases in the suites."""
STEP_MIN = 0.001
"""Seconds that pass at least, whenever time passes."""


class OneWayTests(LeaseSuite):
    """A candidate whose link works one way keeps no name from the others."""

    @pytest.mark.parametrize("fault", ["lose_answer", "cut"])
    async def test_a_candidate_that_is_half_cut_off_keeps_a_free_name_from_nobody(
        self, harness: LeaseHarness, name: str, fault: str
    ) -> None:
        """Its first request may be carried out: it holds the name, and does not know. It must not extend that."""
        async with fleet(harness, name) as candidates:
            async with candidates.half_cut("ann", fault):
                await candidates.join("ann")
                await candidates.join("bob")
                await candidates.lead("bob", within=candidates.timing.ttl + candidates.promised)
                await candidates.hold_on("bob")
            assert not candidates.terms_of("ann")

    @pytest.mark.parametrize("fault", ["lose_answer", "cut"])
    async def test_a_leader_that_is_half_cut_off_is_followed(
        self, harness: LeaseHarness, name: str, fault: str
    ) -> None:
        """Requests that arrive extend its lease as long as it may still lead, and no longer."""
        async with fleet(harness, name) as candidates:
            await candidates.join("ann")
            await candidates.lead("ann", within=candidates.promised)
            await candidates.join("bob")
            async with candidates.half_cut("ann", fault):
                lasts = candidates.timing.ttl * (2 if fault == "lose_answer" else 1)
                await candidates.lead("bob", within=lasts + candidates.promised)
                assert candidates.terms_of("ann") == ["began", "unanswered"]
                await candidates.hold_on("bob")

    async def test_a_candidate_that_is_half_cut_off_keeps_a_name_that_becomes_free_from_nobody(
        self, harness: LeaseHarness, name: str
    ) -> None:
        async with fleet(harness, name) as candidates:
            await candidates.join("cat")
            await candidates.lead("cat", within=candidates.promised)
            await candidates.join("ann")
            async with candidates.half_cut("ann", "lose_answer"):
                await candidates.pass_time(candidates.timing.ttl)
                candidates.stop("cat")
                await candidates.settle()
                await candidates.pass_time(candidates.timing.retry_every)  # ann asks first
                await candidates.join("bob")
                await candidates.lead("bob", within=2 * candidates.timing.ttl + candidates.promised)
                await candidates.hold_on("bob")

    async def test_a_leader_whose_answers_are_slow_leads_on(self, harness: LeaseHarness, name: str) -> None:
        async with fleet(harness, name, late_by=LATE_SHARE) as candidates:
            await candidates.join("ann")
            await candidates.lead("ann", within=candidates.promised)
            await candidates.join("bob")
            await candidates.hold_on("ann")
            assert candidates.terms_of("ann") == ["began"]
            assert not candidates.terms_of("bob")


class Fleet:
    """Candidates for one name, each on a client of its own. Time passes only in :meth:`pass_time`, for all of them."""

    def __init__(self, harness: LeaseHarness, name: str, late_by: float) -> None:
        self.timing = Timing(harness.ttl)
        asks_every = self.timing.ttl / 3 if harness.traits.queued else self.timing.retry_every
        self.promised = asks_every + self.timing.retry_every + harness.ends_within
        """The seconds within which a name that is free has a leader, if no hint tells that."""
        self._harness = harness
        self._name = name
        self._clock = ManualClock()
        self._late_by = late_by * self.timing.retry_every
        self._candidates: dict[str, Candidate] = {}
        self._links: dict[str, Link] = {}

    async def join(self, holder: str) -> None:
        """Begin a candidacy; it asks for the name at once, and that is answered, or lost."""
        candidate = Candidate(self._name, holder, self.timing, await self._link(holder), self._clock)
        self._candidates[holder] = candidate
        candidate.feed(Tick())
        await self.settle()

    @asynccontextmanager
    async def half_cut(self, holder: str, fault: str) -> AsyncIterator[None]:
        """Inside the block, the link of a candidate works one way; it may not have joined yet."""
        link = await self._link(holder)
        async with link.lose_answer() if fault == "lose_answer" else link.cut():
            yield

    async def _link(self, holder: str) -> Link:
        if holder not in self._links:
            answers = LateAnswers(self._clock, self._late_by)
            self._links[holder] = Link(await self._harness.open(), answers)
        return self._links[holder]

    def stop(self, holder: str) -> None:
        """End a candidacy; its lease is released."""
        candidate = self._candidates[holder]
        candidate.feed(Stop())
        candidate.feed(Resign())

    async def lead(self, holder: str, *, within: float) -> None:
        """Let time pass until *holder* leads; fail if that takes more than *within* seconds."""
        until_at = self._clock.now() + within
        while not self._candidates[holder].leads:
            left = until_at - self._clock.now()
            assert left > 0, f"{holder} doesn't lead after {within:g} s; {self._told()}"
            await self._step(left)

    async def hold_on(self, holder: str) -> None:
        """Let the time of several leases pass, in which *holder* leads all the time."""
        until_at = self._clock.now() + LEASED
        while (left := until_at - self._clock.now()) > 0:
            await self._step(left)
            assert self._candidates[holder].leads, f"{holder} lost the name; {self._told()}"

    async def pass_time(self, seconds: float) -> None:
        """Let so many seconds pass."""
        until_at = self._clock.now() + seconds
        while (left := until_at - self._clock.now()) > 0:
            await self._step(left)

    async def settle(self) -> None:
        """Wait until every request is answered, or its answer is late."""
        for candidate in self._candidates.values():
            await candidate.settle()

    def terms_of(self, holder: str) -> list[str]:
        """Return what a candidate has told of the beginnings and ends of its terms."""
        return self._candidates[holder].terms

    async def _step(self, most: float) -> None:
        """Let time pass until anybody has something to do, but no more than *most* seconds."""
        now = self._clock.now()
        due = min(candidate.due for candidate in self._candidates.values())
        wait = min(max(due - now, STEP_MIN), most)
        await self._harness.pass_time(wait)
        self._clock.advance(wait)
        for candidate in list(self._candidates.values()):
            candidate.go_on()
            await candidate.settle()

    def _told(self) -> str:
        return ", ".join(f"{one}: {candidate.state}" for one, candidate in self._candidates.items())

    async def close(self) -> None:
        """End all candidacies."""
        for candidate in self._candidates.values():
            await candidate.close()


class Candidate:
    """One candidate, whose work ends when it is told to: it is its own :class:`~tenure._election.driver.WorkHost`."""

    metadata: Metadata = NO_METADATA
    probe: LoopProbe | None = None
    health_check: object | None = None

    def __init__(self, name: str, holder: str, timing: Timing, link: Link, clock: ManualClock) -> None:
        self.terms: list[str] = []
        """What has become of its terms."""
        self._clock = clock
        self._link = link
        self._driver = Driver(link, clock)
        traits = link.traits
        self._machine = Machine(
            name, holder, timing, random.Random(0), hints=traits.hints, queued=traits.queued, now=clock.now()
        )
        # It is not started: that follows hints, which come at times of their own, and may be lost.
        self._candidacy = Candidacy(self._driver, self._machine, self)
        self._ended: list[tuple[int, bool]] = []
        self.feed = self._candidacy.feed

    @property
    def leads(self) -> bool:
        """Whether it leads, in a term that is trusted."""
        return self._machine.grant is not None and self._clock.now() < self._machine.trusted_until

    @property
    def state(self) -> str:
        """What it does, in words."""
        return f"{self._machine.state.value} ({self._machine.problem or 'no problem'})"

    @property
    def due(self) -> float:
        """When it has something to do next."""
        return min(self._machine.wake_at, self._link.answers.due)

    def go_on(self) -> None:
        """Do what is due now."""
        self._link.answers.let_through()
        if self._machine.wake_at <= self._clock.now():
            self.feed(Tick())

    async def settle(self) -> None:
        """Wait until every request is answered, or its answer is late; say that work has ended that was cancelled."""
        await asyncio.sleep(0)  # renewals go out in the next iteration of the loop
        while True:
            await until(lambda: len(self._driver._tasks.here()) <= self._link.answers.waiting)
            if not self._ended:
                return
            token, again = self._ended.pop()
            self.feed(WorkEnded(token, again))
            await asyncio.sleep(0)

    async def close(self) -> None:
        """End it, whatever is unanswered."""
        self._candidacy.fail(ConfigError("the test is over"))
        await self._driver._tasks.cancel_all()

    # --- as the owner of its work ---

    def start_work(self, grant: Grant, trusted_until: float) -> None:
        """Note that it leads."""
        self.terms.append("began")

    def cancel_work(self, token: int, reason: Reason) -> None:
        """Note that its work ends at once."""
        self.terms.append(reason)
        self._ended.append((token, reason != "stopped"))

    def set_trust(self, token: int, until: float) -> None:
        """Nothing reads it: :attr:`leads` asks the machine."""

    def set_overrun_time(self, at: float) -> None:
        """Nothing overruns."""

    def work_overran(self, token: int) -> None:
        """Nothing overruns."""

    def stall_reason(self) -> str | None:
        """Its work never stalls."""
        return None

    async def health_problem(self, within: float) -> str | None:
        """Its work is always well."""
        return None

    def candidacy_failed(self, error: BaseException) -> None:
        """It is over, for a reason that the test will find."""
        self.terms.append(f"failed: {error}")

    def candidacy_ended(self) -> None:
        """It is over."""

    def emit(self, event: Event) -> None:
        """Nobody observes it."""


class Link(FaultyLeaseStore):
    """The link of one client: it can be made to work one way; or its answers are late."""

    def __init__(self, store: LeaseStore, answers: LateAnswers) -> None:
        super().__init__(store)
        self.answers = answers

    async def _before_answer(self) -> None:
        await self.answers.hold_back()
        await super()._before_answer()


@asynccontextmanager
async def fleet(harness: LeaseHarness, name: str, late_by: float = 0.0) -> AsyncIterator[Fleet]:
    """Yield candidates for *name*, whose answers are late by a share of the time that is waited for them."""
    candidates = Fleet(harness, name, late_by)
    try:
        yield candidates
    finally:
        await candidates.close()
