"""A channel that holds messages: what is unacknowledged on it, the credit of its consumers, proven acknowledgements.

An acknowledgement has no answer in AMQP. So behind each group of them, a request is sent on the same channel: its
answer proves that the channel has taken them. The server passes up to 32 commands of a channel on to a quorum queue,
and keeps the others back until those are written; what it keeps back is lost with the channel. So a group has at most
half as many, and the next one waits for the answer. A queue that writes for longer than that isn't noticed: its log
answers no request that changes nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from aiormq import spec

from tenure._backends.rabbitmq.connection import AmqpChannel, Delivered
from tenure._backends.rabbitmq.errors import AmqpError

GROUP = 16
"""Acknowledgements behind which an answer is awaited. One of many messages counts once for each of their consumers: so
many commands the server makes of it."""

PREFETCH_MAX = 65_535


SLOW = 1.0
"""Messages a second below which none is likely to be on its way just now: none has come within the last second. What is
sent in answer to a message comes right behind it."""

FILL = 0.2
"""Seconds in which the last consumer of a channel is to be filled: longer than it takes to end the others."""

FEW_MIN, FEW_MAX = 8, 256
"""How many messages the last consumer of a channel may hold."""

FILL_MAX = 1.0
"""Seconds within which it is ended, full or not."""

QUIET, QUIET_MAX = 0.25, 0.5
"""Seconds without a message after which it isn't expected to be filled: what comes after a pause comes in a burst."""


