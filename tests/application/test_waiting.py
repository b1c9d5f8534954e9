"""Many who wait for one queue in one process: a hint wakes one of them, and is never lost with it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from tenure._backends.memory.queue import MemoryBroker
from tenure._queue import context
from tenure._queue.broker import Claim, NoSession, QueueSettings
from tenure._queue.context import QueueContext
from tenure._queue.message import SessionLock
from tenure._queue.queue import Queue
from tenure._queue.received import Message
from tenure._runtime.clock import Clock
from tenure._runtime.renewal_thread import RenewalThread
from tenure.errors import Unavailable
from tenure.testing import until
from tenure.testing.loop import VirtualLoop, run

AGES = 100_000.0
"""Nobody looks by itself for so long: whoever gets a message here was woken."""


class Counting(MemoryBroker):
    """Counts what it is asked; a question may be held up, or fail."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.asked: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = 0
        self.dues: list[float] = []
        self.hint_errors: list[BaseException] = []

    def hints(self, queue: str) -> AsyncIterator[None]:
        return Failing(self.hint_errors.pop()) if self.hint_errors else super().hints(queue)

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        self.asked["receive"] += 1
        await self.gate.wait()
        if self.fails:
            self.fails -= 1
            raise Unavailable("the broker can't be asked")
        if self.dues:
            return Claim((), self.dues.pop())
        return await super().receive(queue, limit, lock)

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        self.asked["accept"] += 1
        return await super().accept(queue, session, lock)


class Failing(AsyncIterator[None]):
    """Hints that fail as nobody expects."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def __anext__(self) -> None:
        raise self.error


class Room:
    """A queue on such a broker."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.broker = Counting(loop.clock())
        self.queue = Queue(
            QueueContext(
                "orders", self.broker, RenewalThread.here(), loop.clock(), QueueSettings(), "me", lambda _: None, {}
            )
        )

    def receiving(self, many: int) -> list[asyncio.Task[list[Message]]]:
        return [asyncio.ensure_future(self.queue.receive(1, wait=AGES)) for _ in range(many)]


def in_room(test: Callable[[Room], Coroutine[None, None, None]]) -> Callable[[], None]:
    @wraps(test)
    def runs() -> None:
        async def main() -> None:
            await test(Room())

        run(main(), seed=1, limit=1_000_000)

    del runs.__dict__["__wrapped__"]  # or pytest would look for a fixture
    return runs


@pytest.fixture(autouse=True)
def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "POLL", AGES)


async def rest() -> None:
    await asyncio.sleep(1)


@in_room
async def test_of_a_hundred_who_wait_a_message_wakes_a_few(room: Room) -> None:
    tasks = room.receiving(100)
    await rest()
    assert room.broker.asked["receive"] == 100
    await room.queue.send(b"a")
    await rest()
    assert room.broker.asked["receive"] <= 103
    assert sum(task.done() for task in tasks) == 1
    for _ in range(99):
        await room.queue.send(b"a")
    await asyncio.wait(tasks, timeout=1)
    assert all(task.done() for task in tasks)
    assert room.broker.asked["receive"] <= 100 + 3 * 100


@in_room
async def test_of_a_hundred_consumers_a_message_wakes_a_few(room: Room) -> None:
    handled: list[Message] = []

    async def handle(message: Message) -> None:
        handled.append(message)

    tasks = [asyncio.ensure_future(room.queue.consume(handle, concurrency=1, poll_every=AGES)) for _ in range(100)]
    await rest()
    before = room.broker.asked["receive"]
    assert before == 100
    await room.queue.send(b"a")
    await rest()
    assert len(handled) == 1
    assert room.broker.asked["receive"] - before <= 5
    for _ in range(99):
        await room.queue.send(b"a")
    await rest()
    assert len(handled) == 100
    await room.queue.drain()
    await asyncio.gather(*tasks)


