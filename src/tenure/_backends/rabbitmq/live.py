"""Messages that are looked at, purged or moved while nobody receives them: those that are ready, and dead letters.

RabbitMQ shows no message without delivering it, and counts every delivery. So those that are looked at are received,
page by page, and given back: live ones as uncounted copies, behind the others; dead letters as they are, at first, when
all have been looked at. Until then, no more is kept of them than their numbers. The server keeps what was given back
before what never was, and in its order; so dead letters that have all been looked at are in the order that they had.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from aiormq import spec

from tenure._backends.rabbitmq.client import Client, missing_allowed
from tenure._backends.rabbitmq.connection import Delivered
from tenure._backends.rabbitmq.errors import AmqpError, Unacceptable
from tenure._backends.rabbitmq.held_channels import HeldChannels
from tenure._backends.rabbitmq.message_format import FoundMessage, copied, death_of, delivery_of, found_message
from tenure._backends.rabbitmq.names import amqp_name, is_queue
from tenure._backends.rabbitmq.publishing import Letter, Publisher
from tenure._backends.rabbitmq.receiving import AT_ONCE, BULK_MIN, bulk_of
from tenure._backends.rabbitmq.settling import Settling
from tenure._queue.broker import EVERYTHING, LiveSelection, Selection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import DeadMessage, LiveMessage, dead_message_of, live_message_of
from tenure._queue.page_size import PageSize

PAGE = 200
"""Messages that are received at once, at most."""

SETTLING_LAG = 0.02
"""Seconds after which a queue has written what was acknowledged or given back, which it does not answer itself."""

SHOWN_MAX = 200
"""Live messages that are looked at: each is written anew. Of dead letters, at least so many are, of which those with
the lowest sequences are shown."""


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
        async with self._received(queue, 1) as pages:
            return not await pages.has_more()

    # --- live messages ---

    async def peek(self, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show ready messages, of the first ``SHOWN_MAX``."""
        shown: list[FoundMessage] = []
        async with self._received(queue, min(SHOWN_MAX, await self._most(queue))) as pages:
            while page := await pages.next():
                shown = _lowest([*shown, *(one for one in page if _is_live(one, which))], limit)
        return [_live(one) for one in shown]

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
        seen = 0
        async with self._received(dead, await self._most(dead)) as pages:
            while page := await pages.next():
                seen += len(page)
                shown = _lowest([*shown, *(one for one in page if _is_dead(one, which))], limit)
                if len(shown) >= limit and seen >= SHOWN_MAX:
                    break
        return [_dead(queue, one) for one in shown]

    async def begin_look(self, queue: str, which: Selection) -> DeadLook:
        """Begin to look at all dead letters."""
        dead = dead_letters_of(queue)
        return DeadLook(queue, which.at(time.time()), await self._begin(dead, await self._most(dead)))

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
            properties = copied(one, facts, now=time.time(), most=await self._publisher.properties_max(), id_=id_)
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

        One that is too large for *act* stays. A process that is killed leaves no more than ``AT_ONCE`` for which it has
        acted, and which are not removed.

        Without *act*, only count them.
        """
        count = 0
        async with self._received(queue, most) as pages:

            async def act_and_remove(one: FoundMessage) -> bool:
                if act is not None:
                    try:
                        await act(one)
                    except Unacceptable:  # with what a copy needs; another program has sent it, and it stays here
                        return False
                    await pages.remove(one)
                return True

            at_once = AT_ONCE if act not in (None, _drop) else PAGE
            while (limit is None or count < limit) and (page := await pages.next()):
                chosen = sorted(filter(is_selected, page), key=_sequence_of)
                while chosen and (limit is None or count < limit):
                    most_now = at_once if limit is None else min(at_once, limit - count)
                    some, chosen = chosen[:most_now], chosen[most_now:]
                    count += sum(await _all(act_and_remove(one) for one in some))
        return count

    async def _begin(self, queue: str, most: int) -> Pages:
        channels = HeldChannels(await self._client.receiving(), amqp_name(queue))
        return Pages(self._settling, channels, queue, most)

    @asynccontextmanager
    async def _received(self, queue: str, most: int) -> AsyncIterator[Pages]:
        """Receive up to *most* messages on channels of their own, and give back those that aren't removed."""
        pages = await self._begin(queue, most)
        try:
            yield pages
            await pages.give_back()
        finally:
            pages.close()


