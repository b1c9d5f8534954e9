"""Claims of one queue, on channels of its own: what carries out the decisions of ``receiving``.

RabbitMQ sends messages to consumers; it isn't asked for them. While somebody listens to the hints of the queue, a few
consumers stand, and a message that comes is a hint. While nobody does, a claim takes what is there. When consumers are
begun and ended, and what goes back, is decided in ``receiving``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from tenure._backends.rabbitmq import receiving
from tenure._backends.rabbitmq.client import (
    CONSUMER_TIMEOUT,
    FAILURES,
    NOT_FOUND,
    PRECONDITION_FAILED,
    Client,
    missing_allowed,
)
from tenure._backends.rabbitmq.connection import Delivered
from tenure._backends.rabbitmq.errors import AmqpError, ConnectionLost
from tenure._backends.rabbitmq.held_channels import HeldChannels
from tenure._backends.rabbitmq.names import amqp_name
from tenure._backends.rabbitmq.presence import Presence
from tenure._backends.rabbitmq.receiving import NEVER, Receiving
from tenure._queue.broker import CLAIM_BYTES
from tenure._runtime.backoff import STEADY, Backoff
from tenure._runtime.clock import Clock
from tenure._runtime.notifier import Notifier
from tenure.errors import TenureError

DELETED_WITHIN = 2.0
"""Seconds after which the server has deleted a queue whose consumers it has ended; or another process has remade it."""

LOOKS_AFTER, LOOKS_EVERY = 0.3, 0.05
"""Seconds after which it is asked for the first time whether it has, and then each time."""

CALM = 0.5
"""Seconds for which nothing has come to channels that are idle before they are begun anew. A verdict makes room for
another message, which the queue sends when it has written the verdict: it answers nothing then."""

TAG = "tenure-"
"""How the tags of consumers begin; the rest is their number."""

GiveBack = Callable[["HeldChannels", Sequence[Delivered]], Awaitable[None]]


class Taken(NamedTuple):
    """What a claim has taken."""

    channels: HeldChannels
    messages: list[Delivered]
    is_more: bool
    """Whether it is worth asking again at once."""
    asked_at: float
    """When the server was asked, by the clock: their locks count from then."""


class Receiver:
    """Channels, and the machine that decides about its consumers. On the loop of the connections.

    Args:
        client: The RabbitMQ.
        channels: New.
        give_back: Gives messages back, uncounted.
        on_hint: Called when a message has come for a listener.
        on_move: Called when a message has come, was asked for, or is given back.
    """

    def __init__(
        self,
        client: Client,
        channels: HeldChannels,
        give_back: GiveBack,
        on_hint: Callable[[], None],
        on_move: Callable[[], None],
    ) -> None:
        self.channels = channels
        self.machine = Receiving()
        self.is_idle = asyncio.Event()
        """Set while nothing is given back."""
        self.is_idle.set()
        self._client = client
        self._loop = channels.loop
        self._give_back = give_back
        self._on_hint = on_hint
        self._on_move = on_move
        self._bodies: dict[int, Delivered] = {}  # of what waits; any thread may take from it
        self._claims: dict[int, asyncio.Future[tuple[list[Delivered], bool]]] = {}
        self._numbers = itertools.count(1)
        self._alarm: asyncio.TimerHandle | None = None
        self._closed = asyncio.Event()
        channels.on_received = self._received
        channels.on_verdict = lambda tag: self.feed(receiving.Verdict(tag))

    async def claim(self, limit: int) -> tuple[list[Delivered], bool]:
        """Take up to *limit* messages; return them, and whether it is worth asking again at once.

        Raises:
            AmqpError: The channels are lost.
        """
        if self.channels.lost is not None:
            raise self.channels.lost
        number = next(self._numbers)
        answer: asyncio.Future[tuple[list[Delivered], bool]] = self._loop.create_future()
        self._claims[number] = answer
        self.feed(receiving.Claim(number, limit, CLAIM_BYTES))
        try:
            return await answer
        except asyncio.CancelledError:
            if self._claims.pop(number, None) is not None:
                self.feed(receiving.GiveUp(number))
            elif not answer.cancelled() and answer.exception() is None:
                for one in answer.result()[0]:
                    self._begin_give_back(one)
            raise

    @property
    def known_consumers(self) -> int:
        """How many consumers the server counts of these channels: those that stand, and those that hold messages."""
        return len({f"{TAG}{one}" for one in self.machine.consumers} | self.channels.holders)

    def take(self, limit: int) -> list[Delivered]:
        """Take up to *limit* messages of what waits; on any thread."""
        return self._taken(self.machine.take(limit, CLAIM_BYTES))

    def _taken(self, messages: Sequence[int]) -> list[Delivered]:
        if messages:
            self._on_move()
        return [self._bodies.pop(one) for one in messages]

    def put_back(self, messages: Sequence[Delivered]) -> None:
        """Undo :meth:`take`; on any thread."""
        self._bodies.update((one.tag, one) for one in messages)
        self.machine.put_back([receiving.Waiting(one.tag, one.at, len(one.body)) for one in messages])
        self._client.call_home(self.feed, receiving.Tick())

    async def close(self) -> None:
        """End all consumers, and give back what waits."""
        if self.channels.lost is None:
            self.feed(receiving.Close())
            await self._closed.wait()

    def lose(self) -> None:
        """Note that the channels are lost."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._closed.set()
        self.is_idle.set()
        claims, self._claims = self._claims, {}
        for answer in claims.values():
            if not answer.done() and self.channels.lost is not None:
                answer.set_exception(self.channels.lost)
                answer.exception()  # it may be given up

    # --- the machine ---

    def feed(self, given: receiving.Input) -> None:
        """Tell the machine something, and do what it says."""
        if self.channels.lost is not None:
            return
        with suppress(AmqpError):  # the channel was lost just now
            for effect in self.machine.handle(given, self._loop.time()):
                self._carry_out(effect)
        if not self.machine.returning:
            self.is_idle.set()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if (at := self.machine.wake_at) < NEVER and self.channels.lost is None:
            self._alarm = self._loop.call_at(at, self.feed, receiving.Tick())

    def _carry_out(self, effect: receiving.Effect) -> None:
        match effect:
            case receiving.Begin(tag, credit):
                self.channels.consume(f"{TAG}{tag}", credit)
            case receiving.End(tag):
                self.channels.cancel(f"{TAG}{tag}")
            case receiving.Get():
                self._then(self.channels.get(), self._got)
            case receiving.Count():
                self._then(self.channels.count(), self._counted)
            case receiving.Await():
                self._then(self.channels.arrived(), lambda _: self.feed(receiving.Arrived()))
            case receiving.Answer(claim, messages, is_more):
                answer = self._claims.pop(claim)
                taken = self._taken(messages)
                if not answer.done():
                    answer.set_result((taken, is_more))
                else:
                    for one in taken:
                        self._begin_give_back(one)
            case receiving.GiveBack(message):
                self._on_move()
                self._begin_give_back(self._bodies.pop(message))
            case receiving.Hint():
                self._on_hint()
            case receiving.Closed():
                self._closed.set()

    def _then(self, answer: asyncio.Future[Any], act: Callable[[Any], None]) -> None:
        def done(answer: asyncio.Future[Any]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                act(answer.result())

        answer.add_done_callback(done)

    def _received(self, delivered: Delivered) -> None:
        self._bodies[delivered.tag] = delivered
        self._on_move()
        name = delivered.consumer
        tag = int(name.removeprefix(TAG)) if name.startswith(TAG) else None
        self.feed(receiving.Came(tag, delivered.tag, len(delivered.body)))

    def _got(self, found: object) -> None:
        if found is None:  # else it has been received
            self.feed(receiving.GotNothing())

    def _counted(self, answer: Any) -> None:
        others = answer.consumer_count - self.known_consumers
        self.feed(receiving.Counted(answer.message_count, others))

    def _begin_give_back(self, delivered: Delivered) -> None:
        self.is_idle.clear()
        self._client.begin(self._give_one_back(delivered), "give-back")

    async def _give_one_back(self, delivered: Delivered) -> None:
        try:
            await self._give_back(self.channels, [delivered])
        except (*FAILURES, TenureError):
            self.channels.begin_close()  # then the server gives it back, and counts it


class Subscription:
    """The claims of one queue by this process. On the loop of the connections.

    Args:
        client: The RabbitMQ.
        clock: By which locks end.
        queue: The queue, or its dead letters.
        notifier: Hears of messages that come.
        presence: Knows whether the queue runs.
        ensure: Declares the queue if it isn't there.
        give_back: Gives messages back, uncounted.
        lose: Called with channels whose locks are over.
    """

    def __init__(
        self,
        client: Client,
        clock: Clock,
        queue: str,
        notifier: Notifier,
        presence: Presence,
        ensure: Callable[[str], Awaitable[None]],
        give_back: GiveBack,
        lose: Callable[[HeldChannels], None],
    ) -> None:
        self._client = client
        self._clock = clock
        self._queue = queue
        self._notifier = notifier
        self._presence = presence
        self._ensure = ensure
        self._give_back = give_back
        self._lose = lose
        self._claiming = asyncio.Lock()
        self._receiver: Receiver | None = None
        self._listeners = 0
        self._gone_at = -DELETED_WITHIN
        """When the queue was deleted last, by the loop's clock."""
        self.moves = 0
        """Rises when a message has come, was asked for, or is given back."""
        self._listening: asyncio.Task[object] | None = None
        self._backoff = Backoff()
        self._stands_since: float | None = None  # by the loop's time: since when its consumer has stood
        self._stood_for: float | None = None  # how long one that was lost had stood, until another is begun

    # --- state ---

    @property
    def channels(self) -> HeldChannels | None:
        """The channels on which messages come."""
        return None if self._receiver is None else self._receiver.channels

    @property
    def waiting(self) -> int:
        """How many messages have come and were not asked for yet."""
        return 0 if self._receiver is None else len(self._receiver.machine.waiting)

    @property
    def standing(self) -> int:
        """How many consumers may receive something."""
        return 0 if self._receiver is None else self._receiver.machine.free

    @property
    def known_consumers(self) -> int:
        """How many consumers the server counts of this process: those that stand, and those that hold messages."""
        return 0 if self._receiver is None else self._receiver.known_consumers

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held, and nobody listens."""
        held = self._receiver is not None and self._receiver.channels.unacked
        return not (held or self._listeners or self._claiming.locked())

    # --- claims ---

    async def claim(self, limit: int) -> Taken | None:
        """Take up to *limit* messages; None if the queue doesn't exist."""
        async with self._claiming:
            if not self._presence.knows(self._queue) and not await self._presence.has(self._queue):
                return None
            with missing_allowed:
                receiver = await self._ready_receiver()
                asked_at = self._clock.now()  # not before: it may be its turn later than a short lock lasts
                messages, is_more = await receiver.claim(limit)
                if receiver.channels.lost is not None:
                    raise receiver.channels.lost
                return Taken(receiver.channels, messages, is_more, asked_at)
            self._presence.forget(self._queue)
            return None

    def claim_waiting(self, limit: int) -> Taken | None:
        """Do the same with what has come already, if anything has; on any thread, and without a request."""
        receiver, asked_at = self._receiver, self._clock.now()
        if receiver is None or receiver.channels.lost is not None or not self._listeners:
            return None
        taken = receiver.take(limit)
        if not taken or receiver.channels.lost is not None:
            return None
        missing, machine = limit - len(taken), receiver.machine
        is_more = bool(machine.waiting)
        if missing:
            is_more = is_more or not (machine.is_calm or machine.free)
            # Not before the handlers that are woken now have begun: the other thread would take turns with them.
            asyncio.get_running_loop().call_later(0, self._client.call_home, receiver.feed, receiving.Taken(missing))
        return Taken(receiver.channels, taken, is_more and missing > 0, asked_at)

    def put_back(self, taken: Taken) -> None:
        """Undo :meth:`claim_waiting`."""
        receiver = self._receiver
        if receiver is not None and receiver.channels is taken.channels:  # else it is delivered again
            receiver.put_back(taken.messages)

    async def _ready_receiver(self) -> Receiver:
        if self._receiver is None or self._receiver.channels.lost is not None:  # it may have been, from the start
            await self._wait_until_gone()
            channels = HeldChannels(await self._client.receiving(), amqp_name(self._queue))
            receiver = Receiver(self._client, channels, self._give_back, self._on_hint, self._on_move)
            channels.on_queue_gone = lambda: self._on_queue_gone(channels)
            channels.on_lost = lambda error: self._on_lost(receiver, error)
            self._receiver = receiver
        return self._receiver

    async def _wait_until_gone(self) -> None:
        """Wait until the server has deleted the queue, if it is doing that.

        It ends the consumers first. On a consumer of a queue that is just being deleted, it ends the connection, with
        all locks on it; and if the queue is declared then, it may lose the processes of all queues.
        """
        while (since := self._client.home.time() - self._gone_at) < DELETED_WITHIN:
            if since >= LOOKS_AFTER and not await self._client.has_queue(amqp_name(self._queue)):
                return
            await asyncio.sleep(LOOKS_EVERY)

    def _on_queue_gone(self, channels: HeldChannels) -> None:
        self._presence.forget(self._queue)
        self._gone_at = self._client.home.time()
        channels.begin_close()

    def lose_held(self) -> None:
        """Note that the queue was deleted, and end the channels if they hold messages, which are gone with it."""
        if self._receiver is not None and self._receiver.channels.unacked:
            self._on_queue_gone(self._receiver.channels)
        elif self._receiver is not None and not self._listeners:
            self._receiver.channels.begin_close()

    def begin_anew(self) -> None:
        """End the channels, as the queue was made anew: as soon as they are idle, and nobody claims."""
        if (channels := self.channels) is not None:
            self._client.spawn(self._end_idle(channels), "begin-anew")

    async def _end_idle(self, channels: HeldChannels) -> None:
        """End *channels* when they are idle, and nothing is on its way to a consumer: the server would count that."""
        with suppress(AmqpError):  # they are over
            while channels.lost is None:
                await channels.idle()
                moves = channels.moves
                await asyncio.sleep(CALM)
                await channels.arrived()
                async with self._claiming:
                    if channels.is_idle and channels.moves == moves:
                        channels.begin_close()

    async def give_back_all(self) -> None:
        """End all consumers, and give back what waits: nothing is received any more."""
        if self._receiver is not None:
            await self._receiver.close()

    async def close(self) -> None:
        """Do so, and close the channels, which hold nothing then."""
        if (receiver := self._receiver) is not None:
            await receiver.close()
            receiver.channels.begin_close()

    async def arrived(self) -> None:
        """Return when all has come that the queue has sent so far."""
        if self._receiver is not None:
            await self._receiver.channels.arrived()

    async def returned(self) -> None:
        """Return when nothing is being given back."""
        if self._receiver is not None:
            await self._receiver.is_idle.wait()

    # --- what comes by itself ---

    def _on_move(self) -> None:
        self.moves += 1

    def _on_hint(self) -> None:
        self._notifier.notify(self._queue)

    def _on_lost(self, receiver: Receiver, error: AmqpError) -> None:
        found = CONSUMER_TIMEOUT.search(error.text)
        if error.code == PRECONDITION_FAILED and found:
            self._client.note_consumer_timeout(int(found[1]) / 1_000)
        if self._receiver is receiver:
            self._receiver = None
        receiver.lose()
        self._lose(receiver.channels)
        if error.code != NOT_FOUND:  # else each claim would lose its channel, and each loss would lead to a claim
            self._notifier.notify(self._queue)  # a claim finds out what is there now
        if self._stands_since is not None:
            self._stood_for = asyncio.get_running_loop().time() - self._stands_since
            self._stands_since = None
        if self._listeners:
            self._listen_again()

    # --- hints ---

    def listen(self) -> None:
        """Note that somebody listens."""
        self._listeners += 1
        if self._listeners > 1:
            return
        if self._receiver is not None:
            receiver = self._receiver
            self._begin_to_listen(receiver)
            if receiver.machine.waiting:
                self._notifier.notify(self._queue)
        else:
            self._listen_again()

    def unlisten(self) -> None:
        """Note that somebody listens no more."""
        self._listeners -= 1
        if self._listeners:
            return
        if self._listening is not None:
            self._listening.cancel()
            self._listening = None  # one that listens just now begins another
        if self._receiver is not None and self._receiver.machine.listeners:
            self._receiver.feed(receiving.Unlisten())

    def _begin_to_listen(self, receiver: Receiver) -> None:
        if not receiver.machine.listeners:
            receiver.feed(receiving.Listen())
        self._stands_since = self._client.home.time()

    def _listen_again(self) -> None:
        if self._listening is None or self._listening.done():
            self._listening = self._client.spawn(self._begin_listening(), "listen")

    async def _begin_listening(self) -> None:
        """Begin a consumer, and notify the listeners once it stands: from there on, no message is missed."""
        stood_for, self._stood_for = self._stood_for, None
        if stood_for is not None:
            self._backoff.reset_after(stood_for)
            if stood_for < STEADY:  # the server may accept each consumer, and end it at once
                await self._backoff.rest()
        while self._listeners:
            try:
                async with asyncio.timeout(self._client.options.timeout):
                    await self._wait_until_gone()
                    await self._ensure(self._queue)
                    async with self._claiming:
                        receiver = await self._ready_receiver()
                        self._begin_to_listen(receiver)
                        await receiver.channels.stand()  # until its consumer stands, or was refused
                break
            except (AmqpError, OSError, TenureError) as error:
                if isinstance(error, ConnectionLost) and error.code:
                    self._notifier.notify(self._queue)  # so that a claim reports it
            await self._backoff.rest()
        self._notifier.notify(self._queue)
