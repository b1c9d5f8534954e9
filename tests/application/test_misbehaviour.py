"""Elections with misbehaving parts: user code, drivers that fail, restored stores, lost hints."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import pytest

from tenure._backends.memory.leases import MemoryLeases
from tenure._election.effects import Answered, Emit, Input, Tick
from tenure._election.elector import Election
from tenure._election.machine import Machine
from tenure._election.term import Term
from tenure._lease import Grant, Granted, HeldBy, Leader, Lost, NoAnswer, Vacant
from tenure._runtime.renewal_thread import LoopProbe
from tenure._runtime.watchdog import EXIT_OVERRUN
from tenure._timing import Timing
from tenure.errors import ConfigError, TermLost, Unavailable
from tenure.events import CampaignFailed, Event, RenewalMissed, TermBegan, TermEnding, TokenFell
from tenure.testing import ManualClock
from tests.application.test_elector import TIMING, ElectionSetup, FaultyStore, elected, forever, in_virtual_time


class Unprintable(Exception):
    """An error that can't be printed."""

    def __str__(self) -> str:
        raise RuntimeError("not printable")

    __repr__ = __str__


class Leaving(Exception):
    """An error that ends the program when it is printed."""

    def __str__(self) -> str:
        raise SystemExit("printed")


class Undecided:
    """Neither true nor false."""

    def __bool__(self) -> bool:
        raise Unprintable


async def ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    async with asyncio.timeout(1000):
        await asyncio.wait(tasks)


async def observed(election: Election, seen: list[Leader | None]) -> None:
    async for leader in election.observe():
        seen.append(leader)  # noqa: PERF401  # read while it grows


# --- user code -------------------------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[[], bool]:
    def health() -> bool:
        raise error

    return health


ODD_HEALTH: Mapping[str, Callable[[], Any]] = {
    "unprintable": raising(Unprintable()),
    "StopIteration": raising(StopIteration()),
    "CancelledError": raising(asyncio.CancelledError()),
    "KeyboardInterrupt": raising(KeyboardInterrupt()),
    "GeneratorExit": raising(GeneratorExit()),
    "leaving": raising(Leaving("now")),
    "undecided": Undecided,
}


@pytest.mark.parametrize("kind", ODD_HEALTH)
def test_a_misbehaving_health_callback_counts_as_false(kind: str) -> None:
    @in_virtual_time
    async def scenario(setup: ElectionSetup) -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(setup.candidate(health=ODD_HEALTH[kind]).run(forever, stop=stop))
        await elected(setup, 2)
        assert setup.emitted(TermEnding)[0].reason == "stalled"
        await ended(running)

    scenario()


@in_virtual_time
async def test_each_of_two_elections_on_one_loop_has_its_own_health_callback(setup: ElectionSetup) -> None:
    _, driver = setup.connect()
    asked: list[str] = []

    def health(name: str, well: bool) -> Callable[[], bool]:
        def ask() -> bool:
            asked.append(name)
            return well

        return ask

    ill = setup.candidate(driver, health=health("ill", False))
    ill.name = "sickbed"
    well = setup.candidate(driver, health=health("well", True))
    tasks = [asyncio.create_task(each.run(forever)) for each in (ill, well)]
    await elected(setup, 2)
    await asyncio.sleep(2 * TIMING.ttl)
    assert {"ill", "well"} <= set(asked)
    assert {event.name for event in setup.emitted(TermEnding)} == {"sickbed"}
    await ended(*tasks)


@pytest.mark.parametrize("stuck", [0, 1])
def test_each_of_two_elections_on_one_loop_has_its_own_beats(stuck: int) -> None:
    @in_virtual_time
    async def scenario(setup: ElectionSetup) -> None:
        async def work(term: Term) -> None:
            while term.name != f"chair {stuck}":
                term.beat()
                await asyncio.sleep(1)
            await forever(term)

        _, driver = setup.connect()
        elections = [setup.candidate(driver, stall_after=5) for _ in range(2)]
        for number, election in enumerate(elections):
            election.name = f"chair {number}"
        tasks = [asyncio.create_task(election.run(work)) for election in elections]
        await elected(setup, 2)
        await asyncio.sleep(1.5 * TIMING.ttl)
        assert {event.name for event in setup.emitted(TermEnding)} == {f"chair {stuck}"}
        await ended(*tasks)

    scenario()


