"""The channels on which a process holds messages of one queue: few consumers each; proven acknowledgements.

When a channel ends, the queue takes back what its consumers hold, one consumer after the other. Of more than 32
consumers, the order is that of a hash table: another one when the server reads its log again after a restart, and on
each node of a cluster (RabbitMQ before 4.2). Then the acknowledgements behind that in the log meet other messages: some
are lost, others come again. So a channel has fewer. But it has not one alone: when a process ends, what one of its
channels held may be delivered to another one that has not ended yet, and is counted.

An acknowledgement has no answer in AMQP. So behind each group of them, a request is sent on the same channel: its
answer proves that the channel has taken them. The server passes up to 32 commands of a channel on to a quorum queue,
and keeps the others back until those are written; what it keeps back is lost with the channel. So a group has at most
half as many, and the next one waits for the answer. A queue that writes for longer than that isn't noticed: its log
answers no request that changes nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from aiormq import spec

from tenure._backends.rabbitmq.connection import GET, AmqpChannel, Delivered
from tenure._backends.rabbitmq.errors import AmqpError, ChannelLost

CONSUMERS_MAX = 24
"""Consumers of a channel, those included that only hold messages: some less than 32, as the queue may lag behind."""

GROUP = 16
"""Acknowledgements behind which an answer is awaited. One of many messages counts once for each of their consumers: so
many commands the server makes of it."""


class _Held(NamedTuple):
    """A message that is held."""

    number: int
    consumer: str


class _Channel:
    """A channel, its consumers, and what it holds. What it is asked for waits until it is open.

    Args:
        loop: That of the connections.
        queue: RabbitMQ's name of the queue that it receives from.
        on_verdict: Called with the number of a message right before its acknowledgement or rejection is ordered.
        on_settled: Called with the numbers of messages that are held no more.
        on_answer: Called when verdicts are proven, or a get is answered: it may be idle then.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        queue: str,
        on_verdict: Callable[[int], None],
        on_settled: Callable[[Iterable[int]], None],
        on_answer: Callable[[], None],
    ) -> None:
        self.raw: AmqpChannel | None = None
        """None until it is open."""
        self.unacked: dict[int, _Held] = {}
        """By tag, in the order of the tags."""
        self._loop = loop
        self._queue = queue
        self._on_verdict = on_verdict
        self._on_settled = on_settled
        self._on_answer = on_answer
        self._standing: set[str] = set()
        self._holding: dict[str, int] = {}  # how many messages each consumer holds
        self._gets = 0  # that are not answered
        self._unproven = 0  # groups of verdicts behind which an answer is awaited
        self._complete = 0  # up to this tag, all have come
        self._beyond: set[int] = set()  # those that have come of higher tags
        self._prefetch = 0  # of the consumers that are begun next
        self._early: list[tuple[Any, asyncio.Future[Any]]] = []  # what it was asked for before it was open
        self._pending: dict[int, asyncio.Future[None]] = {}  # to be acknowledged
        self._flushing: asyncio.Task[None] | None = None

    @property
    def consumers(self) -> int:
        """How many consumers it has, those included that only hold messages; each get is one."""
        return self._gets + len(self._standing | self._holding.keys())

    @property
    def holders(self) -> Iterable[str]:
        """The consumers that hold messages."""
        return self._holding

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing, every verdict is proven, and every get is answered."""
        return not (self.unacked or self._unproven or self._gets)

    # --- requests ---

    def open(self, raw: AmqpChannel) -> None:
        """Send what it was asked for, and go on with *raw*."""
        self.raw = raw
        for method, answer in self._early:
            raw.request(method).add_done_callback(partial(_pass_on, answer))
        self._early.clear()

    def fail(self, error: AmqpError) -> None:
        """Fail what waits for its opening."""
        for _, answer in self._early:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # nobody may ask for it
        self._early.clear()

    def _request(self, method: Any) -> asyncio.Future[Any]:
        if self.raw is not None:
            return self.raw.request(method)
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._early.append((method, answer))
        return answer

    def consume(self, consumer: str, credit: int) -> asyncio.Future[object]:
        """Begin a consumer that may hold *credit* messages; the future is done when it stands."""
        self._standing.add(consumer)
        if credit != self._prefetch:
            self._prefetch = credit
            self._request(spec.Basic.Qos(0, credit, False))
        return self._request(spec.Basic.Consume(0, self._queue, consumer))

    def cancel(self, consumer: str) -> asyncio.Future[object]:
        """End a consumer; what it holds stays unacknowledged."""
        self._standing.discard(consumer)
        return self._request(spec.Basic.Cancel(consumer))

    def get(self) -> asyncio.Future[object]:
        """Take one message, if there is one by the log of the queue: then it has been received when this is done."""
        self._gets += 1
        answer = self._request(spec.Basic.Get(0, self._queue))
        answer.add_done_callback(self._got)
        return answer

    def _got(self, _: object) -> None:
        self._gets -= 1
        self._on_answer()

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
        if self._beyond and self.raw is not None and self.raw.lost is None and not answer.cancelled():
            # The driver drops what comes to a consumer that was ended. A server that sends such is not known; but it
            # would wait for a verdict for ever.
            for tag in range(self._complete + 1, max(self._beyond)):
                if tag not in self._beyond:
                    self.raw.reject(tag)
            self._complete = max(self._beyond)
            self._beyond.clear()

    def count(self) -> asyncio.Future[Any]:
        """Count the messages that are ready in the queue, and its consumers; if it was deleted, the channel ends."""
        return self._request(spec.Queue.Declare(0, self._queue, passive=True))

    def flow(self) -> asyncio.Future[object]:
        """Send a request that changes nothing: its answer comes behind everything that the channel sent before."""
        return self._request(spec.Channel.Flow(True))

    def note(self, tag: int, held: _Held) -> None:
        """Note that a message has come."""
        self.unacked[tag] = held
        self._holding[held.consumer] = self._holding.get(held.consumer, 0) + 1
        if tag == self._complete + 1 and not self._beyond:  # as nearly always
            self._complete = tag
            return
        # The answer to a get may be overtaken by what comes to a consumer.
        self.unacked = dict(sorted(self.unacked.items()))
        self._beyond.add(tag)
        while self._complete + 1 in self._beyond:
            self._complete += 1
            self._beyond.remove(self._complete)

    # --- verdicts ---

    @property
    def _open(self) -> AmqpChannel:
        assert self.raw is not None, "it holds messages"
        return self.raw

    def _prove(self) -> asyncio.Future[object]:
        """Return a future that is done when the channel is proven to have taken the verdicts so far."""
        answer = self.flow()
        self._unproven += 1
        answer.add_done_callback(self._proven)
        return answer

    def _proven(self, _: object) -> None:
        self._unproven -= 1
        self._on_answer()

    def reject(self, tag: int, *, requeue: bool) -> asyncio.Future[object]:
        """Let a message be delivered again, and count this delivery; or let the server move it to the dead letters."""
        self._on_verdict(self.unacked[tag].number)
        self._open.reject(tag, requeue=requeue)
        self._settled([tag])
        return self._prove()

    def reject_up_to(self, tags: list[int]) -> asyncio.Future[object]:
        """Let messages be delivered again that are the first on this channel, and count these deliveries."""
        self._settled(tags)
        self._open.reject_up_to(tags[-1])
        return self._prove()

    def begin_ack(self, tag: int) -> asyncio.Future[None]:
        """Acknowledge a message; the future is done when the server is proven to have taken it."""
        done = self._pending[tag] = self._loop.create_future()
        if self._flushing is None:  # at the end of this iteration of the loop, with all that come until then
            self._flushing = self._loop.create_task(self._flush(), name="tenure-rabbitmq-acks")
        return done

    async def _flush(self) -> None:
        """Acknowledge what waits, group by group."""
        try:
            while self._pending:
                group = self._write_group()
                try:
                    await self._prove()
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
        for tag, held in self.unacked.items():
            if tag not in self._pending or tag > self._complete:  # one that has not come would be acknowledged, too
                break
            if held.consumer not in consumers and len(consumers) == GROUP:
                break
            consumers.add(held.consumer)
            prefix.append(tag)
        if len(prefix) > 1:
            for tag in prefix:
                self._on_verdict(self.unacked[tag].number)
            self._open.ack(prefix[-1], multiple=True)
            group += self._acknowledged(prefix)
        else:
            consumers.clear()
        singles = list(self._pending)[: GROUP - len(consumers)]
        for tag in singles:
            self._on_verdict(self.unacked[tag].number)
            self._open.ack(tag)
        group += self._acknowledged(singles)
        return group

    def _settled(self, tags: Iterable[int]) -> None:
        """Forget messages whose verdicts are ordered."""
        numbers: list[int] = []
        for tag in tags:
            number, consumer = self.unacked.pop(tag)
            numbers.append(number)
            if (done := self._pending.pop(tag, None)) is not None and not done.done():  # it was given back meanwhile
                done.set_exception(ChannelLost(0, "the message was given back"))
                done.exception()
            self._holding[consumer] -= 1
            if not self._holding[consumer]:
                del self._holding[consumer]
        self._on_settled(numbers)

    def _acknowledged(self, tags: Iterable[int]) -> list[asyncio.Future[None]]:
        group = [self._pending.pop(tag) for tag in tags]
        self._settled(tags)
        return group

    def _end(self, group: Iterable[asyncio.Future[None]], error: AmqpError) -> None:
        waiting = [*group, *self._pending.values()]
        self._pending.clear()
        for done in waiting:
            if not done.done():
                done.set_exception(error)
                done.exception()


class HeldChannels:
    """The channels of one queue, and their unacknowledged messages. If one of them is lost, all are given up.

    A message that comes gets a number in place of its tag, which is that of its channel.

    Args:
        channel: Open; the first of them, and the only one until it has ``CONSUMERS_MAX`` consumers.
        queue: RabbitMQ's name of the queue that they receive from.
    """

    def __init__(self, channel: AmqpChannel, queue: str) -> None:
        self.lost: AmqpError | None = channel.lost
        """Why it is over; None while it can be used."""
        self.first = channel
        self.moves = 0
        """Rises when a consumer is begun, and when a message comes."""
        self.on_received: Callable[[Delivered], None] = lambda _: None
        """Called with each message that comes."""
        self.on_verdict: Callable[[int], None] = lambda _: None
        """Called with a message right before its acknowledgement or rejection is ordered."""
        self.on_queue_gone: Callable[[], None] = lambda: None
        self.on_lost: Callable[[AmqpError], None] = lambda _: None
        self._queue = queue
        self._numbers = itertools.count(1)
        self._may_be_idle = asyncio.Event()  # set with each answer that one of them has waited for, and at the end
        self._places: dict[int, tuple[_Channel, int]] = {}  # of each message: its channel, and its tag there
        self._consumers: dict[str, _Channel] = {}  # those that stand
        self._channels = [self._new()]
        self._use(self._channels[0], channel)

    # --- channels ---

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """That of the connections."""
        return self.first.connection.loop

    def begin_close(self) -> None:
        """Close them, once all is sent that they were asked for; what is unacknowledged is delivered again."""
        self.first.begin_close()

    def _new(self) -> _Channel:
        return _Channel(
            self.loop, self._queue, lambda number: self.on_verdict(number), self._forget, self._may_be_idle.set
        )

    def _use(self, channel: _Channel, raw: AmqpChannel) -> None:
        raw.on_delivery = partial(self._received, channel)
        raw.on_cancelled = lambda _: self.on_queue_gone()
        raw.on_lost = self._lose
        channel.open(raw)

    def _with_room(self) -> _Channel:
        """Return a channel for one more consumer."""
        self._check()
        for channel in self._channels:
            if channel.consumers < CONSUMERS_MAX:
                return channel
        channel = self._new()
        self._channels.append(channel)
        self.first.connection.spawn(self._open(channel), "channel")
        return channel

    async def _open(self, channel: _Channel) -> None:
        connection = self.first.connection
        try:
            async with asyncio.timeout(connection.patience):
                raw = await connection.channel()
        except Exception as error:  # whatever it is: the channel would take consumers for ever
            self._lose(ChannelLost(0, f"no further channel could be opened: {str(error) or type(error).__name__}"))
            return
        if self.lost is not None:
            raw.begin_close()
        elif raw.lost is not None:
            self._lose(raw.lost)
        else:
            self._use(channel, raw)

    def _lose(self, error: AmqpError) -> None:
        if self.lost is not None:
            return
        self.lost = error
        self._may_be_idle.set()
        for one in self._channels:
            one.fail(error)
            if one.raw is not None and self.first.connection.lost is None:  # else it ends by itself
                one.raw.begin_close()
        self.on_lost(error)

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost

    # --- consumers ---

    def consume(self, consumer: str, credit: int) -> asyncio.Future[object]:
        """Begin a consumer that may hold *credit* messages; the future is done when it stands."""
        channel = self._consumers[consumer] = self._with_room()
        self.moves += 1
        return channel.consume(consumer, credit)

    def cancel(self, consumer: str) -> asyncio.Future[object]:
        """End a consumer; what it holds stays unacknowledged."""
        return self._consumers.pop(consumer).cancel(consumer)

    def end_consumers(self) -> asyncio.Future[list[Any]]:
        """End every consumer for good; the future is done when all has come that was on its way to them.

        Of one that isn't full, the server may take that back, and counts it then: it would do the same at the end of
        its channel. So this is the step before that.
        """
        self._check()
        channels = set(self._consumers.values())
        for consumer in list(self._consumers):
            self.cancel(consumer)
        return asyncio.gather(*[channel.arrived() for channel in channels])

    def get(self) -> asyncio.Future[object]:
        """Take one message, if there is one by the log of the queue: then it has been received when this is done."""
        return self._with_room().get()

    def arrived(self) -> asyncio.Future[list[Any]]:
        """Ask for an answer that comes when all has come that the queue has sent so far."""
        self._check()
        return asyncio.gather(*[channel.arrived() for channel in self._channels])

    def count(self) -> asyncio.Future[Any]:
        """Count the messages that are ready in the queue, and its consumers; if it was deleted, the channels end."""
        self._check()
        return self._channels[0].count()

    def stand(self) -> asyncio.Future[list[Any]]:
        """Return when every consumer that was begun stands, or was refused."""
        self._check()
        return asyncio.gather(*[channel.flow() for channel in self._channels])

    def _received(self, channel: _Channel, delivered: Delivered) -> None:
        self.moves += 1
        number = next(self._numbers)
        if delivered.consumer.startswith(GET):  # by its tag, which another channel has, too
            delivered.consumer = f"{GET}{number}"
        self._places[number] = channel, delivered.tag
        channel.note(delivered.tag, _Held(number, delivered.consumer))
        delivered.tag = number
        self.on_received(delivered)

    # --- verdicts ---

    def _place(self, number: int) -> tuple[_Channel, int]:
        self._check()
        if number not in self._places:
            raise ChannelLost(0, "the message was given back")
        return self._places[number]

    def _forget(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            del self._places[number]

    def begin_reject(self, number: int, *, requeue: bool = True) -> asyncio.Future[object]:
        """Let a message be delivered again, and count this delivery; or let the server move it to the dead letters.

        The future is done when the channel is proven to have taken it.

        Raises:
            AmqpError: It is over.
        """
        channel, tag = self._place(number)
        return channel.reject(tag, requeue=requeue)

    def reject_all(self) -> Iterator[asyncio.Future[object]]:
        """Let all messages be delivered again, in the order in which they came, and count these; a group at each step.

        Before the next step, the queue must have taken it: of more than 32 commands, it would mix the order. No
        consumer may stand: what is given back would come to it, to be given back and counted once more.
        """
        assert not self._consumers, "they would receive what is given back"
        groups: list[tuple[_Channel, list[int]]] = []
        consumers: set[str] = set()
        held = (
            [(one.number, channel, tag, one.consumer) for tag, one in channel.unacked.items()]
            for channel in self._channels
        )
        for _, channel, tag, consumer in heapq.merge(*held, key=itemgetter(0)):  # on each channel, in that of its tags
            is_full = consumer not in consumers and len(consumers) == GROUP
            if is_full or not groups or groups[-1][0] is not channel:
                groups.append((channel, []))
                consumers.clear()
            consumers.add(consumer)
            groups[-1][1].append(tag)
        for channel, tags in groups:
            yield channel.reject_up_to(tags)

    def begin_ack(self, number: int) -> asyncio.Future[None]:
        """Acknowledge a message; the future is done when the channel is proven to have taken it.

        It raises ``AmqpError`` if that was lost before: the server may have taken it or not.
        """
        channel, tag = self._place(number)
        return channel.begin_ack(tag)

    @property
    def is_idle(self) -> bool:
        """Whether they hold nothing, every verdict is proven, and every get is answered."""
        return all(one.is_idle for one in self._channels)

    async def idle(self) -> None:
        """Return when they are idle.

        Raises:
            AmqpError: It is over.
        """
        self._check()
        while not self.is_idle:
            self._may_be_idle.clear()
            await self._may_be_idle.wait()
            self._check()

    @property
    def holders(self) -> set[str]:
        """Which consumers hold messages; each answer to a get counts as one."""
        return {name for channel in self._channels for name in channel.holders}

    @property
    def unacked(self) -> int:
        """How many messages are unacknowledged."""
        return len(self._places)


def _pass_on(answer: asyncio.Future[Any], found: asyncio.Future[Any]) -> None:
    if answer.done():
        return
    if found.cancelled():
        answer.cancel()
    elif (error := found.exception()) is not None:
        answer.set_exception(error)
        answer.exception()  # nobody may ask for it
    else:
        answer.set_result(found.result())
