"""The driver of a pump: feeds it events on the caller's loop, and performs its effects. It decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tenure._queue.broker_requests import BrokerRequests
from tenure._queue.context import QueueContext, loss_message
from tenure._queue.effects import (
    REQUESTS,
    CancelAll,
    CancelHandler,
    Drain,
    Emit,
    Hint,
    LookAlong,
    NothingLeft,
    Pause,
    PumpEffect,
    PumpInput,
    Report,
    Request,
    Tick,
    WakeWorkers,
)
from tenure._queue.handlers import Handlers
from tenure._queue.hints import MESSAGES, SESSIONS, Subscription
from tenure._queue.judge import Judge
from tenure._queue.lock_group import NEVER
from tenure._queue.message import Delivery
from tenure._queue.options import ConsumeSettings
from tenure._queue.pump import Pump
from tenure._queue.received import Message
from tenure._queue.reports import event_of
from tenure._queue.stopping import STOPPED, TIMED_OUT
from tenure._queue.verdicts import GIVE_BACK, Lapsed, Settled, Settlement
from tenure._queue.worker import Workers
from tenure._runtime.alarms import Alarm
from tenure._runtime.tasks import Tasks
from tenure._timing import Timing
from tenure.errors import LockLost
from tenure.events import HandlerOverran, ResultDiscarded

_TICK = (Tick(),)
_LOOK_ALONG = LookAlong()


class PumpDriver:
    """Runs one pump, until it has stopped. Made in the task that runs the consumer.

    Args:
        context: The queue.
        consuming: The options of the consumer.
        handlers: Where its handlers run.
        pump: The machine.
        consumer: The consumer, for :data:`CURRENT_CONSUMER`.
    """

    def __init__(
        self, context: QueueContext, consuming: ConsumeSettings, handlers: Handlers, pump: Pump, consumer: object
    ) -> None:
        self.pump = pump
        self.is_tick_scheduled = False
        self.failure: BaseException | None = None
        """To be raised when all has ended."""
        self._context = context
        self._consuming = consuming
        self._loop = asyncio.get_running_loop()
        self._runner = asyncio.current_task()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the pump has stopped, or failed."""
        self._judge = Judge(context, consuming, handlers, self.end_with, consumer)
        settings = pump.settings
        self._workers = Workers(
            context, pump, handlers.serve, self._judge, consuming.inbox_window, settings.concurrency, self, consumer
        )
        self._subscription: Subscription | None = None
        self._requests: BrokerRequests | None = None
        self._tasks = Tasks()
        self._has_failed = False
        self._events: list[PumpInput] = []  # for the end of this iteration of the loop
        self._alarm = Alarm(context.clock, self._on_alarm)

    def begin(self, stop: asyncio.Event | None, *, is_paused: bool) -> None:
        """Let the pump run, drained when *stop* is set."""
        # Subscribe even if hints come from this process only: its own messages need not wait for the next look.
        context = self._context
        kind = SESSIONS if self._consuming.sessions else MESSAGES
        self._subscription = context.hints.join(context.broker, context.name, kind, self._hint)
        if self.pump.settings.surveys and not self._consuming.sessions:
            context.looks.join(self._look_along)
        lock = self.timing.ttl
        self._requests = BrokerRequests(context, lock, self.pump, self._subscription, self)
        if stop is not None:
            self._spawn(self._drain_at(stop))
        self.feed(Pause() if is_paused else Tick())

    async def _drain_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.drain()

    @property
    def timing(self) -> Timing:
        """The times of a lock."""
        return self.pump.settings.timing

    @property
    def has_ended(self) -> bool:
        """Whether the pump has stopped, or failed."""
        return self.ended.done()

    @property
    def is_ending(self) -> bool:
        """Whether workers are cancelled because consuming ends, or the loop."""
        return self.ended.done() or (self._runner is not None and self._runner.cancelling() > 0)

    # --- feeding the pump ---

    def feed(self, *events: PumpInput) -> None:
        """Give *events* to the pump, and do what it says."""
        for request in self.decide(*events):
            assert self._requests is not None
            self._requests.begin(request)

    def decide(self, *events: PumpInput) -> Sequence[Request]:
        """Give *events* to the pump, do what it says, and return the requests that it makes: they are the caller's."""
        requests: list[Request] = []
        if self.ended.done():
            return requests
        try:
            serves = False
            now = self._context.clock.now()
            for event in events:
                for effect in self.pump.handle(event, now):
                    kind = type(effect)
                    if kind is WakeWorkers:
                        serves = True
                    elif kind in REQUESTS:
                        requests.append(effect)  # type: ignore[arg-type]
                    else:
                        self._perform(effect)
            if serves:
                self._workers.wake(self.pump.waiting)
        except Exception as error:
            self.fail(error)
            return ()
        if self.ended.done():  # an effect has fed the pump again
            return requests
        if self.pump.state in (STOPPED, TIMED_OUT):
            self.ended.set_result(None)
        else:
            self._set_alarm()
        return requests

    def _hint(self) -> bool:
        """Let the pump look at once; return whether it asks, for it may have no room."""
        self.feed(Hint())
        return self._subscription is not None and not self._subscription.has_hint

    def _look_along(self) -> None:
        """Let the pump look together with other consumers."""
        self.feed(_LOOK_ALONG)

    def tick_soon(self) -> None:
        """Let the pump look at what was taken and done, at the end of this iteration of the loop."""
        if not self.is_tick_scheduled:
            self.is_tick_scheduled = True
            self._loop.call_soon(self._tick_now)

    def feed_soon(self, event: PumpInput) -> None:
        """Give *event* to the pump together with others that come in this iteration of the loop."""
        self._events.append(event)
        self.tick_soon()

    def _tick_now(self) -> None:
        self.is_tick_scheduled = False
        events, self._events = self._events, []
        self.feed(*events or _TICK)

    def _set_alarm(self) -> None:
        wake_at = self.pump.wake_at
        # An alarm that comes too early does no harm: as times mostly move on, it need not be set anew each time.
        # An idle pump's is moved: a thousand that have looked together would be woken a thousand times, for nothing.
        if wake_at < self._alarm.at or (self._alarm.at < wake_at < NEVER and not self.pump.busy):
            self._alarm.set(wake_at)

    def _on_alarm(self) -> None:
        self.feed(Tick())

    # --- performing its effects ---

    def _perform(self, effect: PumpEffect) -> None:
        match effect:
            case Report(settlement, answer, lapsed_for):
                self._report(settlement, answer, lapsed_for)
            case CancelHandler(delivery, why):
                self._workers.cancel(delivery, why)
            case CancelAll(why):
                self._workers.cancel_all(why)
            case NothingLeft():
                self.drain()
            case Emit(event):
                self._context.emit(event)

    def _report(self, settlement: Settlement, answer: Settled | Lapsed | None, why: str | None) -> None:
        delivery, verdict = settlement
        if (back_at := self._context.back_at(verdict, answer)) is not None:
            self.pump.abandoned(back_at)
        if answer is None:
            self._emit_discarded(delivery, "unanswered")
            self._complain(
                settlement,
                f"session {delivery.session!r} of {delivery.queue!r} was lost before there was an answer to its "
                f"verdict on message {delivery.id!r}, which may stand or not",
            )
        elif isinstance(answer, Lapsed):
            if why is not None and verdict is not GIVE_BACK:
                self._emit_discarded(delivery, why)
            self._complain(settlement, loss_message(delivery, "its handler had ended, and that was too late"))
        else:
            self._context.report_if_dead(delivery, verdict, answer)

    def _emit_discarded(self, delivery: Delivery, why: str) -> None:
        self._context.emit(event_of(ResultDiscarded, self._context, delivery, why))

    def _complain(self, settlement: Settlement, text: str) -> None:
        self._spawn(self._judge.call_error_hook(Message(settlement.delivery, self._context), LockLost(text)))

    # --- ending ---

    def drain(self, grace: float | None = None) -> None:
        """Let handlers finish for *grace* seconds, the option if None, and stop; see :meth:`Consumer.drain`."""
        wait = self._consuming.grace if grace is None else grace
        self.feed(Drain(self._context.clock.now() + wait))

    def end_with(self, error: BaseException) -> None:
        """End gracefully, and raise *error* then."""
        self.failure = self.failure or error
        self.drain(grace=0.0)

    def fail(self, error: BaseException) -> None:
        """End at once: a request can never work, or tenure itself is broken.

        Sessions are released, as far as the broker still answers; other locks are left to run out.
        """
        if not self.ended.done():
            self._has_failed = True
            self.failure = error
            self.ended.set_result(None)

    async def close(self) -> None:
        """Cancel whatever is left, and report what it leaves behind."""
        self._alarm.end()
        self._context.looks.leave(self._look_along)
        if self._subscription is not None:
            self._subscription.leave()
        left: set[asyncio.Task[Any]] = {*self._tasks, *self._workers.tasks}
        if self._requests is not None:
            left |= self._requests.tasks
        for _ in range(2):  # the second time, threads are left behind
            for task in left:
                task.cancel()
            if left:  # not for ever: a handler may catch its cancellation, and go on
                _, left = await asyncio.wait(left, timeout=self.timing.grace / 2)
        for delivery in self._workers.handled_by(left):
            if not self.pump.has_overrun(delivery):
                self._context.emit(event_of(HandlerOverran, self._context, delivery))
        for delivery, verdict in self.pump.unanswered:
            if verdict is not GIVE_BACK:
                self._emit_discarded(delivery, "unanswered")

        if self._has_failed:
            await self._release_sessions()

    async def _release_sessions(self) -> None:
        """Release the sessions in which no handler runs, or their messages would count as delivered."""
        release = self._context.broker.release
        tasks = [asyncio.ensure_future(release(lock)) for lock in self.pump.releasable]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.timing.grace / 2)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Any) -> None:
        self._tasks.keep(self._loop.create_task(work))