@pytest.mark.parametrize("gone", [0, 1])
def test_each_of_two_elections_is_judged_by_the_loop_that_its_own_work_runs_on(gone: int) -> None:
    @in_virtual_time
    async def scenario(setup: ElectionSetup) -> None:
        closed = asyncio.SelectorEventLoop()
        closed.close()
        _, driver = setup.connect()
        elections = [setup.candidate(driver) for _ in range(2)]
        for number, election in enumerate(elections):
            election.name = f"chair {number}"
        tasks = [asyncio.create_task(election.run(forever)) for election in elections]
        await elected(setup, 2)
        for number, election in enumerate(elections):
            assert election._candidate is not None
            election._candidate.probe = LoopProbe(closed if number == gone else setup.loop)
        await asyncio.sleep(1.5 * TIMING.ttl)
        assert {event.name for event in setup.emitted(TermEnding)} == {f"chair {gone}"}
        await ended(*tasks)

    scenario()


@in_virtual_time
async def test_a_leader_that_has_recovered_is_not_reported_as_stalled_later(setup: ElectionSetup) -> None:
    is_well = True
    store, driver = setup.connect()
    running = asyncio.create_task(setup.candidate(driver, health=lambda: is_well).run(forever))
    await elected(setup)
    is_well = False
    async with asyncio.timeout(TIMING.ttl):
        while not setup.emitted(RenewalMissed):
            await asyncio.sleep(0.1)
    is_well = True
    await asyncio.sleep(TIMING.ttl)
    assert not setup.emitted(TermEnding)
    store.cut = True
    async with asyncio.timeout(TIMING.ttl):
        while not setup.emitted(TermEnding):
            await asyncio.sleep(0.1)
    assert setup.emitted(TermEnding)[0].reason == "unanswered"
    await ended(running)


class Measured(FaultyStore):
    """A store that records the ttl of each renewal."""

    def __init__(self, store: MemoryLeases) -> None:
        super().__init__(store)
        self.ttls: dict[str, set[float]] = {}

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        for grant in grants:
            self.ttls.setdefault(grant.name, set()).add(ttl)
        return await super().renew(grants, ttl)


@in_virtual_time
async def test_each_of_two_elections_on_one_loop_is_renewed_for_its_own_ttl(setup: ElectionSetup) -> None:
    _, driver = setup.connect()
    driver.store = store = Measured(setup.store)
    # They are due at the same time, and so requested in the same turn of the loop.
    elections = {ttl: setup.candidate(driver, timing=Timing(ttl, renew_every=4.0)) for ttl in (15.0, 60.0)}
    for ttl, election in elections.items():
        election.name = f"chair for {ttl:g} s"
    tasks = [asyncio.create_task(election.run(forever)) for election in elections.values()]
    await elected(setup, 2)
    await asyncio.sleep(60)
    assert store.ttls == {"chair for 15 s": {15.0}, "chair for 60 s": {60.0}}
    assert not setup.emitted(TermEnding)
    await ended(*tasks)


@in_virtual_time
async def test_a_hook_that_raises_changes_nothing(setup: ElectionSetup) -> None:
    reported: list[Any] = []
    setup.loop.set_exception_handler(lambda loop, context: reported.append(context["exception"]))
    errors = [Unprintable(), StopIteration(), asyncio.CancelledError(), SystemExit(1)]

    def hook(event: object) -> None:
        setup.events.append(cast(Any, event))
        if errors:
            raise errors.pop()

    running = asyncio.create_task(setup.candidate(on_event=hook).run(forever))
    await elected(setup)
    await asyncio.sleep(TIMING.ttl)
    assert len(reported) == 4
    assert not setup.emitted(TermEnding)
    await ended(running)


@in_virtual_time
async def test_metadata_names_and_labels_are_copied_as_plain_text(setup: ElectionSetup) -> None:
    class Text(str):
        __slots__ = ()

        def __str__(self) -> str:
            raise RuntimeError("not printable")

        encode = __format__ = __repr__ = __str__  # type: ignore[assignment]

    class Fickle(Mapping[str, str]):
        """A mapping that changes at each access."""

        accesses = 0

        def __getitem__(self, key: str) -> str:
            self.accesses += 1
            return Text("fine") if self.accesses == 1 else cast(str, 7)

        def __iter__(self) -> Iterator[str]:
            return iter([Text("key")])

        def __len__(self) -> int:
            return 1

    election = setup.candidate(metadata=Fickle(), label=Text("me"))
    assert dict(election.metadata) == {"key": "fine"}
    texts = [*election.metadata, *election.metadata.values(), election.label]
    assert {type(text) for text in texts} == {str}


