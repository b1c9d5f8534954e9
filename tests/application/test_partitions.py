"""Partitions, their work and their owner, on one loop in virtual time, on a memory store whose connection can fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from itertools import pairwise
from typing import Any

import pytest

from tenure._election.driver import Driver
from tenure._election.health import NOT_HEALTHY
from tenure._partitions.partitions import Partitions, PartitionTerm
from tenure._partitions.plan import Layout, checked_partitions
from tenure._runtime.renewal_thread import RenewalThread
from tenure._timing import Timing
from tenure.errors import ConfigError, Unavailable
from tenure.events import CampaignFailed, TermBegan
from tenure.testing.loop import run
from tests.application.test_elector import ElectionSetup

TIMING = Timing()


class PartitionSetup(ElectionSetup):
    """One store, several members, one virtual clock."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: Counter[str] = Counter()
        self.tasks: list[asyncio.Task[None]] = []

    def partitions(
        self, driver: Driver | None = None, partitions: int | Iterable[str] = 8, *, weight: int = 1, **options: Any
    ) -> Partitions:
        return Partitions(
            Layout("orders", checked_partitions(partitions)),
            TIMING,
            driver=driver or self.connect()[1],
            renewal_thread=RenewalThread.here(),
            options=options,  # type: ignore[arg-type]
            weight=weight,
            on_event=self.events.append,
        )

    async def forever(self, term: PartitionTerm) -> None:
        self.begun[term.partition] += 1
        await asyncio.Event().wait()

    def run(
        self, partitions: Partitions, work: Callable[[PartitionTerm], Awaitable[Any]] | None = None, **options: Any
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(partitions.run(work or self.forever, **options))
        self.tasks.append(task)
        return task

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await super().close()


def in_virtual_time(test: Callable[[PartitionSetup], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run *test* in virtual time, with a setup as its argument."""

    async def main() -> None:
        setup = PartitionSetup()
        try:
            await test(setup)
        finally:
            await setup.close()

    def wrapped() -> None:
        run(main(), seed=1, limit=10_000)

    wrapped.__name__ = test.__name__
    return wrapped


async def owning(*counts: int, of: Iterable[Partitions], within: float = 60.0) -> None:
    """Wait until these members own as many partitions each."""
    members = list(of)
    async with asyncio.timeout(within):
        while tuple(len(one.owned) for one in members) != counts:
            await asyncio.sleep(0.05)


# --- sharing ---


@in_virtual_time
async def test_members_share_the_partitions(setup: PartitionSetup) -> None:
    ann, bob, cat = (setup.partitions() for _ in range(3))
    setup.run(ann)
    await owning(8, of=[ann])
    setup.run(bob)
    await owning(4, 4, of=[ann, bob], within=5.0)
    setup.run(cat)
    await owning(3, 3, 2, of=[ann, bob, cat], within=5.0)
    assert sorted(ann.owned + bob.owned + cat.owned) == sorted(ann.names)
    assert sum(setup.begun.values()) == 8 + 4 + 2
    owners = await ann.owners()
    assert list(owners) == list(ann.names)
    for one in (ann, bob, cat):
        holders = {leader.holder for name in one.owned if (leader := owners[name]) is not None}
        assert len({holder.rpartition("-")[0] for holder in holders}) == 1


@in_virtual_time
async def test_weights_and_names(setup: PartitionSetup) -> None:
    names = [f"region-{letter}" for letter in "abcdef"]
    small, big = setup.partitions(None, names), setup.partitions(None, names, weight=2)
    for one in (small, big):
        setup.run(one)
    await owning(2, 4, of=[small, big])
    assert set(setup.begun) == set(names)
    assert small.partition_of("alice") in names


@in_virtual_time
async def test_a_clean_leave_hands_over_at_once(setup: PartitionSetup) -> None:
    ann, bob = setup.partitions(), setup.partitions()
    running = setup.run(ann)
    setup.run(bob)
    await owning(4, 4, of=[ann, bob])
    async with ann:
        pass
    assert running.done()
    assert running.exception() is None
    assert ann.owned == ()
    await owning(8, of=[bob], within=1.0)


@in_virtual_time
async def test_no_partition_is_released_before_its_work_has_ended(setup: PartitionSetup) -> None:
    running: Counter[str] = Counter()

    async def slow(term: PartitionTerm) -> None:
        running[term.partition] += 1
        assert running[term.partition] == 1, "two at once"
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.5)
            running[term.partition] -= 1

    ann, bob = setup.partitions(), setup.partitions()
    setup.run(ann, slow)
    await owning(8, of=[ann])
    setup.run(bob, slow)
    await owning(4, 4, of=[ann, bob])


@in_virtual_time
async def test_partitions_of_a_member_that_is_cut_off_move_when_its_leases_end(setup: PartitionSetup) -> None:
    store, driver = setup.connect()
    ann, bob = setup.partitions(driver), setup.partitions()
    running, _ = setup.run(ann), setup.run(bob)
    await owning(4, 4, of=[ann, bob])
    store.cut = True
    began = setup.clock.now()
    await owning(8, of=[bob], within=TIMING.ttl + TIMING.retry_every)
    assert setup.clock.now() - began > TIMING.ttl - TIMING.renew_every
    assert ann.owned == ()
    assert not running.done()  # it waits for the store
    store.cut = False
    await owning(4, 4, of=[ann, bob])


@in_virtual_time
async def test_all_leases_of_a_member_are_renewed_together(setup: PartitionSetup) -> None:
    calls = 0

    async def health() -> bool:
        nonlocal calls
        calls += 1
        return True

    store, driver = setup.connect()
    ann = setup.partitions(driver, health=health)
    setup.run(ann)
    await owning(8, of=[ann])
    await asyncio.sleep(5 * TIMING.ttl)
    store.renewals.clear()
    calls = 0
    await asyncio.sleep(4 * TIMING.renew_every)
    assert 3 <= len(store.renewals) <= 6
    assert calls == len(store.renewals)
    assert {len(names) for names in store.renewals} == {9}  # of 8 partitions, and of its slot


@in_virtual_time
async def test_a_member_that_is_not_healthy_loses_all(setup: PartitionSetup) -> None:
    healthy = True
    ann, bob = setup.partitions(None, health=lambda: healthy), setup.partitions()
    setup.run(ann)
    setup.run(bob)
    await owning(4, 4, of=[ann, bob])
    healthy = False
    await owning(0, 8, of=[ann, bob])


@in_virtual_time
async def test_an_operator_can_ask_for_one_partition(setup: PartitionSetup) -> None:
    ann, bob = setup.partitions(), setup.partitions()
    setup.run(ann)
    setup.run(bob)
    await owning(4, 4, of=[ann, bob])
    await asyncio.sleep(2 * TIMING.ttl)
    setup.begun.clear()
    [asked, *_] = bob.owned
    assert await setup.store.ask_to_resign(f"orders.{asked}")
    await asyncio.sleep(2 * TIMING.ttl)
    assert setup.begun == {asked: 1}
    await owning(4, 4, of=[ann, bob])


@in_virtual_time
async def test_a_member_that_is_not_healthy_does_not_come_back_until_it_is(setup: PartitionSetup) -> None:
    """Else it would get its share, lose it, and get it again: the others' work would begin anew all the time."""
    healthy = True
    ann, bob = setup.partitions(None, health=lambda: healthy), setup.partitions()
    setup.run(ann)
    setup.run(bob)
    await owning(4, 4, of=[ann, bob])
    healthy = False
    await owning(0, 8, of=[ann, bob])
    begun = setup.begun.total()
    await asyncio.sleep(10 * TIMING.ttl)
    assert setup.begun.total() == begun
    assert [event.why for event in setup.emitted(CampaignFailed)] == [NOT_HEALTHY]
    healthy = True
    # It asks as rarely as it would a store that can only be read: after up to twice retry_every; then comes a look.
    await owning(4, 4, of=[ann, bob], within=3 * TIMING.retry_every + 1)


# --- the end of the work ---


@in_virtual_time
async def test_work_that_returns_begins_anew_after_a_while(setup: PartitionSetup) -> None:
    times: list[float] = []

    async def short(term: PartitionTerm) -> None:
        times.append(setup.clock.now())

    setup.run(setup.partitions(None, 1), short)
    await asyncio.sleep(20.0)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(gaps) > 3
    assert all(TIMING.retry_every <= gap < 2 * TIMING.retry_every for gap in gaps)


@in_virtual_time
async def test_an_error_of_the_work_ends_all(setup: PartitionSetup) -> None:
    async def failing(term: PartitionTerm) -> None:
        self_begun = setup.begun
        self_begun[term.partition] += 1
        if term.partition == "partition-3":
            await asyncio.sleep(10.0)
            raise ZeroDivisionError("in the work")
        await asyncio.Event().wait()

    ann = setup.partitions()
    with pytest.raises(ZeroDivisionError, match="in the work"):
        await ann.run(failing)
    assert all(leader is None for leader in (await ann.owners()).values())
    assert ann.owned == ()
    bob = setup.partitions()
    setup.run(bob)
    await owning(8, of=[bob], within=2.0)  # at once: nothing has to run out


@in_virtual_time
async def test_an_error_of_the_work_is_raised_also_if_the_run_is_ended_meanwhile(setup: PartitionSetup) -> None:
    """While the lease of the failed work is released: a slow store must hide neither the error nor the release."""
    store, driver = setup.connect()
    fails = asyncio.Event()

    async def failing(term: PartitionTerm) -> None:
        await fails.wait()
        store.delay = 1.0
        raise ZeroDivisionError("in the work")

    ann = setup.partitions(driver, 2)
    running = setup.run(ann, failing)
    await owning(2, of=[ann])
    fails.set()
    await asyncio.sleep(0.5)
    async with ann:
        pass
    with pytest.raises(ZeroDivisionError):
        await running
    assert all(leader is None for leader in (await ann.owners()).values())


@in_virtual_time
async def test_an_exit_in_the_work_comes_out_of_run(setup: PartitionSetup) -> None:
    async def leaving(term: PartitionTerm) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit) as left:
        await setup.partitions().run(leaving)
    assert left.value.code == 3


@in_virtual_time
async def test_work_that_is_no_async_function_is_refused(setup: PartitionSetup) -> None:
    def plain(term: PartitionTerm) -> int:
        return 3

    with pytest.raises(ConfigError, match=r"plain returned int"):
        await setup.partitions().run(plain)  # type: ignore[arg-type]

    def raising(term: PartitionTerm) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await setup.partitions().run(raising)  # type: ignore[arg-type]

    async def generator(term: PartitionTerm) -> Any:
        yield 3

    with pytest.raises(ConfigError, match="generator"):
        await setup.partitions().run(generator)


@in_virtual_time
async def test_stop_lets_work_finish(setup: PartitionSetup) -> None:
    stop, finished = asyncio.Event(), Counter[str]()

    async def finishing(term: PartitionTerm) -> None:
        setup.begun[term.partition] += 1
        await stop.wait()
        await asyncio.sleep(3.0)
        finished[term.partition] += 1

    ann, bob = setup.partitions(), setup.partitions()
    running, _ = setup.run(ann, finishing, stop=stop), setup.run(bob)
    await owning(4, 4, of=[ann, bob])
    finishing_now = set(ann.owned)
    stop.set()
    await asyncio.sleep(2.0)
    assert not running.done()
    assert set(ann.owned) == finishing_now
    await running
    assert set(finished) == finishing_now
    await owning(8, of=[bob], within=1.0)


@in_virtual_time
async def test_a_stop_that_is_set_already_begins_nothing(setup: PartitionSetup) -> None:
    stop = asyncio.Event()
    stop.set()
    await setup.partitions().run(setup.forever, stop=stop)
    assert not setup.begun


@in_virtual_time
async def test_a_cancelled_run_waits_for_the_end_of_its_work(setup: PartitionSetup) -> None:
    ended: Counter[str] = Counter()

    async def slow(term: PartitionTerm) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)
            ended[term.partition] += 1

    ann = setup.partitions()
    running = setup.run(ann, slow)
    await owning(8, of=[ann])
    for _ in range(3):  # the later ones change nothing
        running.cancel()
        await asyncio.sleep(0.1)
    assert not running.done()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(ended) == 8
    assert all(leader is None for leader in (await ann.owners()).values())


@in_virtual_time
async def test_a_run_that_is_cancelled_after_its_stop_cancels_the_work(setup: PartitionSetup) -> None:
    ann, stop = setup.partitions(), asyncio.Event()
    running = setup.run(ann, stop=stop)
    await owning(8, of=[ann])
    stop.set()
    await asyncio.sleep(1.0)
    assert len(ann.owned) == 8
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(1.0):
            await running
    assert all(leader is None for leader in (await ann.owners()).values())


@in_virtual_time
async def test_a_block_that_is_left_ends_what_it_began(setup: PartitionSetup) -> None:
    async with setup.partitions() as mine:
        task = setup.run(mine)
        await owning(8, of=[mine])
    assert task.done()
    assert all(leader is None for leader in (await mine.owners()).values())


# --- what can't work ---


@in_virtual_time
async def test_one_object_is_one_member(setup: PartitionSetup) -> None:
    ann = setup.partitions()
    running = setup.run(ann)
    await owning(8, of=[ann])
    with pytest.raises(ConfigError, match="takes part in 'orders' already"):
        await ann.run(setup.forever)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    setup.run(ann)  # another time
    await owning(8, of=[ann])


@in_virtual_time
async def test_other_partitions_are_refused_and_those_of_the_group_stay(setup: PartitionSetup) -> None:
    ann = setup.partitions()
    setup.run(ann)
    await owning(8, of=[ann])
    for other in (16, ["eu", "us"]):
        with pytest.raises(ConfigError, match=r"'orders' has a member with other partitions \(8\)"):
            await setup.partitions(None, other).run(setup.forever)
    await asyncio.sleep(2 * TIMING.ttl)
    assert len(ann.owned) == 8


@in_virtual_time
async def test_two_that_begin_at_once_with_other_partitions_do_not_both_go_on(setup: PartitionSetup) -> None:
    tasks = [setup.run(setup.partitions(None, 8)), setup.run(setup.partitions(None, 16))]
    done, running = await asyncio.wait(tasks, timeout=3 * TIMING.ttl)
    assert len(done) == len(running) == 1
    with pytest.raises(ConfigError, match="other partitions"):
        await done.pop()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weight": 0}, "weight must be a whole number from 1 to 1,000, not 0"),
        ({"weight": 1.5}, "not 1.5"),
        ({"weight": True}, "not True"),
        ({"metadata": {"tenure-order": "3"}}, "choose another one for 'tenure-order'"),
        ({"metadata": {"a": 3}}, "metadata must map text to text"),
        ({"label": "x" * 990}, "label"),
        ({"health": 3}, "health must be a function"),
        ({"overrun": "never"}, "overrun must be"),
    ],
    ids=str,
)
def test_what_can_not_work_is_refused(options: dict[str, Any], says: str) -> None:
    async def test(setup: PartitionSetup) -> None:
        with pytest.raises(ConfigError) as refused:
            setup.partitions(**options)
        assert says in str(refused.value)

    in_virtual_time(test)()


