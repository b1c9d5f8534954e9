"""Messages on their way to a queue: published, confirmed, and never dropped because the queue isn't there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from tenure._backends.rabbitmq.client import NOT_FOUND, Client
from tenure._backends.rabbitmq.connection import Properties
from tenure._backends.rabbitmq.delays import STEP, Delays, routing_key
from tenure._backends.rabbitmq.errors import ChannelLost, NotConfirmed, Returned, TooLarge
from tenure._backends.rabbitmq.message_format import mark_delayed
from tenure._backends.rabbitmq.names import amqp_name

UNCONFIRMED_MAX = 2_000
"""Messages on their way at once, of one call."""


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
        ensure: Declares a queue that isn't there.
        note_delay: Hears until when messages of a queue will be delayed, in Unix seconds; returns its generation.
    """

    def __init__(
        self,
        client: Client,
        delays: Delays,
        ensure: Callable[[str], Awaitable[None]],
        note_delay: Callable[[str, float], Awaitable[int]],
    ) -> None:
        self._client = client
        self._delays = delays
        self._ensure = ensure
        self._note_delay = note_delay

    async def publish(self, queue: str, letters: Sequence[Letter]) -> None:
        """Return when all *letters* are confirmed.

        Raises:
            TooLarge: One is too large. None is sent.
            NotConfirmed: The queue refuses one. Others may be kept.
            AmqpError: The connection failed. Any of them may be kept.
        """
        most = (await self._client.sending()).connection.properties_max
        for index, one in enumerate(letters):
            if (size := len(one.properties.marshal())) > most:
                raise TooLarge(size, index)
        for start in range(0, len(letters), UNCONFIRMED_MAX):
            left = await self._attempt(queue, letters[start : start + UNCONFIRMED_MAX])
            if left:  # the queue isn't there, or what delays them
                self._delays.forget()
                await self._ensure(queue)
                if await self._attempt(queue, left):
                    raise NotConfirmed(f"the queue {amqp_name(queue)!r} is deleted again and again")

    async def _attempt(self, queue: str, letters: Sequence[Letter]) -> list[Letter]:
        """Publish *letters*; return those that came back, as nothing has the name they were sent to."""
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
                return list(letters)
        channel = await self._client.sending()
        confirmed: list[asyncio.Future[None]] = []
        for properties, body, steps in letters:
            exchange, key = (exchanges[steps], routing_key(steps, queue)) if steps else ("", name)
            confirmed.append(channel.publish(exchange, key, properties, body))
        left: list[Letter] = []
        for one, future in zip(letters, confirmed, strict=True):
            try:
                await future
            except Returned:
                left.append(one)
            except ChannelLost as error:
                if error.code != NOT_FOUND or not exchanges:
                    raise
                left.append(one)  # an exchange of delays is gone
        return left
