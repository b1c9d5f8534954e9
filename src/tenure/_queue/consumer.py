"""The message pump as its owner sees it: claims messages, hands them to a handler, keeps their locks, settles them.

Messages travel on the caller's loop, where the :class:`~tenure._queue.pump.Pump` decides, or for sessions the
:class:`~tenure._queue.session_pump.SessionPump`. Locks are renewed on the renewal thread's loop, by
:class:`~tenure._queue.locks.Locks`, so that a handler that blocks the caller's loop loses nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tenure._queue.cancelling import wait_through_cancellation
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.context import QueueContext
from tenure._queue.effects import Pause, Resume
from tenure._queue.handlers import Handler, Handlers
from tenure._queue.lock_group import LockGroup
from tenure._queue.lock_renewer import LockRenewer
from tenure._queue.locks import Locks
from tenure._queue.message import Token
from tenure._queue.options import ConsumeSettings
from tenure._queue.pump import Pump
from tenure._queue.pump_driver import PumpDriver
from tenure._queue.pump_settings import PumpSettings
from tenure._queue.received import Message
from tenure._queue.reports import log_interrupt
from tenure._queue.startup import wait_until_ready
from tenure._runtime.signals import on_shutdown_signal
from tenure._timing import Timing

MISSES_MAX = 2
"""Requests in a row without an answer, with which a consumer is not ready."""


class Consumer:
    """A handler at work on a queue. Made by ``queue.consumer(handler, …)``, run once."""

    def __init__(
        self,
        context: QueueContext,
        handler: Handler,
        consuming: ConsumeSettings,
        kept: Callable[[Consumer], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._context = context
        self._kept = kept  # while it runs, so that its queue can pause and drain it
        self._consuming = consuming
        self._settings = self._get_settings()  # as known so far; the queue's own settings are read when it begins
        self._handlers = Handlers(handler, consuming.run_in, consuming.concurrency, self)
        self._driver: PumpDriver | None = None  # there once it has begun
        self._is_drained = asyncio.Event()  # maybe before it has begun
        self._is_paused = False

    async def run(self, stop: asyncio.Event | None = None) -> None:
        """Consume until :meth:`drain` is called, *stop* is set, or SIGTERM comes; return when all is settled.

        Cancelled, it cancels the handlers, gives back what they leave, uncounted, and only then returns.

        Raises:
            ConfigError: The broker, or the handler, can never be used as it is.
        """
        with self._kept(self), on_shutdown_signal(self.drain, self._consuming.sigterm, self._log_interrupt):
            if await wait_until_ready(self._context, self._is_drained, stop, self._consuming.wait):
                await self._consume(stop)

    async def _consume(self, stop: asyncio.Event | None) -> None:
        context = self._context
        self._settings = settings = self._get_settings()
        groups: dict[Token, LockGroup] = {}
        kind = _pump_of_sessions() if self._consuming.sessions else Pump
        machine = (context.name, context.holder, settings, context.rng, groups)
        now = context.clock.now()
        pump = kind(*machine, now=now)
        driver = PumpDriver(context, self._consuming, self._handlers, pump, self)
        renewer = LockRenewer(context, Locks(*machine, now=now), driver.feed)
        cancelled = None
        try:
            cancelled = await wait_through_cancellation(renewer.begin())
            if cancelled is None and not self._is_drained.is_set():
                self._driver = driver
                driver.begin(stop, is_paused=self._is_paused)
                cancelled = await wait_through_cancellation(driver.ended, lambda: driver.drain(grace=0.0))
        finally:
            if not context.renewal_thread.is_forked:  # in a child that ends inside of a handler there is nothing to end
                cancelled = await self._close(driver, renewer) or cancelled
        if cancelled is not None:
            raise cancelled
        if driver.failure is not None:
            raise driver.failure

    async def _close(self, driver: PumpDriver, renewer: LockRenewer) -> asyncio.CancelledError | None:
        """End everything; return the first cancellation that came meanwhile."""
        try:
            cancelled = await wait_through_cancellation(asyncio.ensure_future(driver.close()))
            self._handlers.close()
        finally:  # whatever happens: nothing else ends it, and it would renew for ever
            late = await wait_through_cancellation(renewer.end())
        return cancelled or late

    def _get_settings(self) -> PumpSettings:
        traits = self._context.broker.traits
        return self._consuming.settings(
            self._context.settings.lock,
            hints=traits.hints,
            connection_bound=traits.connection_bound,
            surveys=traits.surveys and not self._context.name.endswith(DEAD_SUFFIX),
            looks_first=traits.surveys or not traits.connects,
        )

    def _log_interrupt(self) -> None:
        log_interrupt(self._context, self.running)

    @property
    def concurrency(self) -> int:
        """How many handlers may run at once."""
        return self._consuming.concurrency

    @property
    def running(self) -> int:
        """How many handlers run."""
        return self._driver.pump.busy if self._driver is not None else 0

    @property
    def is_ready(self) -> bool:
        """Whether it receives messages, and the store has answered one of its last two requests."""
        driver = self._driver
        return driver is not None and not driver.has_ended and driver.pump.misses < MISSES_MAX

    def pause(self) -> None:
        """Claim nothing and give the buffer back, until :meth:`resume`; handlers that run go on."""
        self._is_paused = True
        if self._driver is not None:
            self._driver.feed(Pause())

    def resume(self) -> None:
        """Claim again."""
        self._is_paused = False
        if self._driver is not None:
            self._driver.feed(Resume())

    def drain(self, grace: float | None = None) -> None:
        """Claim nothing any more, give the buffer back, let handlers finish for *grace* seconds, and end :meth:`run`.

        Handlers that run longer are cancelled, and what they leave is given back uncounted. A thread can't be stopped:
        the lock of what it does is left to run out. Called before :meth:`run` has begun, it lets that end at once.
        """
        self._is_drained.set()
        if self._driver is not None:
            self._driver.drain(grace)

    @property
    def received(self) -> int:
        """How many messages it has received so far, those included that it gave back."""
        return self._driver.pump.received if self._driver is not None else 0

    @property
    def timing(self) -> Timing:
        """The times of the locks, as of a lease: its ``grace`` is what a handler has to stop before the lock ends."""
        return self._settings.timing

    def remaining(self, message: Message) -> float:
        """Return for how many seconds the lock of a *message* in hand is trusted, without another renewal.

        0.0 if it is over, and in a forked child. It is renewed all the while; see :meth:`tenure.Term.remaining`, the
        same for a leader.
        """
        if self._driver is None or self._context.renewal_thread.is_forked:
            return 0.0
        return max(0.0, self._driver.pump.trusted_until(message.delivery) - self._context.clock.now())


def _pump_of_sessions() -> type[Pump]:
    from tenure._queue.session_pump import SessionPump  # most queues have none

    return SessionPump
