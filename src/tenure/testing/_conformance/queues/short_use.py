"""Short uses of a queue, many of them: each gets the next message, for the first time, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from tenure._queue.broker import Broker, Claim, NoSession
from tenure._queue.message import SessionLock, Stats
from tenure._queue.outgoing import Outgoing
from tenure._queue.received import Message
from tenure.testing import until
from tenure.testing._conformance.harness import QueueHarness
from tenure.testing._conformance.queues.consumers import ObservedQueue
from tenure.testing._conformance.queues.steps import LATE, QueueSuite, expect_stats, needs

WITHIN = 60.0
"""Seconds for which a message is waited for, on a busy machine."""

GONE_WITHIN = 20.0
"""Seconds within which what was used is closed, on a busy machine."""

WARM = 0.2
"""The share of the uses before which nothing is counted: by then, all is open that a client keeps."""

VAIN = 0.02
"""Seconds for which a message is waited for that doesn't come: enough to begin whatever brings it."""

ASKED_MAX = 3
"""How often a ``receive`` that waits may ask: when it begins, when it is woken, and once more for another's hint."""

TURNS = 10
"""Turns of the loop that a handler takes: within them, a consumer notices that it is to stop."""

CONSUMED = 10
"""How many messages a short ``consume`` finds; it is stopped in the middle of them, and gives back what it has."""


