"""Elections among things that misbehave: what users hand in, drivers that fail, stores that go back, lost hints."""

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
from tenure._lease import Grant, Granted, HeldBy, Leader, Lost, NoAnswer
from tenure._runtime.renewal_thread import LoopProbe
from tenure._runtime.watchdog import EXIT_OVERRUN
from tenure._timing import Timing
from tenure.errors import ConfigError, TermLost
from tenure.events import CampaignFailed, Event, RenewalMissed, TermBegan, TermEnding, TokenFell
from tenure.testing import ManualClock
from tests.application.test_elector import TIMING, Road, Town, elected, forever, in_town


class Unprintable(Exception):
    """An error that can't be printed, as some of other people's can't."""

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
        seen.append(leader)  # noqa: PERF401  # it is looked at meanwhile


# --- what users hand in ----------------------------------------------------------------------------------------------


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
def test_whatever_a_health_callback_does_its_leader_is_unwell_and_no_more(kind: str) -> None:
    @in_town
    async def story(town: Town) -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(town.candidate(health=ODD_HEALTH[kind]).run(forever, stop=stop))
        await elected(town, 2)
        assert town.told(TermEnding)[0].reason == "stalled"
        await ended(running)

    story()


@in_town
async def test_each_of_two_elections_on_one_loop_has_a_health_of_its_own(town: Town) -> None:
    _, driver = town.road()
    asked: list[str] = []

    def health(name: str, well: bool) -> Callable[[], bool]:
        def ask() -> bool:
            asked.append(name)
            return well

        return ask

    ill = town.candidate(driver, health=health("ill", False))
    ill.name = "sickbed"
    well = town.candidate(driver, health=health("well", True))
    tasks = [asyncio.create_task(each.run(forever)) for each in (ill, well)]
    await elected(town, 2)
    await asyncio.sleep(2 * TIMING.ttl)
    assert {"ill", "well"} <= set(asked)
    assert {event.name for event in town.told(TermEnding)} == {"sickbed"}
    await ended(*tasks)


@pytest.mark.parametrize("stuck", [0, 1])
def test_each_of_two_elections_on_one_loop_has_beats_of_its_own(stuck: int) -> None:
    @in_town
    async def story(town: Town) -> None:
        async def work(term: Term) -> None:
            while term.name != f"chair {stuck}":
                term.beat()
                await asyncio.sleep(1)
            await forever(term)

        _, driver = town.road()
        elections = [town.candidate(driver, stall_after=5) for _ in range(2)]
        for number, election in enumerate(elections):
            election.name = f"chair {number}"
        tasks = [asyncio.create_task(election.run(work)) for election in elections]
        await elected(town, 2)
        await asyncio.sleep(1.5 * TIMING.ttl)
        assert {event.name for event in town.told(TermEnding)} == {f"chair {stuck}"}
        await ended(*tasks)

    story()


@pytest.mark.parametrize("gone", [0, 1])
def test_each_of_two_elections_is_judged_by_the_loop_that_its_own_work_runs_on(gone: int) -> None:
    @in_town
    async def story(town: Town) -> None:
        closed = asyncio.SelectorEventLoop()
        closed.close()
        _, driver = town.road()
        elections = [town.candidate(driver) for _ in range(2)]
        for number, election in enumerate(elections):
            election.name = f"chair {number}"
        tasks = [asyncio.create_task(election.run(forever)) for election in elections]
        await elected(town, 2)
        for number, election in enumerate(elections):
            assert election._candidate is not None
            election._candidate.probe = LoopProbe(closed if number == gone else town.loop)
        await asyncio.sleep(1.5 * TIMING.ttl)
        assert {event.name for event in town.told(TermEnding)} == {f"chair {gone}"}
        await ended(*tasks)

    story()


@in_town
async def test_a_leader_that_is_well_again_is_not_said_to_be_stalled_later(town: Town) -> None:
    is_well = True
    road, driver = town.road()
    running = asyncio.create_task(town.candidate(driver, health=lambda: is_well).run(forever))
    await elected(town)
    is_well = False
    async with asyncio.timeout(TIMING.ttl):
        while not town.told(RenewalMissed):
            await asyncio.sleep(0.1)
    is_well = True
    await asyncio.sleep(TIMING.ttl)
    assert not town.told(TermEnding)
    road.cut = True
    async with asyncio.timeout(TIMING.ttl):
        while not town.told(TermEnding):
            await asyncio.sleep(0.1)
    assert town.told(TermEnding)[0].reason == "unanswered"
    await ended(running)


class Measured(Road):
    """A road that notes for how long each lease is renewed."""

    def __init__(self, store: MemoryLeases) -> None:
        super().__init__(store)
        self.ttls: dict[str, set[float]] = {}

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        for grant in grants:
            self.ttls.setdefault(grant.name, set()).add(ttl)
        return await super().renew(grants, ttl)


