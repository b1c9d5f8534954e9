"""The driver: feeds machines and does what they say. Dull on purpose; every decision is the machine's.

It lives on the renewal loop. One driver serves all candidates of one store, so that renewals which are due at about
the same time travel together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from tenure._election.machine import (
    NEVER,
    Acquire,
    Answer,
    Answered,
    CancelWork,
    Effect,
    Emit,
    Hint,
    Input,
    Machine,
    Release,
    Renew,
    RenewalWithheld,
    RenewTogether,
    Resign,
    StartWork,
    Stop,
    Tick,
    Trust,
    WorkOverran,
)
from tenure._election.store import LeaseStore
from tenure._lease import Grant, HeldBy, Metadata, NoAnswer, Vacant
from tenure._runtime.clock import Clock
from tenure._runtime.renewal_thread import LoopProbe
from tenure.errors import TenureError, Unavailable, in_words
from tenure.events import Event, Reason

BATCH_MAX = 500
"""Renewals in one call to the store: enough to be cheap, few enough not to hold others up."""

SUSPEND_CHECK = 1.0
"""Seconds between looks for a suspend: timers stand still meanwhile, our clock doesn't."""


class WorkHost(Protocol):
    """Where a candidate's work runs. All but ``healthy`` are called on the renewal loop and must not block it."""

    metadata: Metadata
    probe: LoopProbe | None
    has_health: bool

    def begin(self, grant: Grant, trusted_until: float) -> None:
        """Start the work of this term."""
        ...

    def trust(self, token: int, until: float) -> None:
        """Believe in the term until then."""
        ...

    def cancel(self, token: int, reason: Reason) -> None:
        """Tell the work to stop."""
        ...

    def must_end_by(self, at: float) -> None:
        """Work that still runs then has overrun; called again whenever that changes."""
        ...

    def overran(self, token: int) -> None:
        """The work did not stop in time."""
        ...

    def stalled(self) -> str | None:
        """Say why the work makes no progress, or None."""
        ...

    async def healthy(self, within: float) -> str | None:
        """Ask the work's own health callback: say why it is not well, or None."""
        ...

    def failed(self, error: BaseException) -> None:
        """The candidacy is over: what was asked can never work, or tenure itself is broken."""
        ...

    def left(self) -> None:
        """The candidacy has ended, and nothing of it is under way."""
        ...

    def emit(self, event: Event) -> None:
        """Pass on what happened."""
        ...


class Candidacy:
    """One machine at work: its timer, its hints, its questions to the store."""

    def __init__(self, driver: Driver, machine: Machine, host: WorkHost) -> None:
        self.machine = machine
        self.host = host
        self._driver = driver
        self._timer: asyncio.TimerHandle | None = None
        self._hints: asyncio.Task[None] | None = None
        self._was_answered = False  # once a question of ours has worked, only its state can make the store refuse
        self.ended: asyncio.Event = asyncio.Event()
        self._term_over = asyncio.Event()

    def begin(self) -> None:
        if self._driver.store.traits.hints:
            self._hints = self._driver.spawn(self._listen())
        self.feed(Tick())

    def feed(self, event: Input) -> None:
        """Give *event* to the machine, do what it says, and wake it when it wants."""
        if self.ended.is_set():
            return
        try:
            effects = self.machine.handle(event, self._driver.clock.now())
            self.host.must_end_by(self.machine.overruns_at)
            for effect in effects:
                self._perform(effect)
        except Exception as error:  # a machine that breaks must not leave anybody believing
            self.fail(error)
            return
        if not self.machine.has_term:
            self._term_over.set()
        if self.machine.is_finished:
            self._finish()
        else:
            self._arm()

    async def resign(self, wait: bool) -> bool:
        """End the present term, and *wait* until its lease is handed back; False if there is none."""
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
            self.host.trust(grant.token, -NEVER)
            try:
                self.host.cancel(grant.token, "stopped")
            finally:  # nobody will look at the deadline any more: if it is to exit, it is now
                self.host.overran(grant.token)
        self.host.failed(error)
        self._finish()

    def _finish(self) -> None:
        self.ended.set()
        self._term_over.set()
        if self._timer:
            self._timer.cancel()
        if self._hints:
            self._hints.cancel()
        self._driver.candidacies.discard(self)
        self.host.left()

    def _arm(self) -> None:
        if self._timer:
            self._timer.cancel()
        wake_at = self.machine.wake_at
        wait = max(0.0, wake_at - self._driver.clock.now())
        self._timer = None if wake_at == NEVER else self._driver.loop.call_later(wait, self.feed, Tick())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Renew(ask, grant):
                self._driver.renew_soon(self, ask, grant)
            case Acquire(ask, holder):
                machine, store = self.machine, self._driver.store
                claim = store.acquire(machine.name, holder, machine.timing.ttl, self.host.metadata)
                self._driver.spawn(self._question(ask, claim))
            case Release(ask, grant):
                self._driver.spawn(self._question(ask, self._driver.store.release(grant)))
            case StartWork(grant, until):
                self.host.begin(grant, until)
            case Trust(token, until):
                self.host.trust(token, until)
            case CancelWork(token, reason):
                self.host.cancel(token, reason)
            case WorkOverran(token):
                self.host.overran(token)
            case Emit(event):
                self.host.emit(event)

    async def _question(self, ask: int, call: Coroutine[Any, Any, Answer]) -> None:
        try:
            answer = await call
        except Unavailable as error:
            answer = NoAnswer(str(error))
        except Exception as error:
            if not self._was_answered:  # it can never work as it is, or is a bug: neither must be waited out
                self.fail(error)
                return
            answer = unknown(error)
        except BaseException as error:  # every question comes back, or nobody could ever leave
            self.feed(Answered(ask, unknown(error)))
            if is_our_end(error):
                raise
            return
        else:
            self._was_answered = True
        self.feed(Answered(ask, answer))

    async def _listen(self) -> None:
        while True:
            try:
                async for _ in self._driver.store.hints(self.machine.name):
                    self.feed(Hint())
            except (Exception, asyncio.CancelledError) as error:
                if is_our_end(error):
                    raise
                # Hints may be absent, whatever the reason; the machine looks again in its own time.
            await asyncio.sleep(self.machine.timing.retry_every)


