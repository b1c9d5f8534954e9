"""Looks at empty queues that consumers share: requests are counted in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from tenure._backends.memory.queue import MemoryBroker
from tenure._queue.broker import Claim, QueueSettings, QueueTraits
from tenure._queue.claiming import CLAIM_EVERY
from tenure._queue.context import QueueContext
from tenure._queue.hints import HintSubscriptions
from tenure._queue.looks import SharedLooks
from tenure._queue.outgoing import Outgoing
from tenure._queue.queue import Queue
from tenure._queue.received import Message
from tenure._runtime.renewal_thread import RenewalThread
from tenure.errors import ConfigError, Unavailable
from tenure.testing.loop import VirtualLoop, run

QUEUES = 80  # many more than the requests that they share
MESSAGE = Outgoing(b"a")
POLL = 5.0


class Deaf(MemoryBroker):
    """A broker that loses every hint, and counts requests."""

    surveys = True

    def __init__(self, *inside: object) -> None:
        super().__init__(*inside)  # type: ignore[arg-type]
        self.counted: Counter[str] = Counter()
        self.looked_at: list[int] = []
        self.is_away = False
        self.is_read_only = False

    @property
    def traits(self) -> QueueTraits:
        return replace(super().traits, surveys=self.surveys)

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        self.counted["receive"] += 1
        if self.is_read_only:
            raise Unavailable("the store can only be read")
        return await super().receive(queue, limit, lock)

    async def holding(self, queues: Sequence[str]) -> Sequence[bool]:
        self.counted["holding"] += 1
        self.looked_at.append(len(queues))
        if self.is_away:
            raise Unavailable("the store is away")
        return await super().holding(queues)

    def hints(self, queue: str) -> AsyncIterator[None]:
        return Never()


class Never(AsyncIterator[None]):
    async def __anext__(self) -> None:
        await asyncio.Event().wait()


class Fleet:
    """A consumer of each of many queues, in one process."""

    def __init__(self, broker: type[Deaf] = Deaf) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.broker = broker(loop.clock())
        self.came: list[tuple[str, float]] = []
        hints, looks = HintSubscriptions(), SharedLooks()
        self.queues: list[Queue] = []
        for number in range(QUEUES):
            context = QueueContext(
                f"q{number}", self.broker, RenewalThread.here(), loop.clock(), QueueSettings(), "me", None, {}
            )
            context.hints, context.looks = hints, looks
            self.queues.append(Queue(context))
        self.tasks = [asyncio.ensure_future(queue.consume(self._handle, poll_every=POLL)) for queue in self.queues]

    async def _handle(self, message: Message) -> None:
        self.came.append((message.delivery.queue, self.loop.time()))

    async def end(self) -> None:
        for queue in self.queues:
            await queue.drain()
        for task in self.tasks:
            with suppress(asyncio.CancelledError):
                await task


def test_consumers_of_empty_queues_share_a_request_for_each_poll() -> None:
    async def main() -> None:
        fleet = Fleet()
        await asyncio.sleep(30.0)
        fleet.broker.counted.clear()
        fleet.broker.looked_at.clear()
        await asyncio.sleep(60.0)
        assert fleet.broker.counted["receive"] == 0
        assert 60.0 / (1.2 * POLL) - 1 <= fleet.broker.counted["holding"] <= 60.0 / POLL + 1
        assert set(fleet.broker.looked_at) == {QUEUES}
        await fleet.end()

    run(main(), seed=1, limit=100_000)


def test_a_lost_hint_costs_no_more_than_the_time_of_a_poll() -> None:
    async def main() -> None:
        fleet = Fleet()
        await asyncio.sleep(100.0)
        for number in range(0, QUEUES, 40):
            sent_at = fleet.loop.time()
            await fleet.broker.send(f"q{number}", [MESSAGE])
            await asyncio.sleep(1.2 * POLL + 0.1)
            assert [queue for queue, _ in fleet.came] == [f"q{number}"]
            assert fleet.came[0][1] <= sent_at + 1.2 * POLL + 0.01
            fleet.came.clear()
        await fleet.end()

    run(main(), seed=2, limit=100_000)


def test_what_nobody_claims_for_long_is_claimed_for_now_and_then() -> None:
    async def main() -> None:
        fleet = Fleet()
        await asyncio.sleep(10.0)
        fleet.broker.counted.clear()
        await asyncio.sleep(CLAIM_EVERY)
        assert QUEUES <= fleet.broker.counted["receive"] <= 2 * QUEUES
        await fleet.end()

    run(main(), seed=3, limit=100_000)


def test_a_queue_with_a_locked_message_is_claimed_from_when_the_lock_ends() -> None:
    async def main() -> None:
        fleet = Fleet()
        await asyncio.sleep(20.0)
        await fleet.broker.send("q7", [MESSAGE])
        assert (await fleet.broker.receive("q7", 1, 12.0)).deliveries  # another process, which dies
        locked_at = fleet.loop.time()
        await asyncio.sleep(30.0)
        [(queue, came_at)] = fleet.came
        assert queue == "q7"
        assert came_at == pytest.approx(locked_at + 12.0, abs=0.1)
        await fleet.end()

    run(main(), seed=4, limit=100_000)


def test_after_looks_without_an_answer_the_consumers_look_again() -> None:
    async def main() -> None:
        fleet = Fleet()
        await asyncio.sleep(20.0)
        fleet.broker.is_away = True
        await asyncio.sleep(60.0)
        assert fleet.broker.counted["holding"] < 60.0 / POLL * QUEUES
        await fleet.broker.send("q3", [MESSAGE])
        fleet.broker.is_away = False
        await asyncio.sleep(30.0)
        assert [queue for queue, _ in fleet.came] == ["q3"]
        await fleet.end()

    run(main(), seed=5, limit=100_000)


def test_after_a_claim_without_an_answer_a_consumer_claims_and_does_not_only_look() -> None:
    async def main() -> None:
        fleet = Fleet()
        await asyncio.sleep(20.0)
        fleet.broker.is_read_only = True
        await fleet.broker.send("q5", [MESSAGE])  # so its consumer claims
        await asyncio.sleep(20.0)
        fleet.broker.looked_at.clear()
        fleet.broker.counted.clear()
        await asyncio.sleep(60.0)
        assert set(fleet.broker.looked_at) <= {
            QUEUES - 1,
            QUEUES,
        }  # it looks first, along with the others; or it claims
        assert fleet.broker.counted["receive"] >= 3
        fleet.broker.is_read_only = False
        await asyncio.sleep(60.0)
        assert [queue for queue, _ in fleet.came] == ["q5"]
        await fleet.end()

    run(main(), seed=7, limit=100_000)


def test_where_the_broker_can_not_be_asked_so_each_consumer_polls_by_itself() -> None:
    class Plain(Deaf):
        surveys = False

    async def main() -> None:
        fleet = Fleet(Plain)
        await asyncio.sleep(30.0)
        fleet.broker.counted.clear()
        await asyncio.sleep(60.0)
        assert fleet.broker.counted["holding"] == 0
        assert fleet.broker.counted["receive"] >= QUEUES * 60.0 / (1.2 * POLL) - QUEUES
        await fleet.end()

    run(main(), seed=6, limit=100_000)


class Refusing(Deaf):
    """A broker that can't be asked about one of the queues."""

    async def holding(self, queues: Sequence[str]) -> Sequence[bool]:
        found = await super().holding(queues)
        if "q7" in queues:
            raise ConfigError("the layout of q7 is newer")
        return found