# --- the end of the process ------------------------------------------------------------------------------------------


@in_virtual_time
async def test_overrun_exit_ends_the_process_even_if_no_thread_can_be_started(setup: ElectionSetup) -> None:
    class Gone(BaseException):
        pass

    codes: list[int] = []

    async def stubborn(term: Term) -> None:
        while not codes:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store, driver = setup.connect()
    running = asyncio.create_task(setup.candidate(driver, overrun="exit").run(stubborn))
    await elected(setup)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(os, "_exit", codes.append)
        store.cut = True
        async with asyncio.timeout(2 * TIMING.ttl):
            while not codes:
                await asyncio.sleep(0.1)
    assert codes[0] == EXIT_OVERRUN
    await ended(running)


# --- a driver that fails, a schema that is away ----------------------------------------------------------------------

BREAKS = [TypeError("a bug in a driver"), ConfigError("no such table"), Unprintable(), asyncio.CancelledError()]


@pytest.mark.parametrize("error", BREAKS, ids=lambda error: type(error).__name__)
def test_a_store_that_fails_after_it_has_worked_ends_no_candidate(error: Exception) -> None:
    @in_virtual_time
    async def scenario(setup: ElectionSetup) -> None:
        connections = [setup.connect() for _ in range(2)]
        tasks = [asyncio.create_task(setup.candidate(driver).run(forever)) for _, driver in connections]

        async def broken_until(kind: type[Event], count: int) -> None:
            for store, _ in connections:
                store.broken = error
            async with asyncio.timeout(10 * TIMING.ttl):
                while len(setup.emitted(kind)) < count:
                    await asyncio.sleep(0.1)
            for store, _ in connections:
                store.broken = None

        await elected(setup)
        await broken_until(RenewalMissed, 1)
        await asyncio.sleep(2 * TIMING.ttl)
        assert len(setup.emitted(TermBegan)) == 1
        assert not setup.emitted(TermEnding)
        await broken_until(TermEnding, 1)
        await broken_until(CampaignFailed, len(setup.emitted(CampaignFailed)) + 4)
        await elected(setup, 2)
        assert not any(task.done() for task in tasks)
        await ended(*tasks)

    scenario()


