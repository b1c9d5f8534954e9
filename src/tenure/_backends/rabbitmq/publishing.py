"""Messages on their way to a queue: published, confirmed, and never dropped because the queue isn't there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from tenure._backends.rabbitmq.client import NOT_FOUND, Client
from tenure._backends.rabbitmq.connection import Properties
from tenure._backends.rabbitmq.delays import STEP, Delays, routing_key
from tenure._backends.rabbitmq.errors import ChannelLost, NotConfirmed, Refused, Returned, TooLarge
from tenure._backends.rabbitmq.message_format import mark_delayed
from tenure._backends.rabbitmq.names import amqp_name

UNCONFIRMED_MAX = 2_000
"""Messages on their way at once, of one call."""

NEW_MAX = 2.0
"""Seconds for which a queue that refuses messages may still be one that another process declares."""

NEW_POLL = 0.02
"""Seconds until a refused message is published again."""


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
            await self._publish(queue, letters[start : start + UNCONFIRMED_MAX])

    async def _publish(self, queue: str, letters: Sequence[Letter]) -> None:
        missing, refused = await self._attempt(queue, letters)
        if missing:  # the queue isn't there, or what delays them
            self._delays.forget()
            await self._ensure(queue)
        refused_until = time.monotonic() + NEW_MAX
        while left := [*missing, *refused]:
            if refused:
                await asyncio.sleep(NEW_POLL)
            is_late = time.monotonic() > refused_until
            missing, refused = await self._attempt(queue, left)
            if missing:
                raise NotConfirmed(f"the queue {amqp_name(queue)!r} is deleted again and again")
            if refused and is_late:
                raise Refused

    async def _attempt(self, queue: str, letters: Sequence[Letter]) -> tuple[list[Letter], list[Letter]]:
        """Publish *letters*; return those whose queue is missing, and those that a queue refused.

        A full queue refuses messages, and so does each quorum queue while it is being declared. None is kept.
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
                return list(letters), []
        channel = await self._client.sending()
        confirmed: list[asyncio.Future[None]] = []
        for properties, body, steps in letters:
            exchange, key = (exchanges[steps], routing_key(steps, queue)) if steps else ("", name)
            confirmed.append(channel.publish(exchange, key, properties, body))
        missing: list[Letter] = []
        refused: list[Letter] = []
        for one, future in zip(letters, confirmed, strict=True):
            try:
                await future
            except Returned:
                missing.append(one)
            except Refused:
                refused.append(one)
            except ChannelLost as error:
                if error.code != NOT_FOUND or not exchanges:
                    raise
                missing.append(one)  # an exchange of delays is gone
        return missing, refused
