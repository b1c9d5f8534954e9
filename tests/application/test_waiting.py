"""Many waiters for one queue in one process: a hint wakes one of them, and is passed on if that one is gone."""

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
"""No waiter polls for so long: a waiter that gets a message here was woken."""


class Counting(MemoryBroker):
    """Counts its requests; a request may be delayed, or fail."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.requests: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = 0
        self.dues: list[float] = []
        self.hint_errors: list[BaseException] = []

    def hints(self, queue: str) -> AsyncIterator[None]:
        return Failing(self.hint_errors.pop()) if self.hint_errors else super().hints(queue)

    async def receive(self, queue: str, limit: int, lock: float) -> Claim:
        self.requests["receive"] += 1
        await self.gate.wait()
        if self.fails:
            self.fails -= 1
            raise Unavailable("the broker can't be asked")
        if self.dues:
            return Claim((), self.dues.pop())
        return await super().receive(queue, limit, lock)

    async def accept(self, queue: str, session: str | None, lock: float) -> SessionLock | NoSession:
        self.requests["accept"] += 1
        return await super().accept(queue, session, lock)


class Failing(AsyncIterator[None]):
    """Hints that fail with an unexpected error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def __anext__(self) -> None:
        raise self.error


class Setup:
    """A queue on a counting broker."""

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


def in_virtual_time(test: Callable[[Setup], Coroutine[None, None, None]]) -> Callable[[], None]:
    @wraps(test)
    def runs() -> None:
        async def main() -> None:
            await test(Setup())

        run(main(), seed=1, limit=1_000_000)

    del runs.__dict__["__wrapped__"]  # or pytest would look for a fixture
    return runs


@pytest.fixture(autouse=True)
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "POLL", AGES)


async def rest() -> None:
    await asyncio.sleep(1)


@in_virtual_time
async def test_of_a_hundred_receivers_a_message_wakes_a_few(setup: Setup) -> None:
    tasks = setup.receiving(100)
    await rest()
    assert setup.broker.requests["receive"] == 100
    await setup.queue.send(b"a")
    await rest()
    assert setup.broker.requests["receive"] <= 103
    assert sum(task.done() for task in tasks) == 1
    for _ in range(99):
        await setup.queue.send(b"a")
    await asyncio.wait(tasks, timeout=1)
    assert all(task.done() for task in tasks)
    assert setup.broker.requests["receive"] <= 100 + 3 * 100


@in_virtual_time
async def test_of_a_hundred_consumers_a_message_wakes_a_few(setup: Setup) -> None:
    handled: list[Message] = []

    async def handle(message: Message) -> None:
        handled.append(message)

    tasks = [asyncio.ensure_future(setup.queue.consume(handle, concurrency=1, poll_every=AGES)) for _ in range(100)]
    await rest()
    before = setup.broker.requests["receive"]
    assert before == 100
    await setup.queue.send(b"a")
    await rest()
    assert len(handled) == 1
    assert setup.broker.requests["receive"] - before <= 5
    for _ in range(99):
        await setup.queue.send(b"a")
    await rest()
    assert len(handled) == 100
    await setup.queue.drain()
    await asyncio.gather(*tasks)


@in_virtual_time
async def test_a_receiver_cancelled_when_woken_wakes_another(setup: Setup) -> None:
    tasks = setup.receiving(3)
    await rest()
    setup.broker.gate.clear()
    await setup.queue.send(b"a")
    await until(lambda: setup.broker.requests["receive"] == 4)
    tasks[0].cancel()  # it was the first, so it asks; a message that its request still brings is given back
    await until(lambda: setup.broker.requests["receive"] == 5)
    setup.broker.gate.set()
    await rest()
    assert [task.done() for task in tasks].count(True) == 2


@in_virtual_time
async def test_a_receiver_cancelled_before_it_asks_wakes_another(setup: Setup) -> None:
    tasks = setup.receiving(2)
    await rest()
    sending = asyncio.ensure_future(setup.queue.send(b"a"))
    while not sending.done():
        await asyncio.sleep(0)
    for turn in range(10):  # whatever turn of the loop it is woken in
        if setup.broker.requests["receive"] > 2:
            break
        tasks.append(asyncio.ensure_future(setup.queue.receive(1, wait=AGES)))
        tasks[turn].cancel()
        await asyncio.sleep(0)
    await rest()
    assert sum(task.done() and not task.cancelled() for task in tasks) == 1


@in_virtual_time
async def test_a_receiver_whose_request_fails_wakes_another(setup: Setup) -> None:
    tasks = setup.receiving(3)
    await rest()
    setup.broker.fails = 2
    await setup.queue.send(b"a")
    await rest()
    outcomes = [task.exception() if task.done() else "waits" for task in tasks]
    assert [type(one) for one in outcomes] == [Unavailable, Unavailable, type(None)]


@in_virtual_time
async def test_a_consumer_that_ends_wakes_another(setup: Setup) -> None:
    async def handle(message: Message) -> None:
        await asyncio.sleep(AGES)

    consumer = setup.queue.consumer(handle, concurrency=1, poll_every=AGES, grace=0.0)
    consuming = asyncio.ensure_future(consumer.run())
    await rest()
    await setup.queue.send(b"a")
    await rest()  # it is busy
    await setup.queue.send(b"b")
    await rest()  # it got the hint, as there was no other waiter; now there is one
    [receiving] = setup.receiving(1)
    await rest()
    assert [message.body for message in receiving.result()] == [b"b"]
    [receiving] = setup.receiving(1)
    await rest()
    consumer.drain()
    await consuming
    await rest()
    assert [message.body for message in receiving.result()] == [b"a"]  # which it has given back


