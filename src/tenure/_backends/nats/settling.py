"""Verdicts and renewals: many in a few requests.

A message that is completed is acknowledged, all of one call together. Every other verdict stores the message again, or
marks it as dead, in one step of the server that also compares; see ``storing``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from tenure._backends.nats.client import FAILURES, Client
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.errors import HeadersTooLong, NoJetStream
from tenure._backends.nats.inbox import Inbox
from tenure._backends.nats.messages import Found, undeliverable
from tenure._backends.nats.places import Places, slack_of
from tenure._backends.nats.receipts import Held, Receipts
from tenure._backends.nats.store_clock import StoreClock
from tenure._backends.nats.storing import ACK, WORKING, Storing, locks_for
from tenure._queue.broker import QueueSettings
from tenure._queue.delivery_ends import EndedDelivery, noted, outcome_of
from tenure._queue.message import Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    LAPSED,
    SETTLED,
    Abandon,
    Complete,
    Lapsed,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure._runtime.clock import Clock
from tenure.errors import TenureError

T = TypeVar("T")

Send = Callable[[str, Sequence[Outgoing]], Awaitable[object]]


class Settling:
    """Passes verdicts on the messages that this process holds, and renews their locks."""

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

    @property
    def _local(self) -> Clock:
        return self._clock.local

    # --- renewals ---

    async def renew(self, connection: Connection, held: Sequence[Delivery], lock: float) -> list[Renewed | Lapsed]:
        """Extend the locks of live messages to *lock* seconds from now."""
        asked_at = self._local.now()
        kept = [self._receipts.find(one) for one in held]
        found = [one if one is not None and one.is_known_to(connection) else None for one in kept]
        due = [one for one in found if one is not None and one.ends_at < asked_at + lock]
        for several in _by_consumer(one for one in due if one.found.reply):
            await self._renew_by_server(connection, several, asked_at, lock)
        stored = [one for one in due if not one.found.reply]
        await asyncio.gather(*(self._renew_stored(connection, one, asked_at, lock) for one in stored))
        now, wall = self._local.now(), self._clock.now()
        return [LAPSED if one is None or one.is_over(now) else Renewed(wall + one.ends_at - now) for one in found]

    async def _renew_by_server(
        self, connection: Connection, held: Sequence[Held], asked_at: float, lock: float
    ) -> None:
        consumer = await self._places.consumer_of(connection, held[0].found.queue)
        lasts = lock + slack_of(lock)
        is_usual = consumer is not None and abs(lasts - consumer.ack_wait) <= 0.001
        try:
            how = WORKING if is_usual else locks_for(lasts)
            await self._storing.acknowledge(connection, [one.found for one in held], how)
        except NoJetStream:
            await self._lapse_if_gone(connection, held)
            return
        answered_at = self._local.now()
        for one in held:
            if not one.is_over(answered_at):
                one.ends_at = asked_at + lock

    async def _renew_stored(self, connection: Connection, held: Held, asked_at: float, lock: float) -> None:
        """Store a message once more, locked for longer."""

        async def store(found: Found) -> Found | None:
            token = found.state.lock
            properties = found.with_state(locked_for=lock + slack_of(lock), lock=token)
            return await self._storing.replace(connection, found, properties)

        stored = await self._with_newest(connection, held.found, store)
        if stored is None:
            held.ends_at = -math.inf
        else:
            held.found, held.ends_at = stored, asked_at + lock

    async def _with_newest(
        self, connection: Connection, found: Found, act: Callable[[Found], Awaitable[T | None]]
    ) -> T | None:
        """Return the result of *act* on a message; if it is not as it was *found*, on what is there, if that is ours.

        A renewal may have stored it: a concurrent one, or an earlier one without an answer.
        """
        answer = await act(found)
        if answer is not None or found.reply:
            return answer
        newest = await self._storing.newest(connection, found)
        return await act(newest) if newest is not None and _is_renewed(newest, found) else None

    async def _lapse_if_gone(self, connection: Connection, held: Sequence[Held]) -> None:
        """Note that locks of one consumer are over, as it is gone.

        Raises:
            NoJetStream: JetStream can't be asked; then nothing is known.
        """
        queue, name = held[0].found.queue, held[0].found.consumer
        if await self._places.has_consumer(connection, queue, name):
            raise NoJetStream
        for one in held:
            one.ends_at = -math.inf

    # --- verdicts ---

    async def settle(
        self, connection: Connection, settlements: Sequence[Settlement]
    ) -> list[Settled | Lapsed | Exception]:
        """Pass verdicts on live messages; return in the order given what each was answered, or why it was not."""
        completed: dict[int, Held] = {}
        others: dict[int, Held] = {}
        for number, (_, verdict), held in self._receipts.find_all(settlements):
            if held.is_known_to(connection) and (isinstance(verdict, Complete) or not held.is_completed):
                (completed if isinstance(verdict, Complete) else others)[number] = held
        verdicts = {number: settlements[number].verdict for number in others}
        passing = [
            self._complete_all(connection, completed, settlements),
            self._pass_all(connection, others, verdicts),
        ]
        tried = {**completed, **others}
        outcomes: dict[int, Settled | Lapsed | Exception] = {}
        try:
            for found in await asyncio.gather(*passing):
                outcomes |= found
        finally:
            for number, held in tried.items():
                if isinstance(outcomes.get(number, TimeoutError()), Exception):
                    held.was_tried = True
                else:
                    self._receipts.forget(settlements[number].delivery)
        return [outcomes.get(number, LAPSED) for number in range(len(settlements))]

    async def _pass_all(
        self, connection: Connection, others: dict[int, Held], verdicts: dict[int, Verdict]
    ) -> dict[int, Settled | Lapsed | Exception]:
        if not others:
            return {}
        stream = self._places.place_of(next(iter(others.values())).found.queue).stream
        try:
            await self._clock.ensure_known(connection, stream)
            most = await self._limits(connection, [(held, verdicts[number]) for number, held in others.items()])
        except FAILURES as error:
            return dict.fromkeys(others, error)
        answers = await asyncio.gather(
            *(
                self._pass(connection, held, verdicts[number], most.get(held.found.queue, 0))
                for number, held in others.items()
            ),
            return_exceptions=True,
        )
        return _outcomes(others, answers)

    async def _limits(self, connection: Connection, others: Sequence[tuple[Held, Verdict]]) -> dict[str, int]:
        """Return how often the messages of each queue may be delivered, where that decides something."""
        usual = QueueSettings().max_deliveries
        found = {}
        for queue in {held.found.queue for held, verdict in others if isinstance(verdict, Abandon)}:
            record, _ = await self._places.read_record(connection, queue)
            found[queue] = record.settings.get("max_deliveries", usual)
        return found

    async def _complete_all(
        self, connection: Connection, completed: dict[int, Held], settlements: Sequence[Settlement]
    ) -> dict[int, Settled | Lapsed | Exception]:
        """Send what completed messages send, remove them, and remember their ids."""
        outcomes: dict[int, Settled | Lapsed | Exception] = {}
        ready: dict[int, Held] = {}
        for number, held in completed.items():
            if held.is_completed:
                outcomes[number] = SETTLED
                continue
            try:
                for queue, message in _complete(settlements[number].verdict).sends:
                    await self._send(queue, [message])
                # After a verdict without an answer, a copy may have taken its place.
                is_unsure = held.found.reply and held.was_tried
                if is_unsure and not await self._storing.is_as_found(connection, held.found):
                    outcomes[number] = LAPSED
                else:
                    ready[number] = held
            except (*FAILURES, TenureError) as error:
                outcomes[number] = error
        stored = {number: held for number, held in ready.items() if not held.found.reply}
        deleting = [self._delete(connection, held.found) for held in stored.values()]
        outcomes |= _outcomes(stored, await asyncio.gather(*deleting, return_exceptions=True))
        numbers = {id(held): number for number, held in ready.items()}
        for several in _by_consumer(held for held in ready.values() if held.found.reply):
            outcomes |= {numbers[id(held)]: answer for held, answer in await self._acknowledge(connection, several)}
        for number, held in completed.items():
            seconds = _complete(settlements[number].verdict).remember
            if seconds and isinstance(outcomes[number], Settled):
                try:
                    await self._inbox.remember(connection, held.found.queue, held.found.id, seconds)
                except (*FAILURES, TenureError) as error:
                    held.is_completed, outcomes[number] = True, error
        return outcomes

    async def _acknowledge(
        self, connection: Connection, held: Sequence[Held]
    ) -> list[tuple[Held, Settled | Lapsed | Exception]]:
        """Complete messages of one consumer."""
        try:
            await self._storing.acknowledge(connection, [one.found for one in held], ACK)
        except NoJetStream:
            await self._lapse_if_gone(connection, held)
            return [(one, LAPSED) for one in held]
        except FAILURES as error:
            return [(one, error) for one in held]
        now = self._local.now()
        # Later, the lock may have been over when the server acted: that is no proof.
        return [(one, LAPSED if one.is_over(now) else SETTLED) for one in held]

    async def _delete(self, connection: Connection, found: Found) -> Settled | Lapsed:
        """Remove a message whose lock is stored in it, unless it is not what this process has locked."""
        stream = self._places.place_of(found.queue).stream
        was_there = await self._storing.delete(connection, stream, found.stored_as)
        # A renewal may have stored it once more; one that comes later finds nothing to renew.
        newest = await self._storing.newest(connection, found)
        if newest is not None and _is_renewed(newest, found):
            was_there = await self._storing.delete(connection, stream, newest.stored_as) or was_there
        return SETTLED if was_there else LAPSED

    async def _pass(self, connection: Connection, held: Held, verdict: Verdict, most: int) -> Settled | Lapsed:
        """Store a message again, or dead-letter it."""

        async def act(found: Found) -> Settled | None:
            return await self._pass_on(connection, found, verdict, most)

        return await self._with_newest(connection, held.found, act) or LAPSED

    async def _pass_on(self, connection: Connection, found: Found, verdict: Verdict, most: int) -> Settled | None:
        now, count = self._clock.now(), found.count
        outcome = outcome_of(verdict, EndedDelivery(count, found.is_expired_at(now)), most, now)
        if outcome.cause is None:
            state = noted(found.state, outcome, now, fills=True)
            properties = found.with_state(history=state.history, before=state.before, deliveries=state.deliveries)
            properties = replace(properties, due=self._clock.after(outcome.delay) if outcome.delay else 0.0)
            try:
                stored = await self._storing.replace(connection, found, properties)
                return outcome.answer if stored is not None else None
            except HeadersTooLong:
                outcome = undeliverable(outcome.deliveries, outcome.attempt)
        dead = found.dead(noted(found.state, outcome, now, fills=True))
        return outcome.answer if await self._storing.bury(connection, found, dead) else None


def _is_renewed(newest: Found, found: Found) -> bool:
    """Whether *newest* is what was *found*, under the same lock, but stored once more."""
    return newest.state.lock == found.state.lock and newest.stored_as != found.stored_as


def _by_consumer(held: Iterable[Held]) -> Iterable[list[Held]]:
    """Group deliveries by the consumer that must be asked."""
    groups: dict[tuple[str, str], list[Held]] = {}
    for one in held:
        groups.setdefault((one.found.queue, one.found.consumer), []).append(one)
    return groups.values()


def _outcomes(
    numbers: Iterable[int], answers: Sequence[Settled | Lapsed | BaseException]
) -> dict[int, Settled | Lapsed | Exception]:
    """Return the answers by number; an error of ours, or a cancellation, is raised."""
    found: dict[int, Settled | Lapsed | Exception] = {}
    for number, answer in zip(numbers, answers, strict=True):
        if isinstance(answer, BaseException) and not isinstance(answer, FAILURES):
            raise answer
        found[number] = answer
    return found


def _complete(verdict: Verdict) -> Complete:
    assert isinstance(verdict, Complete)
    return verdict