class ShortUseSuite(QueueSuite):
    """A thousand short uses are as good as a long one: in order, with a count of 1, and with nothing left behind."""

    async def test_short_receives_find_what_is_there_in_order(self, harness: QueueHarness, name: str) -> None:
        use = Use(harness, await harness.open(), name)
        warm = use.warm_of(harness.uses)

        async def receive_one(number: int) -> None:
            receiving = asyncio.ensure_future(use.queue.receive(1, wait=WITHIN))
            if number % warm == 0:  # no message is there while it is counted what there is: that takes its time
                await use.waits(receiving)
                sent = range(number, min(number + warm, harness.uses))
                await use.queue.send_batch([Outgoing(b"%d" % one) for one in sent])
            await use.take(await receiving)

        await use.repeat(receive_one)
        await use.leaves_nothing()
        use.came_once()
        if harness.traits.hints:
            assert use.broker.asked <= harness.uses + ASKED_MAX * (harness.uses // warm + 1)

    async def test_short_receives_wait_for_what_comes(self, harness: QueueHarness, name: str) -> None:
        use = Use(harness, await harness.open(), name)
        other = await harness.open()

        async def receive_one(number: int) -> None:
            receiving = asyncio.ensure_future(use.queue.receive(1, wait=WITHIN))
            await use.waits(receiving)
            await other.send(name, [Outgoing(b"%d" % number)])
            await use.take(await receiving)

        await use.repeat(receive_one)
        await use.leaves_nothing()
        use.came_once()
        if harness.traits.hints:
            assert use.broker.asked <= harness.uses * ASKED_MAX

    async def test_short_receives_in_vain(self, harness: QueueHarness, name: str) -> None:
        use = Use(harness, await harness.open(), name)
        await use.queue.send(b"0")

        async def receive_none(number: int) -> None:
            assert await use.queue.receive(1, wait=VAIN) == []

        await use.take(await use.queue.receive(1, wait=WITHIN))
        await use.repeat(receive_none, share=0.2)
        await use.leaves_nothing()
        # What has ended in vain takes nothing from those that come after it.
        receiving = asyncio.ensure_future(use.queue.receive(1, wait=WITHIN))
        await use.waits(receiving)
        await use.queue.send_batch([Outgoing(b"%d" % number) for number in range(1, 1 + CONSUMED)])
        await use.take(await receiving)
        for _ in range(1, CONSUMED):
            await use.take(await use.queue.receive(1, wait=WITHIN))
        use.came_once()

    async def test_short_consumes(self, harness: QueueHarness, name: str) -> None:
        use = Use(harness, await harness.open(), name)

        async def consume_some(number: int) -> None:
            sent = range(number * CONSUMED, (number + 1) * CONSUMED)
            await use.queue.send_batch([Outgoing(b"%d" % one) for one in sent])
            stop, left = asyncio.Event(), len(sent) // 2

            async def handle(message: Message) -> None:
                nonlocal left
                use.note(message)
                left -= 1
                if not left:
                    stop.set()
                for _ in range(TURNS):
                    await asyncio.sleep(0)

            async with asyncio.timeout(WITHIN):
                await use.queue.consume(handle, stop=stop, concurrency=1, sigterm=False)
                while len(use.got) < sent.stop:
                    await use.take(await use.queue.receive(1, wait=WITHIN))

        await use.repeat(consume_some, share=1 / CONSUMED)
        await use.leaves_nothing()
        use.came_once(in_order=False)

    async def test_sessions_of_one_message(self, harness: QueueHarness, name: str) -> None:
        needs(harness.traits.sessions)
        use = Use(harness, await harness.open(), name)

        async def use_session(number: int) -> None:
            await use.queue.send(b"%d" % number, session=f"s{number % 3}")
            async with use.queue.session(wait=WITHIN) as session:
                await use.take(await session.receive(1, wait=WITHIN))

        await use.repeat(use_session)
        await use.leaves_nothing()
        use.came_once()


class Use:
    """A queue that is used many times, and what has come of it."""

    def __init__(self, harness: QueueHarness, broker: Broker, name: str) -> None:
        self._harness, self._name = harness, name
        self.broker = CountingBroker(broker)
        self._observed = ObservedQueue(cast(Broker, self.broker), name, harness.lock, max_deliveries=3)
        self.queue = self._observed.queue
        self.got: list[bytes] = []
        self.counts: Counter[int] = Counter()
        self._before: Mapping[str, int] = {}

    async def waits(self, receiving: asyncio.Future[Any]) -> None:
        """Return when *receiving*, which has just begun, has asked and found nothing."""
        before = self.broker.asked
        await until(lambda: self.broker.asked > before and self._observed.all_idle())
        assert not receiving.done()

    def note(self, message: Any) -> None:
        """Note a message that has come."""
        self.got.append(message.body)
        self.counts[message.delivery_count] += 1

    async def take(self, messages: list[Any]) -> None:
        """Note the only message that has come, and complete it."""
        [message] = messages
        self.note(message)
        await message.complete()

    @staticmethod
    def warm_of(uses: int) -> int:
        """Return after how many of the uses it is counted what there is."""
        return max(2, int(uses * WARM))

    async def repeat(self, use: Callable[[int], Awaitable[None]], share: float = 1.0) -> None:
        """Make all uses, or a share of them; once all is open that a client keeps, count what there is."""
        uses = int(self._harness.uses * share)
        warm = self.warm_of(uses)
        for number in range(uses):
            if number == warm:
                self._before = await self._left()
            async with asyncio.timeout(WITHIN):
                await use(number)

    async def leaves_nothing(self) -> None:
        """Check that there is hardly more of anything than after the first uses; some of it takes its time to end."""
        left: dict[str, int] = {}
        if self._harness.is_exact:
            await self._harness.pass_time(self._harness.lock * LATE)  # what ends with a lock has ended

        async def is_gone() -> bool:
            after = await self._left()
            left.clear()
            left.update({what: count - self._before.get(what, 0) for what, count in after.items()})
            return all(count <= self._harness.spare for count in left.values())

        try:
            await until(is_gone, within=GONE_WITHIN)
        except AssertionError:
            raise AssertionError(
                f"left behind: { {what: more for what, more in left.items() if more > self._harness.spare} }"
            ) from None
        await expect_stats(self.broker.wrapped, self._harness, self._name, Stats())

    async def _left(self) -> Mapping[str, int]:
        await self.broker.wrapped.stats(self._name)
        gc.collect()
        in_store = await self._harness.left_behind()
        return {
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
            "file descriptors": _open_files(),
            **in_store,
        }

    def came_once(self, *, in_order: bool = True) -> None:
        """Check that all messages have come once, for the first time; in the order of the queue if that has one."""
        got = self.got if in_order and self._harness.receives_in_order else sorted(self.got, key=int)
        assert got == [b"%d" % number for number in range(len(got))]
        assert self.counts.keys() == {1}, self.counts


def _open_files() -> int:
    """Return how many file descriptors are open, where the system tells."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


class CountingBroker:
    """A broker that counts how often it is asked for messages."""

    def __init__(self, broker: Broker) -> None:
        self.wrapped = broker
        self.asked = 0

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        """Ask for messages."""
        self.asked += 1
        return await self.wrapped.receive(queue, limit, lock)

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        """Ask for a session."""
        self.asked += 1
        return await self.wrapped.accept(queue, session, lock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)