class Forgetting(Deaf):
    """A broker that answers about too few queues."""

    async def holding(self, queues: Sequence[str]) -> Sequence[bool]:
        return (await super().holding(queues))[1:]


@pytest.mark.parametrize("broker", [Refusing, Forgetting])
def test_a_request_that_fails_because_of_one_queue_ends_no_consumer_and_hides_no_message(broker: type[Deaf]) -> None:
    async def main() -> None:
        fleet = Fleet(broker)
        await asyncio.sleep(60.0)
        assert not any(task.done() for task in fleet.tasks)
        await fleet.broker.send("q3", [MESSAGE])
        sent_at = fleet.loop.time()
        await asyncio.sleep(2 * POLL)
        [(queue, came_at)] = fleet.came
        assert queue == "q3"
        assert came_at - sent_at <= 1.3 * POLL
        await fleet.end()

    run(main(), seed=1, limit=1_000_000)


def test_a_member_that_fails_while_it_joins_leaves_nobody_without_an_answer() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.set_exception_handler(lambda *_: None)
        looks, broker = SharedLooks(), Deaf(loop.clock())

        def fail() -> None:
            raise RuntimeError("no task can be made")

        looks.join(fail)
        assert not await looks.holds(broker, "q")
        await broker.send("q", [MESSAGE])
        assert await looks.holds(broker, "q")

    run(main(), seed=1, limit=1_000)


def test_looks_that_fail_do_not_keep_a_consumer_from_claims() -> None:
    """A broker may answer claims and no looks: it permits this user no more, or they go to a server of their own."""

    async def main() -> None:
        fleet = Fleet()
        await asyncio.sleep(20.0)
        fleet.broker.is_read_only = fleet.broker.is_away = True
        await asyncio.sleep(20.0)
        await fleet.broker.send("q5", [MESSAGE])
        fleet.broker.is_read_only = False
        await asyncio.sleep(1.5 * QueueSettings().lock)
        assert [queue for queue, _ in fleet.came] == ["q5"]
        fleet.broker.is_away = False
        await fleet.end()

    run(main(), seed=9, limit=100_000)
