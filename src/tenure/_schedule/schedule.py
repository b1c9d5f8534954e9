"""A schedule at work in this process: it performs what its machine says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tenure._queue.context import QueueContext
from tenure._queue.outgoing import Outgoing, checked
from tenure._queue.queue import Queue
from tenure._schedule.machine import Advance, Look, ScheduleMachine, Wait
from tenure._schedule.plan import Plan
from tenure._schedule.schedules import of_record
from tenure._schedule.slots import id_of, shown, slots_of
from tenure._schedule.status import ScheduleStatus
from tenure.errors import ConfigError
from tenure.events import BrokerUnanswered, SlotSent, SlotsSkipped, SlotsWithheld

SCHEDULE_HEADER = "schedule"
"""The header with the name of the schedule."""

SLOT_HEADER = "slot"
"""The header with the slot: ISO 8601, in the time zone of the schedule."""

ENDING = 3.0
"""Seconds that the store has to answer, once the schedule is to end."""


class Schedule:
    """Messages that are sent at the times of a plan; made by :meth:`tenure.Backend.schedule`.

    Attributes:
        name: Its name.
        queue: The name of the queue to which it sends.
    """

    def __init__(self, queue: Queue, name: str, plan: Plan, message: Outgoing | None) -> None:
        slots_of(plan)
        self.name: str = name
        self.queue: str = queue.name
        self._of = queue  # of its own: if the backend is closed, it ends with it
        self._plan = plan
        self._message = message
        self._machine: ScheduleMachine | None = None
        self._draining: asyncio.Event | None = None
        self._withheld = ""

    def __repr__(self) -> str:
        every = self._plan.every if isinstance(self._plan.every, str) else f"{self._plan.every:g} s"
        return f"<Schedule {self.name!r}, {every}, to {self.queue!r}>"

    @property
    def _context(self) -> QueueContext:
        return self._of._context

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Send the messages of the slots when they are due, until :meth:`drain` is called, or *stop* is set.

        Run it in every instance of the program: each slot is sent once, by one of them. If the store doesn't answer, it
        is asked again.

        Raises:
            ConfigError: The message can't be sent to the queue, or the store keeps no schedules.
        """
        if self._draining is not None and not self._context.renewal_thread.is_forked:
            raise ConfigError(f"the schedule {self.name!r} runs already; one object runs once at a time")
        self._machine = machine = ScheduleMachine(self.name, self._plan, random.Random())
        self._draining = draining = asyncio.Event()
        ends = {asyncio.ensure_future(one.wait()) for one in (draining, stop) if one is not None}
        try:
            with self._of._running.keeping(self):
                while not any(one.done() for one in ends):
                    step = machine.next(self._context.clock.now())
                    if isinstance(step, Wait):
                        timeout = max(0.0, step.until - self._context.clock.now())
                        await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                    else:
                        await _within(self._ask(machine, step), ends)
        finally:
            for one in ends:
                one.cancel()
            self._machine = self._draining = None

    def drain(self, grace: float | None = None) -> None:
        """End :meth:`run` once the store has answered, for which it has a few seconds. Call it on the same loop.

        *grace* is for consumers, which a queue drains in the same way.
        """
        if self._draining is not None:
            self._draining.set()

    async def _ask(self, machine: ScheduleMachine, step: Look | Advance) -> None:
        context = self._context
        asked_at = context.clock.now()
        try:
            await context.ready()
            if isinstance(step, Look):
                self._message_of(0.0, self._plan)  # if it can't be sent, that must not come out at the first slot only
                found = await context.broker.schedules(self.queue)
                machine.looked(found.records.get(self.name), found.now, asked_at, context.clock.now())
            else:
                messages = self._messages(step.slots)
                answer = await context.broker.advance(
                    self.queue, self.name, step.expected, step.record, messages, step.not_before
                )
                await context.stay_ready()
                machine.advanced(*answer, asked_at, context.clock.now())
                if answer.is_done:
                    self._report(step, answer.now)
        except (Exception, asyncio.CancelledError) as error:
            if (why := context.why_unanswered(error)) is None:
                raise
            machine.unanswered(context.clock.now())
            what = f"ask for the schedule {self.name!r}" if isinstance(step, Look) else f"advance {self.name!r}"
            context.emit(BrokerUnanswered(context.clock.now(), self.queue, context.holder, what, why))
        else:
            context.has_answered = True
            self._report_withheld(machine)

    def _messages(self, slots: Sequence[float]) -> list[Outgoing]:
        record = None if self._machine is None else self._machine.record
        return [self._message_of(slot, self._plan if record is None else record.plan) for slot in slots]

    def _message_of(self, slot: float, plan: Plan) -> Outgoing:
        """Return the message of *slot*.

        Raises:
            MessageRefused: It can't be sent to the queue.
        """
        text = shown(slot, slots_of(plan).zone).isoformat()
        message = self._message or Outgoing()
        own = Outgoing.json(text) if message.body == b"" else message
        headers = {**own.headers, **message.headers, SCHEDULE_HEADER: self.name, SLOT_HEADER: text}
        whole = replace(message, id=id_of(self.name, slot), body=own.body, headers=headers)
        [ready] = checked([whole], self._context.settings.body_max, self._context.broker.traits.body_max)
        return ready

    def _report(self, done: Advance, store_now: float) -> None:
        context = self._context
        common = (context.clock.now(), self.queue, context.holder, self.name)
        if done.skipped is not None:
            context.emit(SlotsSkipped(*common, *done.skipped))
        for slot in done.slots:
            context.emit(SlotSent(*common, slot, max(0.0, store_now - slot)))

    def _report_withheld(self, machine: ScheduleMachine) -> None:
        why = machine.problem
        if machine.behind:
            why = (
                f"the store's clock is {machine.behind:.0f} s behind the newest settled slot, and may have been set "
                f"back; to begin from now: tenure schedule resume {self.name}"
            )
        kind = "behind" if machine.behind else why
        if kind and kind != self._withheld:
            self._context.emit(
                SlotsWithheld(self._context.clock.now(), self.queue, self._context.holder, self.name, why)
            )
        self._withheld = kind

    def seen(self) -> ScheduleStatus | None:
        """Return its status as the store last told this process; None if it does not run, or has no answer yet."""
        record = None if self._machine is None else self._machine.record
        return None if record is None else of_record(self.name, self.queue, record)