@in_room
async def test_who_is_cancelled_when_woken_wakes_another(room: Room) -> None:
    tasks = room.receiving(3)
    await rest()
    room.broker.gate.clear()
    await room.queue.send(b"a")
    await until(lambda: room.broker.asked["receive"] == 4)
    tasks[0].cancel()  # it was there first, so it asks; what its question brings yet is given back
    await until(lambda: room.broker.asked["receive"] == 5)
    room.broker.gate.set()
    await rest()
    assert [task.done() for task in tasks].count(True) == 2


@in_room
async def test_who_is_cancelled_before_it_asks_wakes_another(room: Room) -> None:
    tasks = room.receiving(2)
    await rest()
    sending = asyncio.ensure_future(room.queue.send(b"a"))
    while not sending.done():
        await asyncio.sleep(0)
    for turn in range(10):  # whatever turn of the loop it is woken in
        if room.broker.asked["receive"] > 2:
            break
        tasks.append(asyncio.ensure_future(room.queue.receive(1, wait=AGES)))
        tasks[turn].cancel()
        await asyncio.sleep(0)
    await rest()
    assert sum(task.done() and not task.cancelled() for task in tasks) == 1


@in_room
async def test_whose_question_fails_wakes_another(room: Room) -> None:
    tasks = room.receiving(3)
    await rest()
    room.broker.fails = 2
    await room.queue.send(b"a")
    await rest()
    outcomes = [task.exception() if task.done() else "waits" for task in tasks]
    assert [type(one) for one in outcomes] == [Unavailable, Unavailable, type(None)]


@in_room
async def test_a_consumer_that_ends_wakes_another(room: Room) -> None:
    async def handle(message: Message) -> None:
        await asyncio.sleep(AGES)

    consumer = room.queue.consumer(handle, concurrency=1, poll_every=AGES, grace=0.0)
    consuming = asyncio.ensure_future(consumer.run())
    await rest()
    await room.queue.send(b"a")
    await rest()  # it is busy
    await room.queue.send(b"b")
    await rest()  # it was told, as nobody else waits; now somebody does
    [receiving] = room.receiving(1)
    await rest()
    assert [message.body for message in receiving.result()] == [b"b"]
    [receiving] = room.receiving(1)
    await rest()
    consumer.drain()
    await consuming
    await rest()
    assert [message.body for message in receiving.result()] == [b"a"]  # which it has given back


@in_room
async def test_a_consumer_whose_question_fails_wakes_another(room: Room) -> None:
    async def handle(message: Message) -> None:
        pass

    consuming = [asyncio.ensure_future(room.queue.consume(handle, poll_every=AGES)) for _ in range(2)]
    await rest()
    room.broker.fails = 1
    await room.queue.send(b"a")
    for _ in range(20):  # before the one that failed asks again
        await asyncio.sleep(0)
    assert (await room.queue.stats()).ready == 0
    await room.queue.drain()
    await asyncio.gather(*consuming)


@in_room
async def test_nobody_listens_when_the_last_consumer_has_ended(room: Room) -> None:
    async def handle(message: Message) -> None:
        pass

    await room.queue.consume(handle, until_empty=True)
    await rest()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "tenure-hints"] == []


@in_room
async def test_a_consumer_that_is_busy_swallows_nothing(room: Room) -> None:
    ended = asyncio.Event()
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        handled.append(message.body)
        await ended.wait()

    consuming = [asyncio.ensure_future(room.queue.consume(handle, concurrency=1, poll_every=AGES)) for _ in range(3)]
    await rest()
    for _ in range(3):
        await room.queue.send(b"a")
    await rest()
    assert len(handled) == 3
    await room.queue.send(b"b")  # for whoever has room first
    [receiving] = room.receiving(1)
    await rest()
    assert receiving.done()
    await room.queue.send(b"c")
    await rest()
    ended.set()
    await rest()
    assert handled == [b"a"] * 3 + [b"c"]
    await room.queue.drain()
    await asyncio.gather(*consuming)


