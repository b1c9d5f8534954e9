"""The schedules that a store keeps of a queue: list them, pause and resume them, forget them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from tenure._queue.context import QueueContext
from tenure._schedule.plan import Record
from tenure._schedule.slots import first_after, slots_of
from tenure._schedule.status import ScheduleStatus
from tenure.errors import ConfigError, nearest

BUSY = 0.1
"""Seconds until a change is tried again while a process sends a slot."""


class Schedules:
    """The schedules of a queue: ``queue.schedules``. Each was kept by a process that has run it."""

    def __init__(self, context: QueueContext) -> None:
        self._context = context

    def __repr__(self) -> str:
        return f"<Schedules of {self._context.name!r}>"

    async def list(self) -> list[ScheduleStatus]:
        """Return the schedules of the queue, sorted by name.

        Raises:
            Unavailable: The store could not be asked.
        """
        found = await self._context.broker.schedules(self._context.name)
        return [status_of(name, self._context.name, text) for name, text in sorted(found.records.items())]

    async def pause(self, name: str) -> ScheduleStatus:
        """Skip the slots of the schedule *name*, in all processes and at once, until :meth:`resume`.

        Raises:
            ConfigError: There is no such schedule.
            Unavailable: The store could not be asked.
        """
        return await self._change(name, lambda record, _: replace(record, paused=True))

    async def resume(self, name: str) -> ScheduleStatus:
        """Let the schedule *name* go on with its next slot, in all processes.

        It also lets one go on whose slots are settled up to a moment in the future, because the store's clock was wrong
        and was set back.

        Raises:
            ConfigError: There is no such schedule.
            Unavailable: The store could not be asked.
        """
        return await self._change(name, resumed)

    async def remove(self, name: str) -> None:
        """Forget the schedule *name*. A process that still runs it makes it anew, within a minute, with its next slot.

        Raises:
            ConfigError: There is no such schedule.
            Unavailable: The store could not be asked.
        """
        await self._change(name, None)

    async def _change(self, name: str, change: Callable[[Record, float], Record] | None) -> ScheduleStatus:
        queue, broker = self._context.name, self._context.broker
        while True:
            found = await broker.schedules(queue)
            text = found.records.get(name)
            if text is None:
                hint = nearest(name, list(found.records)) or "; a process that runs it creates it"
                raise ConfigError(f"the queue {queue!r} has no schedule {name!r}{hint}")
            new = None if change is None else change(Record.decoded(text, name), found.now).encoded()
            answer = await broker.advance(queue, name, text, new)
            if answer.is_done:
                return status_of(name, queue, new or text)
            if answer.record == text:
                await asyncio.sleep(BUSY)


def resumed(record: Record, now: float) -> Record:
    """Return *record*, so that its next slot after *now* is sent, by the store's clock."""
    settled = now if record.paused or record.settled_until > now else record.settled_until
    return replace(record, paused=False, settled_until=settled)


def status_of(name: str, queue: str, text: str) -> ScheduleStatus:
    """Return the status of the schedule of which *text* is kept."""
    try:
        record = Record.decoded(text, name)
    except ConfigError as error:
        return ScheduleStatus(name, queue, "", problem=str(error))
    return of_record(name, queue, record)


def of_record(name: str, queue: str, record: Record) -> ScheduleStatus:
    """Return the status of the schedule of which *record* is kept."""
    plan, problem, following = record.plan, "", None
    try:
        slots = slots_of(plan)
        following = None if record.paused else first_after(slots, record.settled_until)
    except ConfigError as error:
        problem = str(error)
    return ScheduleStatus(
        name,
        queue,
        plan.every,
        plan.timezone,
        plan.missed,
        plan.missed_after,
        record.last,
        following,
        record.paused,
        problem,
    )