@in_virtual_time
async def test_an_observer_survives_a_store_that_fails_after_it_has_worked(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    seen: list[Leader | None] = []
    looking = asyncio.create_task(observed(setup.candidate(driver), seen))
    await asyncio.sleep(1)
    store.broken = TypeError("a bug in a driver")
    await asyncio.sleep(3 * TIMING.retry_every)
    store.broken = None
    leading = asyncio.create_task(setup.candidate().run(forever))
    async with asyncio.timeout(TIMING.ttl):
        while len(seen) < 2:
            await asyncio.sleep(0.1)
    assert seen[0] is None
    assert seen[1] is not None
    await ended(looking, leading)


@in_virtual_time
async def test_an_observer_whose_first_look_ends_with_the_backend_is_told(setup: ElectionSetup) -> None:
    """Its request is cancelled, and it isn't: it would wait for ever."""
    store, driver = setup.connect()
    store.broken = asyncio.CancelledError()
    looking = asyncio.create_task(observed(setup.candidate(driver), []))
    await asyncio.sleep(1)
    await driver.close()
    with pytest.raises(Unavailable, match="the backend was closed"):
        await looking


class Split(FaultyStore):
    """A store on several servers, of which one can't be reached."""

    away = ""

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        answers = await super().renew(grants, ttl)
        pairs = zip(grants, answers, strict=True)
        return [NoAnswer("that server is away") if grant.name == self.away else answer for grant, answer in pairs]


@in_virtual_time
async def test_a_lease_that_can_not_be_renewed_ends_only_its_own_term(setup: ElectionSetup) -> None:
    _, driver = setup.connect()
    driver.store = store = Split(setup.store)
    elections = [setup.candidate(driver) for _ in range(3)]
    for number, election in enumerate(elections):
        election.name = f"chair {number}"
    tasks = [asyncio.create_task(election.run(forever)) for election in elections]
    await elected(setup, 3)
    store.away = "chair 1"
    await asyncio.sleep(1.5 * TIMING.ttl)
    assert max(map(len, store.renewals)) == 3
    assert {event.name for event in setup.emitted(RenewalMissed)} == {"chair 1"}
    assert {event.name for event in setup.emitted(TermEnding)} == {"chair 1"}
    await ended(*tasks)


# --- a store restored from a copy ------------------------------------------------------------------------------------


async def restored(setup: ElectionSetup, terms: int) -> MemoryLeases:
    """Return a store restored from a copy, with so many terms."""
    store = MemoryLeases(setup.clock)
    for number in range(terms):
        answer = await store.acquire("chair", f"candidate#{number}", TIMING.ttl)
        await store.release(cast(Any, answer).grant)
    return store


@pytest.mark.parametrize("terms", [0, 2])
def test_a_former_leader_leads_again_after_tokens_fell_and_it_is_reported(terms: int) -> None:
    """With two terms in the copy, the next one has the token of the present one."""

    @in_virtual_time
    async def scenario(setup: ElectionSetup) -> None:
        async def work(term: Term) -> None:
            await (forever(term) if len(setup.emitted(TermBegan)) == 1 else done.wait())

        done = asyncio.Event()
        store, driver = setup.connect()
        setup.store = store.inner = await restored(setup, 2)
        running = asyncio.create_task(setup.candidate(driver).run(work))
        await elected(setup)
        assert setup.emitted(TermBegan)[0].token == 3
        store.inner = await restored(setup, terms)
        await elected(setup, 2)
        await asyncio.sleep(2 * TIMING.ttl)
        assert [event.token for event in setup.emitted(TermBegan)] == [3, terms + 1]
        assert len(setup.emitted(TermEnding)) == 1  # of the first
        assert not running.done()
        [fell] = setup.emitted(TokenFell)
        assert (fell.token, fell.seen) == (terms + 1, 3)
        done.set()
        async with asyncio.timeout(TIMING.ttl):
            await running  # the second term's work has returned; the first term's end doesn't matter
        assert len(setup.emitted(TermBegan)) == 2

    scenario()


def test_a_late_answer_is_not_reported_as_a_fallen_token() -> None:
    machine = Machine("chair", "me", TIMING, random.Random(1), hints=False, now=0.0)
    events: list[Event] = []

    def feed(event: Input, now: float) -> None:
        events.extend(effect.event for effect in machine.handle(event, now) if isinstance(effect, Emit))

    now = 0.0
    for _ in range(3):  # asks, gives up, looks
        feed(Tick(), now := machine.wake_at)
    feed(Answered(2, Vacant("chair")), now)  # so it asks again
    feed(Answered(3, HeldBy("chair", "bob#1", 7, None)), now)
    feed(Answered(1, HeldBy("chair", "ann#1", 6, None)), now)  # a delayed answer
    assert not [event for event in events if isinstance(event, TokenFell)]
    feed(Tick(), now := machine.wake_at)
    feed(Answered(4, HeldBy("chair", "cid#1", 6, None)), now)
    [fell] = [event for event in events if isinstance(event, TokenFell)]
    assert (fell.token, fell.seen) == (6, 7)


@in_virtual_time
async def test_a_standby_also_reports_that_tokens_fell(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    store.inner = await restored(setup, 5)
    first = await store.inner.acquire("chair", "a leader#1", 3600)
    assert cast(Any, first).grant.token == 6
    waiting = asyncio.create_task(setup.candidate(driver).run(forever))
    await asyncio.sleep(TIMING.ttl)
    store.inner = await restored(setup, 1)
    await store.inner.acquire("chair", "a leader#2", 3600)
    await asyncio.sleep(2 * TIMING.ttl)
    [fell] = setup.emitted(TokenFell)
    assert (fell.holder, fell.token, fell.seen) == ("a leader#2", 2, 6)
    await ended(waiting)


@in_virtual_time
async def test_an_observer_distinguishes_two_leaders_of_one_token(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    await store.inner.acquire("chair", "ann#1", 3600)
    seen: list[Leader | None] = []
    looking = asyncio.create_task(observed(setup.candidate(driver), seen))
    await asyncio.sleep(1)
    store.inner = MemoryLeases(setup.clock)
    await store.inner.acquire("chair", "bob#1", 3600)
    await asyncio.sleep(2 * TIMING.ttl)
    assert [leader.holder if leader else None for leader in seen] == ["ann#1", "bob#1"]
    await ended(looking)


# --- hints that never come -------------------------------------------------------------------------------------------


class Mute(FaultyStore):
    """A store that declares hints and gives none."""

    def hints(self, name: str) -> AsyncIterator[None]:
        return self._nothing()

    async def _nothing(self) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield


@in_virtual_time
async def test_a_candidate_with_hints_asks_at_least_once_in_its_own_ttl(setup: ElectionSetup) -> None:
    _, driver = setup.connect()
    driver.store = Mute(setup.store)
    assert driver.store.traits.hints
    held = await setup.store.acquire("chair", "a leader#1", 3600)
    seen: list[Leader | None] = []
    waiting, looking = (
        asyncio.create_task(setup.candidate(driver).run(forever)),
        asyncio.create_task(observed(setup.candidate(driver), seen)),
    )
    await asyncio.sleep(TIMING.ttl)
    await setup.store.release(cast(Any, held).grant)
    async with asyncio.timeout(TIMING.ttl + TIMING.retry_every):
        await elected(setup)
    async with asyncio.timeout(TIMING.ttl):
        while len(seen) < 2:
            await asyncio.sleep(0.1)
    await ended(waiting, looking)


# --- suspend ---------------------------------------------------------------------------------------------------------


class Suspended:
    """A clock that continues while timers stop."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.slept = 0.0
        self._now = now

    def now(self) -> float:
        return self._now() + self.slept


@in_virtual_time
async def test_after_a_suspend_a_leader_wakes_at_once_and_its_term_is_over(setup: ElectionSetup) -> None:
    clock = Suspended(setup.clock.now)
    setup.clock = cast(Any, clock)
    timing = Timing(ttl=3600)
    _, driver = setup.connect()
    running = asyncio.create_task(setup.candidate(driver, timing=timing).run(forever))
    await elected(setup)
    await asyncio.sleep(1)
    clock.slept += 3600
    async with asyncio.timeout(2):  # its own timer is 1,200 s away
        while not setup.emitted(TermEnding):
            await asyncio.sleep(0.1)
    assert setup.emitted(TermEnding)[0].reason == "unanswered"
    await ended(running)


@in_virtual_time
async def test_every_suspend_wakes_every_leader(setup: ElectionSetup) -> None:
    clock = Suspended(setup.clock.now)
    setup.clock = cast(Any, clock)
    _, driver = setup.connect()
    elections = [setup.candidate(driver, timing=Timing(ttl=3600)) for _ in range(2)]
    for number, election in enumerate(elections):
        election.name = f"chair {number}"
    tasks = [asyncio.create_task(election.run(forever)) for election in elections]
    await elected(setup, 2)
    for slept in (100, 100, 3600):
        await asyncio.sleep(2)
        assert not setup.emitted(TermEnding)
        clock.slept += slept
    async with asyncio.timeout(2):
        while {event.name for event in setup.emitted(TermEnding)} != {"chair 0", "chair 1"}:
            await asyncio.sleep(0.1)
    await ended(*tasks)


# --- trusted times -------------------------------------------------------------------------------------------------


def test_a_term_is_over_at_its_end() -> None:
    clock = ManualClock(100.0)
    term = Term(Grant("chair", "me#1", 1), 110.0, clock)
    clock.advance(9.75)
    term.check()
    assert term.remaining() == 0.25
    clock.advance(0.25)
    assert term.remaining() == 0.0
    with pytest.raises(TermLost):
        term.check()


@in_virtual_time
async def test_a_term_is_trusted_until_the_exact_time(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    store.delay = 1.0
    terms: list[Term] = []

    async def work(term: Term) -> None:
        terms.append(term)
        assert term.remaining() == pytest.approx(TIMING.window - store.delay)
        await forever(term)

    asked_at = setup.clock.now()
    running = asyncio.create_task(setup.candidate(driver).run(work))
    await elected(setup)
    await asyncio.sleep(0)
    [term] = terms
    store.cut = True
    await asyncio.sleep(asked_at + TIMING.work_window - 0.01 - setup.clock.now())
    assert not term.lost.is_set()
    await asyncio.sleep(0.02)
    assert term.lost.is_set()
    assert term.remaining() == pytest.approx(TIMING.grace - 0.01)
    await ended(running)
    with pytest.raises(TermLost):
        await asyncio.sleep(TIMING.grace)
        term.check()