class Arrivals:
    """When the last messages have come."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=64)
        self._came = asyncio.Event()

    def note(self, at: float) -> None:
        """Note a message that has come *at* this time of the loop."""
        self._times.append(at)
        self._came.set()

    def rate(self, now: float) -> float:
        """Return how many messages a second have come lately."""
        recent = [at for at in self._times if at > now - 1.0]
        if len(recent) < self._times.maxlen:  # type: ignore[operator]
            return float(len(recent))
        return len(recent) / max(0.001, now - recent[0])

    async def until(self, condition: Callable[[], bool], quiet: float) -> None:
        """Return when *condition* holds, or when no message has come for *quiet* seconds."""
        while not condition():
            self._came.clear()
            try:
                async with asyncio.timeout(quiet):
                    await self._came.wait()
            except TimeoutError:
                return


class HeldChannel:
    """A channel and its unacknowledged messages.

    Args:
        channel: Open.
        queue: RabbitMQ's name of the queue that it receives from.
    """

    def __init__(self, channel: AmqpChannel, queue: str) -> None:
        self.channel = channel
        self._queue = queue
        self.waiting: deque[Delivered] = deque()
        """What has come and was not asked for yet; any thread may take from its left."""
        self.on_received: Callable[[], None] = lambda: None
        """Called when something has come."""
        self._unacked: dict[int, str] = {}  # tag: consumer; in the order of the tags
        self._complete = 0  # up to this tag, all have come
        self._beyond: set[int] = set()  # those that have come of higher tags
        self._held_by: Counter[str] = Counter()
        self._credits: dict[str, int] = {}  # of the consumers that stand
        self._consumers = 0
        self._pending: dict[int, asyncio.Future[None]] = {}  # to be acknowledged
        self._flushing: asyncio.Task[None] | None = None
        self._arrivals = Arrivals()
        channel.on_delivery = self._received
        channel.on_cancelled = self._on_cancelled
        self.on_queue_gone: Callable[[], None] = lambda: None

    @property
    def lost(self) -> AmqpError | None:
        """Why it is over; None while it can be used."""
        return self.channel.lost

    # --- consumers ---

    @property
    def standing(self) -> int:
        """How many consumers stand, to which the server sends messages as they come."""
        return len(self._credits)

    @property
    def known_consumers(self) -> int:
        """How many consumers the server counts of this channel: those that stand, and those that hold messages."""
        return len(self._credits.keys() | {one for one, held in self._held_by.items() if held})

    @property
    def free_credit(self) -> int:
        """How many messages the server may send before one is settled; on any thread."""
        return sum(credit - self._held_by[one] for one, credit in list(self._credits.items()))

    def consume(self, credit: int, *, first: bool = False) -> tuple[str, asyncio.Future[object]]:
        """Begin a consumer that may hold *credit* messages; return its tag, and the answer.

        If it is to be *first*, no other consumer receives anything until it holds them.
        """
        self._consumers += 1
        tag = f"tenure-{self._consumers}"
        self.channel.request(spec.Basic.Qos(0, min(credit, PREFETCH_MAX), False))
        answer = self.channel.request(
            spec.Basic.Consume(0, self._queue, tag, arguments={"x-priority": 1} if first else None)
        )
        self._credits[tag] = min(credit, PREFETCH_MAX)
        return tag, answer

    async def get(self) -> bool:
        """Take one message, if there is one by the log of the queue: then it has been received when this returns."""
        return isinstance(await self.channel.request(spec.Basic.Get(0, self._queue)), Delivered)

    async def retire(self) -> None:
        """End every consumer that stands; no message on its way is counted then, or hardly ever.

        The server takes back what the queue sends to a consumer that is being ended, and counts that as a delivery. To
        one that holds as many as it may, it sends nothing. So in a queue to which messages come, another consumer is
        begun, which comes before those, and may hold only a few; they end while it has room, and it ends when it is
        full.
        """
        if not self._credits:
            return
        ready = await self.arrived()
        rate = self._arrivals.rate(self.channel.connection.loop.time())
        others = list(self._credits)
        # Messages that are ready although there is room: an acknowledgement that makes the room is not written yet.
        if self.free_credit <= 0 or (rate < SLOW and not ready):
            await self._cancel_all(others)
            return
        tag, begun = self.consume(min(FEW_MAX, max(FEW_MIN, math.ceil(rate * FILL))), first=True)
        await begun
        await self._cancel_all(others)
        if rate >= SLOW or await self.arrived():
            quiet = min(QUIET_MAX, max(QUIET, 5 / max(rate, SLOW)))
            with suppress(TimeoutError):
                async with asyncio.timeout(FILL_MAX):
                    await self._arrivals.until(lambda: self._held_by[tag] >= self._credits.get(tag, 0), quiet)
        await self._cancel_all([tag])

    async def _cancel_all(self, tags: Iterable[str]) -> None:
        for ended in [self.cancel(tag) for tag in tags if tag in self._credits]:
            await ended

    def cancel(self, tag: str) -> asyncio.Future[object]:
        """End a consumer; what it holds stays unacknowledged."""
        self._credits.pop(tag, None)
        return self.channel.request(spec.Basic.Cancel(tag))

    async def arrived(self) -> int:
        """Return when all has come that the queue has sent to this channel so far; return how many are ready in it.

        The queue answers the channel after what it has sent before. But the channel may pass an answer on before what
        came with it. So a second request follows.
        """
        ready = await self.count()
        await self.flow()
        if self._beyond:
            # The driver drops what comes to a consumer that was ended. A server that sends such is not known; but it
            # would wait for a verdict for ever.
            for tag in range(self._complete + 1, max(self._beyond)):
                if tag not in self._beyond:
                    self.channel.reject(tag)
            self._complete = max(self._beyond)
            self._beyond.clear()
        return ready

    async def count(self) -> int:
        """Return how many messages are ready in the queue; if it was deleted, that ends the channel."""
        answer: Any = await self.channel.request(spec.Queue.Declare(0, self._queue, passive=True))
        return int(answer.message_count)

    def flow(self) -> asyncio.Future[object]:
        """Send a request that changes nothing: its answer comes behind everything that the channel sent before."""
        return self.channel.request(spec.Channel.Flow(True))

    def _received(self, delivered: Delivered) -> None:
        self._note(delivered.tag, delivered.consumer)
        self._held_by[delivered.consumer] += 1
        self._arrivals.note(delivered.at)
        self.waiting.append(delivered)
        self.on_received()

    def _note(self, tag: int, consumer: str) -> None:
        self._unacked[tag] = consumer
        if tag == self._complete + 1 and not self._beyond:  # as nearly always
            self._complete = tag
            return
        # The answer to a get may be overtaken by what comes to a consumer.
        self._unacked = dict(sorted(self._unacked.items()))
        self._beyond.add(tag)
        while self._complete + 1 in self._beyond:
            self._complete += 1
            self._beyond.remove(self._complete)

    def _on_cancelled(self, tag: str) -> None:
        self._credits.pop(tag, None)
        self.on_queue_gone()

    # --- verdicts ---

    def take(self) -> Delivered | None:
        """Return what has come first of what waits; None if nothing waits. On any thread."""
        try:
            return self.waiting.popleft()
        except IndexError:  # two threads may take the last one
            return None

    @property
    def waiting_since(self) -> float | None:
        """When that has come which has waited for longest, by the loop's clock; None if nothing waits."""
        try:
            return self.waiting[0].at
        except IndexError:
            return None

    def take_all(self) -> list[Delivered]:
        """Return all that waits, one by one, as another thread may take some."""
        return list(iter(self.take, None))

    def reject(self, tag: int, *, requeue: bool = True) -> None:
        """Let a message be delivered again, and count this delivery; or let the server move it to the dead letters."""
        self._forget(tag)
        self.channel.reject(tag, requeue=requeue)

    def begin_ack(self, tag: int) -> asyncio.Future[None]:
        """Acknowledge a message; the future is done when the server is proven to have taken it.

        It raises ``AmqpError`` if the channel was lost before: the server may have taken it or not.
        """
        if self.channel.lost is not None:
            raise self.channel.lost
        done = self._pending[tag] = self.channel.connection.loop.create_future()
        if self._flushing is None:  # at the end of this iteration of the loop, with all that come until then
            self._flushing = self.channel.connection.loop.create_task(self._flush(), name="tenure-rabbitmq-acks")
        return done

    async def _flush(self) -> None:
        """Acknowledge what waits, group by group."""
        try:
            while self._pending:
                group = self._write_group()
                try:
                    await self.flow()
                except AmqpError as error:
                    self._end(group, error)
                    return
                for done in group:
                    if not done.done():
                        done.set_result(None)
        except AmqpError as error:
            self._end((), error)
        finally:
            self._flushing = None

    def _write_group(self) -> list[asyncio.Future[None]]:
        """Write a group of acknowledgements; return what waits for them."""
        group: list[asyncio.Future[None]] = []
        prefix: list[int] = []
        consumers: set[str] = set()
        for tag, consumer in self._unacked.items():
            if tag not in self._pending or tag > self._complete:  # one that has not come would be acknowledged, too
                break
            if consumer not in consumers and len(consumers) == GROUP:
                break
            consumers.add(consumer)
            prefix.append(tag)
        if len(prefix) > 1:
            self.channel.ack(prefix[-1], multiple=True)
            group += self._acknowledged(prefix)
        else:
            consumers.clear()
        singles = list(self._pending)[: GROUP - len(consumers)]
        for tag in singles:
            self.channel.ack(tag)
        group += self._acknowledged(singles)
        return group

    def _acknowledged(self, tags: Iterable[int]) -> list[asyncio.Future[None]]:
        for tag in tags:
            self._forget(tag)
        return [self._pending.pop(tag) for tag in tags]

    def _forget(self, tag: int) -> None:
        consumer = self._unacked.pop(tag, None)
        if consumer is not None:
            self._held_by[consumer] -= 1
            if not self._held_by[consumer]:
                del self._held_by[consumer]

    def _end(self, group: Iterable[asyncio.Future[None]], error: AmqpError) -> None:
        waiting = [*group, *self._pending.values()]
        self._pending.clear()
        for done in waiting:
            if not done.done():
                done.set_exception(error)
                done.exception()

    @property
    def unacked(self) -> int:
        """How many messages are unacknowledged."""
        return len(self._unacked)
