"""Tasks are kept until they are done, and no longer."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from tenure._runtime.tasks import Tasks


async def test_a_task_is_kept_until_it_is_done() -> None:
    tasks = Tasks()
    proceed = asyncio.Event()
    ended: list[str] = []

    async def work() -> None:
        await proceed.wait()
        ended.append("work")

    task = tasks.spawn(work(), "worker")
    assert task.get_name() == "worker"
    assert list(tasks) == [task]
    del task
    await asyncio.sleep(0)
    gc.collect()
    assert len(list(tasks)) == 1
    proceed.set()
    await asyncio.wait(tasks.here())
    assert ended == ["work"]
    assert list(tasks) == []


async def test_cancel_all_waits_for_the_end_of_every_task_also_after_errors() -> None:
    tasks = Tasks()

    async def fails() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("on its way out")

    one, other = tasks.spawn(asyncio.sleep(60)), tasks.spawn(fails())
    await asyncio.sleep(0)
    await tasks.cancel_all()
    assert one.cancelled()
    with pytest.raises(ValueError, match="on its way out"):
        other.result()
    assert list(tasks) == []


async def test_tasks_of_several_loops_are_separate() -> None:
    tasks = Tasks()
    begun, proceed = threading.Event(), threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def elsewhere() -> None:
        loops.append(asyncio.get_running_loop())
        task = tasks.spawn(asyncio.to_thread(proceed.wait))
        begun.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    try:
        await asyncio.to_thread(begun.wait)
        mine = tasks.spawn(asyncio.sleep(60))
        assert tasks.here() == {mine}
        assert tasks.loops() == {asyncio.get_running_loop(), *loops}
    finally:
        proceed.set()
        await asyncio.to_thread(thread.join)
    assert list(tasks) == [mine]
    await tasks.cancel_all()
