"""Verdicts and renewals: many in a few requests.

A message that is completed is acknowledged, all of one call together. Every other verdict stores the message again, or
marks it as dead, in one step of the server that also compares; see ``storing``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from tenure._backends.nats.client import Client
from tenure._backends.nats.connection import Connection
from tenure._backends.nats.errors import NO_MESSAGE, NO_STREAM, NoJetStream, Refusal
from tenure._backends.nats.inbox import Inbox
from tenure._backends.nats.messages import Found, dead_letter_of, read_message, with_expired_attempts
from tenure._backends.nats.places import Places, slack_of
from tenure._backends.nats.receipts import Held, Receipts
from tenure._backends.nats.receiving import acknowledge
from tenure._backends.nats.store_clock import StoreClock
from tenure._backends.nats.storing import ACK, WORKING, Storing, locks_for
from tenure._queue.broker import QueueSettings
from tenure._queue.message import (
    EXPIRED,
    EXPIRED_DESCRIPTION,
    MAX_DELIVERIES,
    Attempt,
    Delivery,
    exhausted_description,
)
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    LAPSED,
    SETTLED,
    SETTLED_DEAD,
    Abandon,
    Complete,
    DeadLetter,
    Lapsed,
    Renewed,
    Settled,
    Settlement,
    Verdict,
)
from tenure._runtime.clock import Clock

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
        found = [self._find(connection, one) for one in held]
        due = [one for one in found if one is not None and one.locked_until < asked_at + lock]
        by_queue: dict[str, list[Held]] = {}
        for one in due:
            if one.found.reply:
                by_queue.setdefault(one.found.queue, []).append(one)
        for queue, several in by_queue.items():
            await self._renew_by_server(connection, queue, several, asked_at, lock)
        stored = [one for one in due if not one.found.reply]
        await asyncio.gather(*(self._renew_stored(connection, one, asked_at, lock) for one in stored))
        now, wall = self._local.now(), self._clock.now()
        return [
            Renewed(wall + one.locked_until - now) if one is not None and now < one.locked_until else LAPSED
            for one in found
        ]

    async def _renew_by_server(
        self, connection: Connection, queue: str, held: Sequence[Held], asked_at: float, lock: float
    ) -> None:
        consumer = await self._places.consumer_of(connection, queue)
        lasts = lock + slack_of(lock)
        is_usual = consumer is not None and abs(lasts - consumer.ack_wait) <= 0.001
        try:
            await acknowledge(connection, [one.found.reply for one in held], WORKING if is_usual else locks_for(lasts))
        except NoJetStream:
            await self._lapse_if_gone(connection, queue, held)
            return
        answered_at = self._local.now()
        for one in held:
            if answered_at < one.locked_until:
                one.locked_until = asked_at + lock

    async def _renew_stored(self, connection: Connection, held: Held, asked_at: float, lock: float) -> None:
        """Store a message once more, locked for longer."""

        async def store(found: Found) -> Found | None:
            token = found.state.lock
            properties = found.with_state(locked_for=lock + slack_of(lock), lock=token)
            return await self._storing.replace(connection, found, properties)

        stored = await self._with_newest(connection, held, store)
        if stored is None:
            held.locked_until = -math.inf
        else:
            held.found, held.locked_until = stored, asked_at + lock

    async def _with_newest(
        self, connection: Connection, held: Held, act: Callable[[Found], Awaitable[T | None]]
    ) -> T | None:
        """Return the result of *act* on a message; if it is not as it was known, on what is there, if that is ours.

        An earlier renewal, without an answer, may have stored it.
        """
        answer = await act(held.found)
        if answer is not None or held.found.reply:
            return answer
        stream = self._places.place_of(held.found.queue).stream
        try:
            newest = await self._client.call(
                connection, f"STREAM.MSG.GET.{stream}", {"last_by_subj": held.found.subject}
            )
        except Refusal as error:
            if error.code in (NO_MESSAGE, NO_STREAM):
                return None
            raise
        found = read_message(held.found.queue, newest)
        if found.state.lock != held.found.state.lock or found.stored_as == held.found.stored_as:
            return None
        held.found = found
        return await act(found)

    async def _lapse_if_gone(self, connection: Connection, queue: str, held: Sequence[Held]) -> None:
        """Note that locks are over, as their consumer is gone.

        Raises:
            NoJetStream: JetStream can't be asked; then nothing is known.
        """
        self._places.forget(queue)
        names = {one.found.reply.split(".")[-6 if len(one.found.reply.split(".")) == 9 else -7] for one in held}
        consumer = await self._places.consumer_of(connection, queue)
        if consumer is not None and consumer.name in names:
            raise NoJetStream
        for one in held:
            one.locked_until = -math.inf

    # --- verdicts ---

    async def settle(self, connection: Connection, settlements: Sequence[Settlement]) -> list[Settled | Lapsed]:
        """Pass verdicts on live messages; the answers stand in the order given."""
        answers: list[Settled | Lapsed] = [LAPSED] * len(settlements)
        completed: list[tuple[int, Held]] = []
        others: list[tuple[int, Held, Verdict]] = []
        seen: set[tuple[object, int]] = set()
        for number, (delivery, verdict) in enumerate(settlements):
            held = self._find(connection, delivery)
            key = delivery.token, delivery.sequence
            if held is None or key in seen:
                continue
            seen.add(key)
            if isinstance(verdict, Complete):
                completed.append((number, held))
            else:
                others.append((number, held, verdict))
        most = await self._limits(connection, others)
        try:
            for number, _ in completed:
                for queue, message in _complete(settlements[number].verdict).sends:
                    await self._send(queue, [message])
            await self._complete(connection, completed, answers)
            passed = await asyncio.gather(
                *(self._pass(connection, held, verdict, most.get(held.found.queue, 0)) for _, held, verdict in others)
            )
        except BaseException:
            for held in (*(held for _, held in completed), *(held for _, held, _ in others)):
                held.was_tried = True
            raise
        for (number, _, _), answer in zip(others, passed, strict=True):
            answers[number] = answer
        for number, held in completed:
            verdict = _complete(settlements[number].verdict)
            if verdict.remember and not isinstance(answers[number], Lapsed):
                await self._inbox.remember(connection, held.found.queue, held.found.id, verdict.remember)
        for number, _ in completed:
            self._receipts.forget(settlements[number].delivery)
        for number, _, _ in others:
            self._receipts.forget(settlements[number].delivery)
        return answers

    async def _limits(self, connection: Connection, others: Sequence[tuple[int, Held, Verdict]]) -> dict[str, int]:
        """Return how often the messages of each queue may be delivered, where that decides something."""
        usual = QueueSettings().max_deliveries
        queues = {held.found.queue for _, held, verdict in others if isinstance(verdict, Abandon)}
        found = {}
        for queue in queues:
            record, _ = await self._places.read_record(connection, queue)
            found[queue] = record.settings.get("max_deliveries", usual)
        return found

    async def _complete(
        self, connection: Connection, completed: Sequence[tuple[int, Held]], answers: list[Settled | Lapsed]
    ) -> None:
        by_queue: dict[str, list[tuple[int, Held]]] = {}
        stored: list[tuple[int, Held]] = []
        for number, held in completed:
            if not held.found.reply:
                stored.append((number, held))
            elif not held.was_tried or await self._is_there(connection, held):
                by_queue.setdefault(held.found.queue, []).append((number, held))
        for queue, several in by_queue.items():
            try:
                await acknowledge(connection, [held.found.reply for _, held in several], ACK)
            except NoJetStream:
                await self._lapse_if_gone(connection, queue, [held for _, held in several])
                continue
            now = self._local.now()
            for number, held in several:
                # Later, the lock may have been over when the server acted: that is no proof.
                answers[number] = SETTLED if now < held.locked_until else LAPSED
        gone = await asyncio.gather(*(self._delete(connection, held) for _, held in stored))
        for (number, _), was_there in zip(stored, gone, strict=True):
            answers[number] = SETTLED if was_there else LAPSED

    async def _delete(self, connection: Connection, held: Held) -> bool:
        """Remove a message whose lock is stored in it; False if it is not what this process has locked."""

        async def delete(found: Found) -> bool | None:
            stream = self._places.place_of(found.queue).stream
            return await self._storing.delete(connection, stream, found.stored_as) or None

        return bool(await self._with_newest(connection, held, delete))

    async def _is_there(self, connection: Connection, held: Held) -> bool:
        """Whether a message is still there, whose verdict got no answer: an acknowledgement would not tell."""
        stream = self._places.place_of(held.found.queue).stream
        try:
            await self._client.call(connection, f"STREAM.MSG.GET.{stream}", {"seq": held.found.stored_as})
        except Refusal as error:
            if error.code in (NO_MESSAGE, NO_STREAM):
                return False
            raise
        return True

    async def _pass(self, connection: Connection, held: Held, verdict: Verdict, most: int) -> Settled | Lapsed:
        """Store a message again, or dead-letter it."""

        async def act(found: Found) -> Settled | None:
            return await self._pass_on(connection, found, verdict, most)

        return await self._with_newest(connection, held, act) or LAPSED

    async def _pass_on(self, connection: Connection, found: Found, verdict: Verdict, most: int) -> Settled | None:
        now, count = self._clock.now(), found.count
        expired = found.is_expired_at(now)
        state = with_expired_attempts(found.state, count - 1, now)
        if isinstance(verdict, DeadLetter):
            state = state.with_attempt(Attempt(count, now, "rejected", verdict.error))
            dead = dead_letter_of(found, state, verdict.reason, verdict.description, count, now, verdict.error)
            return SETTLED if await self._storing.bury(connection, found, dead) else None
        if isinstance(verdict, Abandon):
            state = state.with_attempt(Attempt(count, now, "abandoned", verdict.error))
            if expired or count >= most:
                reason, why = (
                    (MAX_DELIVERIES, exhausted_description(count)) if count >= most else (EXPIRED, EXPIRED_DESCRIPTION)
                )
                dead = dead_letter_of(found, state, reason, why, count, now)
                return SETTLED_DEAD if await self._storing.bury(connection, found, dead) else None
            due = now + verdict.delay if verdict.delay > 0 else 0.0
        else:
            if expired:
                dead = dead_letter_of(found, state, EXPIRED, EXPIRED_DESCRIPTION, count - 1, now)
                return SETTLED_DEAD if await self._storing.bury(connection, found, dead) else None
            count, due = count - 1, 0.0
        properties = replace(found.with_state(history=state.history, deliveries=count), due=due)
        return SETTLED if await self._storing.replace(connection, found, properties) is not None else None

    def _find(self, connection: Connection, delivery: Delivery) -> Held | None:
        held = self._receipts.find(delivery)
        return held if held is not None and held.is_known_to(connection) else None


def _complete(verdict: Verdict) -> Complete:
    assert isinstance(verdict, Complete)
    return verdict