@in_town
async def test_each_of_two_elections_on_one_loop_is_renewed_for_a_ttl_of_its_own(town: Town) -> None:
    _, driver = town.road()
    driver.store = road = Measured(town.store)
    # They are due at the same time, and so asked for in the same turn of the loop.
    elections = {ttl: town.candidate(driver, timing=Timing(ttl, renew_every=4.0)) for ttl in (15.0, 60.0)}
    for ttl, election in elections.items():
        election.name = f"chair for {ttl:g} s"
    tasks = [asyncio.create_task(election.run(forever)) for election in elections.values()]
    await elected(town, 2)
    await asyncio.sleep(60)
    assert road.ttls == {"chair for 15 s": {15.0}, "chair for 60 s": {60.0}}
    assert not town.told(TermEnding)
    await ended(*tasks)


@in_town
async def test_a_hook_that_raises_anything_changes_nothing(town: Town) -> None:
    reported: list[Any] = []
    town.loop.set_exception_handler(lambda loop, context: reported.append(context["exception"]))
    errors = [Unprintable(), StopIteration(), asyncio.CancelledError(), SystemExit(1)]

    def hook(event: object) -> None:
        town.events.append(cast(Any, event))
        if errors:
            raise errors.pop()

    running = asyncio.create_task(town.candidate(on_event=hook).run(forever))
    await elected(town)
    await asyncio.sleep(TIMING.ttl)
    assert len(reported) == 4
    assert not town.told(TermEnding)
    await ended(running)


@in_town
async def test_metadata_names_and_labels_are_copied_as_plain_text(town: Town) -> None:
    class Text(str):
        __slots__ = ()

        def __str__(self) -> str:
            raise RuntimeError("nobody's business")

        encode = __format__ = __repr__ = __str__  # type: ignore[assignment]

    class Fickle(Mapping[str, str]):
        """Another mapping each time it is looked at."""

        looks = 0

        def __getitem__(self, key: str) -> str:
            self.looks += 1
            return Text("fine") if self.looks == 1 else cast(str, 7)

        def __iter__(self) -> Iterator[str]:
            return iter([Text("key")])

        def __len__(self) -> int:
            return 1

    election = town.candidate(metadata=Fickle(), label=Text("me"))
    assert dict(election.metadata) == {"key": "fine"}
    texts = [*election.metadata, *election.metadata.values(), election.label]
    assert {type(text) for text in texts} == {str}


# --- the end of the process ------------------------------------------------------------------------------------------


@in_town
async def test_an_overrun_that_is_to_exit_does_so_although_no_thread_is_to_be_had(town: Town) -> None:
    class Gone(BaseException):
        pass

    codes: list[int] = []

    async def stubborn(term: Term) -> None:
        while not codes:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    road, driver = town.road()
    running = asyncio.create_task(town.candidate(driver, overrun="exit").run(stubborn))
    await elected(town)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(os, "_exit", codes.append)
        road.cut = True
        async with asyncio.timeout(2 * TIMING.ttl):
            while not codes:
                await asyncio.sleep(0.1)
    assert codes[0] == EXIT_OVERRUN
    await ended(running)


# --- a driver that fails, a schema that is away ----------------------------------------------------------------------

BREAKS = [TypeError("a bug in a driver"), ConfigError("no such table"), Unprintable(), asyncio.CancelledError()]


@pytest.mark.parametrize("error", BREAKS, ids=lambda error: type(error).__name__)
def test_a_store_that_fails_after_it_has_worked_ends_no_candidate(error: Exception) -> None:
    @in_town
    async def story(town: Town) -> None:
        roads = [town.road() for _ in range(2)]
        tasks = [asyncio.create_task(town.candidate(driver).run(forever)) for _, driver in roads]

        async def broken_until(kind: type[Event], count: int) -> None:
            for road, _ in roads:
                road.broken = error
            async with asyncio.timeout(10 * TIMING.ttl):
                while len(town.told(kind)) < count:
                    await asyncio.sleep(0.1)
            for road, _ in roads:
                road.broken = None

        await elected(town)
        await broken_until(RenewalMissed, 1)
        await asyncio.sleep(2 * TIMING.ttl)
        assert len(town.told(TermBegan)) == 1
        assert not town.told(TermEnding)
        await broken_until(CampaignFailed, 4)
        await elected(town, 2)
        assert not any(task.done() for task in tasks)
        await ended(*tasks)

    story()


