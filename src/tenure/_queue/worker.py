"""The workers of a consumer: ``concurrency`` tasks that take messages from the pump and call the handler themselves.

No task is made for a message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, Literal, Protocol

from tenure._queue.cancelling import is_being_closed, undo_cancellations
from tenure._queue.context import QueueContext
from tenure._queue.handlers import Served
from tenure._queue.hooks import is_interrupt
from tenure._queue.judge import Judge
from tenure._queue.message import Delivery
from tenure._queue.outcomes import CancelReason, Disposition
from tenure._queue.pump import Pump
from tenure._queue.received import Message
from tenure._queue.reply import Reply
from tenure._queue.running import CURRENT_CONSUMER
from tenure._queue.verdicts import GIVE_BACK, Verdict
from tenure._telemetry.telemetry import OUTCOMES, report_telemetry, traced
from tenure._timing import Timing

_JUDGED = (BaseException, Reply)
"""The outcomes that mean more than a return: what a handler has raised, ``Retry`` and ``Reject`` also if returned."""

SLICE = 0.001
"""Seconds for which handlers that never suspend may keep the loop from its other work."""


class Host(Protocol):
    """The driver of the pump, as workers use it."""

    is_tick_scheduled: bool
    """Whether the pump is fed at the end of this iteration of the loop anyway."""

    @property
    def timing(self) -> Timing:
        """The times of a lock."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether consuming is over."""
        ...

    @property
    def is_ending(self) -> bool:
        """Whether workers are cancelled because consuming ends, or the loop."""
        ...

    def tick_soon(self) -> None:
        """Let the pump look at what was taken and done, at the end of this iteration of the loop."""
        ...

    def end_with(self, error: BaseException) -> None:
        """End gracefully, and raise *error* then."""
        ...

    def fail(self, error: BaseException) -> None:
        """End at once, and raise *error*."""
        ...


class Workers:
    """The workers of one consumer, made as messages come.

    Args:
        context: The queue.
        pump: The source of the messages.
        serve: Calls the handler.
        judge: Decides what becomes of a message whose handler did not simply return.
        inbox_window: Whether the inbox is asked before the handler is called: for any number but 0.
        concurrency: The most workers.
        host: The driver of the pump.
        consumer: The consumer, for :data:`CURRENT_CONSUMER`.
    """

    def __init__(
        self,
        context: QueueContext,
        pump: Pump,
        serve: Served,
        judge: Judge,
        inbox_window: float,
        concurrency: int,
        host: Host,
        consumer: object,
    ) -> None:
        self.context = context
        self.pump = pump
        self.serve = serve if context.tracing is None else traced(serve, context.tracing)
        self.observe = None if context.telemetry is None else context.telemetry.handling(context.name)
        self.judge = judge
        self.inbox_window = inbox_window
        self.host = host
        self.consumer = consumer
        self.tracker = Tracker(pump, host)
        self._concurrency = concurrency
        self._loop = asyncio.get_running_loop()
        self._workers: list[_Worker] = []
        self._idle: deque[asyncio.Future[None]] = deque()

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """The tasks of all workers."""
        return {worker.task for worker in self._workers}

    def wake(self, count: int) -> None:
        """Let so many workers look for messages; make new ones while there are fewer than may be."""
        while count > 0 and self._idle:
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)
                count -= 1
        while count > 0 and len(self._workers) < self._concurrency:
            self._workers.append(_Worker(self))
            count -= 1

    async def wait_for_messages(self) -> None:
        """Wait until there may be messages to take. Called by a worker."""
        idle = self._loop.create_future()
        self._idle.append(idle)
        await idle

    def replace(self, worker: _Worker) -> None:
        """Make another worker in place of one that has ended, if messages wait."""
        self._workers.remove(worker)
        self.wake(1)

    def cancel(self, delivery: Delivery, why: CancelReason) -> None:
        """Cancel the handler of *delivery*, if it still runs."""
        for worker in self._workers:
            if worker.delivery is delivery:
                worker.cancel(why)

    def cancel_all(self, why: CancelReason) -> None:
        """Cancel every handler that runs."""
        for worker in self._workers:
            worker.cancel(why)

    def handled_by(self, tasks: Collection[asyncio.Task[Any]]) -> Iterator[Delivery]:
        """Yield the messages whose handlers run in these *tasks*."""
        for worker in self._workers:
            if worker.task in tasks and worker.delivery is not None:
                yield worker.delivery


