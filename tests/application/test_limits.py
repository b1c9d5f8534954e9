"""Consumers of queues that have limits, or are paused for the whole fleet; in virtual time."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

import tenure
from tenure.testing import connect_here
from tenure.testing.loop import run

KINDS = pytest.mark.parametrize("sessions", [False, True], ids=["messages", "sessions"])


@dataclass
class Watch:
    """Counts the handlers that run at once, and notes when each began."""

    seconds: float = 1.0
    running: int = 0
    most: int = 0
    began: list[tuple[float, str]] = field(default_factory=list)

    async def handle(self, message: tenure.Message) -> None:
        self.began.append((asyncio.get_running_loop().time(), message.session or ""))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1


def with_backends(test: Callable[[tenure.Backend, tenure.Backend], Awaitable[None]]) -> float:
    """Run *test* with two backends on one memory; return the seconds that it took."""

    name = secrets.token_hex(6)

    async def main() -> float:
        async with connect_here(f"memory:{name}") as one, connect_here(f"memory:{name}") as other:
            begin = asyncio.get_running_loop().time()
            await test(one, other)
            return asyncio.get_running_loop().time() - begin

    return run(main(), limit=86_400.0)


async def fill(queue: tenure.Queue, count: int, *, sessions: bool) -> None:
    for number in range(count):
        await queue.send(b"%d" % number, session=f"s{number % 5}" if sessions else None)


@KINDS
def test_all_consumers_together_have_no_more_than_max_locked(sessions: bool) -> None:
    watch = Watch()

    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        queues = [each.queue("orders", max_locked=3) for each in (one, other)]
        await fill(queues[0], 30, sessions=sessions)
        stop = asyncio.Event()
        both = asyncio.gather(*(each.consume(watch.handle, sessions=sessions, stop=stop) for each in queues))
        while len(watch.began) < 30:
            assert (await queues[0].stats()).locked <= 3
            await asyncio.sleep(0.25)
        stop.set()
        await both

    took = with_backends(test)
    assert watch.most == 3
    # 30 messages of a second each, three at a time; with sessions, in the end two of the last two. No place stays free.
    assert took < (12.5 if sessions else 10.5)


def test_a_buffer_takes_no_places() -> None:
    watch = Watch(seconds=0.001)
    waiting = 0

    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        nonlocal waiting
        queue = one.queue("orders", max_locked=100)
        await fill(queue, 2_000, sessions=False)
        consumer = queue.consumer(watch.handle, concurrency=4, until_empty=True)
        task = asyncio.ensure_future(consumer.run())
        while not task.done():
            waiting = max(waiting, (await queue.stats()).locked - consumer.running)
            await asyncio.sleep(0.0005)
        await task

    with_backends(test)
    assert len(watch.began) == 2_000
    assert waiting <= 8  # those whose verdict is on its way, and those just claimed


@KINDS
def test_a_rate_holds_over_all_consumers_and_until_empty_waits_for_it(sessions: bool) -> None:
    watch = Watch(seconds=0.01)

    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        queues = [each.queue("orders", rate=(5, 60.0)) for each in (one, other)]
        await fill(queues[0], 20, sessions=sessions)
        await asyncio.gather(*(each.consume(watch.handle, sessions=sessions, until_empty=True) for each in queues))
        assert await queues[0].stats() == tenure.Stats()

    took = with_backends(test)
    moments = sorted(moment for moment, _ in watch.began)
    assert len(moments) == 20
    assert all(later - sooner >= 59.9 for sooner, later in zip(moments, moments[5:], strict=False))
    assert 180 <= took < 195


def test_a_rate_of_sessions_leaves_the_others_alone() -> None:
    watch = Watch(seconds=0.01)

    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        queue = one.queue("orders", session_rate=(2, 10.0))
        await fill(queue, 20, sessions=True)
        await queue.consume(watch.handle, sessions=True, until_empty=True)
        assert await queue.stats() == tenure.Stats()

    took = with_backends(test)
    for session in {session for _, session in watch.began}:
        moments = sorted(moment for moment, one in watch.began if one == session)
        assert len(moments) == 4
        assert all(later - sooner >= 9.9 for sooner, later in zip(moments, moments[2:], strict=False))
    assert 10 <= took < 16


def test_consumers_of_sessions_end_when_all_is_done() -> None:
    watch = Watch(seconds=0.02)

    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        queues = [each.queue("orders", max_locked=2, lock=30) for each in (one, other)]
        await fill(queues[0], 30, sessions=True)
        await queues[0].send(b"much later", delay=3_600)
        await asyncio.gather(*(each.consume(watch.handle, sessions=True, until_empty=True) for each in queues))
        assert len(watch.began) == 30

    assert with_backends(test) < 5


def test_a_consumer_of_sessions_ends_soon_after_a_pause() -> None:
    watch = Watch(seconds=1.0)

    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        queue = one.queue("orders")
        await fill(queue, 10, sessions=True)
        await queue.send(b"much later", delay=3_600)
        consuming = asyncio.ensure_future(queue.consume(watch.handle, sessions=True, until_empty=True))
        await asyncio.sleep(0.5)
        await other.queue("orders").declare(paused=True)
        await asyncio.sleep(20)
        await other.queue("orders").declare(paused=False)
        await consuming
        assert len(watch.began) == 10

    assert 20 < with_backends(test) < 25


def test_a_raised_rate_of_sessions_is_noticed_within_a_minute() -> None:
    watch = Watch(seconds=0.01)

    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        queue = one.queue("orders")
        await queue.declare(session_rate=(1, 86_000.0))
        await fill(queue, 10, sessions=True)
        consuming = asyncio.ensure_future(queue.consume(watch.handle, sessions=True, until_empty=True))
        await asyncio.sleep(150)
        assert len(watch.began) == 5
        await other.queue("orders").declare(session_rate=math.inf)
        await consuming
        assert len(watch.began) == 10

    assert with_backends(test) < 150 + 61


def test_a_session_that_is_kept_back_is_no_reason_to_say_there_is_none() -> None:
    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        queue = one.queue("orders")
        await fill(queue, 1, sessions=True)
        await queue.declare(paused=True)
        with pytest.raises(tenure.TimedOut, match="the limits of the queue, or its pause, keep back the messages"):
            async with queue.session(wait=1):
                pass
        await queue.declare(paused=False)
        async with queue.session(wait=1):
            with pytest.raises(tenure.TimedOut, match="no free session has a message"):
                async with queue.session(wait=1):
                    pass

    with_backends(test)


@KINDS
def test_a_paused_queue_keeps_its_consumers_waiting(sessions: bool) -> None:
    watch = Watch(seconds=0.01)

    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        queue = one.queue("orders")
        assert (await other.queue("orders").declare(paused=True)).paused
        await fill(queue, 10, sessions=sessions)
        consuming = asyncio.ensure_future(queue.consume(watch.handle, sessions=sessions, until_empty=True))
        await asyncio.sleep(1_000)
        assert not consuming.done()
        assert not watch.began
        assert not (await other.queue("orders").declare(paused=False)).paused
        await consuming
        assert len(watch.began) == 10

    assert with_backends(test) < 1_001  # the hint wakes it


def test_what_runs_when_the_queue_is_paused_goes_on() -> None:
    watch = Watch(seconds=100)

    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        queue = one.queue("orders", lock=30)
        await fill(queue, 10, sessions=False)
        stop = asyncio.Event()
        consuming = asyncio.ensure_future(queue.consume(watch.handle, concurrency=2, stop=stop))
        await asyncio.sleep(1)
        await other.queue("orders").declare(paused=True)
        await asyncio.sleep(300)
        assert len(watch.began) == 2
        found = await queue.stats()
        assert (found.ready, found.locked) == (8, 0)
        stop.set()
        await consuming

    with_backends(test)


def test_an_empty_paused_queue_is_empty() -> None:
    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        queue = one.queue("orders")
        await queue.declare(paused=True)
        await queue.consume(Watch().handle, until_empty=True)

    assert with_backends(test) < 1


def test_receive_waits_for_the_rate() -> None:
    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        queue = one.queue("orders", rate=(1, 20.0))
        await fill(queue, 2, sessions=False)
        assert len(await queue.receive(10)) == 1
        assert await queue.receive(10, wait=15) == []
        assert len(await queue.receive(10, wait=15)) == 1

    assert 20 <= with_backends(test) < 21


def test_programs_do_not_expect_a_pause() -> None:
    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        with pytest.raises(
            tenure.ConfigError, match=r"await queue.declare\(paused=True\), or tenure queue pause orders"
        ):
            one.queue("orders", paused=True)
        queue = one.queue("orders", max_locked=5)
        await queue.send(b"")
        await queue.declare(paused=True, rate=(10, 1.0))
        holds = await queue.settings()
        assert holds == tenure.QueueSettings(max_locked=5, rate=(10, 1.0), paused=True)
        await queue.delete(force=True)
        assert await queue.receive() == []  # which declares again what is expected here
        assert await queue.settings() == tenure.QueueSettings(max_locked=5, rate=(10, 1.0))

    with_backends(test)


def test_another_limit_than_expected_is_refused() -> None:
    async def test(one: tenure.Backend, other: tenure.Backend) -> None:
        await one.queue("orders").declare(max_locked=5, rate=(100, 60), session_rate=math.inf)
        with pytest.raises(tenure.ConfigError, match="max_locked is 5") as refused:
            await other.queue("orders", max_locked=math.inf, rate=(1, 0.5), session_rate=(2, 1.0)).receive()
        said = str(refused.value)
        assert (
            "max_locked is 5, not inf; rate is 100 in 60 s, not 1 in 0.5 s; session_rate is inf, not 2 in 1 s" in said
        )
        assert "await queue.declare(max_locked=math.inf, rate=(1, 0.5), session_rate=(2, 1))" in said
        assert "tenure queue declare orders --max-locked none --rate 1/0.5 --session-rate 2/1" in said

    with_backends(test)
