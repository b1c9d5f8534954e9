"""Live messages: peek, purge and statistics, as far as JetStream shows them.

JetStream tells how many messages of a stream were delivered and are not acknowledged, but not which. Those are locked,
or put off, or their lock has ended and no consumer has asked since. So only messages that were never delivered in their
present form are shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from tenure._backends.nats.client import Client, Json, number_in, part_of
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.dead_letters import DeadLetters
from tenure._backends.nats.errors import NO_CONSUMER, NO_MESSAGE, NO_STREAM, NoJetStream, Refusal
from tenure._backends.nats.messages import Found, is_selected_live, live_message, lowest, read_message
from tenure._backends.nats.places import Places
from tenure._backends.nats.receiving import Receiving, locked_for, sort
from tenure._backends.nats.store_clock import StoreClock
from tenure._backends.nats.storing import ACK, Storing, locks_for
from tenure._queue.broker import LiveSelection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.message import LiveMessage, Stats

PAGE = 500

REMOVED_WITHIN = 0.25
"""Seconds after which a message that was settled is surely removed, on a server that answers."""

STUCK_FOR = 5.0
"""Seconds after which a message that nobody has, and that is not removed, is counted and delivered again."""


class _Counts(NamedTuple):
    """How many messages a queue has."""

    ready: int
    locked: int
    passed: int
    """The last one in its stream that was delivered."""
    uncounted: int
    """How many more its stream has than its consumer tells of."""


class LiveMessages:
    """The live messages of every queue of one client."""

    def __init__(
        self,
        client: Client,
        places: Places,
        clock: StoreClock,
        storing: Storing,
        receiving: Receiving,
        dead_letters: DeadLetters,
    ) -> None:
        self._client = client
        self._places = places
        self._clock = clock
        self._storing = storing
        self._receiving = receiving
        self._dead_letters = dead_letters
        self._stuck: dict[str, tuple[int, float]] = {}  # by queue: the oldest message, and since when one is stuck

    # --- statistics ---

    async def stats(self, connection: Connection, queue: str) -> Stats:
        """Count the messages of *queue*."""
        if queue.endswith(DEAD_SUFFIX):
            return Stats(dead=await self._dead_letters.count(connection, queue.removesuffix(DEAD_SUFFIX)))
        dead = await self._dead_letters.count(connection, queue)
        counts = await self._count(connection, queue)
        if counts is None:
            return Stats(dead=dead)
        if counts.uncounted and not (counts.ready or counts.locked or queue in self._stuck):
            await asyncio.sleep(REMOVED_WITHIN)
            counts = await self._count(connection, queue) or counts
        if counts.uncounted:
            counts = await self._with_stuck(connection, queue, counts)
        else:
            self._stuck.pop(queue, None)
        oldest = await self._next(connection, queue, counts.passed) if counts.ready else None
        age = 0.0 if oldest is None else max(0.0, self._clock.now() - oldest.enqueued_at)
        # Those that are put off count as locked: JetStream doesn't distinguish them.
        return Stats(ready=counts.ready, locked=counts.locked, dead=dead, oldest_age=age)

    async def _count(self, connection: Connection, queue: str) -> _Counts | None:
        """Return what JetStream counts of *queue*; None if it has no such stream."""
        asked_at = self._clock.local.now()
        stream = await self._info(connection, f"STREAM.INFO.{self._places.place_of(queue).stream}")
        if stream is None:
            return None
        self._clock.learn_from(stream, asked_at)
        total = number_in(part_of(stream, "state"), "messages")
        consumer = await self._looked_after(connection, queue)
        if consumer is None:
            return _Counts(total, 0, 0, 0)
        passed = number_in(part_of(consumer, "delivered"), "stream_seq")
        ready, locked = number_in(consumer, "num_pending"), number_in(consumer, "num_ack_pending")
        return _Counts(ready, locked, passed, max(0, total - ready - locked))

    async def _looked_after(self, connection: Connection, queue: str) -> Json | None:
        """Return what JetStream tells about the consumer of *queue*, after it has looked for locks that have ended.

        It moves their messages when it is asked for messages. While others wait, consumers ask; if none does, and none
        are new, we ask: all that comes then is stored again, and is new.
        """
        consumer = await self._places.consumer_of(connection, queue)
        if consumer is None:
            return None
        path = f"CONSUMER.INFO.{self._places.place_of(queue).stream}.{consumer.name}"
        found = await self._info(connection, path)
        if found is None:
            self._places.forget(queue)
            return None
        with suppress(NoJetStream):
            await self._places.consumer_check.check(connection, self._places.place_of(queue).stream, consumer, found)
        pending = number_in(found, "num_ack_pending")
        if number_in(found, "num_pending") or not pending:
            return found
        page, _ = await self._receiving.pull(connection, queue, consumer, min(PAGE, pending))
        if not page:
            return found
        await self._clock.ensure_known(connection, self._places.place_of(queue).stream)
        sorted_ = sort(page, consumer.ack_wait, self._clock.now())
        await self._receiving.sort_out(connection, queue, sorted_)
        for one in sorted_.deliverable:  # it was sent at this moment
            await self._receiving.return_one(connection, one)
        return await self._info(connection, path)

    async def _with_stuck(self, connection: Connection, queue: str, counts: _Counts) -> _Counts:
        """Return *counts* with the messages that are not among them.

        Some are just being removed, or the servers of a cluster don't agree yet. Others, the consumer has given up, or
        left out, while somebody had changed it, and never delivers them: they are stored again, but only when none is
        locked, from which they can't be told. While other messages come and go, they are counted only if the oldest
        message is the same after a while.
        """
        ready, locked, passed, uncounted = counts
        first = await self._next(connection, queue, 0)
        if first is None:
            self._stuck.pop(queue, None)
            return counts
        known, since = self._stuck.get(queue, (0, 0.0))
        now = self._clock.local.now()
        if known != first.stored_as:
            self._stuck[queue] = known, since = first.stored_as, now
        is_stuck, is_new = now - since >= STUCK_FOR, first.stored_as > passed
        if not is_stuck and (ready or locked):
            return counts
        if locked:
            return _Counts(ready, locked + uncounted, passed, 0)
        if is_stuck and not is_new:
            del self._stuck[queue]
            async for one in self._storing.scan(connection, queue, 0, passed):
                await self._receiving.deliver_again(connection, one)
        if is_stuck or is_new:  # of such a message, JetStream may go on to count too few
            return _Counts(ready + uncounted, 0, passed, 0)
        return _Counts(0, uncounted, passed, 0)

    async def _info(self, connection: Connection, path: str) -> Json | None:
        try:
            return await self._client.call(connection, path)
        except Refusal as error:
            if error.code in (NO_STREAM, NO_CONSUMER):
                return None
            raise

    async def _next(self, connection: Connection, queue: str, after: int) -> Found | None:
        """Return the first message of *queue* after number *after*."""
        stream = self._places.place_of(queue).stream
        try:
            answer = await self._client.call(
                connection, f"STREAM.MSG.GET.{stream}", {"seq": after + 1, "next_by_subj": ">"}
            )
        except Refusal as error:
            if error.code in (NO_MESSAGE, NO_STREAM):
                return None
            raise
        return read_message(queue, answer)

    # --- peek and purge ---

    async def peek(self, connection: Connection, queue: str, which: LiveSelection, limit: int) -> Sequence[LiveMessage]:
        """Show the messages that were not delivered in their present form."""
        return [live_message(one) for one in await lowest(self._selected(connection, queue, which), limit)]

    async def _selected(self, connection: Connection, queue: str, which: LiveSelection) -> AsyncIterator[Found]:
        """Yield the messages that *which* selects, of those that were not delivered."""
        consumer = await self._looked_after(connection, queue)
        await self._clock.ensure_known(connection, self._places.place_of(queue).stream)
        after = 0 if consumer is None else number_in(part_of(consumer, "delivered"), "stream_seq")
        now = self._clock.now()
        async for one in self._storing.scan(connection, queue, after):
            is_ready = one.properties.due <= now and not one.state.locked_for and not one.is_expired_at(now)
            if is_ready and is_selected_live(one, which):
                yield one

    async def purge(self, connection: Connection, queue: str, which: LiveSelection, *, dry_run: bool) -> int:
        """Remove messages that are not locked; each is pulled first, so that nobody else has it.

        Those that are not selected are given back, in their order.
        """
        if dry_run:
            return sum([1 async for _ in self._selected(connection, queue, which)])
        stream = self._places.place_of(queue).stream
        info = await self._info(connection, f"STREAM.INFO.{stream}")
        consumer = await self._places.consumer_of(connection, queue)
        if info is None:
            return 0
        if consumer is None:
            consumer = await self._places.make_consumer(connection, queue, 30.0)
        await self._clock.ensure_known(connection, stream)
        last, began, removed = number_in(part_of(info, "state"), "last_seq"), self._clock.now(), 0
        kept: list[Found] = []
        try:
            while True:
                page, _ = await self._receiving.pull(connection, queue, consumer, PAGE)
                if len(page) < PAGE and not (page and page[-1].stored_as > last):
                    after = max((one.stored_as for one in page), default=0)
                    page += await self._receiving.pull_late(connection, queue, consumer, PAGE - len(page), after)
                chosen: list[Found] = []
                kept = []
                for one in page:
                    if left := locked_for(one, consumer.ack_wait):
                        await connection.publish(one.reply, locks_for(left))
                    else:
                        (chosen if self._is_chosen(one, which, began, last) else kept).append(one)
                async with asyncio.timeout(self._client.options.timeout):
                    await self._storing.acknowledge(connection, chosen, ACK)
                removed += len(chosen)
                for one in kept:  # in their order; their new numbers are higher than the last one's
                    await self._receiving.return_one(connection, one)
                kept = []
                if len(page) < PAGE or page[-1].stored_as > last:
                    break
        except NoJetStream:
            return removed  # the queue was deleted
        except BaseException:
            self._receiving.give_back(connection, kept)
            raise
        return removed

    def _is_chosen(self, found: Found, which: LiveSelection, began: float, last: int) -> bool:
        if found.stored_as > last and not found.state.sequence:
            return False  # sent since
        return found.properties.due <= began and is_selected_live(found, which)
