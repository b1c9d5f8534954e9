"""Schedules: what is kept of them is in the record of their queue, which is replaced if it is what was read."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TypeVar

from tenure._backends.nats.client import Client
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.places import Places, Record
from tenure._backends.nats.store_clock import StoreClock
from tenure._queue.broker import Schedules
from tenure._queue.schedule_steps import Act

T = TypeVar("T")


class NatsSchedules:
    """A ``ScheduleStore`` in the bucket of the queues' records."""

    def __init__(
        self,
        client: Client,
        places: Places,
        clock: StoreClock,
    ) -> None:
        self._client = client
        self._places = places
        self._clock = clock

    async def kept(self, queue: str) -> Schedules:
        """Return the texts that are kept of the schedules of *queue*."""
        record, _ = await self._client.run(partial(self._read, queue=queue))
        return Schedules(record.schedules, self._clock.now())

    async def change(self, queue: str, schedule: str, act: Act[T]) -> T:
        """Replace the text of one schedule by that of *act*; make the stream of *queue* first, so that it is listed."""

        async def ask(connection: Connection) -> T:
            while True:  # until the request times out
                record, revision = await self._read(connection, queue)
                text, answer = act(record.schedules.get(schedule), self._clock.now())
                others = {name: one for name, one in record.schedules.items() if name != schedule}
                schedules = others if text is None else {**others, schedule: text}
                if schedules == record.schedules:
                    return answer
                if not record.schedules:
                    await self._places.make(connection, queue)
                    record, revision = await self._places.read_record(connection, queue)
                    if record.schedules:
                        continue
                changed = replace(record, schedules=schedules)
                if await self._places.write_record(connection, queue, changed, revision):
                    return answer
                await asyncio.sleep(0)

        return await self._client.run(ask)

    async def _read(self, connection: Connection, queue: str) -> tuple[Record, int]:
        """Return the record of *queue*, once the server's time is known."""
        await self._clock.ensure_known(connection, self._places.bucket)
        if not self._clock.is_known:
            await self._places.make_bucket(connection)
            await self._clock.ensure_known(connection, self._places.bucket)
        return await self._places.read_record(connection, queue)
