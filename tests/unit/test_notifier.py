"""The notifier: no notification is lost, several count as one, closing ends the iterators."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from tenure._runtime.notifier import Notifier


async def test_a_notification_before_the_wait_is_kept_and_several_count_as_one() -> None:
    notifier = Notifier()
    listener = notifier.listen("topic")
    notifier.notify("topic")
    notifier.notify("topic")
    await anext(listener)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(listener), 0.01)


async def test_topics_are_separate_unless_all_are_notified() -> None:
    notifier = Notifier()
    one, other = notifier.listen("one"), notifier.listen("other")
    notifier.notify("one")
    await anext(one)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(other), 0.01)
    notifier.notify_all()
    await anext(one)
    await anext(other)


async def test_a_notification_during_a_cancelled_wait_is_kept() -> None:
    notifier = Notifier()
    listener = notifier.listen("topic")
    waiting = asyncio.ensure_future(anext(listener))
    await asyncio.sleep(0)
    notifier.notify("topic")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(anext(listener), 1)


async def test_another_thread_can_notify() -> None:
    notifier = Notifier()
    listener = notifier.listen("topic")
    for _ in range(100):
        waiting = asyncio.ensure_future(anext(listener))
        await asyncio.sleep(0)
        thread = threading.Thread(target=notifier.notify, args=("topic",))
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


async def test_closing_one_iterator_leaves_the_others() -> None:
    notifier = Notifier()
    one, other = notifier.listen("topic"), notifier.listen("topic")
    waiting = asyncio.ensure_future(anext(one, "end"))
    await asyncio.sleep(0)
    await one.aclose()
    assert await waiting == "end"
    notifier.notify("topic")
    await anext(other)


async def test_two_tasks_can_not_share_an_iterator() -> None:
    notifier = Notifier()
    listener = notifier.listen("topic")
    waiting = asyncio.ensure_future(anext(listener))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another task"):
        await anext(listener)
    notifier.notify("topic")
    await waiting


async def test_dropped_listeners_are_removed() -> None:
    notifier = Notifier()
    for _ in range(1_000):
        notifier.listen("topic")
    gc.collect()
    notifier.listen("topic")
    assert len(notifier._listeners["topic"]) <= 2
    notifier.notify("topic")
    assert "topic" not in notifier._listeners


def test_a_closed_loop_is_ignored() -> None:
    notifier = Notifier()
    listener = notifier.listen("topic")

    async def wait() -> None:
        await anext(listener)

    loop = asyncio.new_event_loop()
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    notifier.notify("topic")
    task.cancel  # noqa: B018
    assert not task.done()