class _Worker:
    """Takes a message, calls the handler, passes the verdict to the pump, takes the next."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.delivery: Delivery | None = None  # whose handler runs
        self._why: CancelReason | None = None
        self.task: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._work())
        self.task.add_done_callback(self._ended)

    async def _work(self) -> None:
        workers = self._workers
        context, pump, judge, host, tracker = (
            workers.context,
            workers.pump,
            workers.judge,
            workers.host,
            workers.tracker,
        )
        serve, success, inbox = workers.serve, judge.success, workers.inbox_window
        # To look it up takes as long as a call on Python 3.11.
        let_expire: Literal[Disposition.LET_EXPIRE] = Disposition.LET_EXPIRE
        now, take, done, tick_soon = context.clock.now, pump.take, pump.done, host.tick_soon
        observe = workers.observe
        task = asyncio.current_task()  # self.task is not there yet if tasks are eager
        assert task is not None
        cancelling = task.cancelling
        CURRENT_CONSUMER.set(workers.consumer)
        yielded_at = moment = now()
        while True:
            delivery = take(moment)
            if delivery is None:
                tick_soon()
                await workers.wait_for_messages()
                yielded_at = moment = now()
                continue
            if not host.is_tick_scheduled:
                tick_soon()
            message = Message(delivery, context, tracker)
            self.delivery = delivery
            begun = moment
            try:
                outcome: object = None
                if not inbox or not await judge.was_handled(delivery, host.timing):
                    outcome = await serve(message)
            except BaseException as error:
                if is_being_closed(self.task):
                    raise
                if is_interrupt(error):
                    host.end_with(error)
                outcome = error
            self.delivery = None
            if cancelling() and self._why is None and not host.is_ending:
                await undo_cancellations(self.task)
            verdict: Verdict | Literal[Disposition.LET_EXPIRE] | None
            # A handler's result is judged by its type only: the object may claim to be of any class.
            if self._why is None and (outcome is None or not issubclass(type(outcome), _JUDGED)):
                verdict = success
            else:
                try:
                    verdict = await judge.judge(message, outcome, self.take_cancel_reason(), self.is_cancelled, pump)
                except asyncio.CancelledError:
                    if not host.is_ending:  # not by us: without a verdict, the message would be renewed for ever
                        done(delivery, GIVE_BACK)
                        tick_soon()
                    raise
            if verdict is let_expire:
                pump.let_expire(delivery)
            else:
                done(delivery, verdict)
            if not host.is_tick_scheduled:
                tick_soon()
            moment = now()
            if observe is not None:
                try:
                    observe(delivery, moment - begun, OUTCOMES.get(type(verdict), "lapsed"))
                except Exception as error:
                    report_telemetry(error)
            if cancelling():
                raise asyncio.CancelledError
            if moment - yielded_at > SLICE:
                await asyncio.sleep(0)
                yielded_at = moment = now()

    def _ended(self, task: asyncio.Task[None]) -> None:
        host = self._workers.host
        if not task.cancelled() and (error := task.exception()) is not None:
            host.fail(error)
        elif not host.is_ending:  # it was cancelled, and not by us
            self._workers.replace(self)

    def cancel(self, why: CancelReason) -> None:
        """Cancel the handler that runs, if one does."""
        if self.delivery is not None and (self._why is None or why == "leave"):
            self._why = why
            self.task.cancel()

    def take_cancel_reason(self) -> CancelReason | None:
        """Return why the handler was cancelled by us, and take the cancellation back: the worker goes on.

        It does not if consuming has ended, as one of the cancellations is for the worker then.
        """
        why, self._why = self._why, None
        while why is not None and not self._workers.host.has_ended and self.task.cancelling() > 0:
            self.task.uncancel()
        return why

    @property
    def is_cancelled(self) -> bool:
        """Whether the worker itself is being cancelled."""
        return self.task.cancelling() > 0


class Tracker:
    """Tells the pump of the verdicts that handlers pass by themselves, and lets it look at what follows."""

    def __init__(self, pump: Pump, host: Host) -> None:
        self._host = host
        self._settling_ends = pump.settling_ends
        self.settling_begins = pump.settling_begins
        self.abandoned = pump.abandoned
        self.settled = pump.settled

    def settling_ends(self, delivery: Delivery) -> None:
        """Note that the verdict on *delivery* is answered, or that no answer is waited for."""
        self._settling_ends(delivery)
        if not self._host.has_ended:
            self._host.tick_soon()
