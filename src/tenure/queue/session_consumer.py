"""The message pump for sessions: several sessions at a time, the messages of each one after the other."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

from tenure.errors import ConfigError, LockLost, TenureError, Unavailable
from tenure.pacing import Timing, later
from tenure.queue.consumer import OnError, complain, judge_failure, on_sigterm
from tenure.queue.desk import POLL, Desk, Message
from tenure.queue.handlers import CALLING, Handler, Handlers, RunIn
from tenure.queue.machine import Habits
from tenure.queue.message import COMPLETE, Complete, Delivery, Verdict
from tenure.queue.retry import Reject, Retry, RetryPolicy
from tenure.queue.session import Session


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
        self._habits = Habits(Timing(desk.settings.lock), concurrency, max_hold=max_hold)
        self._desk = desk
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
        self._handling: set[asyncio.Task[None]] = set()  # workers that hold a message
        self._deadline: asyncio.TimerHandle | None = None
        self._workers: list[asyncio.Task[None]] = []

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Consume until :meth:`drain` is called, *stop* is set, or SIGTERM comes; return when all is settled.

        Raises:
            ConfigError: The broker can never be used as it is.
        """
        await self._desk.ready()
        loop = asyncio.get_running_loop()
        unhook = on_sigterm(loop, self.drain) if self._sigterm is not False else None
        stopper = asyncio.ensure_future(self._stop_with(stop)) if stop is not None else None
        self._workers = [asyncio.ensure_future(self._work()) for _ in range(self._habits.concurrency)]
        try:
            await asyncio.gather(*self._workers)
        finally:
            for task in [*self._workers, *([stopper] if stopper else [])]:
                task.cancel()
            await asyncio.gather(*self._workers, return_exceptions=True)
            if self._deadline is not None:
                self._deadline.cancel()
            if unhook is not None:
                unhook()
            self._handlers.close()

    def pause(self) -> None:
        """Take no further message and no further session, until :meth:`resume`; handlers that run go on."""
        self._may_go_on.clear()

    def resume(self) -> None:
        """Go on."""
        self._may_go_on.set()

    def drain(self, grace: float | None = None) -> None:
        """Take no further message, let handlers finish for *grace* seconds, then cancel them; and end :meth:`run`.

        What they leave is given back uncounted, as their sessions are.
        """
        self._stopping.set()
        for worker in self._workers:
            if worker not in self._handling:
                worker.cancel()
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._grace if grace is None else grace, self._cut_short)

    def _cut_short(self) -> None:
        for worker in self._workers:
            worker.cancel()

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
            self._handling.add(me)
            try:
                await self._handle(session, messages[0])
            finally:
                self._handling.discard(me)

    async def _handle(self, session: Session, message: Message) -> None:
        delivery = message._delivery
        error: BaseException | None = None
        limit = asyncio.timeout(self._habits.max_hold if self._habits.max_hold < math.inf else None)
        try:
            async with limit:
                outcome = None if await self._was_handled(delivery) else await self._handlers.serve(message)
            if isinstance(outcome, (Retry, Reject)):
                error = outcome
        except asyncio.CancelledError:
            if session.is_interrupted:
                with suppress(TenureError):
                    await complain(self._on_error, message, LockLost(f"{session.name!r} was lost while it was handled"))
            raise  # by the session, which is lost, or by drain(): given back with the session
        except Exception as raised:
            error = raised
            if limit.expired():
                error = LockLost(f"the handler of message {message.id!r} ran for longer than max_hold")
        if error is None:
            verdict = self._success
        else:
            await complain(self._on_error, message, error)
            verdict = judge_failure(self._desk, self._retry, delivery, error)
        with suppress(LockLost):  # settled by its handler; if the session is lost, the next receive says so
            await self._desk.settle(delivery, verdict)

    async def _was_handled(self, delivery: Delivery) -> bool:
        return bool(self._inbox) and (await self._desk.broker.handled(self._desk.name, [delivery.id]))[0]
