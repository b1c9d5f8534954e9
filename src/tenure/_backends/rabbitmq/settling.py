"""Verdicts.

A message is settled by its acknowledgement. Where it goes on (abandoned, given back, dead), a copy is published first,
with new facts in its headers, and confirmed; then the original is acknowledged. So nothing is lost. If the connection
is lost in between, the server delivers the original again, and there is a copy too many; both have the same sequence
and id. A process that stops gives back all that it has, ``AT_ONCE`` messages of a queue at a time: so a kill just then
leaves no more copies than that.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, cast
from weakref import WeakValueDictionary

from tenure._backends.rabbitmq.client import FAILURES, Client
from tenure._backends.rabbitmq.connection import Delivered
from tenure._backends.rabbitmq.delays import DELAY_MAX, steps_of
from tenure._backends.rabbitmq.errors import AmqpError, Unacceptable
from tenure._backends.rabbitmq.held_channels import HeldChannels
from tenure._backends.rabbitmq.message_format import Facts, FoundMessage, copied, found_message
from tenure._backends.rabbitmq.publishing import Letter, Publisher
from tenure._backends.rabbitmq.receipts import HeldMessage, Receipts
from tenure._backends.rabbitmq.receiving import AT_ONCE
from tenure._lease import NoAnswer
from tenure._queue.delivery_ends import LOCK_ENDED, EndedDelivery, Outcome, noted, outcome_of
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    LAPSED,
    SETTLED,
    Abandon,
    Complete,
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


class Copy(NamedTuple):
    """A copy of a message that goes on elsewhere, or comes back."""

    facts: Facts
    is_dead: bool = False
    """Whether it goes to the dead letters."""
    delay: float = 0.0
    """Seconds until it may be received."""


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
        self._giving_back: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by queue
        receipts.put_back = self._begin_end

    async def settle(self, settlements: Sequence[Settlement]) -> list[Settled | Lapsed | NoAnswer]:
        """Pass many verdicts; each has its own answer, or ``NoAnswer``.

        Raises:
            AmqpError: None has an answer.
        """
        answers: list[Settled | Lapsed | NoAnswer] = [LAPSED] * len(settlements)
        waiting: list[tuple[int, Delivery, HeldMessage, asyncio.Future[Answer | None]]] = []
        errors: list[Exception] = []
        refused: list[TenureError] = []
        try:
            for index, (delivery, verdict), held in self._receipts.find_all(settlements):
                if held.verdict is None or held.verdict == verdict:
                    held.settling += 1
                    waiting.append((index, delivery, held, self._begin(held, verdict)))
            for index, delivery, _, future in waiting:  # each to its end, whatever becomes of the others
                try:
                    answer = await future
                except FAILURES as error:
                    errors.append(error)
                    answers[index] = NoAnswer(str(self._client.translated(error)))
                except TenureError as error:
                    refused.append(error)
                else:
                    answers[index] = SETTLED if answer is None else answer
                    self._receipts.forget(delivery)
        finally:
            for _, _, held, _ in waiting:
                held.settling -= 1
        if refused:
            raise refused[0]
        if errors and all(isinstance(one, NoAnswer) for one in answers):
            raise errors[0]
        return answers

    def _begin(self, held: HeldMessage, verdict: Verdict) -> asyncio.Future[Answer | None]:
        earlier = held.passing if held.passing is not None and not held.passing[1].done() else None
        is_plain = isinstance(verdict, Complete) and not verdict.sends
        if is_plain and earlier is None and held.ending is None and held.channels.lost is None:
            held.verdict, held.ending = verdict, held.channels.begin_ack(held.found.raw.tag)
            # No task: most verdicts are these. Its result is None, which means settled.
            return cast("asyncio.Future[Answer | None]", held.ending)
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
        if held.ending is not None:  # by the same verdict, which had no answer
            await asyncio.shield(held.ending)
            return SETTLED
        if isinstance(verdict, Complete):
            for queue, message in verdict.sends:
                await self._send(queue, [message])
            if held.channels.lost is not None:
                return LAPSED
            await self._ack(held, verdict)
            return SETTLED
        copy, answer = await self._copy_for(held.found, verdict, time.time())
        if isinstance(verdict, GiveBack) and copy is not None:
            async with self._turn_to_give_back(held.found.queue):
                return await self._replace(held, verdict, copy, answer)
        return await self._replace(held, verdict, copy, answer)

    async def _replace(self, held: HeldMessage, verdict: Verdict, copy: Copy | None, answer: Answer) -> Answer:
        """Pass a verdict by a *copy*, or by a rejection if that is none."""
        if held.channels.lost is not None:  # meanwhile, and nothing was done yet: that is certain
            return LAPSED
        if copy is None:
            await self._reject(held, verdict)
            return answer
        try:
            await self._publish(held.channels, held.found, copy)
        except Unacceptable:
            # As it is, the server can move it, or deliver it again; that counts.
            await self._reject(held, verdict, requeue=held.found.is_dead or not copy.is_dead)
        else:
            await self._ack(held, verdict)
        return answer

    def _turn_to_give_back(self, queue: str) -> asyncio.Semaphore:
        return self._giving_back.setdefault(queue, asyncio.Semaphore(AT_ONCE))

    async def _ack(self, held: HeldMessage, verdict: Verdict) -> None:
        if held.ending is None:
            held.verdict, held.ending = verdict, held.channels.begin_ack(held.found.raw.tag)
        await asyncio.shield(held.ending)

    async def _reject(self, held: HeldMessage, verdict: Verdict, *, requeue: bool = True) -> None:
        if held.ending is None:
            held.verdict, held.ending = verdict, held.channels.begin_reject(held.found.raw.tag, requeue=requeue)
        await asyncio.shield(held.ending)

    async def _copy_for(self, found: FoundMessage, verdict: Verdict, now: float) -> tuple[Copy | None, Answer]:
        """Return the copy by which *verdict* is passed, None if none is needed; and the answer."""
        if found.is_dead:
            return _copy_of_dead(found, verdict, now), SETTLED
        most = await self._max_deliveries(found.queue) if isinstance(verdict, Abandon) else math.inf
        outcome = outcome_of(verdict, EndedDelivery(found.count, found.is_expired_at(now)), most, now)
        is_dead = outcome.cause is not None
        facts = noted(found.facts, outcome, now, fills=is_dead or outcome.attempt is not None)
        return Copy(facts, delay=outcome.delay, is_dead=is_dead), outcome.answer

    def _begin_end(self, held: HeldMessage) -> None:
        self._client.begin(self._end_lock(held), "lock-end")

    async def _end_lock(self, held: HeldMessage) -> None:
        """Put a copy of a message back whose lock has ended; of a live one, with this delivery counted."""
        found, now = held.found, time.time()
        copy = Copy(found.facts if found.is_dead else replace(found.facts, deliveries=found.count))
        try:
            if not found.is_dead and found.is_expired_at(now):  # the server would move it, and doesn't know the limit
                most = await self._max_deliveries(found.queue)
                outcome = outcome_of(LOCK_ENDED, EndedDelivery(found.count, is_expired=True), most, now)
                copy = Copy(noted(found.facts, outcome, now, fills=True), is_dead=True)
            await self._publish(held.channels, found, copy)
            if held.ending is None:
                await held.channels.begin_ack(found.raw.tag)
        except (*FAILURES, TenureError):
            with suppress(AmqpError):
                held.channels.begin_reject(found.raw.tag)

    # --- copies ---

    async def _publish(self, channels: HeldChannels, found: FoundMessage, copy: Copy) -> None:
        """Publish a copy of *found* to its queue, or among the dead letters.

        Raises:
            Unacceptable: Its new facts don't fit.
            AmqpError: Its *channels* are lost: then the server delivers it again, and a copy would be one too many.
        """
        if channels.lost is not None:
            raise channels.lost
        steps = steps_of(min(copy.delay, DELAY_MAX)) if copy.delay else 0
        most = await self._publisher.properties_max()
        properties = copied(found, copy.facts, now=time.time(), most=most, is_delayed=bool(steps))
        queue = dead_letters_of(found.queue) if copy.is_dead and not found.is_dead else found.queue
        await self._publisher.publish(queue, [Letter(properties, found.raw.body, steps)])

    async def give_back(self, queue: str, channels: HeldChannels, messages: Sequence[Delivered]) -> None:
        """Give back, uncounted, what came and was not asked for."""
        if channels.lost is not None:  # the server has given them back
            return
        now = time.time()
        founds = [found_message(queue, raw, now) for raw in messages]
        staying = [one for one in founds if one.is_dead and not one.returned]
        staying += await self.write_anew(channels, [one for one in founds if not one.is_dead or one.returned])
        await asyncio.gather(*[channels.begin_reject(one.raw.tag) for one in staying])

    async def write_anew(self, channels: HeldChannels, founds: Sequence[FoundMessage]) -> list[FoundMessage]:
        """Put messages of one queue behind all others, uncounted; return those for which the server takes no copy.

        Once a copy has failed, no more are tried: each might take as long.
        """
        left: list[FoundMessage] = []
        has_failed = False

        async def write(found: FoundMessage) -> None:
            nonlocal has_failed
            async with self._turn_to_give_back(found.queue):
                if has_failed:
                    left.append(found)
                    return
                facts = found.facts if found.is_dead else replace(found.facts, deliveries=found.count - 1)
                try:
                    await self._publish(channels, found, Copy(facts))
                except (*FAILURES, TenureError) as error:
                    if not isinstance(error, Unacceptable):
                        has_failed = True
                    left.append(found)
                else:
                    await channels.begin_ack(found.raw.tag)

        for error in await asyncio.gather(*map(write, founds), return_exceptions=True):
            if error is not None:
                raise error
        return left

    async def move_found(self, channels: HeldChannels, found: FoundMessage, outcome: Outcome, now: float) -> None:
        """Move a message to the dead letters that was found expired or exhausted."""
        facts = noted(found.facts, outcome, now, fills=True)
        try:
            await self._publish(channels, found, Copy(facts, is_dead=True))
        except Unacceptable:
            await channels.begin_reject(found.raw.tag, requeue=False)  # the server moves it, as it is
        except BaseException:  # it is delivered again, and found again
            with suppress(AmqpError):
                channels.begin_reject(found.raw.tag)
            raise
        else:
            await channels.begin_ack(found.raw.tag)


def _copy_of_dead(found: FoundMessage, verdict: Verdict, now: float) -> Copy | None:
    """Return the copy by which *verdict* puts a dead letter back among the dead letters; None if none is needed."""
    outcome = outcome_of(verdict, EndedDelivery(found.facts.deliveries, is_dead=True), math.inf, now)
    if outcome.cause is not None:
        return Copy(noted(found.facts, outcome, now))
    # Deliveries of dead letters don't count, but a policy may let the server drop what was delivered too often.
    return Copy(found.facts, delay=outcome.delay) if outcome.delay or found.returned else None
