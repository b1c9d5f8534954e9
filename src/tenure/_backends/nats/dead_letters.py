"""Dead letters: a stream without a consumer. Their locks are in the messages themselves.

To receive a dead letter, to renew its lock and to put it back, it is stored again, if it is still what was read; each
time under a new number, so that every earlier lock is over. There are few of them, and everybody must be able to see
which are locked: those that are redriven or purged must not be.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tenure._backends.nats.client import FAILURES, Client, number_in, part_of
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.errors import NO_MESSAGE, NO_STREAM, Refusal, TooLarge
from tenure._backends.nats.inbox import Inbox
from tenure._backends.nats.message_format import State, encode_to_fit
from tenure._backends.nats.messages import (
    Found,
    dead_delivery_of,
    dead_message,
    is_selected_dead,
    lowest,
    rank_of,
    read_message,
)
from tenure._backends.nats.places import Places
from tenure._backends.nats.receipts import Held, Receipts
from tenure._backends.nats.settling import Send
from tenure._backends.nats.store_clock import StoreClock
from tenure._backends.nats.storing import Storing, new_key
from tenure._queue.broker import Claim, Selection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.delivery_ends import EndedDelivery, noted, outcome_of
from tenure._queue.identity import dead_letters_of
from tenure._queue.message import DeadMessage, Delivery
from tenure._queue.page_size import BYTES
from tenure._queue.verdicts import (
    GIVE_BACK,
    LAPSED,
    SETTLED,
    Complete,
    Lapsed,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure._runtime.tasks import Tasks
from tenure.errors import TenureError

SCANNING_SHARE = 0.25
"""The share of a lock's time after which a claim looks for no more dead letters."""

PAGE = 100
"""How many dead letters are shown at once, at most."""

