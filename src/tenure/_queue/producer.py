"""Where messages are sent, and where answers to requests come back."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress

from tenure._checks import check_seconds
from tenure._queue.checks import check_text
from tenure._queue.context import POLL, QueueContext
from tenure._queue.message import Delivery
from tenure._queue.outgoing import Outgoing, checked
from tenure._queue.received import Received
from tenure._queue.verdicts import COMPLETE, DeadLetter, NotEmpty, Settled, Settlement
from tenure.errors import ConfigError, TenureError, TimedOut, Unavailable

NOBODY_WAITS = "nobody_waits"
"""The reason of an answer that died because its request had been given up."""

REPLIES = ".replies."

IDLE = 600.0
"""Seconds after which a reply queue may be deleted, unless its process has refreshed it, as it does more often."""

HANDED_MAX = 10_000
"""The most answers remembered as passed on without confirmed completion; then the oldest are forgotten."""


def is_reply_queue(name: str) -> bool:
    """Return whether this is the queue in which one process receives answers to its requests."""
    return re.fullmatch(rf".+{re.escape(REPLIES)}[0-9a-f]{{16}}", name) is not None


class Producer:
    """Sends to one queue."""

    def __init__(self, context: QueueContext) -> None:
        self._context = context

    async def send(self, message: Outgoing) -> str:
        """Send one message; return its id once it is kept."""
        context = self._context
        await context.ready()
        ready = checked((message,), context.settings.body_max, context.broker.traits.body_max)
        return (await context.broker.send(context.name, ready))[0]

    async def send_batch(self, messages: Iterable[Outgoing]) -> list[str]:
        """Send many messages in one step; return their ids once they are kept."""
        context = self._context
        await context.ready()
        ready = checked(list(messages), context.settings.body_max, context.broker.traits.body_max)
        return list(await context.broker.send(context.name, ready)) if ready else []


class Requests:
    """The requests of one process that wait for an answer, and the queue that brings the answers.

    An answer whose request has ended goes to that queue's dead letters, with the reason ``nobody_waits``. The
    queue is deleted when the process has no more use for it; if the process has died, by another that makes requests.
    Both only if it is empty.
    """

    def __init__(self, context: QueueContext) -> None:
        self._context = context
        self.reply_to: str = f"{context.name[:150]}{REPLIES}{secrets.token_hex(8)}"
        self._handed: dict[tuple[int, float], None] = {}  # passed on, and not confirmed as completed
        self._waiting: dict[str, asyncio.Future[Received]] = {}
        self._listener: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._is_closing = False

    async def ask(self, producer: Producer, message: Outgoing, timeout: float) -> Received:
        """Send *message* and return the answer to it.

        Raises:
            TimedOut: None came within *timeout* seconds.
            Unavailable: The store could not be asked, or the backend was closed meanwhile.
        """
        check_seconds("timeout", timeout, least=0.0)
        if message.reply_to is not None:
            raise ConfigError(f"request() has a reply queue of its own; reply_to={message.reply_to!r} is for send()")
        correlation = message.correlation_id or secrets.token_hex(12)
        check_text("correlation_id", correlation)
        if correlation in self._waiting:
            raise ConfigError(f"a request with the correlation_id {correlation!r} is already waiting; use another")
        message.reply_to, message.correlation_id = self.reply_to, correlation
        answer: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
        self._waiting[correlation] = answer
        if self._listener is None or self._listener.done():
            self._is_closing = False
            self._listener = asyncio.ensure_future(self._listen())
        try:
            async with asyncio.timeout(timeout):
                await producer.send(message)
                self._woken.set()
                return await answer
        except TimeoutError:
            if answer.done() and not answer.cancelled():  # it came at the last moment, and no other caller will get it
                return answer.result()
            raise TimedOut(
                f"no answer to request {correlation!r} on {self._context.name!r} within {timeout:g} s; one that comes "
                f"later is kept among the dead letters of {self.reply_to!r}"
            ) from None
        finally:
            del self._waiting[correlation]

    async def close(self) -> None:
        """Stop listening, and dead-letter the answers that have come meanwhile."""
        if self._listener is None:
            return
        self._is_closing = True  # and not cancelled: it has to settle and report the answers it has claimed
        self._woken.set()
        await asyncio.gather(self._listener, return_exceptions=True)
        self._listener = None
        for correlation, answer in self._waiting.items():
            if not answer.done():
                answer.set_exception(
                    Unavailable(f"request {correlation!r} on {self._context.name!r} got no answer before it was closed")
                )
        with suppress(Unavailable):
            await self._take_in()
            await self._context.broker.delete(self.reply_to)  # not if dead-lettered answers are in it

    async def _listen(self) -> None:
        context = self._context
        place = context.hints.join(context.broker, self.reply_to, self, self._wake)
        staying = asyncio.ensure_future(self._stay())
        try:
            while not self._is_closing:
                self._woken.clear()
                place.asks()
                try:
                    more = await self._take_in()
                except Unavailable:
                    more = False
                place.answered(more, None)  # it is the only waiter, so a failure need not be passed on
                if more:
                    continue
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause()):
                        await self._woken.wait()
        finally:
            place.leave()
            staying.cancel()

    def _wake(self) -> bool:
        self._woken.set()
        return True

    async def _stay(self) -> None:
        """Keep the reply queue while this process runs, and delete those of processes that have died."""
        broker = self._context.broker
        while True:
            with suppress(TenureError):  # the next time comes soon enough
                await broker.delete_when_idle(self.reply_to, IDLE)
                for name in await broker.idle():
                    is_others = is_reply_queue(name) and name != self.reply_to
                    if is_others and isinstance(await broker.delete(name), NotEmpty):
                        await broker.delete_when_idle(name, IDLE)  # or it would hide others, as few are listed
            await asyncio.sleep(IDLE / 4)

    def _pause(self) -> float:
        return 0.05 if self._waiting and not self._context.broker.traits.hints else POLL

    async def _take_in(self) -> bool:
        """Pass on the answers that have come; return whether there may be more."""
        context = self._context
        claim = await context.broker.receive(self.reply_to, 100, context.settings.lock)
        context.tell_of_dead(claim.died, self.reply_to)
        for_whom = [self._waiting.get(one.correlation_id or "") for one in claim.deliveries]
        settlements = [self._judge(one, waits) for one, waits in zip(claim.deliveries, for_whom, strict=True)]
        if settlements:
            answers = await context.broker.settle(settlements)
            for (delivery, verdict), answer in zip(settlements, answers, strict=True):
                if isinstance(answer, Settled):  # else it may come again
                    self._handed.pop(_which(delivery), None)
                    context.tell_if_dead(delivery, verdict, answer)
        return bool(settlements) or claim.due_in == 0

    def _judge(self, delivery: Delivery, waits: asyncio.Future[Received] | None) -> Settlement:
        if _which(delivery) in self._handed:  # it comes again only because its completion was not confirmed
            return Settlement(delivery, COMPLETE)
        if waits is None or waits.done():
            text = f"the answer to {delivery.correlation_id!r} came when no request waited for it"
            return Settlement(delivery, DeadLetter(NOBODY_WAITS, text))
        waits.set_result(Received(delivery))
        self._handed[_which(delivery)] = None
        if len(self._handed) > HANDED_MAX:
            del self._handed[next(iter(self._handed))]
        return Settlement(delivery, COMPLETE)


def _which(delivery: Delivery) -> tuple[int, float]:
    """Return a key that no other answer has, even if the queue was created anew meanwhile."""
    return delivery.sequence, delivery.enqueued_at
