"""Renews the locks of a consumer, or of a session, on the renewal thread: performs the effects of its machine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from tenure._lease import NoAnswer
from tenure._queue.context import QueueContext
from tenure._queue.effects import (
    Answered,
    Emit,
    LocksEnded,
    LocksInput,
    LocksMessage,
    MessagesGivenBack,
    Renew,
    Settle,
    Tick,
)
from tenure._queue.failures import name_of, text_of
from tenure._queue.locks import Locks
from tenure._runtime.alarms import Alarm
from tenure._runtime.tasks import Tasks
from tenure.errors import TenureError


def shared_moment(now: float, at: float) -> float:
    """Return a moment between *now* and *at*, the same for all that wait about as long."""
    if not 0.0 < at - now < math.inf:
        return at
    step = 2.0 ** math.floor(math.log2(at - now))
    return at // step * step


class LockRenewer:
    """Runs the machine :class:`Locks` on the renewal loop.

    Args:
        context: Where the broker is reached.
        locks: The machine.
        feed: Called with each message of the locks to the pump, on the loop that is running now.
    """

    def __init__(self, context: QueueContext, locks: Locks, feed: Callable[[LocksMessage], None]) -> None:
        self._context = context
        self._locks = locks
        self._feed_pump = feed
        self._handler_loop = asyncio.get_running_loop()  # where the handlers run
        self._tasks = Tasks()
        self._alarm: Alarm | None = None
        self._ended = False

    def begin(self) -> asyncio.Future[None]:
        """Begin to renew; the future is done when that has begun.

        Await it by `wait_through_cancellation`, which does not cancel it.
        """
        return self._submit(self._begin)

    def end(self) -> asyncio.Future[None]:
        """Renew no longer, whether the future is awaited or not; requests under way have a second to be answered."""
        return self._submit(self._end)

    def _submit(self, step: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Future[None]:
        done = asyncio.wrap_future(self._context.renewal_thread.submit(step))
        # Or asyncio logs that the exception was never retrieved.
        done.add_done_callback(lambda done: done.cancelled() or done.exception())
        return done

    async def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._context.clock, self._on_alarm)
        self._feed(Tick())

    def _on_alarm(self) -> None:
        self._feed(Tick())

    async def _end(self) -> None:
        self._ended = True
        if self._alarm is not None:
            self._alarm.end()
        if tasks := list(self._tasks):
            _, late = await asyncio.wait(tasks, timeout=1.0)
            for task in late:
                task.cancel()

    def _feed(self, event: LocksInput) -> None:
        if self._handler_loop.is_closed():  # and its handlers have ended with it
            self._ended = True
        messages: list[LocksMessage | Emit] = []
        for effect in self._locks.handle(event, self._context.clock.now()):
            match effect:
                case Renew(request_id, held) if not self._ended:
                    self._spawn(self._ask(request_id, self._context.broker.renew(held, self._context.settings.lock)))
                case Settle(request_id, settlements):
                    self._spawn(self._ask(request_id, self._context.broker.settle(settlements)))
                case LocksEnded() | MessagesGivenBack() | Emit():
                    messages.append(effect)
        if messages:
            with suppress(RuntimeError):  # that loop is closed, and its handlers have ended with it
                self._handler_loop.call_soon_threadsafe(self._deliver, messages)
        if self._alarm is not None:
            if self._ended:
                self._alarm.end()
            else:
                wake_at = self._locks.wake_at
                # A call that comes too early does no harm: a thousand consumers without locks wake together.
                self._alarm.set(shared_moment(self._context.clock.now(), wake_at) if self._locks.settled else wake_at)

    async def _ask(self, request_id: int, question: Awaitable[Any]) -> None:
        try:
            answers = await question
        except (Exception, asyncio.CancelledError) as error:  # also one that can never work: the locks end in time
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # this was cancelled at the end
            answers = NoAnswer(str(error) if isinstance(error, TenureError) else f"{name_of(error)}: {text_of(error)}")
        self._feed(Answered(request_id, answers))

    def _deliver(self, messages: Sequence[LocksMessage | Emit]) -> None:
        """Pass on the messages and events of one step. Called on the loop of the handlers."""
        for message in messages:
            if isinstance(message, Emit):
                self._context.emit(message.event)
            else:
                self._feed_pump(message)

    def _spawn(self, work: Any) -> None:
        self._tasks.keep(self._loop.create_task(work))
