"""Verdicts, applied concurrently; one that hangs doesn't delay the others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tenure._backends.azure_storage.background import Background
from tenure._backends.azure_storage.client import CONCURRENCY, Account, LoopConnections
from tenure._backends.azure_storage.dead_letters import DeadLetters
from tenure._backends.azure_storage.message_format import Properties, encode_to_fit
from tenure._backends.azure_storage.receipts import Receipts
from tenure._backends.azure_storage.records import (
    HeldMessage,
    dead_letter_properties,
    with_identity,
)
from tenure._backends.azure_storage.service_clock import ServiceClock
from tenure._lease import NoAnswer
from tenure._queue.delivery_ends import EndedDelivery, history_noted, noted, outcome_of
from tenure._queue.message import Delivery
from tenure._queue.outgoing import Outgoing
from tenure._queue.verdicts import (
    LAPSED,
    SETTLED,
    Complete,
    DeadLetter,
    Lapsed,
    Settled,
    Settlement,
    Verdict,
)
from tenure._runtime.notifier import Notifier
from tenure.errors import Unavailable

STRAGGLER_WAIT = 1.0
"""Seconds that answered verdicts wait for the others."""

PENDING_KEPT = 600.0
"""Seconds for which a late answer is kept for a repetition of the verdict."""

DELAY_MAX = 604_800

Send = Callable[[str, Sequence[Outgoing]], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class PendingVerdict:
    """A verdict that was not answered with the others, and the time until which its answer is kept."""

    verdict: Verdict
    task: asyncio.Task[Settled | Lapsed]
    until: float


class Settling:
    """Applies verdicts."""

    def __init__(
        self,
        account: Account,
        clock: ServiceClock,
        receipts: Receipts,
        dead_letters: DeadLetters,
        background: Background,
        notifier: Notifier,
        send: Send,
    ) -> None:
        self._account = account
        self._clock = clock
        self._receipts = receipts
        self._dead_letters = dead_letters
        self._background = background
        self._notifier = notifier
        self._send = send
        self._pending: dict[tuple[str, int], PendingVerdict] = {}

    async def settle(
        self, settlements: Sequence[Settlement], max_deliveries: dict[str, int]
    ) -> Sequence[Settled | Lapsed | NoAnswer]:
        """Apply many verdicts, concurrently; each has its own answer, or ``NoAnswer``.

        The others don't wait for a verdict that hangs. It goes on until its own time limit; a repetition waits for it.
        """
        free = asyncio.Semaphore(CONCURRENCY)
        pending: dict[tuple[str, int], PendingVerdict] = {}
        for delivery, verdict in settlements:
            key = str(delivery.token), delivery.sequence
            if key not in pending:
                most = max_deliveries.get(delivery.queue, 0)
                request = partial(self._settle, delivery=delivery, verdict=verdict, max_deliveries=most)
                pending[key] = self._take_pending(key, verdict) or PendingVerdict(
                    verdict, self._account.begin(request, free), self._clock.local.now() + PENDING_KEPT
                )
        await _wait_for_most([one.task for one in pending.values()])
        answers = self._answers(pending)
        # A second verdict on a delivery lapses.
        return [answers.pop((str(one.token), one.sequence), LAPSED) for one, _ in settlements]

    def expire(self) -> None:
        """Forget late answers whose verdicts were not repeated."""
        now = self._clock.local.now()
        for key, one in list(self._pending.items()):
            if one.until < now and one.task.done():
                self._pending.pop(key, None)

    def _take_pending(self, key: tuple[str, int], verdict: Verdict) -> PendingVerdict | None:
        """Return the task of the same *verdict* if it was begun before and had no answer then."""
        one = self._pending.pop(key, None)
        here = asyncio.get_running_loop()
        return one if one and one.verdict == verdict and one.task.get_loop() is here else None

    def _answers(
        self, pending: dict[tuple[str, int], PendingVerdict]
    ) -> dict[tuple[str, int], Settled | Lapsed | NoAnswer]:
        """Return the answers, and keep the verdicts that have none yet."""
        answers: dict[tuple[str, int], Settled | Lapsed | NoAnswer] = {}
        unanswered: dict[tuple[str, int], str] = {}
        errors: list[BaseException] = []
        for key, one in pending.items():
            if not one.task.done():
                self._pending[key] = one
                self._background.keep(one.task)
                unanswered[key] = f"{self._account.url} has answered other verdicts, but not this one yet"
            elif one.task.cancelled():
                unanswered[key] = f"{self._account.url} is closed; connect again"
            elif isinstance(error := one.task.exception(), Unavailable):
                unanswered[key] = str(error)
            elif error is not None:
                errors.append(error)
            else:
                answers[key] = one.task.result()
        if errors:
            raise errors[0]
        if unanswered and not answers:
            raise Unavailable(next(iter(unanswered.values())))
        return {**answers, **{key: NoAnswer(reason) for key, reason in unanswered.items()}}

    async def _settle(
        self, connections: LoopConnections, delivery: Delivery, verdict: Verdict, max_deliveries: int
    ) -> Settled | Lapsed:
        held = self._receipts.find(delivery)
        if held is None:
            return LAPSED
        if held.dead is not None:
            answer = await self._settle_decided(connections, delivery, held, held.dead, verdict)
        elif isinstance(verdict, Complete):
            for queue, message in verdict.sends:
                await self._send(queue, [message])
            answer = await self._receipts.delete(connections, held)
        elif delivery.death is not None:
            answer = await self._settle_dead(connections, delivery, held, verdict)
        else:
            answer = await self._settle_failed(connections, delivery, held, verdict, max_deliveries)
        self._receipts.forget(delivery)
        if not isinstance(answer, Lapsed) and not isinstance(verdict, Complete):
            self._notifier.notify(delivery.queue)
        return answer

    async def _settle_decided(
        self, connections: LoopConnections, delivery: Delivery, held: HeldMessage, dead: Properties, verdict: Verdict
    ) -> Settled | Lapsed:
        """Finish the move to the dead letters that an earlier verdict without an answer has begun."""
        answer = await self._dead_letters.move(connections, held, dead, delivery.body, renews=True)
        if isinstance(verdict, Complete) or isinstance(answer, Lapsed):
            return LAPSED
        return SETTLED if isinstance(verdict, DeadLetter) else Settled(dead=True, reason=dead.reason)

    async def _settle_failed(
        self, connections: LoopConnections, delivery: Delivery, held: HeldMessage, verdict: Verdict, max_deliveries: int
    ) -> Settled | Lapsed:
        """Put a live message back, or dead-letter it."""
        now, count, properties = self._clock.now(), delivery.delivery_count, held.properties
        is_expired = properties.ttl is not None and now >= delivery.enqueued_at + properties.ttl
        outcome = outcome_of(verdict, EndedDelivery(count, is_expired), max_deliveries, now)
        if outcome.cause is not None:
            dead = dead_letter_properties(delivery, properties, outcome, now)
            answer = await self._dead_letters.move(connections, held, dead, delivery.body, renews=True)
            return answer if isinstance(answer, Lapsed) else outcome.answer
        if outcome.attempt is None:
            properties = replace(properties, uncounted=properties.uncounted + 1)
        else:
            properties = history_noted(properties, outcome, now, fills=True)
        text = encode_to_fit(held.text, delivery.body, properties)
        return await self._receipts.make_visible(connections, held, min(DELAY_MAX, math.ceil(outcome.delay)), text)

    async def _settle_dead(
        self, connections: LoopConnections, delivery: Delivery, held: HeldMessage, verdict: Verdict
    ) -> Settled | Lapsed:
        """Put a dead letter back among the dead letters."""
        text, now = None, self._clock.now()
        outcome = outcome_of(verdict, EndedDelivery(held.properties.deliveries, is_dead=True), math.inf, now)
        if outcome.cause is not None:
            properties = noted(held.properties, outcome, now)
            text = encode_to_fit(held.text, delivery.body, with_identity(properties, delivery))
        return await self._receipts.make_visible(connections, held, min(DELAY_MAX, math.ceil(outcome.delay)), text)


async def _wait_for_most(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait until all *tasks* are done, or some are and the others take longer. If cancelled, cancel them all."""
    late = set(tasks)
    try:
        while late:
            done, late = await asyncio.wait(late, timeout=STRAGGLER_WAIT)
            if not done and len(late) < len(tasks):
                return
    except asyncio.CancelledError:
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
