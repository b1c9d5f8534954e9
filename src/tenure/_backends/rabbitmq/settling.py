"""Verdicts.

A message is settled by its acknowledgement. Where it goes on (abandoned, given back, dead), a copy is published first,
with new facts in its headers, and confirmed; then the original is acknowledged. So nothing is lost. If the connection
is lost in between, the server delivers the original again, and there is a copy too many; both have the same sequence
and id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

from tenure._backends.rabbitmq.client import Client
from tenure._backends.rabbitmq.connection import Delivered
from tenure._backends.rabbitmq.delays import DELAY_MAX, steps_of
from tenure._backends.rabbitmq.errors import AmqpError, NotConfirmed
from tenure._backends.rabbitmq.held_channel import HeldChannel
from tenure._backends.rabbitmq.message_format import Facts, FoundMessage, copied, found_message
from tenure._backends.rabbitmq.publishing import Letter, Publisher
from tenure._backends.rabbitmq.receipts import HeldMessage, Receipts
from tenure._lease import NoAnswer
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import EXPIRED, EXPIRED_DESCRIPTION, MAX_DELIVERIES, Attempt, Delivery, exhausted_description
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    LAPSED,
    SETTLED,
    SETTLED_DEAD,
    Abandon,
    Complete,
    DeadLetter,
    GiveBack,
    Lapsed,
    Settled,
    Settlement,
    Verdict,
)
from tenure.errors import TenureError

Send = Callable[[str, Sequence[Outgoing]], Awaitable[object]]
MaxDeliveries = Callable[[str], Awaitable[int]]
Answer = Settled | Lapsed


class Settling:
    """Passes verdicts. On the loop of the connections.

    Args:
        client: The RabbitMQ.
        receipts: What this process holds.
        publisher: Publishes copies.
        send: Sends other messages.
        max_deliveries: Returns how often a message of a queue may be delivered.
    """

    def __init__(
        self, client: Client, receipts: Receipts, publisher: Publisher, send: Send, max_deliveries: MaxDeliveries
    ) -> None:
        self._client = client
        self._receipts = receipts
        self._publisher = publisher
        self._send = send
        self._max_deliveries = max_deliveries
        receipts.put_back = self._begin_end

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled | Lapsed | NoAnswer]:
        """Pass many verdicts; each has its own answer, or ``NoAnswer``.

        Raises:
            AmqpError: None has an answer.
        """
        answers: list[Settled | Lapsed | NoAnswer] = [LAPSED] * len(settlements)
        waiting: list[tuple[int, Delivery, HeldMessage, asyncio.Future[Answer | None]]] = []
        seen: set[tuple[object, int]] = set()
        errors: list[Exception] = []
        refused: list[TenureError] = []
        for index, (delivery, verdict) in enumerate(settlements):
            held = self._receipts.find(delivery)
            key = delivery.token, delivery.sequence
            if held is None or key in seen or (held.verdict is not None and held.verdict != verdict):
                continue
            seen.add(key)
            held.settling += 1
            waiting.append((index, delivery, held, self._begin(held, verdict)))
        for index, delivery, held, future in waiting:  # each to its end, whatever becomes of the others
            try:
                answer = await future
            except (AmqpError, NotConfirmed, OSError) as error:
                errors.append(error)
                answers[index] = NoAnswer(str(self._client.translated(error)))
            except TenureError as error:
                refused.append(error)
            else:
                answers[index] = SETTLED if answer is None else answer
                self._receipts.forget(delivery)
            held.settling -= 1
        if refused:
            raise refused[0]
        if errors and all(isinstance(one, NoAnswer) for one in answers):
            raise errors[0]
        return answers

    def _begin(self, held: HeldMessage, verdict: Verdict) -> asyncio.Future[Answer | None]:
        earlier = held.passing if held.passing is not None and not held.passing[1].done() else None
        is_plain = isinstance(verdict, Complete) and not verdict.sends
        if is_plain and earlier is None and not held.is_acked and held.channel.lost is None:
            held.verdict, held.is_acked = verdict, True
            # No task: most verdicts are these. Its result is None, which means settled.
            return cast("asyncio.Future[Answer | None]", held.channel.begin_ack(held.found.raw.tag))
        if earlier is not None and earlier[0] == verdict:
            passing = earlier[1]  # it was given up, and goes on: a second one would make a second copy
        else:
            passing = asyncio.ensure_future(self._settle_after(held, verdict, earlier))
            held.passing = verdict, passing
        return cast("asyncio.Future[Answer | None]", passing)

    async def _settle_after(
        self, held: HeldMessage, verdict: Verdict, earlier: tuple[Verdict, asyncio.Future[Answer]] | None
    ) -> Answer:
        """Pass a verdict, once it is known that an *earlier* one has failed."""
        if earlier is not None:
            await asyncio.wait({earlier[1]})
            if held.verdict is not None and held.verdict != verdict:
                return LAPSED
        return await self._settle(held, verdict)

    async def _settle(self, held: HeldMessage, verdict: Verdict) -> Answer:
        if held.is_acked:  # by the same verdict, which had no answer
            await held.channel.flow()
            return SETTLED
        if isinstance(verdict, Complete):
            for queue, message in verdict.sends:
                await self._send(queue, [message])
            answer: Answer = SETTLED
        elif held.found.is_dead:
            answer = await self._settle_dead(held, verdict)
        else:
            answer = await self._settle_failed(held, verdict)
        await self._ack(held, verdict)
        return answer

    async def _ack(self, held: HeldMessage, verdict: Verdict) -> None:
        if held.is_acked:
            await held.channel.flow()
        else:
            held.verdict, held.is_acked = verdict, True
            await held.channel.begin_ack(held.found.raw.tag)

    async def _settle_failed(self, held: HeldMessage, verdict: Verdict) -> Answer:
        """Put a copy of a live message back, or among the dead letters."""
        found, now = held.found, time.time()
        count, facts = found.count, found.facts
        if isinstance(verdict, DeadLetter):
            facts = facts.with_expired_attempts(count - 1, now).with_attempt(
                Attempt(count, now, "rejected", verdict.error)
            )
            await self.put_dead(found, facts.dead(verdict.reason, verdict.description, count, now, verdict.error))
            return SETTLED
        if isinstance(verdict, Abandon):
            facts = facts.with_expired_attempts(count - 1, now).with_attempt(
                Attempt(count, now, "abandoned", verdict.error)
            )
            if count >= await self._max_deliveries(found.queue):
                await self.put_dead(found, facts.dead(MAX_DELIVERIES, exhausted_description(count), count, now))
                return SETTLED_DEAD
            if found.is_expired_at(now):
                await self.put_dead(found, facts.dead(EXPIRED, EXPIRED_DESCRIPTION, count, now))
                return SETTLED_DEAD
            await self.put_back(found, replace(facts, deliveries=count), verdict.delay)
            return SETTLED
        assert isinstance(verdict, GiveBack), verdict
        if found.is_expired_at(now):
            await self.put_dead(found, facts.dead(EXPIRED, EXPIRED_DESCRIPTION, count - 1, now))
            return SETTLED_DEAD
        await self.put_back(found, replace(facts, deliveries=count - 1))
        return SETTLED

    async def _settle_dead(self, held: HeldMessage, verdict: Verdict) -> Answer:
        """Put a dead letter back among the dead letters."""
        found = held.found
        if isinstance(verdict, DeadLetter):
            error = verdict.error or found.facts.error
            facts = replace(found.facts, reason=verdict.reason, description=verdict.description, error=error)
            await self.put_back(found, facts)
        elif isinstance(verdict, Abandon) and verdict.delay:
            await self.put_back(found, found.facts, verdict.delay)
        else:
            held.verdict, held.is_acked = verdict, True
            held.channel.reject(found.raw.tag)
            await held.channel.flow()
        return SETTLED

    def _begin_end(self, held: HeldMessage) -> None:
        self._client.begin(self._end_lock(held), "lock-end")

    async def _end_lock(self, held: HeldMessage) -> None:
        """Put a copy of a message back whose lock has ended, with this delivery counted."""
        found = held.found
        try:
            await self.put_back(found, replace(found.facts, deliveries=found.count))
            await held.channel.begin_ack(found.raw.tag)
        except (AmqpError, NotConfirmed, OSError, TenureError):
            with suppress(AmqpError):
                held.channel.reject(found.raw.tag)

    # --- copies ---

    async def put_back(self, found: FoundMessage, facts: Facts, delay: float = 0.0) -> None:
        """Publish a copy of *found* with these *facts* to its queue, to be received after *delay*."""
        steps = steps_of(min(delay, DELAY_MAX)) if delay else 0
        properties = copied(found, facts, now=time.time(), is_delayed=bool(steps))
        await self._publisher.publish(found.queue, [Letter(properties, found.raw.body, steps)])

    async def put_dead(self, found: FoundMessage, facts: Facts) -> None:
        """Publish a copy of *found* as a dead letter."""
        properties = copied(found, facts, now=time.time())
        dead = dead_letters_of(found.queue)
        await self._publisher.publish(dead, [Letter(properties, found.raw.body)])

    async def give_back(self, queue: str, channel: HeldChannel, messages: Sequence[Delivered]) -> None:
        """Give back, uncounted, what came and was not asked for."""
        now = time.time()
        founds = [found_message(queue, one, now) for one in messages]
        letters = []
        for found in founds:
            if not found.is_dead:
                facts = replace(found.facts, deliveries=found.count - 1)
                letters.append(Letter(copied(found, facts, now=now), found.raw.body))
        is_copied = True
        try:
            if letters:
                await self._publisher.publish(queue, letters)
        except (AmqpError, NotConfirmed, OSError, TenureError):
            is_copied = False  # then the server gives them back, and counts it
        acked = []
        for found in founds:
            if found.is_dead or not is_copied:
                channel.reject(found.raw.tag)
            else:
                acked.append(channel.begin_ack(found.raw.tag))
        for future in acked:
            await future
        if not acked:
            await channel.flow()

    async def move_found(self, channel: HeldChannel, found: FoundMessage, reason: str) -> Facts:
        """Move a message to the dead letters that was found expired or exhausted; return its facts there."""
        now, count = time.time(), found.count - 1
        description = EXPIRED_DESCRIPTION if reason == EXPIRED else exhausted_description(count)
        facts = found.facts.with_expired_attempts(count, now).dead(reason, description, count, now)
        await self.put_dead(found, facts)
        await channel.begin_ack(found.raw.tag)
        return facts
