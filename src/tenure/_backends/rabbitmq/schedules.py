"""Schedules: what is kept of them is in the records, with the settings of their queue."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenure._backends.rabbitmq.client import Client
from tenure._backends.rabbitmq.records import Record, Records, RecordStore
from tenure._queue.broker import Schedules
from tenure._queue.schedule_steps import Act

T = TypeVar("T")


class RabbitSchedules:
    """A ``ScheduleStore`` in the records of the queues. RabbitMQ tells no time: it is that of this machine."""

    def __init__(
        self,
        client: Client,
        records: RecordStore,
        make: Callable[[str], Awaitable[None]],
    ) -> None:
        self._client = client
        self._records = records
        self._make = make

    async def kept(self, queue: str) -> Schedules:
        """Return the texts that are kept of the schedules of *queue*."""
        records = await self._client.run(self._records.read)
        return Schedules(records.get(queue, Record()).schedules, time.time())

    async def change(self, queue: str, schedule: str, act: Act[T]) -> T:
        """Replace the text of one schedule by that of *act*; declare *queue* first, so that it is listed."""

        def write(records: Records) -> tuple[T, bool]:
            record = records.get(queue, Record())
            kept = record.schedules.get(schedule)
            text, answer = act(kept, time.time())
            if text == kept:
                return answer, True
            if not record.is_there:
                return answer, False
            if text is None:
                del record.schedules[schedule]
            else:
                record.schedules[schedule] = text
            return answer, True

        async def change() -> T:
            while True:  # until the request times out
                answer, is_final = await self._records.change(write)
                if is_final:
                    return answer
                await self._make(queue)

        return await self._client.run(change)
