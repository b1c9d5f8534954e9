"""Handlers that hold the GIL, in one call of C code that doesn't release it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

import tenure
from tenure._queue.handlers import Handler, RunIn
from tenure._queue.message import Stats
from tenure.events import Event, LockEnded, MessageDied, MessageEvent, MessageFailed, ResultDiscarded

pytestmark = [pytest.mark.process, pytest.mark.skipif(os.name != "posix", reason="needs usleep")]

HOLDS = 2.4  # seconds; longer than a lock

served: list[int] = []


def hold_the_gil() -> None:
    """Stop every thread of this process, as one call of ``re`` or of an extension may."""
    ctypes.PyDLL(None).usleep(int(HOLDS * 1_000_000))


async def on_the_loop(message: tenure.Message) -> None:
    in_a_thread(message)


def in_a_thread(message: tenure.Message) -> None:
    served.append(message.delivery_count)
    if message.delivery_count == 1:
        hold_the_gil()


def in_a_process(message: tenure.Message) -> None:
    hold_the_gil()


async def consumed(folder: Path, handler: Handler, lock: float, run_in: RunIn = "auto") -> list[Event]:
    """Let *handler* serve one message, until it is settled; return its events."""
    events: list[Event] = []
    async with tenure.connect(f"sqlite:///{folder}/work.db", on_event=events.append) as backend:
        queue = backend.queue("jobs", lock=lock, max_deliveries=2)
        await queue.send(b"")
        await queue.consume(handler, concurrency=1, until_empty=True, run_in=run_in)
        assert await queue.stats() == Stats()
    return [event for event in events if isinstance(event, MessageEvent)]


@pytest.mark.parametrize("handler", [on_the_loop, in_a_thread])
async def test_a_handler_that_holds_the_gil_is_stalled_and_its_message_delivered_again(
    tmp_path: Path, handler: Handler
) -> None:
    served.clear()
    events = await consumed(tmp_path, handler, 1.5)
    assert served == [1, 2]
    assert not [event for event in events if isinstance(event, MessageFailed | MessageDied)]
    [ended] = [event for event in events if isinstance(event, LockEnded | ResultDiscarded)]
    assert (ended.why, ended.delivery_count) == ("stalled", 1)


async def test_a_process_that_holds_its_own_gil_keeps_its_lock(tmp_path: Path) -> None:
    assert await consumed(tmp_path, in_a_process, 1.8, run_in="process") == []
