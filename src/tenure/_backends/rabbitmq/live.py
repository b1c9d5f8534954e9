"""Messages that are looked at, purged or moved while nobody receives them: those that are ready, and dead letters.

RabbitMQ shows no message without delivering it, and counts every delivery. So those that are looked at are received,
and given back: live ones as uncounted copies, behind the others; dead letters as they are, as nothing counts their
deliveries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from aiormq import spec

from tenure._backends.rabbitmq.client import Client, missing_allowed
from tenure._backends.rabbitmq.connection import Delivered
from tenure._backends.rabbitmq.errors import Unacceptable
from tenure._backends.rabbitmq.held_channel import HeldChannel
from tenure._backends.rabbitmq.message_format import FoundMessage, copied, death_of, delivery_of, found_message
from tenure._backends.rabbitmq.names import amqp_name, is_queue
from tenure._backends.rabbitmq.publishing import Letter, Publisher
from tenure._backends.rabbitmq.receiving import BULK_MIN, bulk_of
from tenure._backends.rabbitmq.settling import Settling
from tenure._queue.broker import EVERYTHING, LiveSelection, Selection
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import DeadMessage, LiveMessage, dead_message_of, live_message_of

PAGE = 200
"""Messages that are received at once."""

SETTLING_LAG = 0.02
"""Seconds after which a queue has written what was acknowledged or given back, which it does not answer itself."""

SHOWN_MAX = 200
"""Live messages that are looked at: each is written anew."""


class Browser:
    """Looks at messages. On the loop of the connections.

    Args:
        client: The RabbitMQ.
        settling: Gives messages back.
        publisher: Publishes messages that are redriven.
        next_sequence: Makes a new sequence.
    """

    def __init__(
        self, client: Client, settling: Settling, publisher: Publisher, next_sequence: Callable[[], int]
    ) -> None:
        self._client = client
        self._settling = settling
        self._publisher = publisher
        self._next_sequence = next_sequence

    async def count(self, queue: str) -> tuple[int, int]:
        """Return how many messages of *queue* are ready, and how many consumers it has; those that hold some, too."""
        if is_queue(name := amqp_name(queue)):
            with missing_allowed:
                [answer] = await self._client.request(spec.Queue.Declare(0, name, passive=True))
                return answer.message_count, answer.consumer_count
        return 0, 0

    async def is_empty(self, queue: str) -> bool:
        """Return whether *queue* has no ready message, by its log.

        The count is not that of the log, and 0 if the leader of the queue doesn't answer in time.
        """
        async with self._received(queue) as pages:
            return not await pages.has_more()

    # --- live messages ---

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show ready messages, of the first ``SHOWN_MAX``."""
        shown: list[FoundMessage] = []
        async with self._received(queue) as pages:
            async for page in pages(min(SHOWN_MAX, await self._most(queue))):
                shown += [one for one in page if _is_live(one, which)]
        shown.sort(key=lambda one: one.facts.sequence)
        return [_live(one) for one in shown[:limit]]

    async def purge(self, queue: str, which: LiveSelection, *, dry_run: bool) -> int:
        """Remove ready messages for good."""
        ready = await self._most(queue)
        if replace(which, states=None) == LiveSelection():
            if dry_run or not ready:
                return ready
            [answer] = await self._client.request(spec.Queue.Purge(0, amqp_name(queue)))
            return int(answer.message_count)

        return await self._remove(queue, lambda one: _is_live(one, which), ready, None, None if dry_run else _drop)

    # --- dead letters ---

    async def peek_dead(self, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters: of as many pages as it takes to find *limit*, those with the lowest sequences."""
        which, dead = which.at(time.time()), dead_letters_of(queue)
        shown: list[FoundMessage] = []
        async with self._received(dead) as pages:
            async for page in pages(await self._most(dead)):
                shown += [one for one in page if _is_dead(one, which)]
                if len(shown) >= limit:
                    break
        shown.sort(key=lambda one: one.facts.sequence)
        return [_dead(queue, one) for one in shown[:limit]]

    async def redrive(self, queue: str, which: Selection, limit: int | None, *, dry_run: bool, to: str | None) -> int:
        """Put dead letters back into *queue*, or into the queue *to*."""
        which, dead = which.at(time.time()), dead_letters_of(queue)
        ready = await self._most(dead)
        if dry_run and which == EVERYTHING:
            return ready if limit is None else min(ready, limit)

        async def put(one: FoundMessage) -> None:
            facts = one.facts.redriven()
            id_ = None
            if to is not None:
                facts, id_ = replace(facts, sequence=self._next_sequence(), sent_at=time.time()), one.id
            properties = copied(one, facts, now=time.time(), id_=id_)
            await self._publisher.publish(to or queue, [Letter(properties, one.raw.body)])

        act = None if dry_run else put
        return await self._remove(dead, lambda one: _is_dead(one, which), ready, limit, act)

    async def purge_dead(self, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""
        which, dead = which.at(time.time()), dead_letters_of(queue)
        ready = await self._most(dead)
        return await self._remove(dead, lambda one: _is_dead(one, which), ready, limit, _drop)

    # --- both ---

    async def _most(self, queue: str) -> int:
        """Return how many messages are ready, those included that were given back just now."""
        await asyncio.sleep(SETTLING_LAG)
        return (await self.count(queue))[0]

    async def _remove(
        self,
        queue: str,
        is_selected: Callable[[FoundMessage], bool],
        most: int,
        limit: int | None,
        act: Callable[[FoundMessage], Awaitable[None]] | None,
    ) -> int:
        """Call *act* with the selected ones of the first *most* messages, then remove them; return how many.

        One that is too large for *act* stays.

        Without *act*, only count them. The others are held until all have been looked at.
        """
        count = 0
        async with self._received(queue) as pages:
            async for page in pages(most):
                for one in sorted(page, key=lambda one: one.facts.sequence):
                    if (limit is not None and count >= limit) or not is_selected(one):
                        continue
                    if act is not None:
                        try:
                            await act(one)
                        except Unacceptable:  # with what a copy needs; another program has sent it, and it stays here
                            continue
                        pages.remove(one)
                    count += 1
                if limit is not None and count >= limit:
                    break
        return count

    @asynccontextmanager
    async def _received(self, queue: str) -> AsyncIterator[Pages]:
        """Receive messages on a channel of its own, and give back those that aren't removed."""
        channel = HeldChannel(await self._client.receiving(), amqp_name(queue))
        pages = Pages(channel, queue)
        try:
            yield pages
            await pages.finish()
            left = [one.raw for one in pages.held.values()]
            if left:
                await self._settling.give_back(queue, channel, left)
                await asyncio.sleep(SETTLING_LAG)  # so that they are counted when this returns
        finally:
            channel.channel.begin_close()


class Pages:
    """The messages of a queue, page by page, each held until the end."""

    def __init__(self, channel: HeldChannel, queue: str) -> None:
        self.held: dict[int, FoundMessage] = {}
        self._channel = channel
        self._queue = queue
        self._removed: list[Any] = []
        self._came: list[Delivered] = []
        self._bulks = self._gets = 0  # the server counts a consumer for each
        channel.on_received = self._came.append

    async def __call__(self, most: int) -> AsyncIterator[list[FoundMessage]]:
        """Yield up to *most* messages."""
        while most > 0:
            want = min(PAGE, most)
            with missing_allowed:
                await self._receive(want)
            page = self._hold()
            if page:
                yield page
            if len(page) < want:
                return
            most -= want

    async def _receive(self, want: int) -> None:
        """Receive up to *want* messages: many by consumers that are full at once, the others one by one.

        One that was not filled, as others took most between the requests, must not be ended: it ends with the channel.
        """
        while len(self._came) < want:
            counted = await self._channel.count()
            others = max(1, counted.consumer_count - self._bulks - self._gets)
            credit = min(bulk_of(counted.message_count, others), want - len(self._came))
            if credit < BULK_MIN:
                break
            self._bulks += 1
            tag, goal = f"bulk-{self._bulks}", len(self._came) + credit
            self._channel.consume(tag, credit)
            await self._channel.arrived()
            if len(self._came) < goal:
                break
            await self._channel.cancel(tag)
        while len(self._came) < want and await self._channel.get() is not None:
            self._gets += 1

    async def has_more(self) -> bool:
        """Return whether there is one more message, which is held, too."""
        with missing_allowed:
            await self._channel.get()
        return bool(self._hold())

    def _hold(self) -> list[FoundMessage]:
        now = time.time()
        page = [found_message(self._queue, one, now) for one in self._came]
        self._came.clear()
        self.held.update((one.raw.tag, one) for one in page)
        return page

    def remove(self, one: FoundMessage) -> None:
        """Remove a message for good."""
        del self.held[one.raw.tag]
        self._removed.append(self._channel.begin_ack(one.raw.tag))

    async def finish(self) -> None:
        """Wait until all are removed that were to be."""
        for future in self._removed:
            await future


def _is_live(one: FoundMessage, which: LiveSelection) -> bool:
    return not one.is_expired_at(time.time()) and which.fits(
        one.facts.sequence, lambda: one.id, None, one.facts.sent_at
    )


def _is_dead(one: FoundMessage, which: Selection) -> bool:
    return which.fits(one.facts.sequence, one.id, death_of(one.facts))


async def _drop(one: FoundMessage) -> None:
    """Do nothing with a message that is removed."""


def _live(one: FoundMessage) -> LiveMessage:
    return live_message_of(delivery_of(one, "", 0.0)._replace(delivery_count=one.count - 1), "ready")


def _dead(queue: str, one: FoundMessage) -> DeadMessage:
    delivery = delivery_of(one, "", 0.0)._replace(delivery_count=one.facts.deliveries)
    return dead_message_of(queue, delivery, death_of(one.facts))
