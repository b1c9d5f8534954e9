"""Messages on their way to a queue: published, confirmed, and never dropped because the queue isn't there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from tenure._backends.rabbitmq.client import NOT_FOUND, Client
from tenure._backends.rabbitmq.delays import STEP, Delays, routing_key
from tenure._backends.rabbitmq.errors import (
    AmqpError,
    ChannelLost,
    NotConfirmed,
    NotTaken,
    Refused,
    Rejected,
    Returned,
    TooLarge,
)
from tenure._backends.rabbitmq.message_format import mark_delayed, mark_queue
from tenure._backends.rabbitmq.names import amqp_name, is_queue
from tenure._backends.rabbitmq.presence import Presence
from tenure._backends.rabbitmq.properties import Properties
from tenure._backends.rabbitmq.rejections import too_large

UNCONFIRMED_MAX = 2_000
"""Messages on their way at once, of one call."""

NOTES_ROOM = 4_096
"""Bytes of the properties that a new message leaves for what is noted with a copy of it: its counts, and why it died,
if not all else; an eighth of a frame at most, where those are small."""

NEW_MAX = 2.0
"""Seconds for which a queue that refuses messages, and is not known yet, may be one that another process declares."""

NEW_POLL, NEW_POLL_MAX = 0.02, 0.3
"""Seconds until a refused message is published again: at first, and when they have doubled often."""


class Letter(NamedTuple):
    """A message to be published."""

    properties: Properties
    body: bytes
    steps: int = 0
    """How many steps it is delayed by."""


class Publisher:
    """Publishes messages. On the loop of the connections.

    Args:
        client: The RabbitMQ.
        delays: The queues of delays.
        presence: Knows which queues run.
        ensure: Declares a queue that isn't there.
        note_delay: Hears until when messages of a queue will be delayed, in Unix seconds; returns its generation.
    """

    def __init__(
        self,
        client: Client,
        delays: Delays,
        presence: Presence,
        ensure: Callable[[str], Awaitable[None]],
        note_delay: Callable[[str, float], Awaitable[int]],
    ) -> None:
        self._client = client
        self._delays = delays
        self._presence = presence
        self._ensure = ensure
        self._note_delay = note_delay

    async def publish(self, queue: str, letters: Sequence[Letter], *, are_new: bool = False) -> None:
        """Return when all *letters* are confirmed; *are_new* if each has to have room for what is noted later.

        Raises:
            TooLarge: One is too large. None is sent.
            Rejected: The server refuses one. Others may be kept.
            NotConfirmed: The queue refuses one. Others may be kept.
            AmqpError: The connection failed. Any of them may be kept.
        """
        frame = await self.properties_max()
        most = frame - min(NOTES_ROOM, frame // 8) if are_new else frame
        for index, one in enumerate(letters):
            mark_queue(one.properties, queue)
            if (size := len(one.properties.marshal())) > most:
                raise TooLarge(
                    f"the properties of a message take {size:,} bytes, and a frame has room for {frame:,}, of which "
                    f"{frame - most:,} are kept for what tenure notes with it; put what is large into the body",
                    index,
                )
            if self._client.body_max is not None and len(one.body) > self._client.body_max:
                raise TooLarge(too_large(one.body, self._client.body_max), index)
        for start in range(0, len(letters), UNCONFIRMED_MAX):
            try:
                await self._publish(queue, letters[start : start + UNCONFIRMED_MAX])
            except Rejected as error:
                error.index += start
                raise

    async def properties_max(self) -> int:
        """Return how many bytes the properties of a message may have."""
        return (await self._client.sending()).connection.properties_max

    async def _publish(self, queue: str, letters: Sequence[Letter]) -> None:
        name, is_new = amqp_name(queue), not self._presence.knows(queue)
        is_made = False
        refused_until = time.monotonic() + min(NEW_MAX, self._client.options.timeout / 2)
        pause = NEW_POLL
        left: Sequence[Letter] = letters
        while True:
            try:
                missing, refused, untaken = await self._attempt(queue, left)
            except Rejected as error:
                error.index = next(index for index, one in enumerate(letters) if one is left[error.index])
                raise
            left = [*missing, *refused, *untaken]
            if not left:
                return
            if missing:  # the queue isn't there, or what delays them
                if is_made:
                    raise NotConfirmed(f"the queue {name!r} is deleted again and again")
                is_new = is_made = True
                self._presence.forget(queue)
                self._delays.forget()
                await self._ensure(queue)
            elif not refused:
                pause = NEW_POLL  # the channel was closed for another message, and a new one is opened
            elif time.monotonic() > refused_until or not (is_new or any(one.steps for one in refused)):
                raise NotConfirmed(
                    f"the queue {name!r} takes no more messages: it is full, or its leader is just being elected; "
                    "receive from it, or raise what limits its length (max-length, max-length-bytes) in its policy"
                )
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, NEW_POLL_MAX)

    async def _attempt(self, queue: str, letters: Sequence[Letter]) -> tuple[list[Letter], list[Letter], list[Letter]]:
        """Publish *letters*; return those whose queue is missing, those that a queue refused, and those not taken.

        A full queue refuses messages, and keeps none of them; so does each quorum queue while it is being declared.
        """
        name = amqp_name(queue)
        exchanges: dict[int, str] = {}
        delayed = [one for one in letters if one.steps]
        if delayed:
            steps_needed = {one.steps for one in delayed}
            generation = await self._note_delay(queue, time.time() + max(steps_needed) * STEP)
            for one in delayed:
                mark_delayed(one.properties, generation)
            try:
                exchanges = await self._delays.ready(queue, steps_needed)
            except ChannelLost as error:
                if error.code != NOT_FOUND:
                    raise
                return list(letters), [], []
        comes_back = is_queue(name)  # else it does so although it has been delivered
        channel = await self._client.sending()
        confirmed: list[asyncio.Future[None]] = []
        for properties, body, steps in letters:
            exchange, key = (exchanges[steps], routing_key(steps, queue)) if steps else ("", name)
            confirmed.append(channel.publish(exchange, key, properties, body, mandatory=comes_back))
        missing: list[Letter] = []
        refused: list[Letter] = []
        untaken: list[Letter] = []
        failed: list[AmqpError] = []
        for index, (one, future) in enumerate(zip(letters, confirmed, strict=True)):
            try:
                await future
                if comes_back and not one.steps:
                    self._presence.note(queue)
            except Returned:
                missing.append(one)
            except Refused:
                refused.append(one)
            except NotTaken:
                untaken.append(one)
            except Rejected as error:
                error.index = index
                raise
            except AmqpError as error:
                if isinstance(error, ChannelLost) and error.code == NOT_FOUND and one.steps:
                    missing.append(one)  # an exchange of delays is gone
                else:
                    failed.append(error)  # one behind it may be the reason
        if failed:
            raise failed[0]
        return missing, refused, untaken