def template_of(message: Outgoing | None, body_max: int) -> Outgoing | None:
    """Return a copy of the message that is to be sent for each slot: changes of the original don't count.

    Raises:
        ConfigError: It has an id, or a moment, or can't be sent to any queue of a store that takes *body_max* bytes.
    """
    if message is None:
        return None
    if not isinstance(message, Outgoing):
        raise ConfigError(f"message must be an Outgoing, not {message!r:.80}; write Outgoing(b'…')")
    for name in ("id", "at"):
        if getattr(message, name) is not None:
            raise ConfigError(f"the message of a schedule must not have {name}=, which each slot has of its own")
    [ready] = checked([message], body_max, body_max)
    return replace(ready)


async def _within(asking: Coroutine[Any, Any, None], ends: Iterable[asyncio.Future[Any]]) -> None:
    """Wait for an answer; once one of *ends* is done, for some seconds only.

    A request that is given up may be carried out, as one whose answer is lost.
    """
    asked = asyncio.ensure_future(asking)
    try:
        await asyncio.wait({asked, *ends}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({asked}, timeout=ENDING)
    except asyncio.CancelledError:
        await asyncio.wait({asked}, timeout=ENDING)  # where it takes several steps, one cut off would be sent again
        raise
    finally:
        asked.cancel()
        await asyncio.wait({asked}, timeout=ENDING)  # the backend may be closed after this
    if asked.done() and not asked.cancelled():
        asked.result()
