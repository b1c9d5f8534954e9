"""Requests: messages that are sent to be answered, and the queue that brings the answers."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

from tenure._checks import check_seconds
from tenure._queue.checks import check_text
from tenure._queue.context import POLL, QueueContext
from tenure._queue.message import Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.received import Received
from tenure._queue.verdicts import COMPLETE, DeadLetter, NotEmpty, Settled, Settlement
from tenure.errors import ConfigError, TenureError, TimedOut, Unavailable

REQUEST_ENDED = "request_ended"
"""The reason of the dead letter of an answer that came after its request had ended."""

REPLIES = ".replies."
LOOP_CHECK = 0.2
"""Seconds between checks whether the loop of a listener still runs."""


IDLE = 600.0
"""Seconds after which a reply queue may be deleted. Its process refreshes it more often while it runs."""

HANDED_MAX = 10_000
"""The number of answers remembered as handed over without confirmed completion; then the oldest are forgotten."""


def is_reply_queue(name: str) -> bool:
    """Return whether this is the queue in which one process receives answers to its requests."""
    return re.fullmatch(rf".+{re.escape(REPLIES)}[0-9a-f]{{16}}", name) is not None


class Sender(Protocol):
    """Sends the requests."""

    def send(self, message: Outgoing) -> Awaitable[str]:
        """Send one message; return its id once the store has it."""
        ...


class Requests:
    """The requests to one queue from one loop that wait for an answer, and the queue that brings the answers.

    An answer whose request has ended goes to that queue's dead letters, with the reason ``request_ended``. The
    process deletes the queue when it is closed; if the process has died, another one that makes requests does. Both
    only if it is empty.
    """

    def __init__(self, context: QueueContext) -> None:
        self._context = context
        self.reply_to: str = f"{context.name[:150]}{REPLIES}{os.urandom(8).hex()}"
        self._handed: dict[tuple[int, float], None] = {}  # passed on, and not confirmed as completed
        self._waiting: dict[str, asyncio.Future[Received]] = {}
        self._listener: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._is_closing = False
        self._loop = asyncio.get_running_loop()
        self._ended: Future[None] = Future()  # of the listener

    async def ask(self, producer: Sender, message: Outgoing, timeout: float) -> Received:
        """Send *message* and return the answer to it.

        Raises:
            TimedOut: No answer came within *timeout* seconds.
            Unavailable: The store could not be asked, or the backend was closed meanwhile.
        """
        check_seconds("timeout", timeout, least=0.0)
        if message.reply_to is not None:
            raise ConfigError(f"request() has a reply queue of its own; reply_to={message.reply_to!r} is for send()")
        correlation = message.correlation_id or os.urandom(12).hex()
        check_text("correlation_id", correlation)
        if correlation in self._waiting:
            raise ConfigError(f"a request with the correlation_id {correlation!r} is already waiting; use another")
        message.reply_to, message.correlation_id = self.reply_to, correlation
        answer: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
        self._waiting[correlation] = answer
        if self._listener is None or self._listener.done():
            self._is_closing = False
            self._ended = Future()
            self._listener = asyncio.ensure_future(self._receive_all())
        try:
            async with asyncio.timeout(timeout):
                await producer.send(message)
                self._woken.set()
                return await answer
        except TimeoutError:
            if answer.done() and not answer.cancelled():  # it came at the last moment, and is not delivered again
                return answer.result()
            raise TimedOut(
                f"no answer to request {correlation!r} on {self._context.name!r} within {timeout:g} s; one that comes "
                f"later is kept among the dead letters of {self.reply_to!r}"
            ) from None
        finally:
            del self._waiting[correlation]

    async def close(self) -> None:
        """Stop receiving, and dead-letter the answers that have come meanwhile. May be called on any loop."""
        here = asyncio.get_running_loop()
        if self._listener is None:
            return
        if self._loop is here:
            self._begin_closing()
        else:
            with suppress(RuntimeError):  # that loop is closed, and the listener has ended with it
                self._loop.call_soon_threadsafe(self._begin_closing)
        # Not cancelled: it has to settle and report the answers it has claimed.
        ended = asyncio.wrap_future(self._ended)
        while not ended.done() and (self._loop is here or self._loop.is_running()):
            await asyncio.wait({ended}, timeout=LOOP_CHECK)
        if not ended.done():  # its loop has stopped: if it runs again, nothing is received any more
            self._is_closing = True
            self._fail_waiting()
        if self._loop is here:
            await asyncio.gather(self._listener, return_exceptions=True)
        self._listener = None
        await self._leave()

    def _begin_closing(self) -> None:
        self._is_closing = True
        self._woken.set()

    def _fail_waiting(self) -> None:
        for correlation, answer in self._waiting.items():
            if not answer.done():
                with suppress(RuntimeError):  # the loop of the waiter is closed
                    answer.set_exception(
                        Unavailable(
                            f"request {correlation!r} on {self._context.name!r} got no answer before it was closed"
                        )
                    )

    async def _leave(self) -> None:
        """Dead-letter the answers that are left, and delete the reply queue if it is empty."""
        with suppress(Unavailable):
            await self._receive()
            await self._context.broker.delete(self.reply_to)  # not if dead-lettered answers are in it

    async def _receive_all(self) -> None:
        context = self._context
        place = context.hints.join(context.broker, self.reply_to, self, self._wake)
        keeping = asyncio.ensure_future(self._keep_queue())
        misses = 0
        try:
            while not self._is_closing:
                self._woken.clear()
                place.asks()
                try:
                    more = await self._receive()
                except Unavailable:
                    place.failed()
                    misses += 1
                    if not self._is_closing:  # keep the pause, whatever was hinted meanwhile
                        self._woken.clear()
                else:
                    place.answered(more, None)
                    misses = 0
                    if more:
                        continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause(misses)):
                        await self._woken.wait()
        finally:
            place.leave()
            keeping.cancel()
            if self._is_closing:
                self._fail_waiting()
            self._ended.set_result(None)

    def _wake(self) -> bool:
        self._woken.set()
        return True

    async def _keep_queue(self) -> None:
        """Keep the reply queue while this process runs, and delete those of processes that have died."""
        broker = self._context.broker
        while True:
            with suppress(TenureError):  # the next attempt is soon enough
                await broker.delete_when_idle(self.reply_to, IDLE)
                for name in await broker.idle():
                    is_others = is_reply_queue(name) and name != self.reply_to
                    if is_others and isinstance(await broker.delete(name), NotEmpty):
                        await broker.delete_when_idle(name, IDLE)  # it would hide others: only a few are listed
            await asyncio.sleep(IDLE / 4)

    def _pause(self, misses: int) -> float:
        """Return how long to wait for a hint after so many requests in a row without an answer."""
        least = 0.05 if self._waiting and not self._context.broker.traits.hints else POLL
        return min(least * 1.5 ** min(misses, 20), POLL)

    async def _receive(self) -> bool:
        """Hand over the answers that have come; return whether there may be more."""
        context = self._context
        claim = await context.broker.receive(self.reply_to, 100, context.settings.lock)
        context.report_dead(claim.died, self.reply_to)
        waiting = [self._waiting.get(one.correlation_id or "") for one in claim.deliveries]
        settlements = [self._settlement(one, request) for one, request in zip(claim.deliveries, waiting, strict=True)]
        if settlements:
            answers = await context.broker.settle(settlements)
            for (delivery, verdict), answer in zip(settlements, answers, strict=True):
                if isinstance(answer, Settled):  # otherwise it may be delivered again
                    self._handed.pop(_identity(delivery), None)
                    context.report_if_dead(delivery, verdict, answer)
        return bool(settlements) or claim.due_in == 0

    def _settlement(self, delivery: Delivery, request: asyncio.Future[Received] | None) -> Settlement:
        if _identity(delivery) in self._handed:  # delivered again only because its completion was not confirmed
            return Settlement(delivery, COMPLETE)
        if request is None or request.done():
            why = f"the answer to {delivery.correlation_id!r} came when no request waited for it"
            return Settlement(delivery, DeadLetter(REQUEST_ENDED, why))
        request.set_result(Received(delivery))
        self._handed[_identity(delivery)] = None
        if len(self._handed) > HANDED_MAX:
            del self._handed[next(iter(self._handed))]
        return Settlement(delivery, COMPLETE)


def _identity(delivery: Delivery) -> tuple[int, float]:
    """Return a key that is unique to this answer, even if the queue was deleted and created again."""
    return delivery.sequence, delivery.enqueued_at