# --- a store that fails ---


@in_virtual_time
async def test_a_store_that_is_away_at_the_beginning_is_asked_again(setup: PartitionSetup) -> None:
    store, driver = setup.connect()
    store.cut = True
    ann = setup.partitions(driver)
    setup.run(ann)
    await asyncio.sleep(30.0)
    assert [(event.name, event.why) for event in setup.emitted(CampaignFailed)] == [("orders", "the connection is cut")]
    store.cut = False
    await owning(8, of=[ann], within=2 * TIMING.retry_every)


@in_virtual_time
async def test_an_error_before_the_first_success_comes_out_of_run(setup: PartitionSetup) -> None:
    store, driver = setup.connect()
    store.broken = RuntimeError("no such table")
    with pytest.raises(RuntimeError, match="no such table"):
        await setup.partitions(driver).run(setup.forever)


@in_virtual_time
async def test_an_error_after_a_success_is_reported_and_the_store_asked_again(setup: PartitionSetup) -> None:
    store, driver = setup.connect()
    ann, bob = setup.partitions(driver), setup.partitions()
    setup.run(ann)
    bobs = setup.run(bob)
    await owning(4, 4, of=[ann, bob])
    bobs.cancel()
    store.broken = RuntimeError("no such table")
    await asyncio.sleep(3.0)
    store.broken = None
    await owning(8, of=[ann], within=TIMING.ttl)