@dataclass(frozen=True, slots=True)
class _Due:
    """A renewal that goes out in this turn of the loop."""

    candidacy: Candidacy
    request_id: int
    grant: Grant

    def answered(self, answer: Answer) -> None:
        self.candidacy.feed(Answered(self.request_id, answer))


class Driver:
    """All candidacies on one store."""

    def __init__(self, store: LeaseStore, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.candidacies: set[Candidacy] = set()
        self._due: list[_Due] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._probes: dict[asyncio.AbstractEventLoop, LoopProbe] = {}
        self._watches: set[asyncio.Event] = set()
        self._is_closing = False
        self._lag = self._clock_lag()
        self._suspend_watch: asyncio.TimerHandle | None = None

    def stand(self, machine: Machine, host: WorkHost) -> Candidacy:
        """Begin a candidacy.

        Raises:
            Unavailable: The driver was closed.
        """
        if self._is_closing:
            raise Unavailable("the backend was closed, so nobody can stand there; connect again")
        candidacy = Candidacy(self, machine, host)
        self.candidacies.add(candidacy)
        if self._suspend_watch is None:
            self._watch_suspend()
        candidacy.begin()
        return candidacy

    async def close(self) -> None:
        """End every candidacy that is left, then everything that is under way."""
        self._is_closing = True
        for woken in self._watches:
            woken.set()
        for candidacy in list(self.candidacies):
            candidacy.feed(Stop())
            candidacy.feed(Resign())
        if leaving := [(c.ended.wait(), c.machine.timing) for c in self.candidacies]:
            patience = max(timing.grace + timing.retry_every for _, timing in leaving)
            try:
                async with asyncio.timeout(patience):
                    await asyncio.gather(*(ended for ended, _ in leaving))
            except TimeoutError:
                pass
            finally:  # also if nobody waits any longer: who is left must hear of it
                self._fail_all()
        if self._suspend_watch:
            self._suspend_watch.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _fail_all(self) -> None:
        for candidacy in list(self.candidacies):
            what = "work was still running" if candidacy.machine.grant else "the store had not answered yet"
            candidacy.fail(Unavailable(f"the backend was closed while {what}; the lease is left to run out"))

    def spawn(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def probe_of(self, loop: asyncio.AbstractEventLoop) -> LoopProbe:
        """Return the one pulse of *loop*, so that all who work there share its questions."""
        if loop not in self._probes:
            self._probes = {known: probe for known, probe in self._probes.items() if not known.is_closed()}
            self._probes[loop] = LoopProbe(loop)
        return self._probes[loop]

    # --- renewals travel together ---

    def renew_soon(self, candidacy: Candidacy, ask: int, grant: Grant) -> None:
        """Renew along with whoever else is due; the question goes out in this turn of the loop."""
        self._due.append(_Due(candidacy, ask, grant))
        if len(self._due) == 1:
            self.loop.call_soon(self._renew_due)

    def _renew_due(self) -> None:
        now = self.clock.now()
        for candidacy in list(self.candidacies):
            if candidacy.machine.renewable_from <= now:
                candidacy.feed(RenewTogether())
        due, self._due = self._due, []
        groups: dict[tuple[int, float], list[_Due]] = {}
        for one in due:
            host = one.candidacy.host
            # Those of one loop stand or fall together. A health callback may be slow, so who has one goes alone.
            place = id(host) if host.has_health else id(host.probe)
            groups.setdefault((place, one.candidacy.machine.timing.ttl), []).append(one)
        for (_, ttl), group in groups.items():
            for start in range(0, len(group), BATCH_MAX):
                self.spawn(self._renew(group[start : start + BATCH_MAX], ttl))

    async def _renew(self, group: list[_Due], ttl: float) -> None:
        try:
            await self._ask_to_renew(group, ttl)
        except BaseException as error:  # every question comes back, or nobody could ever leave
            _answer_alike(group, unknown(error))
            if is_our_end(error):
                raise

    async def _ask_to_renew(self, group: list[_Due], ttl: float) -> None:
        host = group[0].candidacy.host
        # Half of the time that the machine waits, so that it hears "withheld" and not "no answer".
        within = min(one.candidacy.machine.timing.retry_every for one in group) / 2
        if host.probe is not None and not await host.probe.beats(within):
            _answer_alike(group, RenewalWithheld(f"the event loop that runs the work did not answer for {within:g} s"))
            return
        if host.has_health and (why := await host.healthy(within)):
            _answer_alike(group, RenewalWithheld(why))
            return
        moving = []
        for one in group:
            if why := one.candidacy.host.stalled():
                one.answered(RenewalWithheld(why))
            else:
                moving.append(one)
        if not moving:
            return
        # An exception ends nothing here, not even a ConfigError: the terms end when their time is up.
        answers = await self.store.renew([one.grant for one in moving], ttl)
        for one, answer in zip(moving, answers, strict=True):
            one.answered(answer)

    # --- suspend ---

    def _watch_suspend(self) -> None:
        """Timers of the loop stand still while the machine sleeps. When the clocks have come apart, wake everybody."""
        lag = self._clock_lag()
        if lag - self._lag > SUSPEND_CHECK / 2:
            for candidacy in list(self.candidacies):
                candidacy.feed(Tick())
        self._lag = lag
        self._suspend_watch = self.loop.call_later(SUSPEND_CHECK, self._watch_suspend)

    def _clock_lag(self) -> float:
        return self.clock.now() - self.loop.time()

    # --- observing ---

    async def watch(self, name: str, poll: float, longest: float) -> AsyncGenerator[HeldBy | Vacant, None]:
        """Yield who holds *name*, at first and at every change that is seen.

        Looks every *poll* seconds, or, where the store gives hints, when a lease ends, and at least every *longest*.

        Raises:
            Unavailable: The driver was closed.
            ConfigError: The store can't be asked as it is, and never could.
        """
        woken = asyncio.Event()
        self._watches.add(woken)
        listener = self.spawn(self._wake(name, woken.set, poll)) if self.store.traits.hints else None
        seen: HeldBy | Vacant | None = None  # what was told last
        try:
            while not self._is_closing:
                woken.clear()
                wait = poll
                try:
                    found = await self.store.inspect(name)
                except Unavailable:
                    found = None  # don't know: what was seen last stands, look again
                except (Exception, asyncio.CancelledError) as error:
                    if seen is None or is_our_end(error):
                        raise
                    found = None  # it has worked before
                if found is not None:
                    if isinstance(found, HeldBy) and found.remaining is not None:
                        # A hint may be lost, and the lease may be much longer than ours would be.
                        wait = min(found.remaining + poll / 100, max(poll, longest) if listener else poll)
                    if seen is None or not _is_same(found, seen):
                        seen = found
                        yield found
                try:
                    async with asyncio.timeout(wait):
                        await woken.wait()
                except TimeoutError:
                    pass
            raise Unavailable("the backend was closed, so nothing more can be seen there; connect again")
        finally:
            self._watches.discard(woken)
            if listener:
                listener.cancel()

    async def _wake(self, name: str, wake: Callable[[], None], pause: float) -> None:
        while True:
            try:
                async for _ in self.store.hints(name):
                    wake()
            except (Exception, asyncio.CancelledError) as error:
                if is_our_end(error):
                    raise
            await asyncio.sleep(pause)


def is_cancelled() -> bool:
    """Whether the current task is being cancelled; a ``CancelledError`` may also be what somebody just raised."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_our_end(error: BaseException) -> bool:
    """Whether *error* is to end the current task: it is cancelled, or the program is interrupted."""
    return is_cancelled() if isinstance(error, asyncio.CancelledError) else not isinstance(error, Exception)


def unknown(error: BaseException) -> NoAnswer:
    """Return what *error* is as an answer: a driver's or a store's own failure, which says neither yes nor no."""
    return NoAnswer(str(error) if isinstance(error, TenureError) else f"the store failed with {in_words(error)}")


def _is_same(one: HeldBy | Vacant, other: HeldBy | Vacant) -> bool:
    """Whether the same term is told of, or a vacancy both times. By its holder too: tokens may fall."""
    if isinstance(one, HeldBy) and isinstance(other, HeldBy):
        return (one.holder, one.token) == (other.holder, other.token)
    return type(one) is type(other)


def _answer_alike(group: list[_Due], answer: Answer) -> None:
    for one in group:
        one.answered(answer)
