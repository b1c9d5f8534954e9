"""A channel that holds messages: what is unacknowledged on it, its consumers, proven acknowledgements.

An acknowledgement has no answer in AMQP. So behind each group of them, a request is sent on the same channel: its
answer proves that the channel has taken them. The server passes up to 32 commands of a channel on to a quorum queue,
and keeps the others back until those are written; what it keeps back is lost with the channel. So a group has at most
half as many, and the next one waits for the answer. A queue that writes for longer than that isn't noticed: its log
answers no request that changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from aiormq import spec

from tenure._backends.rabbitmq.connection import AmqpChannel, Delivered
from tenure._backends.rabbitmq.errors import AmqpError

GROUP = 16
"""Acknowledgements behind which an answer is awaited. One of many messages counts once for each of their consumers: so
many commands the server makes of it."""


class HeldChannel:
    """A channel and its unacknowledged messages.

    Args:
        channel: Open.
        queue: RabbitMQ's name of the queue that it receives from.
    """

    def __init__(self, channel: AmqpChannel, queue: str) -> None:
        self.channel = channel
        self._queue = queue
        self.on_received: Callable[[Delivered], None] = lambda _: None
        """Called with each message that comes."""
        self.on_verdict: Callable[[int], None] = lambda _: None
        """Called with a message right before its acknowledgement or rejection is ordered."""
        self._unacked: dict[int, str] = {}  # tag: consumer; in the order of the tags
        self._complete = 0  # up to this tag, all have come
        self._beyond: set[int] = set()  # those that have come of higher tags
        self._prefetch = 0  # of the consumers that are begun next
        self._pending: dict[int, asyncio.Future[None]] = {}  # to be acknowledged
        self._flushing: asyncio.Task[None] | None = None
        channel.on_delivery = self._received
        channel.on_cancelled = self._on_cancelled
        self.on_queue_gone: Callable[[], None] = lambda: None

    @property
    def lost(self) -> AmqpError | None:
        """Why it is over; None while it can be used."""
        return self.channel.lost

    # --- consumers ---

    def consume(self, tag: str, credit: int) -> asyncio.Future[object]:
        """Begin a consumer that may hold *credit* messages; the future is done when it stands."""
        if credit != self._prefetch:
            self._prefetch = credit
            self.channel.request(spec.Basic.Qos(0, credit, False))
        return self.channel.request(spec.Basic.Consume(0, self._queue, tag))

    def cancel(self, tag: str) -> asyncio.Future[object]:
        """End a consumer; what it holds stays unacknowledged."""
        return self.channel.request(spec.Basic.Cancel(tag))

    def get(self) -> asyncio.Future[object]:
        """Take one message, if there is one by the log of the queue: then it has been received when this is done."""
        return self.channel.request(spec.Basic.Get(0, self._queue))

    def arrived(self) -> asyncio.Future[object]:
        """Ask for an answer that comes when all has come that the queue has sent to this channel so far.

        The queue answers the channel after what it has sent before. But the channel may pass an answer on before what
        came with it. So a second request follows.
        """
        self.count()
        answer = self.flow()
        answer.add_done_callback(self._reject_dropped)
        return answer

    def _reject_dropped(self, answer: asyncio.Future[object]) -> None:
        if self._beyond and self.channel.lost is None and not answer.cancelled():
            # The driver drops what comes to a consumer that was ended. A server that sends such is not known; but it
            # would wait for a verdict for ever.
            for tag in range(self._complete + 1, max(self._beyond)):
                if tag not in self._beyond:
                    self.channel.reject(tag)
            self._complete = max(self._beyond)
            self._beyond.clear()

    def count(self) -> asyncio.Future[Any]:
        """Count the messages that are ready in the queue, and its consumers; if it was deleted, the channel ends."""
        return self.channel.request(spec.Queue.Declare(0, self._queue, passive=True))

    def flow(self) -> asyncio.Future[object]:
        """Send a request that changes nothing: its answer comes behind everything that the channel sent before."""
        return self.channel.request(spec.Channel.Flow(True))

    def _received(self, delivered: Delivered) -> None:
        self._note(delivered.tag, delivered.consumer)
        self.on_received(delivered)

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
        self.on_queue_gone()

    # --- verdicts ---

    def reject(self, tag: int, *, requeue: bool = True) -> None:
        """Let a message be delivered again, and count this delivery; or let the server move it to the dead letters."""
        self._unacked.pop(tag, None)
        if self.channel.lost is None:
            self.on_verdict(tag)
        self.channel.reject(tag, requeue=requeue)

    def reject_all(self) -> Iterator[None]:
        """Let all messages be delivered again, in their order, and count these deliveries; a ``GROUP`` at each step.

        Before the next step, the queue must have taken them: of more than 32 commands, it would mix the order.
        """
        groups: list[list[int]] = []
        consumers: set[str] = set()
        for tag, consumer in self._unacked.items():  # as they are now: those that come again stay
            if not groups or (consumer not in consumers and len(consumers) == GROUP):
                groups.append([])
                consumers.clear()
            consumers.add(consumer)
            groups[-1].append(tag)
        for group in groups:
            for tag in group:
                del self._unacked[tag]
            self.channel.reject_up_to(group[-1])
            yield

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
            for tag in prefix:
                self.on_verdict(tag)
            self.channel.ack(prefix[-1], multiple=True)
            group += self._acknowledged(prefix)
        else:
            consumers.clear()
        singles = list(self._pending)[: GROUP - len(consumers)]
        for tag in singles:
            self.on_verdict(tag)
            self.channel.ack(tag)
        group += self._acknowledged(singles)
        return group

    def _acknowledged(self, tags: Iterable[int]) -> list[asyncio.Future[None]]:
        for tag in tags:
            self._unacked.pop(tag, None)
        return [self._pending.pop(tag) for tag in tags]

    def _end(self, group: Iterable[asyncio.Future[None]], error: AmqpError) -> None:
        waiting = [*group, *self._pending.values()]
        self._pending.clear()
        for done in waiting:
            if not done.done():
                done.set_exception(error)
                done.exception()

    @property
    def holders(self) -> set[str]:
        """Which consumers hold messages; each answer to a get counts as one."""
        return set(self._unacked.values())

    @property
    def unacked(self) -> int:
        """How many messages are unacknowledged."""
        return len(self._unacked)