@in_virtual_time
async def test_a_claim_that_fails_is_reported(setup: PartitionSetup) -> None:
    store, driver = setup.connect()
    acquire, is_broken = store.inner.acquire, False

    async def failing(*arguments: Any) -> Any:
        if is_broken:
            raise RuntimeError("no such column")
        return await acquire(*arguments)

    store.inner.acquire = failing  # type: ignore[assignment, method-assign]
    ann, bob = setup.partitions(driver), setup.partitions()
    setup.run(ann)
    bobs = setup.run(bob)
    await owning(4, 4, of=[ann, bob])
    is_broken = True
    bobs.cancel()
    await asyncio.sleep(5.0)
    reported = setup.emitted(CampaignFailed)
    assert {event.why for event in reported} >= {"no such column"}
    assert all(event.name.startswith("orders.partition-") for event in reported)
    is_broken = False
    await owning(8, of=[ann], within=TIMING.ttl)


@in_virtual_time
async def test_closing_the_backend_ends_the_run(setup: PartitionSetup) -> None:
    _, driver = setup.connect()
    ann = setup.partitions(driver)
    running = setup.run(ann)
    await owning(8, of=[ann])
    await driver.close()
    with pytest.raises(Unavailable, match="the backend was closed"):
        async with asyncio.timeout(2 * TIMING.ttl):
            await running
    bob = setup.partitions()
    setup.run(bob)
    await owning(8, of=[bob], within=2.0)


