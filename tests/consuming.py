"""Consume until a queue holds what a test expects."""

from __future__ import annotations

import asyncio
from typing import Unpack

import tenure
from tenure._queue.handlers import Handler
from tenure._queue.message import Stats
from tenure._queue.options import ConsumeOptions
from tests.durations import until


async def consume_down_to(
    left: Stats, queue: tenure.Queue, handler: Handler, **options: Unpack[ConsumeOptions]
) -> None:
    """Consume until the queue's stats equal *left*; ``until_empty`` would also wait for delayed retries."""

    async def is_left() -> bool:
        return await queue.stats() == left

    consuming = asyncio.create_task(queue.consume(handler, **options))
    await until(is_left)
    await queue.drain()
    await consuming
