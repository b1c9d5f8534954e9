"""Claims: messages are pulled, and those that are not to be delivered are moved, put off, or stored again.

A message that NATS has delivered before was locked by somebody whose lock has ended, or was put off until its delay
ends. It is stored again before it is handed out, see ``storing``; the same claim then receives the copy. What was
pulled, and can't be handed out because the claim failed or was given up, is given back.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from tenure._backends.nats.client import Client
from tenure._backends.nats.configuration import SHORTENS_LOCKS, Consumer
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.errors import NO_LEADER, HeadersTooLong, NoJetStream, Refusal, TooLarge
from tenure._backends.nats.messages import Found, delivery_of, undeliverable
from tenure._backends.nats.places import Places, nanoseconds, slack_of
from tenure._backends.nats.pulls import ENDED, Inbox, Inboxes
from tenure._backends.nats.receipts import Held, Receipts
from tenure._backends.nats.store_clock import StoreClock
from tenure._backends.nats.storing import Storing, locks_for
from tenure._queue.broker import CLAIM_BYTES, Claim, QueueSettings
from tenure._queue.checks import COUNT_MAX
from tenure._queue.delivery_ends import Outcome, found_dead, noted
from tenure._queue.message import Delivery, Died
from tenure._runtime.tasks import Tasks
from tenure.errors import TenureError

PAGE = 500
"""Messages of one pull."""

SORTED_MAX = 1_000
"""Messages that one claim moves to the dead letters, puts off or stores again; the next claim goes on."""

SORTING_SHARE = 0.125
"""The share of a lock's time after which a claim looks for no more: the locks of what it has found are running."""

SILENT_FOR, SILENT_SHARE = 1.0, 0.5
"""After so many seconds before 2.10, and after this share of ``timeout`` in a cluster, a pull that got no answer may be
one from a consumer that was deleted."""

JUST_SENT = 0.01
"""Seconds for which a claim looks again that finds nothing, or not what it has just stored."""

TOO_LARGE_FOR = 60.0
"""Seconds for which a message is put off that is too large to be stored again."""

DUE_KNOWN_MAX = 10_000
"""Messages of a queue, of which is known when they are due."""

DUE_MIN, OVERDUE_MAX = 0.005, 0.25
"""Seconds by which the server is late with a message that was put off: at least and at most."""

DEATHS_MAX = 10_000
"""The newest deaths of a queue that are kept at most until a claim reports them."""


class Sorted(NamedTuple):
    """The messages of a page, by what is to be done with them."""

    deliverable: list[Found]
    put_off: list[tuple[Found, float]]
    """Those that can't be received yet, with the seconds for which they are to be put off."""
    again: list[Found]
    """Those to be stored again: they were delivered before, or their delay has just ended."""
    expired: list[Found]
    marked: list[Found]
    """Those that are dead letters already, and only have to be moved."""


def sort(page: Iterable[Found], ack_wait: float, now: float) -> Sorted:
    """Decide what to do with each message that was pulled at *now*, by the store's clock."""
    found = Sorted([], [], [], [], [])
    for one in page:
        due = one.properties.due
        if one.state.is_dead:
            found.marked.append(one)
        elif left := locked_for(one, ack_wait):
            found.put_off.append((one, left))
        elif one.is_expired_at(now):
            found.expired.append(one)
        elif due > now:
            found.put_off.append((one, due - now))
        elif one.delivered > 1 or due or one.state.locked_for:
            found.again.append(one)
        else:
            found.deliverable.append(one)
    return found


def locked_for(found: Found, ack_wait: float) -> float:
    """Return for how many seconds a message that was stored as locked is to be put off; 0 if its lock is over.

    No clock is compared: it counts from when somebody pulls it. It is over when it was put off for that time, and the
    server's own locks, one after another, have taken as long: who pulled it may have died before it put it off. So a
    lock that is longer than the server's may last twice as long.
    """
    lasts = found.state.locked_for
    if found.delivered > math.ceil(lasts / ack_wait):
        return 0.0
    return lasts if found.delivered == 1 else ack_wait


def deliveries_before(found: Found) -> int:
    """Return how often a message was handed out before this delivery.

    Under one number, it is handed out once; further deliveries are of claims that failed. Those of a message with a
    delay, or that was stored as locked, only put it off.
    """
    puts_off = found.properties.due or found.state.locked_for
    return min(COUNT_MAX, found.state.deliveries + (0 if puts_off else min(1, found.delivered - 1)))