@in_virtual_time
async def test_an_error_of_work_is_raised_also_if_the_backend_was_closed_before(setup: PartitionSetup) -> None:
    async def fail_late(term: PartitionTerm) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.5)
            if term.partition == "partition-1":
                raise LookupError("no plan")

    _, driver = setup.connect()
    ann = setup.partitions(driver)
    running = setup.run(ann, fail_late)
    await owning(8, of=[ann])
    await driver.close()
    with pytest.raises(LookupError, match="no plan"):
        await running


@in_virtual_time
async def test_a_refused_claim_is_no_error(setup: PartitionSetup) -> None:
    """Somebody else holds one of the leases: the others are shared, and it is claimed when it is free."""
    await setup.store.acquire("orders.partition-2", "somebody", 30.0)
    ann = setup.partitions()
    setup.run(ann)
    await owning(7, of=[ann])
    await owning(8, of=[ann], within=30.0 + TIMING.retry_every)


@in_virtual_time
async def test_each_term_has_a_token_of_its_own(setup: PartitionSetup) -> None:
    tokens: dict[str, list[int]] = {}

    async def noting(term: PartitionTerm) -> None:
        assert isinstance(term, PartitionTerm)
        assert term.name == f"orders.{term.partition}"
        tokens.setdefault(term.partition, []).append(term.token)
        await asyncio.Event().wait()

    ann, bob = setup.partitions(), setup.partitions()
    setup.run(ann, noting)
    await owning(8, of=[ann])
    setup.run(bob, noting)
    await owning(4, 4, of=[ann, bob])
    assert sorted(map(tuple, tokens.values())) == [(1,)] * 4 + [(1, 2)] * 4
    assert len(setup.emitted(TermBegan)) == 12 + 2  # and of two slots
    assert repr(ann) == "<Partitions 'orders', ttl 15 s, 4 of 8 partitions owned>"
