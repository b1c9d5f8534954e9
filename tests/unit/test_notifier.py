"""The bell: no ring is lost, several are one, a closed one ends."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from tenure._runtime.notifier import Notifier


async def test_a_ring_before_the_wait_is_kept_and_several_are_one() -> None:
    notifier = Notifier()
    listener = notifier.listen("topic")
    notifier.ring("topic")
    notifier.ring("topic")
    await anext(listener)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(listener), 0.01)


async def test_topics_are_apart_unless_all_are_rung() -> None:
    notifier = Notifier()
    one, other = notifier.listen("one"), notifier.listen("other")
    notifier.ring("one")
    await anext(one)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(other), 0.01)
    notifier.ring_all()
    await anext(one)
    await anext(other)


async def test_a_ring_that_meets_a_cancelled_wait_is_kept() -> None:
    notifier = Notifier()
    listener = notifier.listen("topic")
    waiting = asyncio.ensure_future(anext(listener))
    await asyncio.sleep(0)
    notifier.ring("topic")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(anext(listener), 1)


async def test_it_is_heard_from_another_thread() -> None:
    notifier = Notifier()
    listener = notifier.listen("topic")
    for _ in range(100):
        waiting = asyncio.ensure_future(anext(listener))
        await asyncio.sleep(0)
        thread = threading.Thread(target=notifier.ring, args=("topic",))
        thread.start()
        await asyncio.wait_for(waiting, 5)
        thread.join()


async def test_closing_ends_every_iterator() -> None:
    notifier = Notifier()
    waiting = asyncio.ensure_future(anext(notifier.listen("topic"), "end"))
    idle = notifier.listen("topic")
    await asyncio.sleep(0)
    notifier.close()
    assert await waiting == "end"
    assert await anext(idle, "end") == "end"
    assert await anext(notifier.listen("new"), "end") == "end"


async def test_one_iterator_can_be_closed_alone() -> None:
    notifier = Notifier()
    one, other = notifier.listen("topic"), notifier.listen("topic")
    waiting = asyncio.ensure_future(anext(one, "end"))
    await asyncio.sleep(0)
    await one.aclose()
    assert await waiting == "end"
    notifier.ring("topic")
    await anext(other)


async def test_two_tasks_can_not_share_an_iterator() -> None:
    notifier = Notifier()
    listener = notifier.listen("topic")
    waiting = asyncio.ensure_future(anext(listener))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another task"):
        await anext(listener)
    notifier.ring("topic")
    await waiting


async def test_forgotten_listeners_are_forgotten() -> None:
    notifier = Notifier()
    for _ in range(1_000):
        notifier.listen("topic")
    gc.collect()
    notifier.listen("topic")
    assert len(notifier._listeners["topic"]) <= 2
    notifier.ring("topic")
    assert "topic" not in notifier._listeners


def test_a_loop_that_is_gone_does_not_matter() -> None:
    notifier = Notifier()
    listener = notifier.listen("topic")

    async def wait() -> None:
        await anext(listener)

    loop = asyncio.new_event_loop()
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    notifier.ring("topic")
    task.cancel  # noqa: B018
    assert not task.done()
