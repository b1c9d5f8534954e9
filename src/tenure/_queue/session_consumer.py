"""The message pump for sessions: several sessions at a time, the messages of each one after the other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tenure._jitter import later
from tenure._queue.consumer import (
    event_of,
    hint_at,
    is_being_closed,
    is_to_begin,
    judge_failure,
    outlast,
    take_back,
    tell_unanswered,
    unusable,
)
from tenure._queue.context import POLL, QueueContext
from tenure._queue.handlers import CALLING, Handler, Handlers, RanOn
from tenure._queue.hooks import complain, is_interrupt
from tenure._queue.message import COMPLETE, GIVE_BACK, Complete, Delivery, Verdict
from tenure._queue.options import ConsumeSettings
from tenure._queue.outcomes import Why
from tenure._queue.processes import NeverBegins, NotBegun
from tenure._queue.pump_settings import PumpSettings
from tenure._queue.received import Message
from tenure._queue.session import Session
from tenure._runtime.signals import on_shutdown_signal
from tenure._timing import Timing
from tenure.errors import LockLost
from tenure.events import HandlerOverran, LockEnded, ResultDiscarded

T = TypeVar("T")


class SessionConsumer:
    """A handler at work on the sessions of a queue. Made by ``queue.consumer(handler, sessions=True)``, run once.

    Each of its workers holds one session at a time, whose lock the renewal thread renews. It hands over the messages
    in order,
    each when the one before is settled, and looks for another session when none is waiting.
    """

    def __init__(self, context: QueueContext, handler: Handler, consuming: ConsumeSettings) -> None:
        self._context = context
        self._consuming = consuming
        self._settings = self._get_settings()
        self._handlers = Handlers(handler, consuming.run_in, consuming.concurrency, self)
        self._success: Verdict = Complete(remember=consuming.inbox_window) if consuming.inbox_window else COMPLETE
        self._may_go_on = asyncio.Event()  # cleared by pause()
        self._may_go_on.set()
        self._stopping = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self._workers: list[_Worker] = []
        self._ended: asyncio.Future[None] | None = None
        self._runner: asyncio.Task[object] | None = None
        self._failure: BaseException | None = None
        self._retry_at = -math.inf  # by then, all that was abandoned has come back

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Consume until :meth:`drain` is called, *stop* is set, or SIGTERM comes; return when all is settled.

        Cancelled, it cancels the handlers, gives back what they leave, uncounted, and only then lets go.

        Raises:
            ConfigError: The broker, or the handler, can never be used as it is.
        """
        self._runner = asyncio.current_task()
        with on_shutdown_signal(self.drain, self._consuming.sigterm, lambda: hint_at(self._context, self._running)):
            if await is_to_begin(self._context, self._stopping, stop, self._consuming.wait):
                await self._consume(asyncio.get_running_loop(), stop)
        if self._failure is not None:
            raise self._failure

    @property
    def _running(self) -> int:
        return sum(worker.delivery is not None for worker in self._workers)

    def _get_settings(self) -> PumpSettings:
        return self._consuming.settings(self._context.settings.lock)

    async def _consume(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event | None) -> None:
        self._settings = self._get_settings()
        self._ended = loop.create_future()
        stopper = asyncio.ensure_future(self._stop_with(stop)) if stop is not None else None
        self._workers += [_Worker(self) for _ in range(self._settings.concurrency)]
        cut = None
        try:
            cut = await outlast(self._ended, lambda: self.drain(grace=0.0))
        finally:
            if stopper is not None:
                stopper.cancel()
            cut = await outlast(asyncio.ensure_future(self._close())) or cut
        if cut is not None:
            raise cut

    def pause(self) -> None:
        """Take no further message and no further session, until :meth:`resume`; handlers that run go on."""
        self._may_go_on.clear()

    def resume(self) -> None:
        """Go on."""
        self._may_go_on.set()

    def drain(self, grace: float | None = None) -> None:
        """Take no further message, let handlers finish for *grace* seconds, then cancel them; and end :meth:`run`.

        What they leave is given back uncounted, as their sessions are. Called before :meth:`run` has begun, it lets
        that end at once.
        """
        is_first = not self._stopping.is_set()
        self._stopping.set()
        if self._ended is None or self._ended.done():
            return
        for worker in self._workers if is_first else ():
            if worker.delivery is None:
                worker.task.cancel()
        wait = self._consuming.grace if grace is None else grace
        patience = self._settings.timing.grace
        loop = self._ended.get_loop()
        self._timers += [
            loop.call_later(wait, self._cut_short),
            loop.call_later(wait + patience, self._cut_short),  # a thread that runs on is left behind
            loop.call_later(wait + 2 * patience, self._give_up),
        ]

    @property
    def timing(self) -> Timing:
        """The times of the locks; see :attr:`Consumer.timing`."""
        return self._settings.timing

    def remaining(self, message: Message) -> float:
        """Return for how many seconds the lock of the session of *message* may be believed; 0.0 if it is over."""
        for worker in self._workers:
            session = worker.session  # by a name of ours: we may be in another thread
            if session is not None and worker.delivery == message.delivery:
                return session.remaining()
        return 0.0

    def _cut_short(self) -> None:
        for worker in self._workers:
            if worker.delivery is not None:
                worker.task.cancel()

    def _give_up(self) -> None:
        """End with handlers that won't stop: their sessions' locks run out by themselves."""
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_result(None)

    def _worker_ended(self, task: asyncio.Task[None]) -> None:
        assert self._ended is not None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        elif task.cancelled() and not self._is_ending:  # by somebody else: its place is taken
            self._workers = [worker for worker in self._workers if worker.task is not task]
            self._workers.append(_Worker(self))
        if (self._failure is not None or all(one.task.done() for one in self._workers)) and not self._ended.done():
            self._ended.set_result(None)

    async def _close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for _ in range(2):  # the second time, threads are left behind
            if left := [worker.task for worker in self._workers if not worker.task.done()]:
                for task in left:
                    task.cancel()
                await asyncio.wait(left, timeout=self._settings.timing.grace / 2)
        for worker in self._workers:
            worker.leave()
        self._handlers.close()

    async def _stop_with(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.drain()

    @property
    def _is_ending(self) -> bool:
        """Whether workers are cancelled because all of this ends, or the loop does."""
        if self._stopping.is_set() or self._ended is None or self._ended.done():
            return True
        return self._runner is not None and self._runner.cancelling() > 0

    async def _complain(self, message: Message, error: BaseException) -> None:
        if (interrupt := await complain(self._consuming.on_error, message, error)) is not None:
            self._end_with(interrupt)

    def _end_with(self, error: BaseException) -> None:
        """End gracefully, and raise *error* then."""
        self._failure = self._failure or error
        self.drain(grace=0.0)

    async def _was_handled(self, session: Session, delivery: Delivery) -> bool:
        return (await self._ask(session, "look into the inbox", lambda: self._context.handled([delivery.id])))[0]

    async def _ask(self, session: Session, what: str, question: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to *question*, asked again as long as there is none and *session* is ours."""
        while True:
            try:
                return await question()
            except (Exception, asyncio.CancelledError) as error:
                why = self._context.why_unanswered(error)
                if why is None or session.lost.is_set():
                    raise
                tell_unanswered(self._context, what, why)
                await asyncio.sleep(later(self._settings.timing.retry_every / 4, self._context.rng))


class _Worker:
    """One of ``concurrency`` tasks: holds a session, handles what waits there, looks for the next one.

    It has one timer, for the moment at which its handler is cancelled or is told to be too late. That is set anew only
    when it rings: of most handlers, nobody hears it.
    """

    def __init__(self, consumer: SessionConsumer) -> None:
        self._consumer = consumer
        self._context = consumer._context
        self._loop = asyncio.get_running_loop()
        self.session: Session | None = None
        self.delivery: Delivery | None = None  # in hand
        self._runs = False  # its handler does
        self._limit = math.inf  # when the handler has run for max_hold
        self._is_late = False  # the handler was told to stop; when the timer rings, it is left
        self._has_expired = False  # it was told so for max_hold
        self._is_left = False
        self._is_settled = False  # by the handler
        self._is_told = False  # that the lock is over
        self._timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] = self._loop.create_task(self._work())
        self.task.add_done_callback(self._ended)

    async def _work(self) -> None:
        consumer, context = self._consumer, self._context
        CALLING.set(consumer)
        try:
            while not consumer._stopping.is_set():
                await consumer._may_go_on.wait()
                self.session = None
                asked_at = context.clock.now()
                wait = max(0.0, consumer._retry_at - asked_at) if consumer._consuming.until_empty else None
                try:
                    async with Session(context, None, wait, self) as session:
                        self.session = session
                        context.has_answered = True
                        await self._serve(session)
                except TimeoutError:
                    if asked_at >= consumer._retry_at:
                        return  # nothing is waiting, and until_empty was asked for
                except LockLost:
                    continue  # the session is with another by now, or free
                except Exception as error:
                    if (why := context.why_unanswered(error)) is None:
                        raise
                    tell_unanswered(context, "accept" if self.session is None else "receive", why)
                    await asyncio.sleep(later(min(1.0, POLL), context.rng))
        except asyncio.CancelledError:
            if not consumer._stopping.is_set():
                raise

    async def _serve(self, session: Session) -> None:
        """Handle what is waiting in *session*, in order."""
        consumer = self._consumer
        while not consumer._stopping.is_set() and consumer._may_go_on.is_set():
            messages = await session.receive()
            if not messages:
                return
            self.delivery = messages[0].delivery
            self._is_settled = self._is_left = self._is_told = False
            try:
                await self._handle(session, messages[0])
            finally:
                self.delivery = None

    async def _handle(self, session: Session, message: Message) -> None:
        consumer, delivery = self._consumer, message.delivery
        if consumer._consuming.inbox_window and await consumer._was_handled(session, delivery):
            error = None
        else:
            error = await self._call(session, message)
        verdict = consumer._success
        if error is not None:
            await consumer._complain(message, error)
            if consumer._consuming.is_to_raise(error):
                consumer._end_with(consumer._consuming.raised_for(error))
            if isinstance(error, NeverBegins):
                consumer._end_with(unusable(error))
            if self._has_expired and self._context.clock.now() >= session.sure_until:
                return  # it was left, and is nobody's to judge
            is_tried = not isinstance(error, NotBegun)
            verdict = (
                judge_failure(self._context, consumer._consuming.policy, delivery, error) if is_tried else GIVE_BACK
            )
        await self._settle(session, message, verdict, is_told=isinstance(error, LockLost))

    async def _settle(self, session: Session, message: Message, verdict: Verdict, *, is_told: bool) -> None:
        """Pass *verdict*. Unless that *is told* already, the error hook hears if it doesn't stand."""
        consumer, context, delivery = self._consumer, self._context, message.delivery
        lost: LockLost | None = None
        try:
            await consumer._ask(session, "settle", lambda: context.settle(delivery, verdict, self))
        except LockLost as error:  # if the session is lost, the next receive says so
            lost = error
        except asyncio.CancelledError:
            if session.is_interrupted and not self._is_settled:
                self._tell_discarded("unanswered")
            if session.is_interrupted and not self._is_settled and not is_told:
                why = f"{session.name!r} was lost before there was an answer to its verdict, which may stand or not"
                await consumer._complain(message, LockLost(why))
            raise
        if lost is not None and not self._is_settled:
            self._tell_discarded("denied")
        if lost is not None and not self._is_settled and not is_told:
            await consumer._complain(message, lost)

    def _tell_discarded(self, why: Why) -> None:
        """Let the observers know that a result is thrown away, if they have not heard that the lock is over."""
        if not self._is_told and self.delivery is not None:
            self._is_told = True
            self._context.emit(event_of(ResultDiscarded, self._context, self.delivery, why))

    async def _call(self, session: Session, message: Message) -> BaseException | None:
        """Call the handler; return what it raised, or returned in its place."""
        consumer = self._consumer
        before = self.task.cancelling()
        self._begin()
        try:
            outcome = await consumer._handlers.serve(message)
        except asyncio.CancelledError as error:
            if consumer._handlers.is_left_behind(message.delivery):
                self.leave()
            if self._end(before):
                return self._overdue(message)
            if session.is_interrupted:
                await consumer._complain(message, LockLost(f"{session.name!r} was lost while it was handled"))
            elif isinstance(error, RanOn) and consumer._stopping.is_set() and not session.lost.is_set():
                # By drain(), and the session was kept all the while.
                return error.outcome if isinstance(error.outcome, BaseException) else None
            if not self._is_called_off(session):  # by itself
                await take_back(self.task)
                return error
            raise  # by the session, which is lost, or by drain(): given back with the session
        except BaseException as error:
            if is_being_closed(self.task):
                raise
            if is_interrupt(error):
                consumer._end_with(error)
            await self._end_by_itself(session, before)
            return self._overdue(message) if self._has_expired else error
        await self._end_by_itself(session, before)
        # Nothing is asked of it but its type: it may claim to be of any class.
        return outcome if issubclass(type(outcome), BaseException) else None  # type: ignore[return-value]

    async def _end_by_itself(self, session: Session, before: int) -> None:
        self._end(before)
        if self.task.cancelling() > before and not self._is_called_off(session):
            await take_back(self.task)

    def _is_called_off(self, session: Session) -> bool:
        """Tell whether others than the handler may have cancelled it."""
        return session.is_interrupted or self._consumer._is_ending or self._is_late

    def _end(self, before: int) -> bool:
        """Note that the handler has ended; tell, as asyncio.timeout does, if it was cancelled for max_hold alone."""
        self._runs = False
        return self._has_expired and self.task.uncancel() <= before

    def _overdue(self, message: Message) -> LockLost:
        return LockLost(f"the handler of message {message.id!r} ran for longer than max_hold")

    def leave(self) -> None:
        """Leave the session to itself, and not to another, as long as its lock is not over: a handler runs on in it."""
        if self.delivery is None or self.session is None:
            return
        self.session.leave()
        if not self._is_left:
            self._is_left = True
            self._context.emit(event_of(HandlerOverran, self._context, self.delivery))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._consumer._worker_ended(task)

    # --- the timer ---

    def _begin(self) -> None:
        self._runs, self._is_late, self._has_expired = True, False, False
        most = self._consumer._settings.max_hold
        if most < math.inf:
            self._limit = self._loop.time() + most
            if self._timer is None or self._timer.when() > self._limit:
                self._set_timer(self._limit)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if not self._runs:
            return
        if self._is_late:
            self.leave()
        elif self._loop.time() >= self._limit:
            self._has_expired = True
            self.task.cancel()
            self._tell_ended("max_hold")
            self._be_late_at(self._consumer.timing.grace)
        elif self._limit < math.inf:
            self._set_timer(self._limit)

    def _be_late_at(self, delay: float) -> None:
        self._is_late = True
        self._set_timer(self._loop.time() + delay)

    # --- what is heard of the session and of its messages ---

    def lost(self, why: Why, until: float) -> None:
        """Note that the session is lost, and we are being cancelled."""
        if not self._runs or self.delivery is None:
            return
        left = (
            max(0.0, until - self._context.clock.now())
            if why in ("unanswered", "stalled")
            else self._consumer.timing.grace
        )
        self._be_late_at(left)
        self._tell_ended(why)

    def _tell_ended(self, why: Why) -> None:
        if not self._is_told and self.delivery is not None:
            self._is_told = True
            self._context.emit(event_of(LockEnded, self._context, self.delivery, why))

    def asks(self, delivery: Delivery) -> None:
        """Note that the handler passes a verdict by itself."""

    def heard(self, delivery: Delivery) -> None:
        """Note that it is answered, or given up."""

    def settled(self, delivery: Delivery) -> bool:
        """Note that the handler has settled *delivery*, or heard that it is lost; tell whether that is news."""
        if delivery != self.delivery:
            return False
        is_news = not self._is_settled and not self._is_told
        self._is_settled = True
        return is_news

    def abandoned(self, until: float) -> None:
        """Note that a message which was abandoned, as far as is known, comes back at *until*."""
        self._consumer._retry_at = max(self._consumer._retry_at, until)
