"""Candidates on a store in which they stand in a queue, in virtual time: order, hand-over, places, withdrawals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tenure._election.driver import Driver
from tenure._election.elector import Election
from tenure._election.term import Term
from tenure._lease import NO_METADATA, Granted, HeldBy, Metadata
from tenure._runtime.renewal_thread import RenewalThread
from tenure._timing import Timing
from tenure.errors import Unavailable
from tenure.events import Event, ReleasedUnused, TermBegan, TermEnded
from tenure.testing.conformance import FaultyLeaseStore
from tenure.testing.loop import VirtualLoop, run
from tests.conformance.queued_memory import QueuedMemoryLeases, Queues

TIMING = Timing()
ROUND_TRIP = 0.002


class Store(FaultyLeaseStore):
    """A store at some distance, which counts requests for the name."""

    asked = 0
    error: BaseException | None = None

    async def acquire(self, name: str, holder: str, ttl: float, metadata: Metadata = NO_METADATA) -> Granted | HeldBy:
        self.asked += 1
        answer = await super().acquire(name, holder, ttl, metadata)
        await asyncio.sleep(ROUND_TRIP)
        if self.error:
            raise self.error
        return answer


class Setup:
    """One store with a queue, and candidates in the order in which they came."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.clock = loop.clock()
        self.queues = Queues()
        self.events: list[Event] = []
        self.stores: list[Store] = []
        self.drivers: list[Driver] = []
        self.tasks: list[asyncio.Task[Any]] = []

    @property
    def line(self) -> list[str]:
        """The candidates in the queue, by their labels; the first one leads."""
        return [place.holder.partition("-")[0] for place in self.queues.places.get("chair", [])]

    def election(self, label: str, metadata: Metadata = NO_METADATA) -> Election:
        self.stores.append(Store(QueuedMemoryLeases(self.clock, self.queues)))
        self.drivers.append(Driver(self.stores[-1], self.clock))
        return Election(
            "chair",
            TIMING,
            driver=self.drivers[-1],
            renewal_thread=RenewalThread.here(),
            on_event=self.events.append,
            label=label,
            metadata=metadata,
        )

    async def campaign(self, label: str, metadata: Metadata = NO_METADATA, **options: Any) -> Election:
        """Start a candidate, and wait until it has a place."""
        election = self.election(label, metadata)
        options.setdefault("again", True)
        self.tasks.append(asyncio.create_task(election.run(forever, **options)))
        await asyncio.sleep(1.0)
        return election

    def emitted(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def led_by(self, label: str, within: float) -> None:
        """Wait until the last term that began is of *label*."""
        async with asyncio.timeout(within):
            while not self.emitted(TermBegan)[-1].holder.startswith(label):
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for driver in self.drivers:
            await driver.close()


async def forever(term: Term) -> None:
    await asyncio.Event().wait()


def in_virtual_time(test: Callable[[Setup], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run *test* in virtual time, with a setup as its argument."""

    async def main() -> None:
        setup = Setup()
        try:
            await test(setup)
        finally:
            await setup.close()
            assert setup.line == []

    def wrapped() -> None:
        run(main(), seed=1, limit=100_000)

    wrapped.__name__ = test.__name__
    return wrapped


@in_virtual_time
async def test_terms_are_in_the_order_of_the_queue_and_a_hand_over_takes_milliseconds(setup: Setup) -> None:
    elections = [await setup.campaign(label) for label in "abcde"]
    for number in range(40):
        await asyncio.sleep(0.05 if number % 2 else 7.0)
        expected = setup.line[1:2]
        leader = setup.emitted(TermBegan)[-1].holder[0]
        await elections["abcde".index(leader)].resign()
        async with asyncio.timeout(TIMING.ttl):
            while len(setup.emitted(TermBegan)) < number + 2:
                await asyncio.sleep(0.001)
        if expected:
            assert setup.emitted(TermBegan)[-1].holder[0] == expected[0]
    began, ended = setup.emitted(TermBegan), setup.emitted(TermEnded)
    gaps = [later.at - earlier.at for earlier, later in zip(ended, began[1:], strict=True)]
    assert max(gaps) < 0.02


@in_virtual_time
async def test_a_leader_seen_before_its_metadata_is_observed_again_with_them(setup: Setup) -> None:
    for label in "ab":
        await setup.campaign(label, {"url": label})
    seen: list[tuple[str, Metadata]] = []
    note = seen.append

    async def watch() -> None:
        async for leader in setup.election("w").observe():
            assert leader is not None
            note((leader.holder[0], leader.metadata))

    setup.tasks.append(asyncio.create_task(watch()))
    await asyncio.sleep(1.0)
    async with setup.stores[1].cut():
        setup.tasks[0].cancel()
        await asyncio.sleep(TIMING.ttl / 3)
    await asyncio.sleep(TIMING.ttl)
    assert seen == [("a", {"url": "a"}), ("b", {}), ("b", {"url": "b"})]


@in_virtual_time
async def test_a_waiting_candidate_keeps_its_place_with_few_requests(setup: Setup) -> None:
    for label in "abc":
        await setup.campaign(label)
    tokens = [place.token for place in setup.queues.places["chair"]]
    before = [store.asked for store in setup.stores]
    await asyncio.sleep(3600.0)
    assert [place.token for place in setup.queues.places["chair"]] == tokens
    asked = [store.asked - earlier for store, earlier in zip(setup.stores, before, strict=True)]
    assert asked[0] == 0
    assert max(asked) <= 3600.0 / (0.9 * TIMING.renew_every) + 1


@in_virtual_time
async def test_a_cancelled_candidate_leaves_the_queue_at_once(setup: Setup) -> None:
    for label in "abc":
        await setup.campaign(label)
    setup.tasks[1].cancel()
    await asyncio.wait([setup.tasks[1]])
    assert setup.line == ["a", "c"]
    setup.tasks[0].cancel()
    await setup.led_by("c", within=0.1)


@in_virtual_time
async def test_a_stopped_candidate_leaves_the_queue_and_ends(setup: Setup) -> None:
    stop = asyncio.Event()
    await setup.campaign("a")
    await setup.campaign("b", stop=stop)
    assert setup.line == ["a", "b"]
    stop.set()
    async with asyncio.timeout(0.1):
        await setup.tasks[1]
    assert setup.line == ["a"]


@in_virtual_time
async def test_a_closed_backend_leaves_the_queue(setup: Setup) -> None:
    for label in "abc":
        await setup.campaign(label)
    await setup.drivers[1].close()
    assert setup.line == ["a", "c"]


@in_virtual_time
async def test_a_candidate_that_is_stopped_while_it_asks_leaves_no_place(setup: Setup) -> None:
    await setup.campaign("a")
    await setup.campaign("b")
    asked = setup.stores[1].asked
    setup.queues.notifier.notify("chair")
    while setup.stores[1].asked == asked:
        await asyncio.sleep(0)
    setup.tasks[1].cancel()
    await asyncio.wait([setup.tasks[1]])
    assert setup.line == ["a"]


@in_virtual_time
async def test_a_candidate_without_a_connection_ends_and_its_place_does_later(setup: Setup) -> None:
    for label in "abc":
        await setup.campaign(label)
    async with setup.stores[1].cut():
        setup.tasks[1].cancel()
        async with asyncio.timeout(0.1):
            await asyncio.wait([setup.tasks[1]])
    assert setup.line == ["a", "b", "c"]
    setup.tasks[0].cancel()
    # The end of a place gives no hint here, so the next one finds it when it asks.
    await setup.led_by("c", within=TIMING.ttl + TIMING.renew_every)


@in_virtual_time
async def test_a_candidate_that_failed_leaves_the_queue(setup: Setup) -> None:
    await setup.campaign("a")
    setup.stores.append(Store(QueuedMemoryLeases(setup.clock, setup.queues)))
    setup.stores[-1].error = RuntimeError("not what a store answers")
    driver = Driver(setup.stores[-1], setup.clock)
    setup.drivers.append(driver)
    election = Election("chair", TIMING, driver=driver, renewal_thread=RenewalThread.here(), label="b")
    with pytest.raises(RuntimeError, match="not what a store answers"):
        await election.run(forever)
    await asyncio.sleep(ROUND_TRIP)
    assert setup.line == ["a"]


@in_virtual_time
async def test_a_grant_that_comes_after_the_withdrawal_is_released(setup: Setup) -> None:
    """The request is carried out late, when the candidate has withdrawn: its store did not put them in order."""
    stop = asyncio.Event()
    store = Store(QueuedMemoryLeases(setup.clock, setup.queues))
    driver = Driver(store, setup.clock)
    setup.drivers.append(driver)
    election = Election(
        "chair", TIMING, driver=driver, renewal_thread=RenewalThread.here(), on_event=setup.events.append
    )
    async with store.late():
        held = asyncio.Event()
        store._held._holding = held  # the first request is held back
        running = asyncio.create_task(election.run(forever, stop=stop))
        await held.wait()
        stop.set()
        await asyncio.sleep(0.01)
        assert not running.done()
    async with asyncio.timeout(1.0):
        await running
    assert setup.emitted(ReleasedUnused)
    assert setup.line == []


@in_virtual_time
async def test_a_withdrawal_without_an_answer_does_not_keep_the_backend_open(setup: Setup) -> None:
    for label in "ab":
        await setup.campaign(label)

    async def hangs(name: str, holder: str) -> None:
        await asyncio.Event().wait()

    setup.stores[1].withdraw = hangs  # type: ignore[method-assign]
    async with asyncio.timeout(TIMING.grace + TIMING.retry_every + 0.1):
        await setup.drivers[1].close()
    with pytest.raises(Unavailable, match="the store had not answered yet"):
        await setup.tasks[1]
    setup.queues.places["chair"].pop()
