"""The driver: feeds inputs to machines and performs their effects. It decides nothing itself.

It runs on the renewal loop. One driver serves all candidates of one store, so that renewals which are due at about
the same time go out in one statement.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, cast

from tenure._election.effects import (
    Acquire,
    Answer,
    Answered,
    CancelWork,
    Effect,
    Emit,
    Hint,
    HintsAbsent,
    Input,
    Inspect,
    Release,
    Renew,
    RenewalWithheld,
    RenewTogether,
    Resign,
    StartWork,
    Stop,
    Tick,
    Trust,
    Withdraw,
    Withdrawn,
    WorkOverran,
)
from tenure._election.machine import NEVER, Machine
from tenure._election.store import FollowedLeaseStore, LeaseStore, QueuedLeaseStore
from tenure._election.store import Hint as StoreHint
from tenure._lease import Grant, HeldBy, Metadata, NoAnswer, Vacant
from tenure._runtime.alarms import Alarm
from tenure._runtime.clock import Clock
from tenure._runtime.renewal_thread import LoopProbe
from tenure._runtime.tasks import Tasks, is_cancelled
from tenure.errors import TenureError, Unavailable, in_words
from tenure.events import Event, Reason

REQUESTS_MAX = 32
"""Requests after which no more halves of a batch are renewed: one bad renewal among ``BATCH_MAX`` takes 19."""

BATCH_MAX = 500
"""Renewals in one call to the store: enough to be cheap, few enough not to delay others."""

NOT_OBSERVED = "the backend was closed, so its leaders can't be observed any more; connect again"
"""What who observes leaders is told at the end of the backend."""


class WorkHost(Protocol):
    """The owner of a candidate's work. All methods are called on the renewal loop and must not block it."""

    metadata: Metadata
    probe: LoopProbe | None
    health_check: object | None
    """What calls the health callback, if there is one: hosts that share it are asked together."""

    def start_work(self, grant: Grant, trusted_until: float) -> None:
        """Start the work of this term."""
        ...

    def set_trust(self, token: int, until: float) -> None:
        """Trust the term up to the time *until*."""
        ...

    def cancel_work(self, token: int, reason: Reason) -> None:
        """Cancel the work of this term."""
        ...

    def set_overrun_time(self, at: float) -> None:
        """Set the time *at* which work that still runs has overrun; called again whenever it changes."""
        ...

    def work_overran(self, token: int) -> None:
        """The work did not stop in time."""
        ...

    def stall_reason(self) -> str | None:
        """Return why the work makes no progress, or None."""
        ...

    async def health_problem(self, within: float) -> str | None:
        """Call the health callback; return why the work is not healthy, or None. Takes at most *within* seconds."""
        ...

    def candidacy_failed(self, error: BaseException) -> None:
        """The candidacy is over: its request can never work, or tenure itself has a bug."""
        ...

    def candidacy_ended(self) -> None:
        """The candidacy has ended, and no request of it is unanswered."""
        ...

    def emit(self, event: Event) -> None:
        """Pass *event* to the observers."""
        ...