class Receiving:
    """Claims the messages of every queue."""

    def __init__(self, client: Client, places: Places, clock: StoreClock, receipts: Receipts, storing: Storing) -> None:
        self._client = client
        self._places = places
        self._clock = clock
        self._receipts = receipts
        self._storing = storing
        self._inboxes = Inboxes()
        self._due: dict[str, list[float]] = {}  # by queue: when those that were put off are due, by the local clock
        self._deaths: dict[str, deque[Died]] = {}  # by queue: found by a claim, and not reported yet
        self._returns: dict[str, Tasks] = {}  # by queue: what is being given back

    async def close(self) -> None:
        """Let what is being given back finish."""
        for queue in list(self._returns):
            await self.has_returned(queue)

    # --- claims ---

    async def receive(
        self,
        connection: Connection,
        queue: str,
        consumer: Consumer,
        limit: int,
        lock: float,
        first: Sequence[Found],
        asked_at: float,
        age: float,
        *,
        waits: bool,
    ) -> Claim:
        """Claim up to *limit* messages for *lock* seconds from *asked_at*, or from *age* seconds before that.

        *first* come those that are locked since then.
        If there are none, and it *waits*, look again for a moment: a consumer learns of a message after its sender was
        answered. So it is with the copies that are stored here: they are put off when they come, and the lock of one
        that came later would last longer.
        """
        token = secrets.token_hex(8)
        held: list[Found] = []
        taken: list[Found] = []
        stored: set[int] = set()  # the numbers of those that were stored again, until they come
        is_more = False
        sorted_out = asked = 0
        sorting_max = min(lock, consumer.ack_wait) * SORTING_SHARE
        page: Sequence[Found] = first
        unsorted: Sequence[Found] = first
        try:
            while True:
                unsorted = page
                timely = await self._without_early(connection, queue, consumer, page)
                found = sort(timely, consumer.ack_wait, await self._now(connection, queue, page))
                others = len(page) - len(found.deliverable)
                sorted_out += others
                copies = await self.sort_out(connection, queue, found, token, lock)
                taken += copies
                stored.update(one.stored_as for one in copies)
                held += found.deliverable
                unsorted = ()
                room = limit - len(held) - len(taken)
                if room <= 0:
                    break
                if held and page is first:  # what has just come is not kept waiting
                    is_more = True
                if sorted_out >= SORTED_MAX or self._clock.local.now() - asked_at > sorting_max:
                    is_more = True
                if is_more:
                    break
                if page and page is not first and not others and not found.again and len(page) < asked:
                    break
                asked = min(PAGE, room)
                finds_nothing = not (held or taken or sorted_out)
                page, is_more = await self._next_page(
                    connection, queue, consumer, asked, stored, waits=waits, finds_nothing=finds_nothing
                )
                if not page:
                    break
            since = asked_at - age
            deliveries = await self._lock(connection, consumer, held, token, since, lock)
        except BaseException:
            self.give_back(connection, [*held, *taken, *unsorted])
            raise
        deliveries += [self._deliver(connection, one, token, since, lock) for one in taken]
        deliveries.sort(key=_sequence)
        self._receipts.expire()
        due = 0.0 if is_more else self._due_in(queue)
        return Claim(tuple(deliveries), due if len(deliveries) < limit else None, self.take_deaths(queue), age)

    async def _next_page(
        self,
        connection: Connection,
        queue: str,
        consumer: Consumer,
        asked: int,
        stored: set[int],
        *,
        waits: bool,
        finds_nothing: bool,
    ) -> tuple[Sequence[Found], bool]:
        """Pull up to *asked* messages; return them, and whether there are more.

        If it *waits*, that includes what the consumer learns of in a moment: any message, if the claim *finds_nothing*
        else, and those that it has *stored* under these numbers.
        """
        page, is_more = await self.pull(connection, queue, consumer, asked)
        stored.difference_update(one.stored_as for one in page)
        finds_nothing = finds_nothing and not page
        try:
            if self._client.is_spread(connection):
                if len(page) < asked and not is_more and (waits or finds_nothing):
                    page += await self.pull_late(connection, queue, consumer, asked - len(page), _last(page))
            elif waits and finds_nothing:
                page, _ = await self.pull(connection, queue, consumer, 1, JUST_SENT)
                is_more = bool(page)
            elif waits and stored and len(page) < asked and not is_more:
                wanted = min(len(stored), asked - len(page))
                late, is_more = await self.pull(connection, queue, consumer, wanted, JUST_SENT)
                page += late
                stored.clear()
        except BaseException:
            self.give_back(connection, page)
            raise
        return page, is_more

    async def _without_early(
        self, connection: Connection, queue: str, consumer: Consumer, page: Sequence[Found]
    ) -> Sequence[Found]:
        """Return *page* without what may have come before its lock has ended, as somebody has shortened the locks.

        That is put off for a whole lock of the consumer, as nobody knows when it ends.
        """
        if not any(one.delivered > 1 for one in page):
            return page
        stream = self._places.place_of(queue).stream
        if SHORTENS_LOCKS.isdisjoint(await self._places.consumer_check.check(connection, stream, consumer)):
            return page
        for one in page:
            if one.delivered > 1:
                await connection.publish(one.reply, locks_for(consumer.ack_wait))
        return [one for one in page if one.delivered == 1]

    def _due_in(self, queue: str) -> float | None:
        """Return in how many seconds the next message comes that this process has put off; None if there is none."""
        known, now = self._due.get(queue, ()), self._clock.local.now()
        while known and known[0] < now - OVERDUE_MAX:  # it came, or another process has it
            heappop(known)
        return max(known[0] - now, DUE_MIN) if known else None

    def _put_off(self, queue: str, left: float) -> None:
        known = self._due.setdefault(queue, [])
        if len(known) < DUE_KNOWN_MAX:
            heappush(known, self._clock.local.now() + left)

    async def pull(
        self, connection: Connection, queue: str, consumer: Consumer, wanted: int, wait: float = 0.0
    ) -> tuple[list[Found], bool]:
        """Pull what there is, or comes within *wait* seconds; and whether there is more than fits into one answer.

        Raises:
            NoJetStream: There is no such consumer any more.
            Refusal: It has no leader.
        """
        pauses = self._client.pauses(connection)
        while True:
            try:
                return await self._pull(connection, queue, consumer, wanted, wait)
            except NoJetStream:
                await self._places.require_consumer(connection, queue, consumer.name)
                pause = next(pauses, None)
                if pause is None:
                    raise Refusal(NO_LEADER, f"no server leads the consumer {consumer.name!r}") from None
            await asyncio.sleep(pause)

    async def pull_late(
        self, connection: Connection, queue: str, consumer: Consumer, wanted: int, after: int
    ) -> list[Found]:
        """Pull what the stream has after number *after*, and its consumer did not deliver; nothing if there is none.

        In a cluster, the server that leads the consumer learns of a message after its sender was answered.

        Raises:
            NoJetStream: There is no such consumer any more.
            Refusal: The server that leads the consumer does not get what the stream has.
        """
        if not self._client.is_spread(connection):
            return []
        pauses = self._client.pauses(connection)
        while await self._places.has_undelivered(connection, queue, consumer, after):
            pause = next(pauses, None)
            if pause is None:
                raise Refusal(NO_LEADER, f"the server that leads the consumer {consumer.name!r} lags behind the stream")
            page, _ = await self.pull(connection, queue, consumer, wanted, max(pause, JUST_SENT))
            if page:
                return page
        return []

    async def _pull(
        self, connection: Connection, queue: str, consumer: Consumer, wanted: int, wait: float
    ) -> tuple[list[Found], bool]:
        inbox = await self._inboxes.take(connection)
        bytes_max = max(CLAIM_BYTES, connection.max_payload + 2**16)
        subject = f"{self._client.api}.CONSUMER.MSG.NEXT.{self._places.place_of(queue).stream}.{consumer.name}"
        request: dict[str, object] = {"batch": wanted, "max_bytes": bytes_max}
        request |= {"expires": nanoseconds(wait)} if wait else {"no_wait": True}
        timeout = self._client.options.timeout
        # Such a pull gets no answer before 2.10, and none in a cluster while the consumer is just being deleted.
        silent = timeout * SILENT_SHARE if self._client.is_spread(connection) else timeout
        if connection.version < (2, 10, 0):
            silent = min(silent, SILENT_FOR)
        is_gone = partial(self._places.is_gone, connection, queue, consumer.name) if silent < timeout else None
        try:
            async with asyncio.timeout(timeout):
                pulling = inbox.pull(queue, subject, request, wanted, is_gone=is_gone, after=wait + silent)
                messages, status = await pulling
        except BaseException as error:
            self.abandon(connection, inbox)
            if isinstance(error, NoJetStream):
                self._places.forget(queue)  # it was deleted, and perhaps made again
            raise
        if status == ENDED:
            self.abandon(connection, inbox)
        else:
            self._inboxes.put_back(connection, inbox)
        return messages, bool(status and "MaxBytes" in status)

    async def take_inbox(self, connection: Connection) -> Inbox:
        """Return an inbox for a pull that waits."""
        return await self._inboxes.take(connection)

    def abandon(self, connection: Connection, inbox: Inbox) -> None:
        """Give up the pull of an inbox; what still comes is given back."""
        inbox.abandon(partial(self.give_back, connection), is_spread=self._client.is_spread(connection))

    def put_back_inbox(self, connection: Connection, inbox: Inbox) -> None:
        """Let others use an inbox whose pull was answered."""
        self._inboxes.put_back(connection, inbox)

    async def _now(self, connection: Connection, queue: str, page: Sequence[Found]) -> float:
        """Return the store's time; it is asked for only if a message of *page* has a delay, or can expire."""
        if any(one.properties.due or one.properties.expires_in < float("inf") for one in page):
            await self._clock.ensure_known(connection, self._places.place_of(queue).stream)
        return self._clock.now()

    async def _lock(
        self, connection: Connection, consumer: Consumer, held: list[Found], token: str, asked_at: float, lock: float
    ) -> list[Delivery]:
        """Return the deliveries of messages that were pulled after *asked_at*, locked for *lock* seconds from then."""
        lasts = lock + slack_of(lock)
        if held and abs(lasts - consumer.ack_wait) > 0.001:
            wanted = locks_for(lasts)
            if lasts < consumer.ack_wait:
                for one in held:  # no answer is needed: until it arrives, the lock is longer
                    await connection.publish(one.reply, wanted)
            else:
                await self._storing.acknowledge(connection, held, wanted)
                if self._clock.local.now() >= asked_at + consumer.ack_wait - slack_of(lock):
                    self.give_back(connection, held)  # the locks may have ended before
                    return []
        return [self._deliver(connection, one, token, asked_at, lock) for one in held]

    def _deliver(self, connection: Connection, found: Found, token: str, asked_at: float, lock: float) -> Delivery:
        """Return a message that is locked for *lock* seconds from *asked_at*, and keep its lock."""
        shown_until = self._clock.now() - self._clock.local.now() + asked_at + lock
        # A lock that is stored with its message outlives the server's process.
        given_by = None if found.state.locked_for else connection
        return self._receipts.add(delivery_of(found, token, shown_until), Held(found, asked_at + lock, given_by))

    # --- what is not delivered ---

    async def sort_out(
        self, connection: Connection, queue: str, found: Sorted, token: str = "", lock: float = 0.0
    ) -> list[Found]:
        """Put off, store again, or move to the dead letters.

        With *lock*, those that are stored again are locked for so many seconds, and returned.
        """
        for one, left in found.put_off:
            await connection.publish(one.reply, locks_for(left))
            if not one.state.locked_for:
                self._put_off(queue, left)
        if not (found.again or found.expired or found.marked):
            return []
        most = QueueSettings().max_deliveries
        if any(deliveries_before(one) for one in (*found.again, *found.expired)):
            record, _ = await self._places.read_record(connection, queue)
            most = record.settings.get("max_deliveries", most)
        dying = [*found.expired, *found.marked]
        storing = [asyncio.ensure_future(self._store_again(connection, one, most, token, lock)) for one in found.again]
        others = [asyncio.ensure_future(self._expire(connection, one, most)) for one in found.expired]
        others += [asyncio.ensure_future(self._finish(connection, one)) for one in found.marked]
        try:
            await asyncio.wait([*storing, *others])
        except BaseException:
            # Each goes on, and what it has locked by then is given back.
            self._returns.setdefault(queue, Tasks()).spawn(self._return_all(storing, others))
            raise
        failures = [error for one in (*storing, *others) if (error := one.exception()) is not None]
        if grave := [error for error in failures if not isinstance(error, TooLarge)]:
            self.give_back(connection, [copy for one in storing if not one.exception() and (copy := one.result())])
            raise grave[0]
        for task, one in zip((*storing, *others), (*found.again, *dying), strict=True):
            if task.exception() is not None:  # it can't be delivered again, or moved; others can
                await connection.publish(one.reply, locks_for(TOO_LARGE_FOR))
        copies = [copy for one in storing if not one.exception() and (copy := one.result())]
        return copies if lock else []

    async def _return_all(
        self, storing: Sequence[asyncio.Future[Found | None]], others: Sequence[asyncio.Future[None]]
    ) -> None:
        answers = await asyncio.gather(*storing, *others, return_exceptions=True)
        await self._give_back([one for one in answers if isinstance(one, Found) and one.state.locked_for])

    async def _store_again(
        self, connection: Connection, found: Found, most: int, token: str, lock: float
    ) -> Found | None:
        """Store a message again; return it, unless it is dead, or gone."""
        count, now = deliveries_before(found), self._clock.now()
        outcome = found_dead(count, found.state, most, now, is_expired=False)
        if outcome is not None:
            await self._bury(connection, found, outcome, now)
            return None
        state = found.state.with_expired_attempts(count, now)
        lasts = lock + slack_of(lock) if lock else 0.0
        handed_out = min(COUNT_MAX, count + (1 if lock else 0))
        properties = found.with_state(
            history=state.history, before=state.before, deliveries=handed_out, locked_for=lasts, lock=token
        )
        try:
            return await self._storing.replace(connection, found, replace(properties, due=0.0))
        except HeadersTooLong:
            await self._bury(connection, found, undeliverable(count), now)
            return None

    async def _expire(self, connection: Connection, found: Found, most: int) -> None:
        count, now = deliveries_before(found), self._clock.now()
        outcome = found_dead(count, found.state, most, now, is_expired=True)
        assert outcome is not None
        await self._bury(connection, found, outcome, now)

    async def _bury(self, connection: Connection, found: Found, outcome: Outcome, now: float) -> None:
        dead = noted(found.state, outcome, now, fills=True)
        assert dead.reason is not None
        if await self._storing.bury(connection, found, found.dead(dead)):
            self.record_death(found, outcome.deliveries, dead.reason)

    async def _finish(self, connection: Connection, found: Found) -> None:
        await self._storing.finish(connection, found)  # the process that has marked it reports it

    # --- deaths ---

    def record_death(self, found: Found, count: int, reason: str) -> None:
        """Note a death for the next claim to report."""
        died = Died(found.sequence, found.id, count, reason)
        self._deaths.setdefault(found.queue, deque(maxlen=DEATHS_MAX)).append(died)

    def take_deaths(self, queue: str) -> Sequence[Died]:
        """Return the deaths that claims of this process have found since the last call."""
        deaths, taken = self._deaths.get(queue), []
        while deaths:
            try:
                taken.append(deaths.popleft())
            except IndexError:  # another thread was faster
                break
        return tuple(taken)

    # --- giving back ---

    def give_back(self, connection: Connection, found: Sequence[Found]) -> None:
        """Begin to give messages back that were not handed out, as if they had never been delivered."""
        if found and not connection.is_lost:
            returns = self._returns.setdefault(found[0].queue, Tasks())
            returns.spawn(self._give_back(found), name="tenure-nats-give-back")

    async def has_returned(self, queue: str) -> bool:
        """Wait until what is being given back to *queue* here can be received; return whether there was anything."""
        returns = self._returns.get(queue, Tasks()).here()
        await asyncio.gather(*returns, return_exceptions=True)
        return bool(returns)

    async def _give_back(self, found: Sequence[Found]) -> None:
        async def ask(connection: Connection) -> None:
            await asyncio.gather(*(self.return_one(connection, one) for one in found), return_exceptions=True)

        with suppress(TenureError):  # then they are delivered again when their locks end
            await self._client.run(ask)

    async def deliver_again(self, connection: Connection, found: Found) -> None:
        """Let a message come that its consumer never delivers any more; that it was delivered is counted."""
        state = found.state
        if not state.is_dead:
            state = state.with_expired_attempts(found.count, self._clock.now())
        properties = found.with_state(
            history=state.history, before=state.before, deliveries=max(found.count, state.deliveries)
        )
        with suppress(TooLarge):  # then it stays as it is
            await self._storing.replace(connection, found, properties)

    async def return_one(self, connection: Connection, found: Found) -> bool:
        """Give one message back; its deliveries before this one stay counted."""
        if found.reply and (found.state.locked_for or found.state.is_dead):
            # Another process has locked it, or moves it: here, it was only to be put off, or moved.
            left = found.state.locked_for if found.delivered == 1 else 0.0
            await connection.publish(found.reply, locks_for(left))
            return False
        now = self._clock.now()
        count = deliveries_before(found) if found.reply else found.count - 1  # it was locked, and not handed out
        state = found.state.with_expired_attempts(count, now)
        properties = found.with_state(history=state.history, before=state.before, deliveries=count)
        try:
            return await self._storing.replace(connection, found, properties) is not None
        except TooLarge:
            if found.reply:
                await connection.publish(found.reply, locks_for(TOO_LARGE_FOR))
            return False


def _last(page: Sequence[Found]) -> int:
    """Return the highest number of a message that was pulled; 0 if none was."""
    return max((one.stored_as for one in page), default=0)


def _sequence(delivery: Delivery) -> int:
    return delivery.sequence
