"""The message pump: claims, hands messages to a handler, keeps their locks, settles them.

Messages travel on the caller's loop, where the :class:`~tenure._queue.pump.Pump` decides. Locks are renewed on the
the renewal thread's, by :class:`~tenure._queue.locks.Locks`, so that a handler that blocks the caller's loop loses
nothing.

No task is made for a message: ``concurrency`` workers take from the buffer and call the handler themselves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from tenure._jitter import later
from tenure._lease import NoAnswer
from tenure._queue.context import QueueContext, loss_message
from tenure._queue.effects import (
    Answered,
    CancelAll,
    CancelHandler,
    Claimed,
    Drain,
    Emit,
    Ended,
    Hint,
    LocksInput,
    LocksMessage,
    Pause,
    PumpEffect,
    PumpInput,
    Receive,
    Renew,
    Report,
    Resume,
    Returned,
    Serve,
    Settle,
    Tick,
)
from tenure._queue.handlers import CALLING, Handler, Handlers, RanOn
from tenure._queue.hints import MESSAGES, Subscription
from tenure._queue.hooks import complain, is_interrupt
from tenure._queue.lock_group import NEVER, LockGroup
from tenure._queue.locks import Locks
from tenure._queue.message import (
    COMPLETE,
    GIVE_BACK,
    Abandon,
    Complete,
    Delivery,
    Lapsed,
    Settled,
    Settlement,
    Token,
    Verdict,
    name_of,
    text_of,
    traceback_most,
)
from tenure._queue.options import ConsumeSettings
from tenure._queue.outcomes import RULES, Becomes, Ending, Reason, Reports, Rule, Why
from tenure._queue.processes import NeverBegins, NotBegun
from tenure._queue.pump import Pump, State
from tenure._queue.pump_settings import PumpSettings
from tenure._queue.received import Message
from tenure._queue.retry import Reject, Retry, RetryPolicy, verdict_on_failure
from tenure._queue.tracebacks import place_of
from tenure._runtime.signals import on_shutdown_signal
from tenure._telemetry.log import logger
from tenure._timing import Timing
from tenure.errors import ConfigError, DecodeError, LockLost, TenureError, Unavailable
from tenure.events import (
    BrokerAnswered,
    BrokerAwaited,
    BrokerUnanswered,
    Event,
    HandlerOverran,
    MessageFailed,
    ResultDiscarded,
)

_NO_RESULT = (BaseException, Retry, Reject)
"""What a handler may have raised, or returned in its place."""

SLICE = 0.001
"""Seconds for which handlers that never suspend may keep the loop from its other work."""

PAUSE_MIN, PAUSE_MAX = 0.1, 2.0
"""Seconds between the questions of a consumer whose store is not there yet: short at first, then longer."""

TIMER_MAX = 1.0
"""Seconds a timer is set for at most: timers stand still while the machine sleeps, our clock doesn't."""

WHY = {
    "denied": "the broker says that it is over",
    "unanswered": "renewals got no answer in time",
    "stalled": "this process did not run in time to renew it; work that holds the GIL belongs into run_in='process'",
    "max_hold": "the handler ran for longer than max_hold",
}


class InboxUnanswered(Exception):
    """Nobody knows whether a message was handled before, so it goes to no handler now."""