@in_room
async def test_who_asks_for_something_else_is_woken_too(room: Room) -> None:
    any_session, named = room.queue.session(), room.queue.session("b")
    held = await room.queue.session("c").__aenter__()
    answering = asyncio.ensure_future(room.queue.request(b"question", timeout=AGES))
    await room.queue.receive(1)  # the request
    waiting: dict[str, asyncio.Task[Any]] = {
        "message": asyncio.ensure_future(room.queue.receive(1, wait=AGES)),
        "in session": asyncio.ensure_future(held.receive(1, wait=AGES)),
        "any": asyncio.ensure_future(any_session.__aenter__()),
    }
    await rest()
    await room.queue.send(b"c", session="c")
    await rest()
    assert [name for name, task in waiting.items() if task.done()] == ["in session"]
    await room.queue.send(b"a", session="a")
    await rest()
    assert not waiting["message"].done()
    assert (await waiting["any"]).name == "a"
    await room.queue.send(b"m")
    await rest()
    assert waiting["message"].done()
    async with named:
        waits = asyncio.ensure_future(room.queue.session("b", wait=AGES).__aenter__())
        await rest()
    await rest()
    assert waits.done()  # by the release
    answering.cancel()
    for session in (await waits, await waiting["any"], held):
        await session.__aexit__(None, None, None)
    await room.queue.close()
    for asking in room.queue._requests.values():
        await asking.close()


@in_room
async def test_what_time_brings_reaches_another_if_who_heard_of_it_is_gone(room: Room) -> None:
    tasks = room.receiving(3)
    await rest()
    await room.queue.send(b"a", delay=60.0)
    await rest()
    assert room.broker.asked["receive"] == 4
    tasks[0].cancel()  # it alone has heard when that is
    await asyncio.sleep(70)
    assert sum(task.done() and not task.cancelled() for task in tasks) == 1


@in_room
async def test_all_that_comes_due_at_once_reaches_all(room: Room) -> None:
    tasks = room.receiving(20)
    await rest()
    for _ in range(20):
        await room.queue.send(b"a", delay=60.0)
    await asyncio.sleep(70)
    assert all(task.done() for task in tasks)


@in_room
async def test_a_failing_broker_is_not_asked_round_in_a_circle(room: Room) -> None:
    async def handle(message: Message) -> None:
        pass

    consuming = [asyncio.ensure_future(room.queue.consume(handle, poll_every=AGES)) for _ in range(5)]
    await rest()
    room.broker.fails = 10_000
    before = room.broker.asked["receive"]
    await room.queue.send(b"a")
    await asyncio.sleep(0.5)
    assert room.broker.asked["receive"] - before <= 6
    room.broker.fails = 0
    await asyncio.sleep(30)
    assert (await room.queue.stats()).ready == 0
    await room.queue.drain()
    await asyncio.gather(*consuming)


@in_room
async def test_a_paused_consumer_passes_on_a_hint_that_its_question_did_not_answer(room: Room) -> None:
    async def handle(message: Message) -> None:
        pass

    consumer = room.queue.consumer(handle, concurrency=1, poll_every=AGES)
    consuming = asyncio.ensure_future(consumer.run())
    await rest()
    [receiving] = room.receiving(1)
    await rest()
    room.broker.gate.clear()
    await room.queue.send(b"a")
    await until(lambda: room.broker.asked["receive"] == 3)  # the consumer was woken for it, as it was there first
    room.broker.dues = [0.0]
    consumer.pause()
    room.broker.gate.set()
    await rest()
    assert receiving.done()
    consumer.drain()
    await consuming


@in_room
async def test_hints_are_heard_again_whatever_they_failed_with(room: Room) -> None:
    room.broker.hint_errors = [asyncio.CancelledError(), RuntimeError("not what a broker may raise")]
    [receiving] = room.receiving(1)
    await asyncio.sleep(5)
    assert not room.broker.hint_errors
    await room.queue.send(b"a")
    await rest()
    assert receiving.done()