Act = Callable[[Connection, Found], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class DeadLook:
    """A look at the dead letters of *queue* that *which* selects, up to number *last* in the stream."""

    queue: str
    which: Selection
    last: int
    after: int = 0
    """The number of the one that was seen last."""


class DeadLetters:
    """The dead letters of every queue of one client."""

    def __init__(
        self,
        client: Client,
        places: Places,
        clock: StoreClock,
        receipts: Receipts,
        storing: Storing,
        inbox: Inbox,
        send: Send,
    ) -> None:
        self._client = client
        self._places = places
        self._clock = clock
        self._receipts = receipts
        self._storing = storing
        self._inbox = inbox
        self._send = send
        self._returns = Tasks()

    # --- as a queue ---

    async def receive(self, connection: Connection, queue: str, limit: int, lock: float) -> Claim:
        """Lock up to *limit* dead letters of *queue*, which is the queue of dead letters itself."""
        asked_at, token = self._clock.local.now(), secrets.token_hex(8)
        await self._clock.ensure_known(connection, self._places.place_of(queue).stream)
        deliveries: list[Delivery] = []
        due: float | None = None
        last = await self._last(connection, queue)
        try:
            async for found in self._storing.scan(connection, queue):
                if found.stored_as > last or len(deliveries) >= limit:
                    break
                now = self._clock.now()
                free_at = max(found.locked_until, found.state.due)
                if free_at > now:
                    due = free_at - now if due is None else min(due, free_at - now)
                    continue
                state = _kept(found, locked_until=now + lock, lock=token, due=0.0)
                locked = None
                with suppress(TooLarge):  # then it can only be purged
                    locked = await self._store(connection, found, state)
                if locked is not None:
                    delivery = dead_delivery_of(locked, token, now + lock)
                    deliveries.append(self._receipts.add(delivery, Held(locked, asked_at + lock, None)))
                if self._clock.local.now() - asked_at > lock * SCANNING_SHARE:
                    due = 0.0  # the locks of those that it has are running
                    break
        except BaseException:
            self._returns.spawn(self._give_back(deliveries), name="tenure-nats-give-back")
            raise
        if len(deliveries) >= limit:
            due = None
        self._receipts.expire()
        return Claim(tuple(deliveries), due)

    async def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Unlock what a claim has locked that failed, or was given up."""

        async def ask(connection: Connection) -> None:
            await self.settle(connection, [Settlement(one, GIVE_BACK) for one in deliveries])

        with suppress(TenureError):  # then they are free when their locks end
            await self._client.run(ask)

    async def close(self) -> None:
        """Let what is being given back finish."""
        await asyncio.gather(*self._returns.here(), return_exceptions=True)

    async def renew(self, connection: Connection, delivery: Delivery, lock: float) -> Renewed | Lapsed:
        """Extend the lock of a dead letter to *lock* seconds from now, unless it lasts longer."""
        held, asked_at = self._receipts.find(delivery), self._clock.local.now()
        if held is None:
            return LAPSED
        if held.ends_at < asked_at + lock:
            state = _kept(held.found, locked_until=self._clock.now() + lock)
            stored = await self._store(connection, held.found, state)
            if stored is None:
                return await self._lapse(connection, held, delivery)
            held.found, held.ends_at = stored, asked_at + lock
        return Renewed(held.found.state.locked_until)

    async def _lapse(self, connection: Connection, held: Held, delivery: Delivery) -> Renewed | Lapsed:
        """Answer for a dead letter that is not as it was: an earlier renewal without an answer may have changed it."""
        place = self._places.place_of(held.found.queue)
        try:
            answer = await self._client.call(
                connection, f"STREAM.MSG.GET.{place.stream}", {"last_by_subj": held.found.subject}
            )
        except Refusal as error:
            if error.code not in (NO_MESSAGE, NO_STREAM):
                raise
        else:
            found = read_message(held.found.queue, answer)
            if found.state.lock == delivery.token and found.state.locked_until > held.found.state.locked_until:
                held.found = found
                return Renewed(found.state.locked_until)
        self._receipts.forget(delivery)
        return LAPSED

    async def settle(
        self, connection: Connection, settlements: Sequence[Settlement]
    ) -> list[Settled | Lapsed | Exception]:
        """Pass verdicts on locked dead letters; return in the order given what each was answered, or why it was not."""
        outcomes: list[Settled | Lapsed | Exception] = []
        for one in settlements:
            try:
                outcomes.append(await self._settle(connection, one))
            except (*FAILURES, TenureError) as error:
                outcomes.append(error)
        return outcomes

    async def _settle(self, connection: Connection, settlement: Settlement) -> Settled | Lapsed:
        delivery, verdict = settlement
        held = self._receipts.find(delivery)
        if held is None:
            return LAPSED
        stands = (
            isinstance(verdict, Complete)
            if held.is_completed
            else await self._pass_newest(connection, held.found, settlement)
        )
        if not stands:
            self._receipts.forget(delivery)
            return LAPSED
        if isinstance(verdict, Complete) and verdict.remember:
            held.is_completed = True
            home = delivery.queue.removesuffix(DEAD_SUFFIX)
            await self._inbox.remember(connection, home, held.found.id, verdict.remember)
        self._receipts.forget(delivery)
        return SETTLED

    async def _pass_newest(self, connection: Connection, found: Found, settlement: Settlement) -> bool:
        """Pass a verdict, with what it sends, on a dead letter that was *found*, or has been renewed since."""
        delivery, verdict = settlement
        if isinstance(verdict, Complete):
            for queue, message in verdict.sends:
                await self._send(queue, [message])
        if await self._pass(connection, found, verdict):
            return True
        # An earlier renewal without an answer may have changed it.
        newest = await self._storing.newest(connection, found)
        if newest is None or newest.state.lock != delivery.token:
            return False
        return await self._pass(connection, newest, verdict)

    async def _pass(self, connection: Connection, found: Found, verdict: Verdict) -> bool:
        if isinstance(verdict, Complete):
            return await self._storing.delete(connection, self._places.place_of(found.queue).stream, found.stored_as)
        state, now = _kept(found, locked_until=0.0, lock=""), self._clock.now()
        outcome = outcome_of(verdict, EndedDelivery(state.deliveries, is_dead=True), math.inf, now)
        if outcome.cause is not None:
            state = noted(state, outcome, now)
        elif outcome.delay > 0:
            state = replace(state, due=self._clock.after(outcome.delay))
        return await self._store(connection, found, state) is not None

    async def _store(self, connection: Connection, found: Found, state: State) -> Found | None:
        """Store a dead letter again with *state*; None if it is not what was found."""
        return await self._storing.replace_dead(connection, found, replace(found.properties, id=found.id, state=state))

    async def _last(self, connection: Connection, queue: str) -> int:
        """Return the last number in the stream of *queue*; what is stored again while it is read comes after it."""
        try:
            answer = await self._client.call(connection, f"STREAM.INFO.{self._places.place_of(queue).stream}")
        except Refusal as error:
            if error.code == NO_STREAM:
                return 0
            raise
        return number_in(part_of(answer, "state"), "last_seq")

    # --- peek, redrive, purge ---

    async def count(self, connection: Connection, queue: str) -> int:
        """Return how many dead letters *queue* has."""
        try:
            stream = self._places.place_of(dead_letters_of(queue)).stream
            answer = await self._client.call(connection, f"STREAM.INFO.{stream}")
            return number_in(part_of(answer, "state"), "messages")
        except Refusal as error:
            if error.code == NO_STREAM:
                return 0
            raise

    async def begin_look(self, connection: Connection, queue: str, which: Selection) -> DeadLook:
        """Begin to look at the dead letters of *queue* that *which* selects."""
        dead = dead_letters_of(queue)
        await self._clock.ensure_known(connection, self._places.place_of(dead).stream)
        return DeadLook(queue, which.at(self._clock.now()), await self._last(connection, dead))

    async def _selected(self, connection: Connection, look: DeadLook) -> AsyncIterator[Found]:
        """Yield what *look* has not seen yet, as it lies in the stream."""
        async for one in self._storing.scan(connection, dead_letters_of(look.queue), look.after, look.last):
            look.after = one.stored_as
            if is_selected_dead(one, look.which):
                yield one

    async def page(self, connection: Connection, look: DeadLook) -> Sequence[DeadMessage]:
        """Go on with *look*, and show up to ``PAGE`` dead letters, and no more than one beyond ``BYTES`` of bodies."""
        page: list[DeadMessage] = []
        size = 0
        async for one in self._selected(connection, look):
            page.append(dead_message(look.queue, one))
            size += len(one.body)
            if len(page) >= PAGE or size > BYTES:
                break
        return page

    async def peek(self, connection: Connection, queue: str, which: Selection, limit: int) -> Sequence[DeadMessage]:
        """Show dead letters."""
        look = await self.begin_look(connection, queue, which)
        return [dead_message(queue, one) for one in await lowest(self._selected(connection, look), limit)]

    async def redrive(
        self, connection: Connection, queue: str, which: Selection, limit: int | None, *, dry_run: bool, to: str | None
    ) -> int:
        """Put dead letters back into *queue*, or into the queue *to*."""

        async def put_back(connection: Connection, found: Found) -> None:
            home = queue if to is None else to
            sequence, enqueued_at = (found.sequence, found.enqueued_at) if to is None else (0, 0.0)
            state = replace(found.state.redriven(), sequence=sequence, enqueued_at=enqueued_at)
            properties = replace(found.properties, id=found.id, due=0.0, expires_in=float("inf"), state=state)
            headers = encode_to_fit(properties, found.body, connection.max_payload)
            # One key for this dead letter, whatever becomes of it there: once, also if this is repeated.
            copies = await self._storing.copies_of(connection, replace(found, queue=queue))
            await self._storing.store_new(connection, home, copies.key_of_redriven(found), found.body, headers)

        return await self._remove(connection, queue, which, limit, put_back, dry_run=dry_run)

    async def purge(self, connection: Connection, queue: str, which: Selection, limit: int | None) -> int:
        """Remove dead letters for good."""

        return await self._remove(connection, queue, which, limit, None, dry_run=False)

    async def _remove(
        self, connection: Connection, queue: str, which: Selection, limit: int | None, act: Act | None, *, dry_run: bool
    ) -> int:
        """Lock the dead letters that are selected and not locked, act on each, and remove it; the oldest first.

        They are read once more, each for itself: all of them may be too large for the memory. One that is too large to
        be stored again, as another program's may be, can only be removed.
        """
        look, now = await self.begin_look(connection, queue, which), self._clock.now()
        places = sorted([rank_of(one) async for one in self._selected(connection, look) if one.locked_until <= now])
        if dry_run:
            return len(places[:limit])
        removed = 0
        for *_, place in places:
            if limit is not None and removed >= limit:
                break
            async for found in self._storing.scan(connection, dead_letters_of(queue), place - 1, place):
                removed += await self._remove_one(connection, found, act)
        return removed

    async def _remove_one(self, connection: Connection, found: Found, act: Act | None) -> bool:
        now = self._clock.now()
        if found.locked_until > now:
            return False
        # Locked first: of two processes, one moves it.
        state = _kept(found, locked_until=now + self._client.options.timeout, lock=new_key())
        try:
            locked = await self._store(connection, found, state)
            if locked is None:
                return False
            if act is not None:
                await act(connection, locked)
        except TooLarge:
            if act is not None:
                return False
            locked = found
        await self._storing.delete(connection, self._places.place_of(locked.queue).stream, locked.stored_as)
        return True


def _kept(found: Found, **changes: object) -> State:
    """Return the state of a dead letter with *changes*; one of another program gets its identity written down."""
    return replace(found.state, sequence=found.sequence, enqueued_at=found.enqueued_at, **changes)  # type: ignore[arg-type]
