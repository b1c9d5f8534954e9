"""The cost of leases at rest: while nothing happens, only what is due is asked, also where no hints come.

Processes of each role do nothing for a while: leaders, candidates that stand by, observers, and a member that owns
partitions. What they ask for is counted at the port. Their leases are long, so that nothing is due but what those ask
who wait without hints.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import pytest

from tenure._election.driver import Driver
from tenure._election.elector import Election
from tenure._election.store import LeaseStore
from tenure._election.term import Term
from tenure._lease import HeldBy
from tenure._partitions.partitions import Partitions, PartitionTerm
from tenure._partitions.plan import Layout
from tenure._runtime.clock import Clock, SystemClock
from tenure._runtime.renewal_thread import RenewalThread
from tenure._timing import EARLY_RENEWAL_SHARE, Timing
from tenure.events import Event, StandingBy, TermBegan
from tenure.testing import until
from tenure.testing._conformance.harness import LeaseHarness
from tenure.testing._conformance.leases.steps import LeaseSuite
from tenure.testing.loop import VirtualLoop

NAMES = 12
"""The elections, each with a leader, a candidate that stands by, and an observer."""
PARTITIONS = 8
RETRY_EVERY = 1.0
"""Seconds between the requests of those who wait without hints."""
WATCHED = 2.5
"""Seconds for which they are watched at rest: a timer of two seconds is seen."""
QUIET = 0.5
"""Seconds without a request after which those are at rest that have no reason to ask: an early renewal comes sooner."""
WITHIN = 60.0
"""Seconds within which all have begun."""

ON_TIME = "leader", "member"
"""Those who ask in their own time only, whether hints come or not. Others do, too, while hints come, unless they can't
know how long a lease lasts."""

VERBS = frozenset({"acquire", "renew", "release", "inspect", "inspect_many", "names", "ask_to_resign", "withdraw"})

Open = Callable[[], Awaitable[LeaseStore]]
"""Returns a new client, which stands for another process."""


class LeaseRestSuite(LeaseSuite):
    """What processes at rest ask for: nothing before it is due; those who wait without hints every ``retry_every``."""

    async def test_with_hints_nobody_asks_before_it_is_due(self, harness: LeaseHarness, name: str) -> None:
        if not harness.traits.hints:
            pytest.skip("this store gives no hints")
        async with Crowd(harness.open, name, ttl=harness.long_ttl) as crowd:
            wait_for_hints = ("candidate", "observer") if harness.traits.tells_remaining else ()
            await crowd.rest(*ON_TIME, *wait_for_hints)
            asked, seconds = await crowd.watch(WATCHED)
        crowd.require_rest(asked, *ON_TIME, *wait_for_hints)
        crowd.require_pauses(asked, seconds)

    async def test_without_hints_only_those_who_wait_ask(self, harness: LeaseHarness, name: str) -> None:
        if not harness.hintless:
            pytest.skip("hints come here whenever requests are answered")
        for how in harness.hintless:
            open_client = partial(harness.open_without_hints, how)
            async with Crowd(open_client, f"{name}-{how.lower().replace(' ', '-')}", ttl=harness.long_ttl) as crowd:
                await crowd.ask_in_their_own_time("candidate", "observer")
                await crowd.rest(*ON_TIME)
                asked, seconds = await crowd.watch(WATCHED)
            crowd.require_rest(asked, *ON_TIME)
            crowd.require_pauses(asked, seconds)


class Crowd:
    """Processes that have begun, and are ended at the end of the block.

    Args:
        open_client: Opens a client for each of them.
        name: Begins the names of their elections.
        names: How many elections there are.
        ttl: The length of the leases.
        retry_every: How often those who wait ask without hints; None: as is usual.
        members: How many processes share partitions.
    """

    def __init__(
        self,
        open_client: Open,
        name: str,
        *,
        ttl: float,
        names: int = NAMES,
        members: int = 1,
        retry_every: float | None = RETRY_EVERY,
    ) -> None:
        self._open = open_client
        self._name = name
        self._names = [f"{name}-{number}" for number in range(names)]
        self._members = members
        self.asked: Counter[tuple[str, str]] = Counter()
        """By role and verb, how many leases were asked about; a look at a group counts as one."""
        self._drivers: list[Driver] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._events: list[Event] = []
        self._observed: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._began = math.inf
        self._clock: Clock = self._loop.clock() if isinstance(self._loop, VirtualLoop) else SystemClock()
        self.timing: Timing = Timing(ttl) if retry_every is None else Timing(ttl, retry_every=retry_every)

    async def __aenter__(self) -> Self:
        try:
            await self._begin()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end()

    async def _begin(self) -> None:
        self._began = self._clock.now()
        for role, kind in (("leader", TermBegan), ("candidate", StandingBy)):
            driver = await self._driver(role)
            for name in self._names:
                self._run(self._election(name, driver).run(_for_ever))
            await until(partial(self._have_all, kind))
        observers = await self._driver("observer")
        for name in self._names:
            self._run(self._observe(observers, name))
        await until(lambda: len(self._observed) == len(self._names))
        group = [self._partitions(await self._driver("member")) for _ in range(self._members)]
        for member in group:
            self._run(member.run(_for_ever))
        share = PARTITIONS // self._members
        within = (
            WITHIN if self._members == 1 else 2 * self.timing.ttl
        )  # without hints, each learns of others as it looks
        await until(lambda: all(len(member.owned) == share for member in group), within=within)

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for driver in self._drivers:
            await driver.close()

    async def rest(self, *roles: str) -> None:
        """Return when these *roles*, or all, ask nothing for a moment."""
        async with asyncio.timeout(WITHIN):
            before = None
            while before != (now := self._total(*roles)):
                before = now
                await asyncio.sleep(QUIET)

    async def ask_in_their_own_time(self, *roles: str) -> None:
        """Return when processes of each of these *roles* have asked again: they know that no hints come."""
        began = {role: self._total(role) for role in roles}
        await until(lambda: all(self._total(role) >= began[role] + len(self._names) / 2 for role in roles))

    async def watch(self, seconds: float) -> tuple[dict[str, int], float]:
        """Return what each role asks for in the next *seconds*, and how many these were: the machine may be busy."""
        roles = {role for role, _ in self.asked}
        before, began = {role: self._total(role) for role in roles}, self._clock.now()
        await asyncio.sleep(seconds)
        return {role: self._total(role) - before[role] for role in roles}, self._clock.now() - began

    def require_rest(self, asked: Mapping[str, int], *roles: str) -> None:
        """Fail if processes of these *roles* have asked for anything; skip the test if a renewal may have been due."""
        if self._clock.now() - self._began > (1 - EARLY_RENEWAL_SHARE) * self.timing.renew_every * 0.9:
            pytest.skip(f"the machine is so busy that renewals are due, although leases last {self.timing.ttl:g} s")
        assert {role: asked[role] for role in roles} == dict.fromkeys(roles, 0), f"asked too early on {self._name}"

    def require_pauses(self, asked: Mapping[str, int], seconds: float) -> None:
        """Fail if those who wait have asked much more often than every ``retry_every`` in so many *seconds*.

        Half of it, for a candidate that was refused together with others asks again by itself.
        """
        most = len(self._names) * (2 * seconds / self.timing.retry_every + 1)
        assert max(asked["candidate"], asked["observer"]) <= most, f"asked too often on {self._name}: {asked}"

    def _total(self, *roles: str) -> int:
        return sum(count for (role, _), count in self.asked.items() if not roles or role in roles)

    def _have_all(self, kind: type[Event]) -> bool:
        return sum(isinstance(event, kind) for event in self._events) >= len(self._names)

    def _run(self, running: Any) -> None:
        self._tasks.append(asyncio.ensure_future(running))

    # --- the roles ---

    async def _driver(self, role: str) -> Driver:
        self.asked[role, "acquire"] += 0
        store = cast(LeaseStore, _Counted(await self._open(), self.asked, role))
        self._drivers.append(Driver(store, self._clock))
        return self._drivers[-1]

    def _election(self, name: str, driver: Driver) -> Election:
        here = RenewalThread.here()
        return Election(name, self.timing, driver=driver, renewal_thread=here, on_event=self._events.append)

    async def _observe(self, driver: Driver, name: str) -> None:
        async with aclosing(driver.watch(name, self.timing.retry_every, self.timing.ttl)) as answers:
            async for answer in answers:
                if isinstance(answer, HeldBy):
                    self._observed.add(name)

    def _partitions(self, driver: Driver) -> Partitions:
        layout = Layout(f"{self._name}-group", tuple(map(str, range(PARTITIONS))))
        return Partitions(layout, self.timing, driver=driver, renewal_thread=RenewalThread.here(), options={})


class _Counted:
    """A store whose requests are counted under the role of its process."""

    def __init__(self, store: LeaseStore, asked: Counter[tuple[str, str]], role: str) -> None:
        self._store = store
        self._asked = asked
        self._role = role

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return partial(self._ask, name, found) if name in VERBS else found

    async def _ask(self, verb: str, ask: Callable[..., Awaitable[Any]], *given: Any) -> Any:
        self._asked[self._role, verb] += len(given[0]) if verb == "renew" else 1
        return await ask(*given)


async def _for_ever(term: Term | PartitionTerm) -> None:
    await asyncio.Event().wait()