class Candidacy:
    """One machine, with its alarm, its hints and its requests to the store."""

    def __init__(self, driver: Driver, machine: Machine, host: WorkHost) -> None:
        self.machine = machine
        self.host = host
        self.number: int = next(driver.numbers)
        """Its place in the order in which the candidacies of a driver began."""
        self._driver = driver
        self._alarm = Alarm(driver.clock, self._on_alarm)
        self._hints: asyncio.Task[None] | None = None
        self._was_answered = False  # after one success, an error may be temporary: the request is repeated
        self.ended: asyncio.Event = asyncio.Event()
        self._term_over = asyncio.Event()

    def start(self) -> None:
        if self._driver.store.traits.hints and not self.machine.once:
            name, pause = self.machine.name, self.machine.timing.retry_every
            self._hints = self._driver.spawn(self._driver.follow_hints(name, self._on_hint, pause))
        self.feed(Tick())

    def feed(self, event: Input) -> None:
        """Give *event* to the machine, perform its effects, and set the alarm for ``wake_at``."""
        if self.ended.is_set():
            return
        try:
            effects = self.machine.handle(event, self._driver.clock.now())
            self.host.set_overrun_time(self.machine.overruns_at)
            for effect in effects:
                self._perform(effect)
        except Exception as error:  # a bug in the machine must not leave the term trusted
            self.fail(error)
            return
        if not self.machine.has_term:
            self._term_over.set()
        if self.machine.is_finished:
            self._finish()
        else:
            self._alarm.set(self.machine.wake_at)

    def _on_alarm(self) -> None:
        self.feed(Tick())

    def _on_hint(self, hint: StoreHint) -> None:
        self.feed(HintsAbsent() if hint == "absent" else Hint())

    async def resign(self, wait: bool) -> bool:
        """End the present term, and *wait* until its lease is released; False if there is none."""
        if not self.machine.has_term:
            return False
        self._term_over.clear()
        self.feed(Resign())
        if wait:
            await self._term_over.wait()
        return True

    def fail(self, error: BaseException) -> None:
        if self.ended.is_set():
            return
        if grant := self.machine.grant:
            self.host.set_trust(grant.token, -NEVER)
            try:
                self.host.cancel_work(grant.token, "stopped")
            finally:  # no timer watches the deadline any more: with overrun="exit", exit now
                self.host.work_overran(grant.token)
        if place := self.machine.place:
            self._driver.spawn(self._leave_queue(place))
        self.host.candidacy_failed(error)
        self._finish()

    def _finish(self) -> None:
        self.ended.set()
        self._term_over.set()
        self._alarm.end()
        if self._hints:
            self._hints.cancel()
        self._driver.candidacies.discard(self)
        self.host.candidacy_ended()

    @property
    def renewal_group(self) -> tuple[int, float]:
        """Renewals of one group share a request; the second value is their ``ttl``."""
        # All work of one loop shares its probe. A health callback may be slow, so such renewals go by themselves.
        shared = self.host.probe if self.host.health_check is None else self.host.health_check
        return id(shared), self.machine.timing.ttl

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Renew(request_id, grant):
                self._driver.renew_soon(self, request_id, grant)
            case Acquire(request_id, holder):
                machine, store = self.machine, self._driver.store
                claim = store.acquire(machine.name, holder, machine.timing.ttl, self.host.metadata)
                self._driver.spawn(self._ask_store(request_id, claim))
            case Inspect(request_id):
                looked = self._driver.store.inspect(self.machine.name)
                self._driver.spawn(self._ask_store(request_id, looked, proves=False))
            case Release(request_id, grant):
                self._driver.spawn(self._ask_store(request_id, self._driver.store.release(grant)))
            case Withdraw(request_id, holder):
                self._driver.spawn(self._ask_store(request_id, self._withdraw(holder)))
            case StartWork(grant, until):
                self.host.start_work(grant, until)
            case Trust(token, until):
                self.host.set_trust(token, until)
            case CancelWork(token, reason):
                self.host.cancel_work(token, reason)
            case WorkOverran(token):
                self.host.work_overran(token)
            case Emit(event):
                self.host.emit(event)

    async def _ask_store(self, request_id: int, call: Coroutine[Any, Any, Answer], *, proves: bool = True) -> None:
        """Pass on the answer to *call*; *proves*: it shows that claims can work, and a failure of one may pass."""
        try:
            answer = await call
        except Unavailable as error:
            answer = NoAnswer(str(error))
        except Exception as error:
            if not self._was_answered:  # a wrong configuration or a bug: retrying would hide it
                self.fail(error)
                return
            answer = no_answer(error)
        except BaseException as error:  # every request is answered, or the candidacy could never end
            self.feed(Answered(request_id, no_answer(error)))
            if ends_this_task(error):
                raise
            return
        else:
            self._was_answered = self._was_answered or proves
        self.feed(Answered(request_id, answer))

    async def _withdraw(self, holder: str) -> Withdrawn:
        await cast(QueuedLeaseStore, self._driver.store).withdraw(self.machine.name, holder)
        return Withdrawn()

    async def _leave_queue(self, place: str) -> None:
        """Give up a *place* in the queue if the store answers; without an answer, the place ends after a ttl."""
        with suppress(Exception):
            await self._withdraw(place)


@dataclass(frozen=True, slots=True)
class _DueRenewal:
    """A renewal that goes out in this iteration of the loop."""

    candidacy: Candidacy
    request_id: int
    grant: Grant

    def answered(self, answer: Answer) -> None:
        self.candidacy.feed(Answered(self.request_id, answer))


