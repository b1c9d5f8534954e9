"""The message pump for sessions: several sessions at a time, the messages of each one after the other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from tenure.errors import ConfigError, LockLost, TenureError, Unavailable
from tenure.events import HandlerOverran
from tenure.pacing import Timing, later
from tenure.queue.consumer import (
    OnError,
    complain,
    event_of,
    is_to_begin,
    judge_failure,
    on_sigterm,
    outlast,
    tell_unanswered,
)
from tenure.queue.desk import POLL, Desk, Message
from tenure.queue.handlers import CALLING, Handler, Handlers, RunIn
from tenure.queue.machine import Habits
from tenure.queue.message import COMPLETE, GIVE_BACK, Complete, Delivery, Token, Verdict
from tenure.queue.processes import NotBegun
from tenure.queue.retry import Reject, Retry, RetryPolicy
from tenure.queue.session import Session

T = TypeVar("T")


class SessionConsumer:
    """A handler at work on the sessions of a queue. Made by ``queue.consumer(handler, sessions=True)``, run once.

    Each of its workers holds one session at a time, whose lock the keeper renews. It hands over the messages in order,
    each when the one before is settled, and looks for another session when none is waiting.
    """

    def __init__(
        self,
        desk: Desk,
        handler: Handler,
        *,
        concurrency: int,
        max_hold: float,
        retry: RetryPolicy,
        grace: float,
        auto_complete: bool,
        on_error: OnError | None,
        run_in: RunIn,
        inbox: float,
        until_empty: bool,
        sigterm: bool | None,
    ) -> None:
        if not auto_complete:
            raise ConfigError("auto_complete=False is not for sessions=True; use 'async with queue.session()' instead")
        self._desk = desk
        self._concurrency = concurrency
        self._max_hold = max_hold
        self._habits = self._get_habits()
        self._retry = retry
        self._grace = grace
        self._on_error = on_error
        self._inbox = inbox
        self._until_empty = until_empty
        self._sigterm = sigterm
        self._handlers = Handlers(handler, run_in, concurrency)
        self._success: Verdict = Complete(remember=inbox) if inbox else COMPLETE
        self._may_go_on = asyncio.Event()  # cleared by pause()
        self._may_go_on.set()
        self._stopping = asyncio.Event()
        self._handling: dict[asyncio.Task[None], tuple[Session, Delivery]] = {}  # workers that hold a message
        self._overrun: set[tuple[Token, int]] = set()  # told of
        self._timers: list[asyncio.TimerHandle] = []
        self._workers: list[asyncio.Task[None]] = []
        self._ended: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Consume until :meth:`drain` is called, *stop* is set, or SIGTERM comes; return when all is settled.

        Cancelled, it cancels the handlers, gives back what they leave, uncounted, and only then lets go.

        Raises:
            ConfigError: The broker can never be used as it is.
        """
        loop = asyncio.get_running_loop()
        unhook = on_sigterm(loop, self.drain) if self._sigterm is not False else None
        try:
            if await is_to_begin(self._desk, self._stopping, stop):
                await self._consume(loop, stop)
        finally:
            if unhook is not None:
                unhook()
        if self._failure is not None:
            raise self._failure

    def _get_habits(self) -> Habits:
        return Habits(Timing(self._desk.settings.lock), self._concurrency, max_hold=self._max_hold)

    async def _consume(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event | None) -> None:
        self._habits = self._get_habits()
        self._ended = loop.create_future()
        stopper = asyncio.ensure_future(self._stop_with(stop)) if stop is not None else None
        for _ in range(self._habits.concurrency):
            worker = loop.create_task(self._work())
            worker.add_done_callback(self._worker_ended)
            self._workers.append(worker)
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
            if worker not in self._handling:
                worker.cancel()
        wait = self._grace if grace is None else grace
        patience = self._habits.timing.grace
        loop = self._ended.get_loop()
        self._timers += [
            loop.call_later(wait, self._cut_short),
            loop.call_later(wait + patience, self._cut_short),  # a thread that runs on is left behind
            loop.call_later(wait + 2 * patience, self._give_up),
        ]

    @property
    def timing(self) -> Timing:
        """The times of the locks; see :attr:`Consumer.timing`."""
        return self._habits.timing

    def remaining(self, message: Message) -> float:
        """Return for how many seconds the lock of the session of *message* may be believed; 0.0 if it is over."""
        found = (session for session, delivery in self._handling.values() if delivery == message.delivery)
        session = next(found, None)
        return session.remaining() if session is not None else 0.0

    def _cut_short(self) -> None:
        for worker in list(self._handling):
            worker.cancel()

    def _give_up(self) -> None:
        """End with handlers that won't stop: their sessions' locks run out by themselves."""
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_result(None)

    def _worker_ended(self, task: asyncio.Task[None]) -> None:
        assert self._ended is not None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        if (self._failure is not None or all(one.done() for one in self._workers)) and not self._ended.done():
            self._ended.set_result(None)

    async def _close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for _ in range(2):  # the second time, threads are left behind
            if left := [worker for worker in self._workers if not worker.done()]:
                for worker in left:
                    worker.cancel()
                await asyncio.wait(left, timeout=self._habits.timing.grace / 2)
        for session, delivery in self._handling.values():
            self._leave(session, delivery)
        self._handlers.close()

    def _leave(self, session: Session, delivery: Delivery) -> None:
        """Leave *session* to itself, and not to another, as long as its lock is not over: a handler runs on in it."""
        session.leave()
        if (delivery.token, delivery.sequence) not in self._overrun:
            self._overrun.add((delivery.token, delivery.sequence))
            self._desk.tell(event_of(HandlerOverran, self._desk, delivery))

    async def _stop_with(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self.drain()

    async def _work(self) -> None:
        CALLING.set(self)
        desk = self._desk
        try:
            while not self._stopping.is_set():
                await self._may_go_on.wait()
                try:
                    async with Session(desk, None, 0.0 if self._until_empty else None) as session:
                        await self._serve(session)
                except TimeoutError:
                    return  # nothing is waiting, and until_empty was asked for
                except LockLost:
                    continue  # the session is with another by now, or free
                except Unavailable:
                    await asyncio.sleep(later(min(1.0, POLL), desk.dice))
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise

    async def _serve(self, session: Session) -> None:
        """Handle what is waiting in *session*, in order."""
        me = asyncio.current_task()
        assert me is not None
        while not self._stopping.is_set() and self._may_go_on.is_set():
            messages = await session.receive()
            if not messages:
                return
            self._handling[me] = session, messages[0].delivery
            try:
                await self._handle(session, messages[0])
            finally:
                del self._handling[me]

    async def _handle(self, session: Session, message: Message) -> None:
        delivery = message.delivery
        if await self._was_handled(session, delivery):
            error = None
        else:
            error = await self._call(session, message)
        if error is None:
            verdict = self._success
        else:
            await complain(self._on_error, message, error)
            is_tried = not isinstance(error, NotBegun)
            verdict = judge_failure(self._desk, self._retry, delivery, error) if is_tried else GIVE_BACK
        with suppress(LockLost):  # settled by its handler; if the session is lost, the next receive says so
            await self._ask(session, "settle", lambda: self._desk.settle(delivery, verdict))

    async def _call(self, session: Session, message: Message) -> BaseException | None:
        """Call the handler; return what it raised, or returned in its place."""
        most, patience = self._habits.max_hold, self._habits.timing.grace
        limit = asyncio.timeout(most if most < math.inf else None)
        overrun = None
        if most < math.inf:
            overrun = asyncio.get_running_loop().call_later(most + patience, self._leave, session, message.delivery)
        try:
            async with limit:
                outcome = await self._handlers.serve(message)
        except asyncio.CancelledError:
            if self._handlers.is_left_behind(message.delivery):
                self._leave(session, message.delivery)
            if session.is_interrupted:
                with suppress(TenureError):
                    await complain(self._on_error, message, LockLost(f"{session.name!r} was lost while it was handled"))
            raise  # by the session, which is lost, or by drain(): given back with the session
        except Exception as error:
            if limit.expired():
                return LockLost(f"the handler of message {message.id!r} ran for longer than max_hold")
            return error
        finally:
            if overrun is not None:
                overrun.cancel()
        return outcome if isinstance(outcome, (Retry, Reject)) else None

    async def _was_handled(self, session: Session, delivery: Delivery) -> bool:
        if not self._inbox:
            return False
        broker, name = self._desk.broker, self._desk.name
        return (await self._ask(session, "look into the inbox", lambda: broker.handled(name, [delivery.id])))[0]

    async def _ask(self, session: Session, what: str, question: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to *question*, asked again as long as there is none and *session* is ours."""
        while True:
            try:
                return await question()
            except Unavailable as error:
                if session.lost.is_set():
                    raise
                tell_unanswered(self._desk, what, error)
                await asyncio.sleep(later(self._habits.timing.retry_every / 4, self._desk.dice))