def ending_of(outcome: object) -> Ending:
    """Tell how a handler has ended, from what it returned or raised."""
    if not issubclass(
        type(outcome), BaseException
    ):  # of a result, only its type is asked: it may claim to be any class
        return Ending.RETURNED
    match outcome:
        case asyncio.CancelledError():
            return Ending.CANCELLED
        case InboxUnanswered():
            return Ending.INBOX_UNANSWERED
        case NeverBegins():
            return Ending.NEVER_BEGINS
        case NotBegun():
            return Ending.NOT_BEGUN
    return Ending.RAISED


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
        self._verdict: Verdict | None = None
        if consuming.auto_complete:
            self._verdict = Complete(remember=consuming.inbox_window) if consuming.inbox_window else COMPLETE
        self._holds: dict[Token, LockGroup] = {}
        self._pump = self._new_pump()
        self._workers: list[_Worker] = []
        self._idle: deque[asyncio.Future[None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turning = False
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
        locks = Locks(context.name, context.holder, self._settings, context.rng, self._holds, now=context.clock.now())
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
        self._subscription = context.hints.join(context.broker, context.name, MESSAGES, self._hint)
        if stop is not None:
            self._spawn(self._stop_with(stop))
        self._feed(Pause() if self._is_paused else Tick())

    def _get_settings(self) -> PumpSettings:
        return self._consuming.settings(self._context.settings.lock, hints=self._context.broker.traits.hints)

    def _new_pump(self) -> Pump:
        context = self._context
        return Pump(context.name, context.holder, self._settings, context.rng, self._holds, now=context.clock.now())

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
        patience = self._settings.timing.grace
        self._loop.call_later(wait + patience, self._leave_behind)
        self._loop.call_later(wait + 2 * patience, self._give_up)
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

    def _feed(self, event: PumpInput) -> None:
        """Give *event* to the pump's machine, and do what it says."""
        if self._ended is None or self._ended.done():
            return
        try:
            for effect in self._pump.handle(event, self._context.clock.now()):
                self._perform(effect)
        except Exception as error:
            self._fail(error)
            return
        if self._pump.state is State.STOPPED:
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
        self._look_again()  # a handler that settled its message by itself leaves us no answer to wait for

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
            case Serve():
                self._wake(self._pump.waiting)
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
            case CancelAll():
                for worker in self._workers:
                    worker.cancel("drain")
            case Emit(event):
                self._context.emit(event)

    async def _receive(self, ask: int, limit: int) -> None:
        context = self._context
        asked_at = context.clock.now()
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
        is_empty = not claim.deliveries and claim.due_in != 0 and asked_at >= self._pump.retry_at
        if self._consuming.until_empty and is_empty and not self._pump.outstanding:
            self.drain()

    async def _settle(self, ask: int, settlements: Any) -> None:
        try:
            answers = await self._context.broker.settle(settlements)
        except (Exception, asyncio.CancelledError) as error:
            self._go_without(ask, error)
        else:
            self._feed(Answered(ask, answers))
            if self._consuming.until_empty and not self._pump.outstanding:
                self._feed(Hint())  # look at once whether more has come

    def _go_without(self, ask: int, error: BaseException) -> None:
        """Take in that the question number *ask* brought no answer, if that is all that *error* says."""
        why = self._context.why_unanswered(error)
        if why is None:
            if isinstance(error, asyncio.CancelledError):  # by us, at the end
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

    def _report(self, settlement: Settlement, answer: Settled | Lapsed, why: str | None) -> None:
        delivery, verdict = settlement
        if (back_at := self._context.back_at(verdict, answer)) is not None:
            self._pump.abandoned(back_at)
        if isinstance(answer, Lapsed):
            if why is not None and verdict is not GIVE_BACK:
                self._context.emit(event_of(ResultDiscarded, self._context, delivery, why))
            error = LockLost(loss_message(delivery, "its handler had ended, and that was too late"))
            self._spawn(self._complain(Message(delivery, self._context), error))
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

    async def _judge(self, worker: _Worker, delivery: Delivery, message: Message, outcome: object) -> Verdict | None:
        """Return the verdict on a message whose handler did not simply return, as :data:`RULES` say; report it."""
        why = worker.called_off()
        if isinstance(outcome, RanOn) and why in ("drain", "leave"):
            outcome = outcome.outcome  # its lock was kept all the while, so the verdict on it is as good as any
        ending = ending_of(outcome)

        def rule() -> Rule:
            over = self._pump.sure_until(delivery) <= self._context.clock.now()
            left_behind = self._handlers.is_left_behind(delivery)
            reason = Reason.of(why, closing=worker.is_cancelled, left_behind=left_behind, over=over)
            return RULES[reason, ending]

        reports = rule().reports
        if reports is Reports.OVERRUN:
            self._context.emit(event_of(HandlerOverran, self._context, delivery))
        elif reports is Reports.LOCK_LOST:
            assert why is not None
            outcome = LockLost(loss_message(delivery, f"its handler was cancelled, for {WHY[why]}"))
        if reports in (Reports.ERROR, Reports.LOCK_LOST):
            assert isinstance(outcome, BaseException)
            await self._complain(message, outcome)
            if self._consuming.is_to_raise(outcome):
                self._end_with(self._consuming.raised_for(outcome))
        becomes, _, ends = rule()  # once more: the error hook may have taken until the lock was over
        if ends and isinstance(outcome, NeverBegins):
            self._end_with(unusable(outcome))
        match becomes:
            case Becomes.SUCCESS:
                return self._verdict
            case Becomes.GIVE_BACK:
                return GIVE_BACK
            case Becomes.FORGET:
                self._pump.settled(delivery)
                return None
        assert isinstance(outcome, BaseException)
        return judge_failure(self._context, self._consuming.policy, delivery, outcome)

    async def _complain(self, message: Message, error: BaseException) -> None:
        CALLING.set(self)
        if (interrupt := await complain(self._consuming.on_error, message, error)) is not None:
            self._end_with(interrupt)

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

    async def _was_handled(self, delivery: Delivery) -> bool:
        """Tell whether the inbox knows the message.

        Raises:
            InboxUnanswered: It could not be asked; a while ago, so that it isn't asked again and again at once.
        """
        try:
            return (await self._context.handled([delivery.id]))[0]
        except Exception as error:
            if (why := self._context.why_unanswered(error)) is None:
                raise
            tell_unanswered(self._context, "look into the inbox", why)
            await asyncio.sleep(later(self._settings.timing.retry_every, self._context.rng))
            raise InboxUnanswered from error

    def _hear_locks(self, message: LocksMessage) -> None:
        """Take in what the renewal thread has to say. Called on our loop."""
        self._feed(message)
        if isinstance(message, Returned) and self._consuming.until_empty and not self._pump.outstanding:
            self._feed(Hint())  # look at once whether more has come

    def _look_again(self) -> None:
        """Let the machine look at what is left; if that is nothing, whether more has come."""
        self._feed(Hint() if self._consuming.until_empty and not self._pump.outstanding else Tick())

    def _leave_behind(self) -> None:
        for worker in self._workers:
            worker.cancel("leave")

    def _give_up(self) -> None:
        """End with verdicts unanswered, or handlers that won't stop: their locks run out by themselves."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    # --- beginning and end ---

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        tracker = _Tracker(consumer)
        success, inbox = consumer._verdict, consumer._consuming.inbox_window
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
                if not inbox or not await consumer._was_handled(delivery):
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
            # Of what a handler returns, nothing is asked but its type: it may claim to be of any class.
            if self._why is None and (outcome is None or not issubclass(type(outcome), _NO_RESULT)):
                verdict = success
            else:
                try:
                    verdict = await consumer._judge(self, delivery, message, outcome)
                except asyncio.CancelledError:
                    if not consumer._is_ending:  # by somebody else: without a verdict, it would be renewed for ever
                        done(delivery, GIVE_BACK)
                        turn_soon()
                    raise
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


class LockRenewer:
    """Does what :class:`Locks` says, on the renewal loop.

    Args:
        context: Where the broker is reached.
        locks: The machine.
        hear: Called with each message of the locks, on the loop that is running now.
    """

    def __init__(self, context: QueueContext, locks: Locks, hear: Callable[[LocksMessage], None]) -> None:
        self._context = context
        self._locks = locks
        self._hear = hear
        self._home = asyncio.get_running_loop()  # where the handlers run
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    def begin(self) -> asyncio.Future[None]:
        """Start keeping; the future says when. Whoever awaits it takes care not to call that off: see `outlast`."""
        return self._submit(self._begin)

    def end(self) -> asyncio.Future[None]:
        """Keep no longer, from now on whether the future is awaited or not; what is being given back may arrive."""
        return self._submit(self._end)

    def _submit(self, step: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Future[None]:
        done = asyncio.wrap_future(self._context.renewal_thread.submit(step))
        done.add_done_callback(lambda done: done.cancelled() or done.exception())  # so that nobody complains
        return done

    async def _begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._feed(Tick())

    async def _end(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=1.0)
            for task in late:
                task.cancel()

    def _feed(self, event: LocksInput) -> None:
        if self._home.is_closed():  # and its handlers with it, whoever was to end us
            self._ended = True
        messages: list[LocksMessage | Emit] = []
        for effect in self._locks.handle(event, self._context.clock.now()):
            match effect:
                case Renew(ask, held) if not self._ended:
                    self._spawn(self._ask(ask, self._context.broker.renew(held, self._context.settings.lock)))
                case Settle(ask, settlements):
                    self._spawn(self._ask(ask, self._context.broker.settle(settlements)))
                case Ended() | Returned() | Emit():
                    messages.append(effect)
        if messages:
            with suppress(RuntimeError):  # that loop is closed, and its handlers with it
                self._home.call_soon_threadsafe(self._deliver, messages)
        if not self._ended:
            if self._timer is not None:
                self._timer.cancel()
            wait = min(max(0.0, self._locks.wake_at - self._context.clock.now()), TIMER_MAX)
            self._timer = self._loop.call_later(wait, self._feed, Tick())

    async def _ask(self, ask: int, question: Awaitable[Any]) -> None:
        try:
            answers = await question
        except (Exception, asyncio.CancelledError) as error:  # also one that can never work: the locks end in time
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # by us, at the end
            answers = NoAnswer(str(error) if isinstance(error, TenureError) else f"{name_of(error)}: {text_of(error)}")
        self._feed(Answered(ask, answers))

    def _deliver(self, messages: Sequence[LocksMessage | Emit]) -> None:
        """Hand over what one step of the locks has brought. Called where the handlers run."""
        for message in messages:
            if isinstance(message, Emit):
                self._context.emit(message.event)
            else:
                self._hear(message)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def is_being_closed(task: asyncio.Task[Any]) -> bool:
    """Tell whether *task* is being thrown away, its loop ended, in place of running."""
    try:
        return asyncio.current_task() is not task
    except RuntimeError:
        return True


async def take_back(task: asyncio.Task[Any]) -> None:
    """Undo cancellations of *task*, the current one, that its handler has called for by itself."""
    while task.cancelling() > 0:
        task.uncancel()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)  # one may be under way yet


async def outlast(
    work: asyncio.Future[Any], when_cut: Callable[[], object] | None = None
) -> asyncio.CancelledError | None:
    """Wait for the end of *work*, however often we are cancelled meanwhile.

    Returns:
        The first cancellation, upon which *when_cut* was called at once. The caller raises it when all is tidy.
    """
    cut = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            if cut is None:
                cut = error
                if when_cut is not None:
                    when_cut()
    if work.cancelled():  # by who ends the loop, and every task on it
        return cut or asyncio.CancelledError()
    work.result()
    return cut


async def is_to_begin(
    context: QueueContext, told: asyncio.Event, stop: asyncio.Event | None, wait: float | None
) -> bool:
    """Make *desk* ready for a consumer; False if that one is *told* to end before, whatever the store does.

    Raises:
        Unavailable: There was no answer within *wait* seconds.
        ConfigError: The store can never be used as it is.
    """
    events = [told, stop] if stop is not None else [told]
    ready = asyncio.ensure_future(_readied(context, wait))
    tasks = [ready, *(asyncio.ensure_future(event.wait()) for event in events)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if any(event.is_set() for event in events):
        return False
    ready.result()
    return True


async def _readied(context: QueueContext, wait: float | None) -> None:
    """Make *desk* ready, asking as long as there is no answer, for *wait* seconds at most; for any time if None."""
    began = context.clock.now()
    why, is_told = "the store did not answer", False
    pause, left = PAUSE_MIN, wait
    while True:
        # With no time to wait, the patience of the store itself counts.
        limit = asyncio.timeout(left if left and left < NEVER else None)
        try:
            async with limit:
                was_ready = context.expected is None
                await context.ready()
                if was_ready and wait is not None:  # then it has asked nothing
                    await context.broker.settings(context.name)
            break
        except (Exception, asyncio.CancelledError) as error:
            if not (limit.expired() and isinstance(error, TimeoutError)):
                if (found := context.why_unanswered(error)) is None:
                    raise
                why = found
            waited = context.clock.now() - began
            if wait is not None and waited >= wait:
                if not wait:
                    raise
                raise Unavailable(f"{why} (there was no answer within {wait:g} s)") from error
            if not is_told:
                is_told = True
                context.emit(BrokerAwaited(context.clock.now(), context.name, context.holder, why))
        rest = pause if wait is None else min(pause, max(PAUSE_MIN, (wait - waited) / 2))
        await asyncio.sleep(later(rest, context.rng))
        if wait:
            left = max(1e-9, wait - (context.clock.now() - began))
        pause = min(1.5 * pause, PAUSE_MAX)
    if is_told:
        now = context.clock.now()
        context.emit(BrokerAnswered(now, context.name, context.holder, now - began))


def hint_at(context: QueueContext, running: int) -> None:
    """Say in the log, when an interrupt has ended a consumer, what it waits for, and how to hurry it."""
    count = f"{running} message{'' if running == 1 else 's'}"
    logger.warning("%s: interrupted: finishing %s; interrupt once more to hurry", context.name, count)


def unusable(error: NeverBegins) -> ConfigError:
    """Return what to end a consumer with whose handler can never be begun."""
    failure = ConfigError(str(error))
    failure.__cause__ = error.__cause__
    return failure


def judge_failure(context: QueueContext, retry: RetryPolicy, delivery: Delivery, error: BaseException) -> Verdict:
    """Return the verdict on a message whose handler failed with *error*, and let the observers know."""
    most = traceback_most(delivery.delivery_count, context.settings.max_deliveries)
    verdict = verdict_on_failure(error, delivery.delivery_count, retry, context.rng, most, delivery)
    if not isinstance(error, Reject):
        delay = verdict.delay if isinstance(verdict, Abandon) else None
        what, subscription = f"{type(error).__name__}: {text_of(error)}", place_of(error)
        # Of a body that can't be decoded, the text says all.
        is_news = not isinstance(error, (Retry, DecodeError)) and context.is_news(
            delivery, f"{type(error)} {subscription}"
        )
        event = event_of(MessageFailed, context, delivery, what, delay, subscription)
        context.emit(event, error if is_news else None)
    return verdict


def tell_unanswered(context: QueueContext, what: str, why: str) -> None:
    """Let the observers know that the broker did not answer when it was asked to do *what*."""
    context.emit(BrokerUnanswered(context.clock.now(), context.name, context.holder, what, why))


def event_of(kind: type[Any], context: QueueContext, delivery: Delivery, *more: object) -> Event:
    """Return an event of this *kind* about *delivery*."""
    named = (delivery.id, delivery.sequence, delivery.delivery_count)
    event: Event = kind(context.clock.now(), context.name, context.holder, *named, *more)
    return event