class Driver:
    """All candidacies on one store."""

    def __init__(self, store: LeaseStore, clock: Clock, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.store = store
        self.clock = clock
        self.loop: asyncio.AbstractEventLoop = loop or asyncio.get_running_loop()
        self.candidacies: set[Candidacy] = set()
        self.numbers: Iterator[int] = count()
        self._due: list[_DueRenewal] = []
        self._tasks = Tasks()
        self._probes: dict[asyncio.AbstractEventLoop, LoopProbe] = {}
        self._watches: set[asyncio.Event] = set()
        self._is_closing = False

    def start_candidacy(self, machine: Machine, host: WorkHost) -> Candidacy:
        """Start a candidacy.

        Raises:
            Unavailable: The driver was closed.
        """
        if self._is_closing:
            raise Unavailable("the backend was closed, so no candidate can campaign on it; connect again")
        candidacy = Candidacy(self, machine, host)
        self.candidacies.add(candidacy)
        candidacy.start()
        return candidacy

    async def close(self) -> None:
        """End every candidacy, then every request that is still unanswered."""
        self._is_closing = True
        for woken in self._watches:
            woken.set()
        for candidacy in list(self.candidacies):
            candidacy.feed(Stop())
            candidacy.feed(Resign())
        if leaving := [(c.ended.wait(), c.machine.timing) for c in self.candidacies]:
            longest = max(timing.grace + timing.retry_every for _, timing in leaving)
            try:
                async with asyncio.timeout(longest):
                    await asyncio.gather(*(ended for ended, _ in leaving))
            except TimeoutError:
                pass
            finally:  # also if this call is cancelled: the owners of the remaining candidacies must be notified
                self._fail_all()
        await self._tasks.cancel_all()

    def _fail_all(self) -> None:
        for candidacy in list(self.candidacies):
            cause = "work was still running" if candidacy.machine.grant else "the store had not answered yet"
            candidacy.fail(Unavailable(f"the backend was closed while {cause}; the lease is left to run out"))

    @property
    def is_closing(self) -> bool:
        """Whether it was closed, so that nothing can be claimed on it any more."""
        return self._is_closing

    def spawn(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.keep(self.loop.create_task(call))

    def probe_of(self, loop: asyncio.AbstractEventLoop) -> LoopProbe:
        """Return the probe of *loop*, shared by all candidates whose work runs there."""
        if loop not in self._probes:
            self._probes = {known: probe for known, probe in self._probes.items() if not known.is_closed()}
            self._probes[loop] = LoopProbe(loop)
        return self._probes[loop]

    # --- renewals in batches ---

    def renew_soon(self, candidacy: Candidacy, request_id: int, grant: Grant) -> None:
        """Renew in one batch with all others that are due; the batch goes out in this iteration of the loop."""
        self._due.append(_DueRenewal(candidacy, request_id, grant))
        if len(self._due) == 1:
            self.loop.call_soon(self._renew_due)

    def _renew_due(self) -> None:
        now = self.clock.now()
        due_groups = {one.candidacy.renewal_group for one in self._due}
        for candidacy in list(self.candidacies):
            if candidacy.machine.renewable_from <= now and candidacy.renewal_group in due_groups:
                candidacy.feed(RenewTogether())
        due, self._due = self._due, []
        groups: dict[tuple[int, float], list[_DueRenewal]] = {}
        # In their order: a store may keep those together that began together, as etcd does.
        for one in sorted(due, key=lambda one: one.candidacy.number):
            groups.setdefault(one.candidacy.renewal_group, []).append(one)
        for (_, ttl), group in groups.items():
            for start in range(0, len(group), BATCH_MAX):
                self.spawn(self._renew(group[start : start + BATCH_MAX], ttl))

    async def _renew(self, group: list[_DueRenewal], ttl: float) -> None:
        try:
            await self._renew_if_healthy(group, ttl)
        except BaseException as error:  # every request is answered, or the candidacy could never end
            _answer_all(group, no_answer(error))
            if ends_this_task(error):
                raise

    async def _renew_if_healthy(self, group: list[_DueRenewal], ttl: float) -> None:
        host = group[0].candidacy.host
        # Half of the time that the machine usually waits, so that it gets RenewalWithheld and not NoAnswer.
        within = min(one.candidacy.machine.timing.retry_every for one in group) / 2
        if host.probe is not None and not await host.probe.responds(within):
            _answer_all(group, RenewalWithheld(f"the event loop that runs the work did not answer for {within:g} s"))
            return
        if host.health_check is not None and (why := await host.health_problem(within)):
            _answer_all(group, RenewalWithheld(why))
            return
        progressing = []
        for one in group:
            if why := one.candidacy.host.stall_reason():
                one.answered(RenewalWithheld(why))
            else:
                progressing.append(one)
        if progressing:
            await self._renew_at_once(progressing, ttl)

    async def _renew_at_once(self, group: list[_DueRenewal], ttl: float) -> None:
        """Renew by one request. If that fails, by one for each half: one bad record must not cost all their terms.

        Not without an end: a store that refuses every one of them would be asked about each.
        """
        groups, asked = [group], 0
        while groups:
            asked += len(groups)
            failures = await asyncio.gather(*(self._renew_some(some, ttl) for some in groups))
            groups, failed = [], list(zip(groups, failures, strict=True))
            for some, error in failed:
                if error is None:
                    continue
                if isinstance(error, Unavailable) or len(some) == 1 or asked >= REQUESTS_MAX:
                    _answer_all(some, no_answer(error))
                else:
                    middle = len(some) // 2
                    groups += (some[:middle], some[middle:])

    async def _renew_some(self, group: list[_DueRenewal], ttl: float) -> Exception | None:
        """Renew by one request, and pass on the answers; return why there are none."""
        try:
            answers = await self.store.renew([one.grant for one in group], ttl)
        except Exception as error:
            # It ends no term here, not even a ConfigError: terms end when their time is up.
            return error
        for one, answer in zip(group, answers, strict=True):
            one.answered(answer)
        return None

    # --- observing ---

    async def watch(self, name: str, poll: float, longest: float) -> AsyncGenerator[HeldBy | Vacant, None]:
        """Yield the holder of *name*, at first and at every change that is seen.

        Asks every *poll* seconds, or, while the store gives hints, when a lease ends, and at least every *longest*.
        While there is no answer, it asks every *poll* seconds, whatever hints come.

        Raises:
            Unavailable: The driver was closed.
            ConfigError: The store can't be asked as it is configured, and never could.
        """
        woken, is_answered, gives_hints = asyncio.Event(), True, self.store.traits.hints

        def hinted(hint: StoreHint) -> None:
            nonlocal gives_hints
            gives_hints = hint != "absent"
            if is_answered:
                woken.set()

        self._watches.add(woken)
        hints = self.spawn(self.follow_hints(name, hinted, poll)) if gives_hints else None
        seen: HeldBy | Vacant | None = None  # the last answer that was yielded
        try:
            while not self._is_closing:
                woken.clear()
                wait = poll
                try:
                    found = await self.store.inspect(name)
                except Unavailable:
                    found = None  # don't know: the last answer stays valid; ask again
                except (Exception, asyncio.CancelledError) as error:
                    if ends_this_task(error) or (seen is None and isinstance(error, Exception)):
                        raise
                    found = None  # an earlier request succeeded, or the end of the backend has cancelled it: look again
                is_answered = found is not None
                if found is None:
                    if not self._is_closing:  # keep the pause, whatever was hinted meanwhile
                        woken.clear()
                else:
                    if isinstance(found, HeldBy) and found.remaining is not None:
                        # A hint may be lost, and the lease may be much longer than ours would be.
                        wait = min(found.remaining + poll / 100, max(poll, longest) if gives_hints else poll)
                    if seen is None or not _is_same(found, seen):
                        seen = found
                        yield found
                try:
                    async with asyncio.timeout(wait):
                        await woken.wait()
                except TimeoutError:
                    pass
            raise Unavailable(NOT_OBSERVED)
        finally:
            self._watches.discard(woken)
            if hints:
                hints.cancel()

    async def follow_hints(self, name: str, on_hint: Callable[[StoreHint], None], pause: float) -> None:
        """Call *on_hint* at every hint about *name*. If the store's hints end or fail, ask for them after a *pause*."""
        while True:
            try:
                async for hint in self.store.hints(name):
                    on_hint(hint)
            except (Exception, asyncio.CancelledError) as error:
                if ends_this_task(error):
                    raise
                # Hints are optional: callers also poll.
            await asyncio.sleep(pause)

    async def follow_renewals(self, prefix: str, pause: float) -> None:
        """Let the store note the renewals of all leases that begin with *prefix*, if it follows any; else return."""
        while self.store.traits.follows_renewals:
            try:
                async for _ in cast(FollowedLeaseStore, self.store).follow_renewals(prefix):
                    pass
            except (Exception, asyncio.CancelledError) as error:
                if ends_this_task(error):
                    raise
                # It is optional, too: looks find the same, later.
            await asyncio.sleep(pause)


def ends_this_task(error: BaseException) -> bool:
    """Whether *error* is to end the current task: it is cancelled, or the program is interrupted."""
    return is_cancelled() if isinstance(error, asyncio.CancelledError) else not isinstance(error, Exception)


def no_answer(error: BaseException) -> NoAnswer:
    """Return *error*, a failure of the store or its driver, as an answer: it says neither yes nor no."""
    return NoAnswer(str(error) if isinstance(error, TenureError) else f"the store failed with {in_words(error)}")


def _is_same(one: HeldBy | Vacant, other: HeldBy | Vacant) -> bool:
    """Whether both are the same term, or both a vacancy. Compares holders too, as tokens may fall.

    And metadata: where candidates stand in a queue, the next one is the holder before it has written them.
    """
    if isinstance(one, HeldBy) and isinstance(other, HeldBy):
        return (one.holder, one.token, one.metadata) == (other.holder, other.token, other.metadata)
    return type(one) is type(other)


def _answer_all(group: list[_DueRenewal], answer: Answer) -> None:
    for one in group:
        one.answered(answer)