@in_virtual_time
async def test_a_consumer_whose_request_fails_wakes_another(setup: Setup) -> None:
    async def handle(message: Message) -> None:
        pass

    consuming = [asyncio.ensure_future(setup.queue.consume(handle, poll_every=AGES)) for _ in range(2)]
    await rest()
    setup.broker.fails = 1
    await setup.queue.send(b"a")
    for _ in range(20):  # before the one that failed asks again
        await asyncio.sleep(0)
    assert (await setup.queue.stats()).ready == 0
    await setup.queue.drain()
    await asyncio.gather(*consuming)


@in_virtual_time
async def test_hints_end_with_the_last_consumer(setup: Setup) -> None:
    async def handle(message: Message) -> None:
        pass

    await setup.queue.consume(handle, until_empty=True)
    await rest()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "tenure-hints"] == []


@in_virtual_time
async def test_a_consumer_that_is_busy_loses_no_hint(setup: Setup) -> None:
    ended = asyncio.Event()
    handled: list[bytes] = []

    async def handle(message: Message) -> None:
        handled.append(message.body)
        await ended.wait()

    consuming = [asyncio.ensure_future(setup.queue.consume(handle, concurrency=1, poll_every=AGES)) for _ in range(3)]
    await rest()
    for _ in range(3):
        await setup.queue.send(b"a")
    await rest()
    assert len(handled) == 3
    await setup.queue.send(b"b")  # for the first consumer with free slots
    [receiving] = setup.receiving(1)
    await rest()
    assert receiving.done()
    await setup.queue.send(b"c")
    await rest()
    ended.set()
    await rest()
    assert handled == [b"a"] * 3 + [b"c"]
    await setup.queue.drain()
    await asyncio.gather(*consuming)


@in_virtual_time
async def test_waiters_for_something_else_are_woken_too(setup: Setup) -> None:
    any_session, named = setup.queue.session(), setup.queue.session("b")
    held = await setup.queue.session("c").__aenter__()
    answering = asyncio.ensure_future(setup.queue.request(b"question", timeout=AGES))
    await setup.queue.receive(1)  # the request
    waiting: dict[str, asyncio.Task[Any]] = {
        "message": asyncio.ensure_future(setup.queue.receive(1, wait=AGES)),
        "in session": asyncio.ensure_future(held.receive(1, wait=AGES)),
        "any": asyncio.ensure_future(any_session.__aenter__()),
    }
    await rest()
    await setup.queue.send(b"c", session="c")
    await rest()
    assert [name for name, task in waiting.items() if task.done()] == ["in session"]
    await setup.queue.send(b"a", session="a")
    await rest()
    assert not waiting["message"].done()
    assert (await waiting["any"]).name == "a"
    await setup.queue.send(b"m")
    await rest()
    assert waiting["message"].done()
    async with named:
        waits = asyncio.ensure_future(setup.queue.session("b", wait=AGES).__aenter__())
        await rest()
    await rest()
    assert waits.done()  # by the release
    answering.cancel()
    for session in (await waits, await waiting["any"], held):
        await session.__aexit__(None, None, None)
    await setup.queue.close()
    for asking in setup.queue._requests:
        await asking.close()


@in_virtual_time
async def test_a_due_message_wakes_another_waiter_if_the_first_is_gone(setup: Setup) -> None:
    tasks = setup.receiving(3)
    await rest()
    await setup.queue.send(b"a", delay=60.0)
    await rest()
    assert setup.broker.requests["receive"] == 4
    tasks[0].cancel()  # only this one knows the time
    await asyncio.sleep(70)
    assert sum(task.done() and not task.cancelled() for task in tasks) == 1


@in_virtual_time
async def test_all_that_comes_due_at_once_reaches_all(setup: Setup) -> None:
    tasks = setup.receiving(20)
    await rest()
    for _ in range(20):
        await setup.queue.send(b"a", delay=60.0)
    await asyncio.sleep(70)
    assert all(task.done() for task in tasks)


@in_virtual_time
async def test_a_failing_broker_is_not_asked_in_an_endless_circle(setup: Setup) -> None:
    async def handle(message: Message) -> None:
        pass

    consuming = [asyncio.ensure_future(setup.queue.consume(handle, poll_every=AGES)) for _ in range(5)]
    await rest()
    setup.broker.fails = 10_000
    before = setup.broker.requests["receive"]
    await setup.queue.send(b"a")
    await asyncio.sleep(0.5)
    assert setup.broker.requests["receive"] - before <= 6
    setup.broker.fails = 0
    await asyncio.sleep(30)
    assert (await setup.queue.stats()).ready == 0
    await setup.queue.drain()
    await asyncio.gather(*consuming)


@in_virtual_time
async def test_a_paused_consumer_passes_on_a_hint_whose_request_failed(setup: Setup) -> None:
    async def handle(message: Message) -> None:
        pass

    consumer = setup.queue.consumer(handle, concurrency=1, poll_every=AGES)
    consuming = asyncio.ensure_future(consumer.run())
    await rest()
    [receiving] = setup.receiving(1)
    await rest()
    setup.broker.gate.clear()
    await setup.queue.send(b"a")
    await until(lambda: setup.broker.requests["receive"] == 3)  # the consumer was woken for it, as the first
    setup.broker.dues = [0.0]
    consumer.pause()
    setup.broker.gate.set()
    await rest()
    assert receiving.done()
    consumer.drain()
    await consuming


@in_virtual_time
async def test_hints_are_followed_again_after_any_failure(setup: Setup) -> None:
    setup.broker.hint_errors = [asyncio.CancelledError(), RuntimeError("not what a broker may raise")]
    [receiving] = setup.receiving(1)
    await asyncio.sleep(5)
    assert not setup.broker.hint_errors
    await setup.queue.send(b"a")
    await rest()
    assert receiving.done()
