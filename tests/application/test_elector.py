"""Election, Term and the driver on one loop in virtual time, on a memory store whose connection can fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from tenure._backends.memory.leases import MemoryLeases
from tenure._election.driver import Driver
from tenure._election.elector import Election
from tenure._election.health import Health
from tenure._election.store import Hint, LeaseStore, LeaseTraits
from tenure._election.term import Term
from tenure._lease import NO_METADATA, Grant, Granted, HeldBy, Leader, Lost, Metadata, NoAnswer, Released, Vacant
from tenure._runtime.renewal_thread import RenewalThread
from tenure._timing import Timing
from tenure.errors import ConfigError, TenureError, TermLost, Unavailable
from tenure.events import Event, Overrun, ReleasedUnused, ReleaseMissed, RenewalMissed, TermBegan, TermEnded, TermEnding
from tenure.testing.loop import VirtualLoop, run

T = TypeVar("T")
TIMING = Timing()


class FaultyStore:
    """A store whose connection can be slow, be cut, or lose answers."""

    def __init__(self, inner: LeaseStore) -> None:
        self.inner = inner
        self.cut = False
        self.loses_answers = False
        self.broken: BaseException | None = None
        self.hint_errors: list[Exception] = []
        self.delay = 0.0
        self.renewals: list[list[str]] = []  # the names in each request

    @property
    def traits(self) -> LeaseTraits:
        return self.inner.traits

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        if self.broken:
            raise self.broken
        if self.cut:
            raise Unavailable("the connection is cut")
        answer = await call()
        await asyncio.sleep(self.delay)
        if self.loses_answers:
            raise Unavailable("the answer was lost")
        return answer

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        return await self._call(lambda: self.inner.acquire(name, holder, ttl, metadata))

    async def renew(self, grants: Sequence[Grant], ttl: float) -> Sequence[Granted | Lost | NoAnswer]:
        self.renewals.append([grant.name for grant in grants])
        return await self._call(lambda: self.inner.renew(grants, ttl))

    async def release(self, grant: Grant) -> Released | Lost:
        return await self._call(lambda: self.inner.release(grant))

    async def inspect(self, name: str) -> HeldBy | Vacant:
        return await self._call(lambda: self.inner.inspect(name))

    async def inspect_many(self, names: Sequence[str]) -> Sequence[HeldBy | Vacant]:
        return await self._call(lambda: self.inner.inspect_many(names))

    async def names(self) -> Sequence[str]:
        return await self._call(self.inner.names)

    async def ask_to_resign(self, name: str) -> bool:
        return await self._call(lambda: self.inner.ask_to_resign(name))

    def hints(self, name: str) -> AsyncIterator[Hint]:
        if self.hint_errors:
            raise self.hint_errors.pop()
        return self.inner.hints(name)


class ElectionSetup:
    """One store, several candidates, one virtual clock."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.clock = loop.clock()
        self.store = MemoryLeases(self.clock)
        self.events: list[Event] = []
        self._drivers: list[Driver] = []

    def connect(self) -> tuple[FaultyStore, Driver]:
        store = FaultyStore(self.store)
        driver = Driver(store, self.clock)
        self._drivers.append(driver)
        return store, driver

    def candidate(self, driver: Driver | None = None, *, timing: Timing = TIMING, **options: Any) -> Election:
        driver = driver or self.connect()[1]
        options.setdefault("on_event", self.events.append)
        return Election("chair", timing, driver=driver, renewal_thread=RenewalThread.here(), **options)

    def emitted(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def close(self) -> None:
        for driver in self._drivers:
            await driver.close()


def in_virtual_time(test: Callable[[ElectionSetup], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run *test* in virtual time, with a setup as its argument."""

    async def main() -> None:
        setup = ElectionSetup()
        try:
            await test(setup)
        finally:
            await setup.close()

    def wrapped() -> None:
        run(main(), seed=1, limit=10_000)

    wrapped.__name__ = test.__name__
    return wrapped


async def forever(term: Term) -> None:
    await asyncio.Event().wait()


async def elected(setup: ElectionSetup, count: int = 1) -> None:
    """Wait until so many terms have begun."""
    async with asyncio.timeout(1000):
        while len(setup.emitted(TermBegan)) < count:
            await asyncio.sleep(0.05)


@in_virtual_time
async def test_work_that_returns_ends_the_campaign_and_releases_the_lease(setup: ElectionSetup) -> None:
    election = setup.candidate()
    seen: list[Leader | None] = []

    async def work(term: Term) -> None:
        seen.append(await election.leader())
        assert (term.name, term.token) == ("chair", 1)
        assert seen[0] is not None
        assert seen[0].holder == term.holder

    await election.run(work)
    assert await election.leader() is None
    assert setup.emitted(TermEnded)[0].released


@in_virtual_time
async def test_again_campaigns_anew_with_a_higher_token(setup: ElectionSetup) -> None:
    tokens: list[int] = []
    stop = asyncio.Event()

    async def work(term: Term) -> None:
        tokens.append(term.token)
        if len(tokens) == 3:
            stop.set()

    await setup.candidate().run(work, again=True, stop=stop)
    assert tokens == [1, 2, 3]


@in_virtual_time
async def test_a_candidate_whose_hints_failed_gets_the_next_vacancy(setup: ElectionSetup) -> None:
    stop = asyncio.Event()
    leading = asyncio.create_task(setup.candidate().run(forever, stop=stop))
    await elected(setup)
    store, driver = setup.connect()
    store.hint_errors = [OSError("no file descriptors left"), Unavailable("the connection is cut")]
    waiting = asyncio.create_task(setup.candidate(driver).run(forever))
    await asyncio.sleep(3 * TIMING.retry_every)
    assert not store.hint_errors
    leading.cancel()
    async with asyncio.timeout(TIMING.retry_every):
        await elected(setup, 2)
    waiting.cancel()


@in_virtual_time
async def test_work_that_raises_steps_down_and_raises(setup: ElectionSetup) -> None:
    election = setup.candidate()

    async def work(term: Term) -> None:
        raise KeyError("no such plan")

    with pytest.raises(KeyError, match="no such plan"):
        await election.run(work)
    assert await election.leader() is None


@in_virtual_time
async def test_the_lease_is_renewed_for_as_long_as_the_work_runs(setup: ElectionSetup) -> None:
    election = setup.candidate()

    async def work(term: Term) -> None:
        for _ in range(100):
            await asyncio.sleep(1)
            term.check()
            assert term.remaining() > TIMING.grace

    await election.run(work)
    assert len(setup.emitted(TermBegan)) == 1


@in_virtual_time
async def test_a_cut_leader_stops_before_another_can_lead_and_campaigns_again(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    old, new = setup.candidate(driver), setup.candidate()
    stopped_at: list[float] = []
    began_at: list[float] = []

    async def lead(term: Term) -> None:
        try:
            await forever(term)
        finally:
            assert term.remaining() > 0.0
            stopped_at.append(setup.loop.time())

    async def succeed(term: Term) -> None:
        began_at.append(setup.loop.time())
        await asyncio.sleep(30)

    first = asyncio.create_task(old.run(lead))
    await elected(setup)
    second = asyncio.create_task(new.run(succeed))
    await asyncio.sleep(20)
    store.cut = True
    await elected(setup, 2)
    assert stopped_at[0] < began_at[0]
    store.cut = False
    await second
    await elected(setup, 3)  # the old one leads again, in a new term
    assert [event.token for event in setup.emitted(TermBegan)] == [1, 2, 3]
    first.cancel()
    await asyncio.wait({first})


@in_virtual_time
async def test_two_lost_answers_in_a_row_end_no_term(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    task = asyncio.create_task(setup.candidate(driver).run(forever))
    await elected(setup)
    await asyncio.sleep(4)
    store.loses_answers = True
    while len(setup.emitted(RenewalMissed)) < 2:
        await asyncio.sleep(0.1)
    store.loses_answers = False
    await asyncio.sleep(60)
    assert len(setup.emitted(TermBegan)) == 1
    assert not setup.emitted(TermEnding)
    task.cancel()
    await asyncio.wait({task})


@in_virtual_time
async def test_a_lease_that_can_not_be_released_is_reported_once(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    stop = asyncio.Event()
    task = asyncio.create_task(setup.candidate(driver).run(forever, stop=stop))
    await elected(setup)
    store.cut = True
    stop.set()
    await task
    [missed] = setup.emitted(ReleaseMissed)
    assert missed.token == 1
    assert 0 < missed.time_left <= TIMING.ttl


@in_virtual_time
async def test_an_acquisition_whose_answer_was_lost_is_found_again(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    store.loses_answers = True
    task = asyncio.create_task(setup.candidate(driver).run(forever))
    await asyncio.sleep(1)
    store.loses_answers = False
    await elected(setup)
    assert setup.loop.time() < TIMING.ttl  # it did not have to wait for its own lost lease
    assert setup.emitted(TermBegan)[0].token == 1
    task.cancel()
    await asyncio.wait({task})


@in_virtual_time
async def test_a_grant_that_comes_after_the_campaign_was_stopped_is_released(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    store.delay = 1.0
    task = asyncio.create_task(setup.candidate(driver).run(forever))
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.wait({task})
    assert len(setup.emitted(ReleasedUnused)) == 1
    assert not setup.emitted(TermBegan)
    assert isinstance(await setup.store.inspect("chair"), Vacant)


@in_virtual_time
async def test_cancelling_run_waits_for_the_work_and_then_releases(setup: ElectionSetup) -> None:
    election = setup.candidate()
    tidy: list[bool] = []

    async def work(term: Term) -> None:
        try:
            await forever(term)
        except asyncio.CancelledError:
            await asyncio.sleep(1)
            tidy.append(await election.leader() is not None)
            raise

    task = asyncio.create_task(election.run(work))
    await elected(setup)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tidy == [True]
    assert await election.leader() is None


@in_virtual_time
async def test_work_that_ignores_cancellation_keeps_its_lease_until_it_runs_out(setup: ElectionSetup) -> None:
    election, other = setup.candidate(), setup.candidate()
    stubborn_until: list[float] = []

    async def stubborn(term: Term) -> None:
        until = setup.loop.time() + 60
        while setup.loop.time() < until:
            try:
                await asyncio.sleep(until - setup.loop.time())
            except asyncio.CancelledError:
                continue
        stubborn_until.append(setup.loop.time())

    task = asyncio.create_task(election.run(stubborn))
    await elected(setup)
    leaving = asyncio.create_task(election.resign())
    await asyncio.sleep(0)
    rival = asyncio.create_task(other.run(forever))
    await elected(setup, 2)
    assert setup.emitted(Overrun)
    assert not stubborn_until
    assert setup.loop.time() >= TIMING.window
    await leaving
    assert stubborn_until
    assert not setup.emitted(TermEnded)[0].released
    for each in (task, rival):
        each.cancel()
    await asyncio.wait({task, rival})


@in_virtual_time
async def test_a_block_is_cancelled_when_its_term_is_lost(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    election = setup.candidate(driver)
    with pytest.raises(TermLost, match="did not confirm the lease in time"):
        async with election.campaign() as term:
            store.cut = True
            await forever(term)
    assert asyncio.current_task() is not None
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
    await asyncio.sleep(1)  # nothing of the cancellation is left


@in_virtual_time
async def test_a_block_that_ends_releases_and_a_block_that_raises_raises(setup: ElectionSetup) -> None:
    election = setup.candidate()
    async with election.campaign() as term:
        assert term.remaining() > 0
    assert await election.leader() is None
    with pytest.raises(ZeroDivisionError):
        async with election.campaign():
            _ = 1 // 0
    assert await election.leader() is None


@in_virtual_time
async def test_a_block_cancelled_from_outside_is_cancelled_and_not_lost(setup: ElectionSetup) -> None:
    election = setup.candidate()

    async def campaign() -> None:
        async with election.campaign() as term:
            await forever(term)

    task = asyncio.create_task(campaign())
    await elected(setup)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await election.leader() is None


@in_virtual_time
async def test_a_block_that_is_not_cancelled_sees_that_its_term_is_lost(setup: ElectionSetup) -> None:
    election = setup.candidate()
    async with election.campaign(cancel=False) as term:
        assert await election.ask_to_resign()
        await term.lost.wait()
        term.check()  # until the lease is released, it may still act as the leader


@in_virtual_time
async def test_the_leader_can_be_asked_to_step_down_and_lets_others_go_first(setup: ElectionSetup) -> None:
    one, two = setup.candidate(), setup.candidate()
    first = asyncio.create_task(one.run(forever))
    await elected(setup)
    second = asyncio.create_task(two.run(forever))
    await asyncio.sleep(1)
    asked_at = setup.loop.time()
    assert await two.ask_to_resign()
    await elected(setup, 2)
    assert setup.loop.time() - asked_at < 1.0
    assert setup.emitted(TermEnding)[0].reason == "asked"
    holders = [event.holder.rpartition("#")[0] for event in setup.emitted(TermBegan)]
    assert holders[0] != holders[1]
    for task in (first, second):
        task.cancel()
    await asyncio.wait({first, second})


@in_virtual_time
async def test_without_a_leader_there_is_none_to_ask_to_resign(setup: ElectionSetup) -> None:
    assert not await setup.candidate().ask_to_resign()
    assert not await setup.candidate().resign()


@in_virtual_time
async def test_stop_lets_the_work_finish(setup: ElectionSetup) -> None:
    stop = asyncio.Event()
    finished: list[bool] = []

    async def work(term: Term) -> None:
        stop.set()
        await asyncio.sleep(40)
        term.check()
        finished.append(True)

    await setup.candidate().run(work, again=True, stop=stop)
    assert finished == [True]


@in_virtual_time
async def test_stopped_before_or_while_it_wins_it_does_not_begin(setup: ElectionSetup) -> None:
    stop = asyncio.Event()
    began: list[int] = []

    async def work(term: Term) -> None:
        began.append(term.token)

    stop.set()
    await setup.candidate().run(work, stop=stop)
    stop.clear()

    def stop_at_the_win(event: Event) -> None:
        if isinstance(event, TermBegan):
            stop.set()

    await setup.candidate(on_event=stop_at_the_win).run(work, stop=stop)
    assert not began
    assert isinstance(await setup.store.inspect("chair"), Vacant)


@in_virtual_time
async def test_work_that_cancels_itself_is_an_error(setup: ElectionSetup) -> None:
    async def work(term: Term) -> None:
        raise asyncio.CancelledError

    with pytest.raises(TenureError, match="the work cancelled itself"):
        await setup.candidate().run(work)
    assert isinstance(await setup.store.inspect("chair"), Vacant)


@in_virtual_time
async def test_a_health_callback_that_is_cancelled_counts_as_false(setup: ElectionSetup) -> None:
    async def cancelled() -> bool:
        raise asyncio.CancelledError

    task = asyncio.create_task(setup.candidate(health=cancelled).run(forever))
    await elected(setup, 2)
    assert setup.emitted(TermEnding)[0].reason == "stalled"
    task.cancel()
    await asyncio.wait({task})


@in_virtual_time
async def test_observe_yields_every_change_and_nothing_while_the_store_is_away(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    watcher = setup.candidate(driver)
    seen: list[int | None] = []
    note = seen.append

    async def watch() -> None:
        async for leader in watcher.observe():
            note(leader.token if leader else None)

    task = asyncio.create_task(watch())
    await asyncio.sleep(0.1)
    async with setup.candidate().campaign():
        await asyncio.sleep(0.1)
        store.cut = True
        await asyncio.sleep(20)
        store.cut = False
        await asyncio.sleep(20)
    await asyncio.sleep(0.1)
    assert seen == [None, 1, None]
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_unhealthy_leader_loses_its_lease(asynchronous: bool) -> None:
    @in_virtual_time
    async def scenario(setup: ElectionSetup) -> None:
        well = [True]

        async def ask() -> bool:
            return well[0]

        health: Health = ask if asynchronous else lambda: well[0]
        task = asyncio.create_task(setup.candidate(health=health).run(forever))
        await elected(setup)
        await asyncio.sleep(30)
        assert len(setup.emitted(TermBegan)) == 1
        well[0] = False
        await elected(setup, 2)
        assert setup.emitted(TermEnding)[0].reason == "stalled"
        task.cancel()
        await asyncio.wait({task})

    scenario()


@in_virtual_time
async def test_without_beats_a_leader_loses_its_lease(setup: ElectionSetup) -> None:
    async def work(term: Term) -> None:
        for _ in range(20):
            term.beat()
            await asyncio.sleep(1)
        await forever(term)

    task = asyncio.create_task(setup.candidate(stall_after=3).run(work))
    await elected(setup)
    await elected(setup, 2)
    ending = setup.emitted(TermEnding)[0]
    assert ending.reason == "stalled"
    assert 20 < ending.at < 20 + 3 + TIMING.ttl
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("error", [ConfigError("not a database"), TypeError("a bug in a driver")])
def test_a_permanent_error_is_raised_by_run(error: Exception) -> None:
    @in_virtual_time
    async def scenario(setup: ElectionSetup) -> None:
        store, driver = setup.connect()
        store.broken = error
        with pytest.raises(type(error), match=str(error)):
            await setup.candidate(driver).run(forever)
        with pytest.raises(type(error), match=str(error)):
            async with setup.candidate(driver).campaign():
                pass

    scenario()


def test_a_look_does_not_show_that_the_name_can_be_asked_for() -> None:
    """The first request has no answer, so the next one is a look; that is answered also to who may only read."""

    @in_virtual_time
    async def scenario(setup: ElectionSetup) -> None:
        store, driver = setup.connect()
        inner, asked = store.inner, list[Exception]([ConfigError("only for reading"), Unavailable("slow")])

        class ReadOnly:
            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

            async def acquire(self, *_: Any) -> Any:
                raise asked.pop()

        store.inner = ReadOnly()
        with pytest.raises(ConfigError, match="only for reading"):
            await setup.candidate(driver).run(forever)

    scenario()


@in_virtual_time
async def test_one_object_is_one_candidate(setup: ElectionSetup) -> None:
    election = setup.candidate()
    async with election.campaign():
        with pytest.raises(ConfigError, match="campaigns for 'chair' already"):
            await election.run(forever)


@in_virtual_time
async def test_work_that_is_not_a_coroutine_function_is_refused(setup: ElectionSetup) -> None:
    def work(term: Term) -> None:
        return None

    election = setup.candidate()
    with pytest.raises(ConfigError, match=r"must be an async function.*tenure\.sync"):
        await election.run(work)  # type: ignore[arg-type]
    assert await election.leader() is None


@in_virtual_time
async def test_work_that_raises_before_it_can_be_awaited(setup: ElectionSetup) -> None:
    def work(term: Term) -> Awaitable[None]:
        raise KeyError("at once")

    election = setup.candidate()
    with pytest.raises(KeyError, match="at once"):
        await election.run(work)
    assert await election.leader() is None


@in_virtual_time
async def test_an_error_of_work_that_cleans_up_is_not_lost(setup: ElectionSetup) -> None:
    async def work(term: Term) -> None:
        try:
            await forever(term)
        finally:
            raise OSError("could not save")

    task = asyncio.create_task(setup.candidate().run(work))
    await elected(setup)
    task.cancel()
    with pytest.raises(OSError, match="could not save"):
        await task


@in_virtual_time
async def test_a_candidate_cancelled_at_any_moment_leaves_no_leader(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    store.delay = 0.01
    for steps in range(40):
        task = asyncio.create_task(setup.candidate(driver).run(forever))
        for _ in range(steps):
            await asyncio.sleep(0 if steps < 30 else 0.005)
        task.cancel()
        await asyncio.wait({task})
        assert not driver.candidacies
        assert isinstance(await setup.store.inspect("chair"), Vacant)


@in_virtual_time
async def test_others_read_the_metadata_of_the_leader(setup: ElectionSetup) -> None:
    election = setup.candidate(metadata={"address": "10.0.0.7:80"}, label="web-1")
    async with election.campaign() as term:
        leader = await election.leader()
        assert leader is not None
        assert leader.metadata == {"address": "10.0.0.7:80"}
        assert leader.holder == term.holder
        assert leader.holder.startswith("web-1-")


@in_virtual_time
async def test_a_thousand_leases_share_their_renewals(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    elections = [
        Election(f"chair {n}", TIMING, driver=driver, renewal_thread=RenewalThread.here(), on_event=setup.events.append)
        for n in range(1000)
    ]
    tasks = [asyncio.create_task(election.run(forever)) for election in elections]
    await elected(setup, 1000)
    store.renewals.clear()
    start = setup.loop.time()
    await asyncio.sleep(100)
    rounds = (setup.loop.time() - start) / TIMING.renew_every
    assert sum(map(len, store.renewals)) >= 1000 * (rounds - 1)
    assert len(store.renewals) <= 2 * 1.15 * rounds  # in two statements of 500, and up to a tenth early
    assert len(setup.emitted(TermBegan)) == 1000
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert not driver.candidacies


@in_virtual_time
async def test_leases_that_begin_at_any_time_come_to_share_their_renewals(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    tasks = []
    for n in range(100):
        election = Election(
            f"chair {n:02}", TIMING, driver=driver, renewal_thread=RenewalThread.here(), on_event=setup.events.append
        )
        tasks.append(asyncio.create_task(election.run(forever)))
        await asyncio.sleep(TIMING.renew_every / 37)
    await asyncio.sleep(2 * TIMING.renew_every)
    store.renewals.clear()
    await asyncio.sleep(20 * TIMING.renew_every)
    assert set(map(len, store.renewals)) == {100}
    assert len(store.renewals) <= 23  # a renewal is a tenth early at most
    assert store.renewals[-1] == sorted(store.renewals[-1])  # in the order in which they began
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@in_virtual_time
async def test_a_store_that_answers_after_the_deadline_is_trusted_from_the_request(setup: ElectionSetup) -> None:
    store, driver = setup.connect()
    task = asyncio.create_task(setup.candidate(driver).run(forever))
    await elected(setup)
    store.delay = TIMING.retry_every * 1.5  # each answer comes late, and still in time
    await asyncio.sleep(60)
    assert len(setup.emitted(TermBegan)) == 1
    store.delay = 0.0
    task.cancel()
    await asyncio.wait({task})


def yields() -> Iterator[bool]:
    """A generator function: calling it runs nothing."""
    yield False


@in_virtual_time
async def test_bad_settings_are_refused_when_built(setup: ElectionSetup) -> None:
    for options, message in [
        ({"stall_after": 0}, "stall_after must be a positive number"),
        ({"stall_after": "5"}, "stall_after must be a positive number"),
        ({"health": 3}, "health must be a function"),
        ({"health": yields}, "health must be a function that does its work when it is called"),
        ({"label": "x" * 1_000}, "the label must have at most 991 characters, not 1000"),
        ({"label": "a\0b"}, "the label must hold no NUL"),
        ({"overrun": "ignore"}, "overrun must be 'report' or 'exit', not 'ignore'"),
        ({"metadata": {"port": 80}}, "metadata must map text to text"),
        ({"metadata": {"port": "\udcff"}}, "metadata must hold no NUL and no lone surrogate"),
    ]:
        with pytest.raises(ConfigError, match=message):
            setup.candidate(**options)  # type: ignore[arg-type]