class Pages:
    """The messages of a queue, page by page, each held until the end."""

    def __init__(self, settling: Settling, channels: HeldChannels, queue: str, most: int) -> None:
        self._settling = settling
        self._channels = channels
        self._queue = queue
        self._left = most
        self._size = PageSize(PAGE)
        self._page: dict[int, FoundMessage] = {}
        self._came: list[Delivered] = []
        self._consumers = 0
        self._unfilled: set[str] = set()
        self._writes_anew = False
        self._is_refused = False
        """Whether the server takes no copies."""
        channels.on_received = self._came.append

    async def next(self) -> list[FoundMessage]:
        """Return the next page, empty if there is none. Of the page before, what wasn't removed is put aside."""
        await self._put_aside()
        want = min(self._size.messages, self._left)
        if want <= 0:
            return []
        with missing_allowed:
            await self._receive(want)
        page = self._hold()
        self._left = self._left - len(page) if len(page) >= want else 0
        self._size.learn(len(one.raw.body) for one in page)
        return page

    async def _receive(self, want: int) -> None:
        """Receive up to *want* messages: many by consumers that are full at once, the others one by one.

        One that was not filled, as others took most between the requests, is not ended before the look is.
        Of dead letters, all come so: if this process dies, the server gives back those of each consumer together.
        """
        is_dead = self._queue.endswith(DEAD_SUFFIX)
        while len(self._came) < want:
            ready, others = await self._counted()
            credit = min(ready if is_dead else bulk_of(ready, max(1, others)), want - len(self._came))
            if credit < (1 if is_dead else BULK_MIN):
                break
            self._consumers += 1
            tag, goal = f"page-{self._consumers:06d}", len(self._came) + credit
            self._channels.consume(tag, credit)
            await self._channels.arrived()
            if len(self._came) < goal:
                self._unfilled.add(tag)
                break
            await self._channels.cancel(tag)
        while len(self._came) < want and await self._channels.get() is not None:
            pass

    async def _counted(self) -> tuple[int, int]:
        """Return how many messages are ready, and how many consumers others have: each get of theirs is one, too."""
        counted = await self._channels.count()
        ours = len(self._channels.holders | self._unfilled)
        return counted.message_count, max(0, counted.consumer_count - ours)

    async def has_more(self) -> bool:
        """Return whether there is one more message, which is held, too."""
        with missing_allowed:
            await self._channels.get()
        return bool(self._hold())

    def _hold(self) -> list[FoundMessage]:
        now = time.time()
        page = [found_message(self._queue, one, now) for one in self._came]
        self._came.clear()
        self._page.update((one.raw.tag, one) for one in page)
        return page

    async def remove(self, one: FoundMessage) -> None:
        """Remove a message of this page for good."""
        del self._page[one.raw.tag]
        await self._channels.begin_ack(one.raw.tag)

    async def _put_aside(self) -> None:
        """Forget the bodies of what can stay where it is, and write the others anew, behind all others."""
        page, self._page = self._page, {}
        anew: list[FoundMessage] = []
        for _, one in sorted(page.items()):
            # A dead letter, too, if it was delivered before: a policy may let the server drop it soon. And those behind
            # it, as they would come before it.
            self._writes_anew = self._writes_anew or not one.is_dead or one.returned > 0
            if self._writes_anew and not self._is_refused:
                anew.append(one)
        if anew:
            left = await self._settling.write_anew(self._channels, anew)
            self._is_refused = len(left) == len(anew)

    async def give_back(self) -> None:
        """Give back what wasn't removed."""
        with suppress(AmqpError):  # they are lost
            await self._channels.end_consumers()  # else what is given back would come to those that were not filled
        self._hold()
        await self._put_aside()
        if self._channels.lost is not None:  # the server has given them back
            return
        for taken in self._channels.reject_all():
            await taken
            await asyncio.sleep(SETTLING_LAG)

    def close(self) -> None:
        """End: what is still held, the server gives back, and counts it."""
        self._channels.begin_close()


class DeadLook:
    """A look at all dead letters of a queue that *which* selects. Begun by :meth:`Browser.begin_look`."""

    def __init__(self, queue: str, which: Selection, pages: Pages) -> None:
        self._queue = queue
        self._which = which
        self._pages = pages

    async def next(self) -> Sequence[DeadMessage]:
        """Return the next ones that are selected; empty if there are none."""
        while page := await self._pages.next():
            if selected := [_dead(self._queue, one) for one in page if _is_dead(one, self._which)]:
                return selected
        return []

    async def end(self) -> None:
        """Give them back."""
        try:
            await self._pages.give_back()
        finally:
            self._pages.close()


async def _all(acts: Iterable[Awaitable[bool]]) -> list[bool]:
    """Return what *acts* return once all have ended, or raise what the first one raises that fails."""
    done = await asyncio.gather(*acts, return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException):
            raise one
    return [one for one in done if one is True]


def _sequence_of(one: FoundMessage) -> int:
    return one.facts.sequence


def _lowest(founds: list[FoundMessage], limit: int) -> list[FoundMessage]:
    return sorted(founds, key=_sequence_of)[:limit]


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
