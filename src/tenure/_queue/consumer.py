"""The message pump: claims, hands messages to a handler, keeps their locks, settles them.

Messages travel on the caller's loop, where the :class:`~tenure._queue.pump.Pump` decides, or for sessions the
:class:`~tenure._queue.session_pump.SessionPump`. Locks are renewed on the renewal thread's loop, by
:class:`~tenure._queue.locks.Locks`, so that a handler that blocks the caller's loop loses nothing.

No task is made for a message: ``concurrency`` workers take from the buffer and call the handler themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Literal

from tenure._lease import NoAnswer
from tenure._queue.beginning import is_to_begin
from tenure._queue.broker import NoSession
from tenure._queue.cancelling import is_being_closed, outlast, take_back
from tenure._queue.context import QueueContext, loss_message
from tenure._queue.effects import (
    Accept,
    Accepted,
    Answered,
    CancelAll,
    CancelHandler,
    Claimed,
    Drain,
    Emit,
    Hint,
    LocksMessage,
    NothingLeft,
    Pause,
    PumpEffect,
    PumpInput,
    Receive,
    ReceiveIn,
    Release,
    Report,
    Resume,
    Serve,
    Settle,
    Tick,
)
from tenure._queue.handlers import CALLING, Handler, Handlers
from tenure._queue.hints import MESSAGES, SESSIONS, Subscription
from tenure._queue.hooks import is_interrupt
from tenure._queue.judge import Judge
from tenure._queue.lock_group import NEVER, LockGroup
from tenure._queue.lock_renewer import TIMER_MAX, LockRenewer
from tenure._queue.locks import Locks
from tenure._queue.message import Delivery, SessionLock, Token
from tenure._queue.options import ConsumeSettings
from tenure._queue.outcomes import Becomes, Why
from tenure._queue.pump import Pump, State
from tenure._queue.pump_settings import PumpSettings
from tenure._queue.received import Message
from tenure._queue.reports import event_of, hint_at
from tenure._queue.retry import Reject, Retry
from tenure._queue.session_pump import SessionPump
from tenure._queue.verdicts import GIVE_BACK, Lapsed, Settled, Settlement, Verdict
from tenure._runtime.signals import on_shutdown_signal
from tenure._runtime.tasks import Tasks
from tenure._timing import Timing
from tenure.errors import LockLost
from tenure.events import (
    HandlerOverran,
    ResultDiscarded,
)

_NO_RESULT = (BaseException, Retry, Reject)
"""What a handler may have raised, or returned in its place."""

SLICE = 0.001
"""Seconds for which handlers that never suspend may keep the loop from its other work."""


class Consumer:
    """A handler at work on a queue. Made by ``queue.consumer(handler, …)``, run once."""

    def __init__(
        self,
        context: QueueContext,
        handler: Handler,
        consuming: ConsumeSettings,
    ) -> None:
        self._context = context
        self._consuming = consuming
        self._settings = self._get_settings()  # as far as is known; what others declared is known when we begin
        self._handlers = Handlers(handler, consuming.run_in, consuming.concurrency, self)
        self._judge = Judge(context, consuming, self._handlers, self._end_with, self)
        self._groups: dict[Token, LockGroup] = {}
        self._pump = self._new_pump()
        self._workers: list[_Worker] = []
        self._idle: deque[asyncio.Future[None]] = deque()
        self._tasks = Tasks()
        self._turning = False
        self._events: list[PumpInput] = []  # for the end of this turn of the loop
        self._subscription: Subscription | None = None  # among those who wait for messages
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = NEVER
        self._told = asyncio.Event()  # to drain, maybe before we have begun
        self._is_paused = False
        self._ended: asyncio.Future[None] | None = None
        self._runner: asyncio.Task[Any] | None = None
        self._failure: BaseException | None = None

    # --- for its owner ---

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Consume until :meth:`drain` is called, *stop* is set, or SIGTERM comes; return when all is settled.

        Cancelled, it cancels the handlers, gives back what they leave, uncounted, and only then lets go.

        Raises:
            ConfigError: The broker, or the handler, can never be used as it is.
        """
        self._loop = asyncio.get_running_loop()
        self._runner = asyncio.current_task()
        with on_shutdown_signal(self.drain, self._consuming.sigterm, lambda: hint_at(self._context, self._pump.busy)):
            if await is_to_begin(self._context, self._told, stop, self._consuming.wait):
                await self._consume(stop)
        if self._failure is not None:
            raise self._failure

    async def _consume(self, stop: asyncio.Event | None) -> None:
        context = self._context
        self._settings = self._get_settings()
        self._pump = self._new_pump()
        self._ended = self._loop.create_future()
        locks = Locks(context.name, context.holder, self._settings, context.rng, self._groups, now=context.clock.now())
        renewer = LockRenewer(context, locks, self._hear_locks)
        cut = None
        try:
            cut = await outlast(renewer.begin())
            if cut is None:
                self._begin(stop)
                cut = await outlast(self._ended, lambda: self.drain(grace=0.0))
        finally:
            if not context.renewal_thread.is_forked:  # in a child that ends inside of a handler there is nothing to end
                cut = await self._close(renewer) or cut
        if cut is not None:
            raise cut

    def _begin(self, stop: asyncio.Event | None) -> None:
        # Also where no other process is heard of: what is sent by this one need not wait for the next look.
        context = self._context
        kind = SESSIONS if self._consuming.sessions else MESSAGES
        self._subscription = context.hints.join(context.broker, context.name, kind, self._hint)
        if stop is not None:
            self._spawn(self._stop_with(stop))
        self._feed(Pause() if self._is_paused else Tick())

    def _get_settings(self) -> PumpSettings:
        return self._consuming.settings(self._context.settings.lock, hints=self._context.broker.traits.hints)

    def _new_pump(self) -> Pump:
        context = self._context
        kind = SessionPump if self._consuming.sessions else Pump
        return kind(context.name, context.holder, self._settings, context.rng, self._groups, now=context.clock.now())

    def pause(self) -> None:
        """Claim nothing and give the buffer back, until :meth:`resume`; handlers that run go on."""
        self._is_paused = True
        self._feed(Pause())

    def resume(self) -> None:
        """Claim again."""
        self._is_paused = False
        self._feed(Resume())

    def drain(self, grace: float | None = None) -> None:
        """Claim nothing any more, give the buffer back, let handlers finish for *grace* seconds, and end :meth:`run`.

        Handlers that run longer are cancelled, and what they leave is given back uncounted. A thread can't be stopped:
        the lock of what it does is left to run out. Called before :meth:`run` has begun, it lets that end at once.
        """
        self._told.set()
        if self._has_ended:
            return
        wait = self._consuming.grace if grace is None else grace
        self._feed(Drain(self._context.clock.now() + wait))

    @property
    def timing(self) -> Timing:
        """The times of the locks, as of a lease: its ``grace`` is what a handler has to stop before the lock ends."""
        return self._settings.timing

    def remaining(self, message: Message) -> float:
        """Return for how many seconds the lock of a *message* in hand may be believed, if nothing more is heard.

        0.0 if it is over, and in a forked child. It is renewed all the while; see :meth:`tenure.Term.remaining`, the
        same for a leader.
        """
        if self._context.renewal_thread.is_forked:
            return 0.0
        return max(0.0, self._pump.sure_until(message.delivery) - self._context.clock.now())

    # --- the machine ---

    def _feed(self, *events: PumpInput) -> None:
        """Give *events* to the pump's machine, and do what it says."""
        if self._ended is None or self._ended.done():
            return
        try:
            serves = False
            for event in events:
                for effect in self._pump.handle(event, self._context.clock.now()):
                    if type(effect) is Serve:
                        serves = True
                    else:
                        self._perform(effect)
            if serves:
                self._wake(self._pump.waiting)
        except Exception as error:
            self._fail(error)
            return
        if self._ended.done():  # what was done has fed the machine again
            return
        if self._pump.state in (State.STOPPED, State.LEFT):
            self._ended.set_result(None)
        else:
            self._arm()

    def _hint(self) -> bool:
        """Let the machine look at once; tell whether it asks, for it may have no room."""
        self._feed(Hint())
        return self._subscription is not None and self._subscription.is_asking

    def _turn_soon(self) -> None:
        """Let the machine look at what was taken and done, once this turn of the loop is over."""
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turning = False
        events, self._events = self._events, []
        self._feed(*events or (Tick(),))

    def _feed_soon(self, event: PumpInput) -> None:
        """Give *event* to the machine together with others that come in this turn of the loop."""
        self._events.append(event)
        self._turn_soon()

    def _arm(self) -> None:
        wake_at = self._pump.wake_at
        # An alarm that comes too early does no harm: as times mostly move on, it need not be set anew each time.
        if wake_at >= self._armed_for or wake_at == NEVER:
            return
        if self._timer is not None:
            self._timer.cancel()
        wait = min(max(0.0, wake_at - self._context.clock.now()), TIMER_MAX)
        self._armed_for = wake_at
        self._timer = self._loop.call_later(wait, self._alarm)

    def _alarm(self) -> None:
        self._armed_for = NEVER
        self._timer = None
        self._feed(Tick())

    def _perform(self, effect: PumpEffect) -> None:
        match effect:
            case Settle(ask, settlements):
                self._spawn(self._settle(ask, settlements))
            case Receive(ask, limit):
                if self._subscription is not None:
                    self._subscription.asks()
                self._spawn(self._receive(ask, limit))
            case Report(settlement, answer, lapsed_for):
                self._report(settlement, answer, lapsed_for)
            case CancelHandler(delivery, why):
                for worker in self._workers:
                    if worker.delivery is delivery:
                        worker.cancel(why)
            case CancelAll(why):
                for worker in self._workers:
                    worker.cancel(why)
            case Accept(ask):
                # Of several requests at a time, the first is the one that a hint has called for.
                subscription = self._subscription if self._subscription and not self._subscription.is_asking else None
                if subscription is not None:
                    subscription.asks()
                self._spawn(self._accept(ask, subscription))
            case ReceiveIn(ask, session):
                self._spawn(self._receive_in(ask, session))
            case Release(ask, session):
                self._spawn(self._release(ask, session))
            case NothingLeft():
                self.drain()
            case Emit(event):
                self._context.emit(event)

    async def _receive(self, ask: int, limit: int) -> None:
        context = self._context
        try:
            context.look_after()
            claim = await context.broker.receive(context.name, limit, self._settings.timing.ttl)
        except (Exception, asyncio.CancelledError) as error:
            if self._subscription is not None:
                self._subscription.failed()
            self._go_without(ask, error)
            return
        context.has_answered = True
        if claim.died:
            context.tell_of_dead(claim.died)
        if self._subscription is not None:
            if not claim.deliveries and claim.due_in == 0 and self._pump.state is not State.RUNNING:
                self._subscription.failed()  # the store has not got through yet, and we don't ask again
            else:
                self._subscription.answered(bool(claim.deliveries), claim.due_in)
        self._feed(Claimed(ask, claim.deliveries, claim.due_in))

    async def _accept(self, ask: int, subscription: Subscription | None) -> None:
        context = self._context
        try:
            context.look_after()
            answer = await context.broker.accept(context.name, None, self._settings.timing.ttl)
        except (Exception, asyncio.CancelledError) as error:
            if subscription is not None:
                subscription.failed()
            self._go_without(ask, error)
            return
        context.has_answered = True
        session, due_in = (None, answer.due_in) if isinstance(answer, NoSession) else (answer, None)
        if isinstance(answer, NoSession) and answer.died:
            context.tell_of_dead(answer.died)
        if subscription is not None:
            if due_in == 0 and self._pump.state is not State.RUNNING:
                subscription.failed()  # the store has not got through yet, and we don't ask again
            else:
                subscription.answered(session is not None, due_in)
        self._feed(Accepted(ask, session, due_in))

    async def _receive_in(self, ask: int, session: SessionLock) -> None:
        try:
            claim = await self._context.broker.receive_session(session, 1)
        except (Exception, asyncio.CancelledError) as error:
            self._go_without(ask, error)
            return
        if isinstance(claim, Lapsed):
            self._feed(Answered(ask, [claim]))
            return
        if claim.died:
            self._context.tell_of_dead(claim.died)
        self._feed_soon(Claimed(ask, claim.deliveries, claim.due_in))

    async def _release(self, ask: int, session: SessionLock) -> None:
        try:
            answer = await self._context.broker.release(session)
        except (Exception, asyncio.CancelledError) as error:
            self._go_without(ask, error)
        else:
            self._feed(Answered(ask, [answer]))

    async def _settle(self, ask: int, settlements: Any) -> None:
        try:
            answers = await self._context.broker.settle(settlements)
        except (Exception, asyncio.CancelledError) as error:
            self._go_without(ask, error)
        else:
            self._feed(Answered(ask, answers))

    def _go_without(self, ask: int, error: BaseException) -> None:
        """Take in that the question number *ask* brought no answer, if that is all that *error* says."""
        why = self._context.why_unanswered(error)
        if why is None:
            if isinstance(error, asyncio.CancelledError):  # by us, at the end
                if not self._has_ended:  # by whoever ends the loop: the machine waits for each answer
                    self._feed(Answered(ask, NoAnswer("the request was cancelled")))
                raise error
            self._fail(error)
        else:
            self._feed(Answered(ask, NoAnswer(why)))

    def _fail(self, error: BaseException) -> None:
        """End at once: what was asked can never work, or tenure itself is broken. The locks are left to run out."""
        assert self._ended is not None
        if not self._ended.done():
            self._failure = error
            self._ended.set_result(None)

    def _report(self, settlement: Settlement, answer: Settled | Lapsed | None, why: str | None) -> None:
        delivery, verdict = settlement
        if answer is None:
            if (back_at := self._context.back_at(verdict, None)) is not None:
                self._pump.abandoned(back_at)
            self._context.emit(event_of(ResultDiscarded, self._context, delivery, "unanswered"))
            error = LockLost(
                f"session {delivery.session!r} of {delivery.queue!r} was lost before there was an answer to its "
                f"verdict on message {delivery.id!r}, which may stand or not"
            )
            self._spawn(self._judge.complain(Message(delivery, self._context), error))
            return
        if (back_at := self._context.back_at(verdict, answer)) is not None:
            self._pump.abandoned(back_at)
        if isinstance(answer, Lapsed):
            if why is not None and verdict is not GIVE_BACK:
                self._context.emit(event_of(ResultDiscarded, self._context, delivery, why))
            error = LockLost(loss_message(delivery, "its handler had ended, and that was too late"))
            self._spawn(self._judge.complain(Message(delivery, self._context), error))
        else:
            self._context.tell_if_dead(delivery, verdict, answer)

    # --- handlers ---

    def _wake(self, count: int) -> None:
        """Let so many workers look for messages; make new ones while there are fewer than may be."""
        while count > 0 and self._idle:
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)
                count -= 1
        while count > 0 and len(self._workers) < self._settings.concurrency:
            self._workers.append(_Worker(self))
            count -= 1

    async def _rest(self) -> None:
        """Wait until there may be messages to take."""
        idle = self._loop.create_future()
        self._idle.append(idle)
        await idle

    def _end_with(self, error: BaseException) -> None:
        """End gracefully, and raise *error* then."""
        self._failure = self._failure or error
        self.drain(grace=0.0)

    @property
    def _is_ending(self) -> bool:
        """Whether workers are cancelled because all of this ends, or the loop does."""
        return self._has_ended or (self._runner is not None and self._runner.cancelling() > 0)

    @property
    def _has_ended(self) -> bool:
        return self._ended is None or self._ended.done()

    def _hear_locks(self, message: LocksMessage) -> None:
        """Take in what the renewal thread has to say. Called on our loop."""
        self._feed(message)

    # --- beginning and end ---

    def _spawn(self, work: Any) -> None:
        self._tasks.keep(self._loop.create_task(work))

    async def _stop_with(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.drain()

    async def _close(self, renewer: LockRenewer) -> asyncio.CancelledError | None:
        """End everything; return the first cancellation that came meanwhile."""
        try:
            cut = await outlast(asyncio.ensure_future(self._end_workers()))
        finally:  # whatever happens: nobody else would end it, and it would renew for ever
            late = await outlast(renewer.end())
        return cut or late

    async def _end_workers(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._subscription is not None:
            self._subscription.leave()
        left = {*self._tasks, *(worker.task for worker in self._workers)}
        for _ in range(2):  # the second time, threads are left behind
            for task in left:
                task.cancel()
            if left:  # not for ever: a handler may catch what is to cancel it, and go on
                _, left = await asyncio.wait(left, timeout=self._settings.timing.grace / 2)
        for worker in self._workers:
            if worker.task in left and worker.delivery is not None:
                self._context.emit(event_of(HandlerOverran, self._context, worker.delivery))
        for delivery, verdict in self._pump.unanswered:
            if verdict is not GIVE_BACK:
                self._context.emit(event_of(ResultDiscarded, self._context, delivery, "unanswered"))
        self._handlers.close()


class _Worker:
    """One of ``concurrency`` tasks: takes a message, calls the handler, says what became of it, takes the next."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self.delivery: Delivery | None = None  # whose handler runs
        self._why: Why | None = None
        self.task: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._work())
        self.task.add_done_callback(self._ended)

    async def _work(self) -> None:
        consumer = self._consumer
        context, pump, serve = consumer._context, consumer._pump, consumer._handlers.serve
        now, take, done, turn_soon = context.clock.now, pump.take, pump.done, consumer._turn_soon
        judge = consumer._judge
        tracker = _Tracker(consumer)
        success, inbox = judge.success, consumer._consuming.inbox_window
        task = asyncio.current_task()  # self.task is not there yet if tasks are eager
        assert task is not None
        cancelling = task.cancelling
        CALLING.set(consumer)
        yielded_at = now()
        while True:
            moment = now()
            delivery = take(moment)
            if delivery is None:
                turn_soon()
                await consumer._rest()
                yielded_at = now()
                continue
            if not consumer._turning:
                turn_soon()
            message = Message(delivery, context, tracker)
            self.delivery = delivery
            try:
                outcome: object = None
                if not inbox or not await judge.was_handled(delivery, consumer.timing):
                    outcome = await serve(message)
            except BaseException as error:
                if is_being_closed(self.task):
                    raise
                if is_interrupt(error):
                    consumer._end_with(error)
                outcome = error
            self.delivery = None
            if cancelling() and self._why is None and not consumer._is_ending:
                await take_back(self.task)
            verdict: Verdict | Literal[Becomes.FORGET] | None
            # Of what a handler returns, nothing is asked but its type: it may claim to be of any class.
            if self._why is None and (outcome is None or not issubclass(type(outcome), _NO_RESULT)):
                verdict = success
            else:
                try:
                    verdict = await judge.judge(message, outcome, self.called_off(), self.is_cancelled, pump.sure_until)
                except asyncio.CancelledError:
                    if not consumer._is_ending:  # by somebody else: without a verdict, it would be renewed for ever
                        done(delivery, GIVE_BACK)
                        turn_soon()
                    raise
            if verdict is Becomes.FORGET:
                pump.forget(delivery)
            else:
                done(delivery, verdict)
            if not consumer._turning:
                turn_soon()
            if cancelling():
                raise asyncio.CancelledError
            if moment - yielded_at > SLICE:
                await asyncio.sleep(0)
                yielded_at = now()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._consumer._fail(error)
        elif not self._consumer._is_ending:  # somebody has cancelled it: another may be made
            self._consumer._workers.remove(self)
            self._consumer._wake(1)

    def cancel(self, why: Why) -> None:
        """Cancel the handler that runs, if one does."""
        if self.delivery is not None and (self._why is None or why == "leave"):
            self._why = why
            self.task.cancel()

    def called_off(self) -> Why | None:
        """Return why the handler was cancelled by us, and take the cancellation back: the worker goes on."""
        why, self._why = self._why, None
        while why is not None and self.task.cancelling() > 0:
            self.task.uncancel()
        return why

    @property
    def is_cancelled(self) -> bool:
        """Whether the worker itself is being cancelled."""
        return self.task.cancelling() > 0


class _Tracker:
    """Lets the pump know of the verdicts that handlers pass by themselves, and look at what follows."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self.asks = consumer._pump.asks
        self.abandoned = consumer._pump.abandoned

    def heard(self, delivery: Delivery) -> None:
        self._consumer._pump.heard(delivery)
        if not self._consumer._has_ended:
            self._consumer._turn_soon()

    def settled(self, delivery: Delivery) -> bool:
        return self._consumer._pump.settled(delivery)
