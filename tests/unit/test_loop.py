"""The loop in virtual time: asyncio's promises, free time, detected deadlocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tenure._runtime.clock import Clock
from tenure.testing import loop as virtual
from tenure.testing import until
from tenure.testing.loop import Deadlock, LimitReached, Livelock, VirtualLoop


def test_sleeping_moves_time_and_nothing_else() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert virtual.run(main()) == 86_400
    assert time.monotonic() - began < 600


def test_time_stands_still_while_callbacks_run() -> None:
    async def main() -> set[float]:
        seen = set()
        for _ in range(100):
            await asyncio.sleep(0)
            seen.add(asyncio.get_running_loop().time())
        return seen

    assert virtual.run(main()) == {0.0}


def test_call_soon_keeps_its_order() -> None:
    order: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_soon(order.append, number)
        await asyncio.sleep(0)

    virtual.run(main(), seed=3)
    assert order == list(range(50))


def _order_of_ties(seed: int) -> list[int]:
    order: list[int] = []

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(_later(number))

    async def _later(number: int) -> None:
        await asyncio.sleep(1)
        order.append(number)

    virtual.run(main(), seed=seed)
    return order


def test_ties_follow_the_seed() -> None:
    assert _order_of_ties(1) == _order_of_ties(1)
    assert len({tuple(_order_of_ties(seed)) for seed in range(20)}) > 10


def test_timers_fire_in_order_of_time_and_can_be_cancelled() -> None:
    order: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(2, order.append, "late")
        loop.call_at(1, order.append, "early")
        loop.call_later(1.5, order.append, "never").cancel()
        await asyncio.sleep(3)

    virtual.run(main())
    assert order == ["early", "late"]


def test_a_due_timer_is_not_starved_by_callbacks() -> None:
    async def main() -> float:
        due = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0, due.set_result, None)
        turns = 0
        while not due.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert virtual.run(main()) < 5


def test_timeout_event_and_wait_for_work() -> None:
    async def main() -> float:
        event = asyncio.Event()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await event.wait()
        asyncio.get_running_loop().call_later(2, event.set)
        await asyncio.wait_for(event.wait(), 10)
        return asyncio.get_running_loop().time()

    assert virtual.run(main()) == 7


def test_executor_runs_inline_and_outside_the_loop() -> None:
    def in_thread() -> str:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return "done"

    def fails() -> None:
        raise ValueError("no")

    async def main() -> str:
        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(fails)
        result = await asyncio.to_thread(in_thread)
        assert asyncio.get_running_loop().time() == 0
        return result

    assert virtual.run(main()) == "done"


def test_threadsafe_calls_and_futures_work() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        loop.call_soon_threadsafe(answer.set_result, 42)
        return int(await answer)

    assert virtual.run(main()) == 42


def test_deadlock_names_the_waiting_tasks() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(3)
        await asyncio.create_task(waits_for_ever())

    with pytest.raises(Deadlock, match=r"nothing is left to run at 3 s; waiting: .*waits_for_ever"):
        virtual.run(main())


def test_livelock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "STEPS_MAX", 1000)

    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match="callbacks ran at 0 s"):
        virtual.run(main())


def test_the_limit_is_virtual_time() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(LimitReached, match="still running at 10 s"):
        virtual.run(main(), limit=10)


def test_uncaught_exceptions_are_collected(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("lost")

    loop = VirtualLoop()
    loop.call_soon(fails)
    loop.run_until_complete(asyncio.sleep(1))
    loop.close()
    assert [str(context["exception"]) for context in loop.unhandled] == ["lost"]
    assert "fails" in caplog.text


def test_generators_are_closed_at_the_end() -> None:
    closed: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
        finally:
            await asyncio.sleep(1)
            closed.append("yes")

    kept: list[AsyncIterator[int]] = []

    async def main() -> int:
        kept.append(numbers())
        return await anext(kept[0])

    assert virtual.run(main()) == 0
    assert closed == ["yes"]


def test_left_over_tasks_are_cancelled() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    kept: list[asyncio.Task[None]] = []

    async def main() -> None:
        kept.append(asyncio.create_task(forever()))
        await asyncio.sleep(1)

    virtual.run(main())
    assert ended == ["cancelled"]


def test_blocking_lets_time_pass_for_all() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        fired: list[float] = []
        loop.call_later(1, lambda: fired.append(loop.time()))
        loop.block(5)
        assert fired == []
        await asyncio.sleep(0.1)
        return fired[0]

    assert virtual.run(main()) == 5


def test_clocks_run_at_their_own_rate() -> None:
    loop = VirtualLoop()
    fast: Clock = loop.clock(rate=1.5, offset=100)
    suspended = loop.clock()
    loop.run_until_complete(asyncio.sleep(10))
    suspended.jump(60)
    assert fast.now() == 115
    assert suspended.now() == 70
    with pytest.raises(ValueError, match="can't go back"):
        suspended.jump(-1)
    loop.close()


def test_it_serves_as_the_loop_of_a_runner() -> None:
    async def main() -> float:
        await asyncio.sleep(5)
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(main()) == 5


def test_a_closed_or_running_loop_refuses() -> None:
    loop = VirtualLoop()

    async def nested() -> None:
        inner = VirtualLoop()
        coroutine = asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="running already"):
            inner.run_until_complete(coroutine)
        coroutine.close()

    loop.run_until_complete(nested())
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)
    assert loop.is_closed()


def test_run_forever_ends_by_stop_or_when_nothing_is_left() -> None:
    loop = VirtualLoop()
    loop.call_later(3, loop.stop)
    loop.call_later(9, print)
    loop.run_forever()
    assert loop.time() == 3
    loop.run_forever()
    assert loop.time() == 9
    loop.close()


def test_until_waits_in_virtual_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        await until(lambda: loop.time() >= 3.0)
        with pytest.raises(AssertionError, match="it did not hold within 60 s"):
            await until(lambda: False, within=60.0, what="it")
        return loop.time()

    assert 63.0 <= virtual.run(main()) < 64.0