@in_town
async def test_an_observer_survives_a_store_that_fails_after_it_has_worked(town: Town) -> None:
    road, driver = town.road()
    seen: list[Leader | None] = []
    looking = asyncio.create_task(observed(town.candidate(driver), seen))
    await asyncio.sleep(1)
    road.broken = TypeError("a bug in a driver")
    await asyncio.sleep(3 * TIMING.retry_every)
    road.broken = None
    leading = asyncio.create_task(town.candidate().run(forever))
    async with asyncio.timeout(TIMING.ttl):
        while len(seen) < 2:
            await asyncio.sleep(0.1)
    assert seen[0] is None
    assert seen[1] is not None
    await ended(looking, leading)


class Split(Road):
    """A road to a store on several servers, of which one can't be reached."""

    away = ""

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        answers = await super().renew(grants, ttl)
        pairs = zip(grants, answers, strict=True)
        return [NoAnswer("that server is away") if grant.name == self.away else answer for grant, answer in pairs]


@in_town
async def test_one_lease_that_can_not_be_asked_costs_its_own_term_alone(town: Town) -> None:
    _, driver = town.road()
    driver.store = road = Split(town.store)
    elections = [town.candidate(driver) for _ in range(3)]
    for number, election in enumerate(elections):
        election.name = f"chair {number}"
    tasks = [asyncio.create_task(election.run(forever)) for election in elections]
    await elected(town, 3)
    road.away = "chair 1"
    await asyncio.sleep(1.5 * TIMING.ttl)
    assert max(road.renewals) == 3
    assert {event.name for event in town.told(RenewalMissed)} == {"chair 1"}
    assert {event.name for event in town.told(TermEnding)} == {"chair 1"}
    await ended(*tasks)


# --- a store that goes back ------------------------------------------------------------------------------------------


async def restored(town: Town, terms: int) -> MemoryLeases:
    """Return a store as one of before, that has seen so many terms."""
    store = MemoryLeases(town.clock)
    for number in range(terms):
        answer = await store.acquire("chair", f"somebody#{number}", TIMING.ttl)
        await store.release(cast(Any, answer).grant)
    return store


@pytest.mark.parametrize("terms", [0, 2])
def test_a_former_leader_leads_again_after_tokens_fell_and_it_is_reported(terms: int) -> None:
    """With two terms in the copy, the next one has the very token of the present one."""

    @in_town
    async def story(town: Town) -> None:
        async def work(term: Term) -> None:
            await (forever(term) if len(town.told(TermBegan)) == 1 else done.wait())

        done = asyncio.Event()
        road, driver = town.road()
        town.store = road.store = await restored(town, 2)
        running = asyncio.create_task(town.candidate(driver).run(work))
        await elected(town)
        assert town.told(TermBegan)[0].token == 3
        road.store = await restored(town, terms)
        await elected(town, 2)
        await asyncio.sleep(2 * TIMING.ttl)
        assert [event.token for event in town.told(TermBegan)] == [3, terms + 1]
        assert len(town.told(TermEnding)) == 1  # of the first
        assert not running.done()
        [fell] = town.told(TokenFell)
        assert (fell.token, fell.seen) == (terms + 1, 3)
        done.set()
        async with asyncio.timeout(TIMING.ttl):
            await running  # what became of the first term says nothing of the second, which has just returned
        assert len(town.told(TermBegan)) == 2

    story()


def test_an_answer_that_was_given_before_a_newer_one_says_of_no_token_that_it_fell() -> None:
    machine = Machine("chair", "me", TIMING, random.Random(1), hints=False, now=0.0)
    told: list[Event] = []

    def heard(event: Input, now: float) -> None:
        told.extend(effect.event for effect in machine.handle(event, now) if isinstance(effect, Emit))

    now = 0.0
    for _ in range(3):  # asks, gives up, asks again
        heard(Tick(), now := machine.wake_at)
    heard(Answered(2, HeldBy("chair", "bob#1", 7, None)), now)
    heard(Answered(1, HeldBy("chair", "ann#1", 6, None)), now)  # it was under way for long
    assert not [event for event in told if isinstance(event, TokenFell)]
    heard(Tick(), now := machine.wake_at)
    heard(Answered(3, HeldBy("chair", "cid#1", 6, None)), now)
    [fell] = [event for event in told if isinstance(event, TokenFell)]
    assert (fell.token, fell.seen) == (6, 7)


@in_town
async def test_a_standby_also_reports_that_tokens_fell(town: Town) -> None:
    road, driver = town.road()
    road.store = await restored(town, 5)
    first = await road.store.acquire("chair", "a leader#1", 3600)
    assert cast(Any, first).grant.token == 6
    waiting = asyncio.create_task(town.candidate(driver).run(forever))
    await asyncio.sleep(TIMING.ttl)
    road.store = await restored(town, 1)
    await road.store.acquire("chair", "a leader#2", 3600)
    await asyncio.sleep(2 * TIMING.ttl)
    [fell] = town.told(TokenFell)
    assert (fell.holder, fell.token, fell.seen) == ("a leader#2", 2, 6)
    await ended(waiting)


