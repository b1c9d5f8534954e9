"""Claims of one queue, on a channel of its own.

RabbitMQ sends messages to consumers; it isn't asked for them. There are two ways to make claims of that:

- While nobody listens to the hints of the queue, a claim asks how many messages are ready, begins a consumer that may
  hold so many of them, and ends it when they have come. So a claim takes what is there, no more than asked for, and
  nothing comes later.
- While somebody listens, consumers stand, and a message that comes is a hint. They may hold as many as were last asked
  for: each that is settled makes room for the next, which then is here already when it is asked for.

What comes and isn't asked for within ``KEPT`` goes back, uncounted, so that another process has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

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
from tenure._backends.rabbitmq.held_channel import HeldChannel
from tenure._backends.rabbitmq.names import amqp_name
from tenure._backends.rabbitmq.presence import Presence
from tenure._queue.broker import CLAIM_BYTES
from tenure._runtime.backoff import STEADY, Backoff
from tenure._runtime.clock import Clock
from tenure._runtime.notifier import Notifier
from tenure.errors import TenureError

KEPT = 1.0
"""Seconds for which a message waits to be asked for before it goes back."""

DELETED_WITHIN = 2.0
"""Seconds after which the server has deleted a queue whose consumers it has ended; or another process has remade it."""

LOOKS_AFTER, LOOKS_EVERY = 0.3, 0.05
"""Seconds after which it is asked for the first time whether it has, and then each time."""

SINGLY = 8
"""Messages that are taken one by one, while nobody listens."""

CONSUMERS_MAX = 32
"""Consumers that stand at once: each adds to what the others may hold."""

GiveBack = Callable[["HeldChannel", Sequence[Delivered]], Awaitable[None]]


class Taken(NamedTuple):
    """What a claim has taken."""

    channel: HeldChannel
    messages: list[Delivered]
    is_more: bool
    """Whether there is more at once."""
    asked_at: float
    """When the server was asked, by the clock: their locks count from then."""


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
        lose: Called with a channel whose locks are over.
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
        lose: Callable[[HeldChannel], None],
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
        self._channel: HeldChannel | None = None
        self._listeners = 0
        self._gone_at = -DELETED_WITHIN
        """When the queue was deleted last, by the loop's clock."""
        self._returning = 0  # how many times what waits is being given back
        self.moves = 0
        """Rises when a message has come, was asked for, or is given back."""
        self._stale: asyncio.TimerHandle | None = None
        self._listening: asyncio.Task[object] | None = None
        self._backoff = Backoff()
        self._stands_since: float | None = None  # by the loop's time: since when its consumer has stood
        self._stood_for: float | None = None  # how long one that was lost had stood, until another is begun

    # --- state ---

    @property
    def waiting(self) -> int:
        """How many messages have come and were not asked for yet."""
        channel = self._channel
        return 0 if channel is None else len(channel.waiting)

    @property
    def known_consumers(self) -> int:
        """How many consumers the server counts of this process."""
        return 0 if self._channel is None or self._channel.lost else self._channel.known_consumers

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held, and nobody listens."""
        held = self._channel is not None and not self._channel.lost and self._channel.unacked
        return not (held or self._listeners or self._claiming.locked())

    # --- claims ---

    async def claim(self, limit: int) -> Taken | None:
        """Take up to *limit* messages; None if the queue doesn't exist."""
        async with self._claiming:
            if not self._presence.knows(self._queue) and not await self._presence.has(self._queue):
                return None
            with missing_allowed:
                channel = await self._ready_channel()
                if not self._listeners:
                    await channel.retire()
                asked_at = self._clock.now()  # not before: it may be its turn later than a short lock lasts
                if self._listeners:  # by now, perhaps
                    await self._claim_standing(channel, limit)
                else:
                    await self._claim_exactly(channel, limit)
                if channel.lost is not None:
                    raise channel.lost
                taken = self._take(channel, limit)
                return Taken(channel, taken, bool(channel.waiting) and len(taken) < limit, asked_at)
            self._presence.forget(self._queue)
            return None

    def claim_waiting(self, limit: int) -> Taken | None:
        """Do the same with what has come already, if anything has; on any thread, and without a request."""
        channel, asked_at = self._channel, self._clock.now()
        if channel is None or channel.lost is not None or not channel.waiting or not self._listeners:
            return None
        if self._returning:  # its consumers are being ended, and must not get room for more
            return None
        credit = channel.free_credit
        taken = self._take(channel, limit)
        if not taken or channel.lost is not None:
            return None
        missing = limit - len(taken)
        if missing > credit:
            self._client.call_home(self._raise_credit, missing)
        return Taken(channel, taken, bool(channel.waiting) and missing > 0, asked_at)

    def _raise_credit(self, wanted: int) -> None:
        """Let consumers hold *wanted* more messages than they do."""
        channel = self._channel
        if channel is None or channel.lost is not None or not self._listeners or self._claiming.locked():
            return
        missing = wanted - len(channel.waiting) - channel.free_credit
        if missing > 0 and channel.standing < CONSUMERS_MAX:
            channel.consume(missing)

    async def _claim_exactly(self, channel: HeldChannel, limit: int) -> None:
        while len(channel.waiting) < limit:
            missing = min(limit - len(channel.waiting), await channel.arrived())
            if missing <= SINGLY:
                # One by one: of few, others may take some meanwhile, and a consumer that is ended with credit left may
                # have a message counted. And the count is not that of the log, in which earlier verdicts stand.
                while len(channel.waiting) < limit:
                    if not await channel.get():
                        return
                continue
            goal = len(channel.waiting) + missing
            tag, begun = channel.consume(missing)
            await begun
            if len(channel.waiting) < goal:
                await channel.arrived()
            await channel.cancel(tag)

    async def _claim_standing(self, channel: HeldChannel, limit: int) -> None:
        missing = limit - len(channel.waiting) - channel.free_credit
        if missing > 0 and channel.standing < CONSUMERS_MAX:
            begun = channel.consume(missing)[1]
            if not channel.waiting:
                await begun
        if not channel.waiting:
            await channel.arrived()

    def _take(self, channel: HeldChannel, limit: int) -> list[Delivered]:
        taken: list[Delivered] = []
        size = 0
        while len(taken) < limit and size < CLAIM_BYTES and (one := channel.take()) is not None:
            taken.append(one)
            self.moves += 1
            size += len(one.body)
        return taken

    async def _ready_channel(self) -> HeldChannel:
        if self._channel is None or self._channel.lost is not None:
            await self._wait_until_gone()
            raw = await self._client.receiving()
            channel = HeldChannel(raw, amqp_name(self._queue))
            channel.on_received = self._on_received
            channel.on_queue_gone = lambda: self._on_queue_gone(channel)
            raw.on_lost = lambda error: self._on_lost(channel, error)
            self._channel = channel
        return self._channel

    async def _wait_until_gone(self) -> None:
        """Wait until the server has deleted the queue, if it is doing that.

        It ends the consumers first. On a consumer of a queue that is just being deleted, it ends the connection, with
        all locks on it; and if the queue is declared then, it may lose the processes of all queues.
        """
        while (since := self._client.home.time() - self._gone_at) < DELETED_WITHIN:
            if since >= LOOKS_AFTER and not await self._client.has_queue(amqp_name(self._queue)):
                return
            await asyncio.sleep(LOOKS_EVERY)

    def _on_queue_gone(self, channel: HeldChannel) -> None:
        self._presence.forget(self._queue)
        self._gone_at = self._client.home.time()
        channel.channel.begin_close()

    def lose_held(self) -> None:
        """Note that the queue was deleted, and end the channel if it holds messages, which are gone with it."""
        if self._channel is not None and self._channel.unacked:
            self._on_queue_gone(self._channel)

    def close(self) -> None:
        """Close the channel, which holds nothing."""
        if self._channel is not None:
            self._channel.channel.begin_close()

    # --- what comes by itself ---

    def _on_received(self) -> None:
        self.moves += 1
        if self._listeners:
            self._notifier.notify(self._queue)
        if self._stale is None:
            self._stale = self._client.home.call_later(KEPT, self._check_stale)

    def _check_stale(self) -> None:
        """Give back what has waited for too long."""
        self._stale = None
        since = None if self._channel is None else self._channel.waiting_since
        if since is None:
            return
        age = self._client.home.time() - since
        if age >= KEPT:
            self._client.begin(self.give_back_all(), "give-back")
        else:
            self._stale = self._client.home.call_later(KEPT - age, self._check_stale)

    async def give_back_all(self) -> None:
        """End the consumers that stand, and give back what waits."""
        self._returning += 1
        try:
            await self._give_back_all()
        finally:
            self._returning -= 1

    async def returned(self) -> None:
        """Return when nothing is being given back."""
        while self._returning:
            async with self._claiming:
                await asyncio.sleep(0)

    async def _give_back_all(self) -> None:
        async with self._claiming:
            channel = self._channel
            if channel is None or channel.lost is not None:
                return
            try:
                await channel.retire()
                waiting = channel.take_all()
                self.moves += len(waiting)
                if waiting:
                    await self._give_back(channel, waiting)
            except (*FAILURES, TenureError):
                channel.channel.begin_close()  # then the server gives them back, and counts it

    def _on_lost(self, channel: HeldChannel, error: AmqpError) -> None:
        found = CONSUMER_TIMEOUT.search(error.text)
        if error.code == PRECONDITION_FAILED and found:
            self._client.note_consumer_timeout(int(found[1]) / 1_000)
        if self._channel is channel:
            self._channel = None
        channel.waiting.clear()
        self._lose(channel)
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
        self._listen_again()

    def unlisten(self) -> None:
        """Note that somebody listens no more."""
        self._listeners -= 1
        if not self._listeners:
            if self._listening is not None:
                self._listening.cancel()
                self._listening = None  # one that listens just now begins another
            self._client.begin(self.give_back_all(), "give-back")

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
                        channel = await self._ready_channel()
                        if not channel.standing:
                            await channel.consume(1)[1]
                self._stands_since = asyncio.get_running_loop().time()
                break
            except (AmqpError, OSError, TenureError) as error:
                if isinstance(error, ConnectionLost) and error.code:
                    self._notifier.notify(self._queue)  # so that a claim reports it
            await self._backoff.rest()
        self._notifier.notify(self._queue)