@in_town
async def test_an_observer_distinguishes_two_leaders_of_one_token(town: Town) -> None:
    road, driver = town.road()
    await road.store.acquire("chair", "ann#1", 3600)
    seen: list[Leader | None] = []
    looking = asyncio.create_task(observed(town.candidate(driver), seen))
    await asyncio.sleep(1)
    road.store = MemoryLeases(town.clock)
    await road.store.acquire("chair", "bob#1", 3600)
    await asyncio.sleep(2 * TIMING.ttl)
    assert [leader.holder if leader else None for leader in seen] == ["ann#1", "bob#1"]
    await ended(looking)


# --- hints that never come -------------------------------------------------------------------------------------------


class Mute(Road):
    """A road that promises hints and brings none."""

    def hints(self, name: str) -> AsyncIterator[None]:
        return self._nothing()

    async def _nothing(self) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield


@in_town
async def test_a_candidate_with_hints_asks_at_least_once_in_its_own_ttl(town: Town) -> None:
    _, driver = town.road()
    driver.store = Mute(town.store)
    assert driver.store.traits.hints
    held = await town.store.acquire("chair", "a leader#1", 3600)
    seen: list[Leader | None] = []
    waiting, looking = (
        asyncio.create_task(town.candidate(driver).run(forever)),
        asyncio.create_task(observed(town.candidate(driver), seen)),
    )
    await asyncio.sleep(TIMING.ttl)
    await town.store.release(cast(Any, held).grant)
    async with asyncio.timeout(TIMING.ttl + TIMING.retry_every):
        await elected(town)
    async with asyncio.timeout(TIMING.ttl):
        while len(seen) < 2:
            await asyncio.sleep(0.1)
    await ended(waiting, looking)


# --- suspend ---------------------------------------------------------------------------------------------------------


class Awake:
    """A clock that went on while timers stood still."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.slept = 0.0
        self._now = now

    def now(self) -> float:
        return self._now() + self.slept


@in_town
async def test_after_a_suspend_a_leader_wakes_at_once_and_knows_that_it_is_over(town: Town) -> None:
    clock = Awake(town.clock.now)
    town.clock = cast(Any, clock)
    timing = Timing(ttl=3600)
    _, driver = town.road()
    running = asyncio.create_task(town.candidate(driver, timing=timing).run(forever))
    await elected(town)
    await asyncio.sleep(1)
    clock.slept += 3600
    async with asyncio.timeout(2):  # its own timer is 1,200 s away
        while not town.told(TermEnding):
            await asyncio.sleep(0.1)
    assert town.told(TermEnding)[0].reason == "unanswered"
    await ended(running)


@in_town
async def test_every_suspend_wakes_every_leader(town: Town) -> None:
    clock = Awake(town.clock.now)
    town.clock = cast(Any, clock)
    _, driver = town.road()
    elections = [town.candidate(driver, timing=Timing(ttl=3600)) for _ in range(2)]
    for number, election in enumerate(elections):
        election.name = f"chair {number}"
    tasks = [asyncio.create_task(election.run(forever)) for election in elections]
    await elected(town, 2)
    for slept in (100, 100, 3600):
        await asyncio.sleep(2)
        assert not town.told(TermEnding)
        clock.slept += slept
    async with asyncio.timeout(2):
        while {event.name for event in town.told(TermEnding)} != {"chair 0", "chair 1"}:
            await asyncio.sleep(0.1)
    await ended(*tasks)


# --- numbers that are believed ---------------------------------------------------------------------------------------


def test_a_term_is_over_at_its_very_end() -> None:
    clock = ManualClock(100.0)
    term = Term(Grant("chair", "me#1", 1), 110.0, clock)
    clock.advance(9.75)
    term.check()
    assert term.remaining() == 0.25
    clock.advance(0.25)
    assert term.remaining() == 0.0
    with pytest.raises(TermLost):
        term.check()


@in_town
async def test_a_term_is_believed_to_the_number(town: Town) -> None:
    road, driver = town.road()
    road.delay = 1.0
    terms: list[Term] = []

    async def work(term: Term) -> None:
        terms.append(term)
        assert term.remaining() == pytest.approx(TIMING.window - road.delay)
        await forever(term)

    asked_at = town.clock.now()
    running = asyncio.create_task(town.candidate(driver).run(work))
    await elected(town)
    await asyncio.sleep(0)
    [term] = terms
    road.cut = True
    await asyncio.sleep(asked_at + TIMING.work_window - 0.01 - town.clock.now())
    assert not term.lost.is_set()
    await asyncio.sleep(0.02)
    assert term.lost.is_set()
    assert term.remaining() == pytest.approx(TIMING.grace - 0.01)
    await ended(running)
    with pytest.raises(TermLost):
        await asyncio.sleep(TIMING.grace)
        term.check()
