"""Verdicts: on the link that brought the message while it is there, else by the lock token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tenure._backends.servicebus.client import LOST, Namespace
from tenure._backends.servicebus.codec import array_of
from tenure._backends.servicebus.driver import ACCEPTED, RELEASED, Disconnected, Outcome, Refused, modified, rejected
from tenure._backends.servicebus.links import ReceiveLink
from tenure._backends.servicebus.message_format import (
    DESCRIPTION,
    NATIVE_REASONS,
    REASON,
    copied,
    outgoing,
)
from tenure._backends.servicebus.places import Places
from tenure._backends.servicebus.receipts import Held, Receipts
from tenure._backends.servicebus.sending import Sending
from tenure._backends.servicebus.service_clock import ServiceClock
from tenure._lease import NoAnswer
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.failures import Failure
from tenure._queue.message import EXPIRED, EXPIRED_DESCRIPTION, MAX_DELIVERIES, Attempt, exhausted_description
from tenure._queue.verdicts import (
    LAPSED,
    SETTLED,
    SETTLED_DEAD,
    Abandon,
    Complete,
    DeadLetter,
    Defer,
    GiveBack,
    Lapsed,
    Settled,
    Settlement,
    Verdict,
)

DELAY_NONE = 0.05
"""Seconds: a shorter delay is none."""

Answer = Settled | Lapsed | NoAnswer


class Decision:
    """What is to be done about one delivery: first a copy, perhaps; then the outcome, in the words of the link."""

    def __init__(self, outcome: Outcome, answer: Settled, copy: bytes | None = None) -> None:
        self.outcome = outcome
        self.answer = answer
        self.copy = copy


class Settling:
    """Passes verdicts. All of it belongs to the library's thread."""

    def __init__(
        self, namespace: Namespace, places: Places, receipts: Receipts, sending: Sending, clock: ServiceClock
    ) -> None:
        self._namespace = namespace
        self._places = places
        self._receipts = receipts
        self._sending = sending
        self._clock = clock

    async def settle(self, settlements: Sequence[Settlement]) -> list[Answer]:
        """Pass many verdicts; each has its own answer, or ``NoAnswer``."""
        answers: list[Answer | None] = [None] * len(settlements)
        by_link: dict[ReceiveLink | None, list[tuple[int, Held, Decision]]] = {}
        seen: set[int] = set()
        passed: set[int] = set()
        for index, (delivery, verdict) in enumerate(settlements):
            held = self._receipts.find(delivery)
            if held is None or id(held) in seen or (held.session is not None and held.session.is_lost):
                answers[index] = LAPSED
                continue
            seen.add(id(held))
            passed.add(index)
            try:
                decision = await self._decide(held, verdict)
                if decision.copy is not None:
                    has_session = held.received.session is not None
                    await self._sending.send(held.queue, [decision.copy], sessions=has_session)
            except (Refused, Disconnected, OSError, ValueError) as error:
                answers[index] = self._unanswered(error)
                continue
            by_link.setdefault(_usable(held), []).append((index, held, decision))
        await asyncio.gather(*(self._pass(link, rows, answers) for link, rows in by_link.items()))
        for index, (delivery, _) in enumerate(settlements):
            if index in passed and not isinstance(answers[index], NoAnswer):
                self._receipts.forget(delivery)
        return [one if one is not None else NoAnswer("there was no answer") for one in answers]

    async def _pass(
        self, link: ReceiveLink | None, rows: list[tuple[int, Held, Decision]], answers: list[Answer | None]
    ) -> None:
        if link is None:
            found = await asyncio.gather(*(self._by_token(held, decision.outcome) for _, held, decision in rows))
        else:
            verdicts = [(held.arrived, decision.outcome) for _, held, decision in rows if held.arrived is not None]
            found = await link.settle(verdicts)
        for (index, held, decision), error in zip(rows, found, strict=True):
            if error is None:
                answers[index] = decision.answer
            elif isinstance(error, Refused) and error.condition in LOST:
                answers[index] = LAPSED
            elif held.session is not None and held.session.is_lost:
                answers[index] = NoAnswer("the session's link was detached")
            else:
                answers[index] = self._unanswered(error)

    async def _by_token(self, held: Held, outcome: Outcome) -> Exception | None:
        """Settle over the management link, as after a lost link; return why it was not done, or None."""
        body: dict[str, Any] = {"disposition-status": _status(outcome), "lock-tokens": array_of([held.token])}
        state = outcome.state
        if outcome.name == "modified" and state.message_annotations:
            body["properties-to-modify"] = state.message_annotations
        if outcome.name == "rejected":
            info = dict(state.error.info)
            body["deadletter-reason"] = info.pop(REASON)
            body["deadletter-description"] = info.pop(DESCRIPTION)
            if info:
                body["properties-to-modify"] = info
        try:
            await self._namespace.ask(held.path, "update-disposition", body)
        except (Refused, Disconnected, OSError, ValueError) as error:
            return error
        return None

    def _unanswered(self, error: Exception) -> NoAnswer:
        return NoAnswer(str(self._namespace.translated(error)))

    # --- decisions ---

    async def _decide(self, held: Held, verdict: Verdict) -> Decision:
        if isinstance(verdict, Complete):
            for queue, message in verdict.sends:
                encoded = outgoing(message, self._clock.now())
                await self._sending.send(queue, [encoded], sessions=message.session is not None)
            return Decision(ACCEPTED, SETTLED)
        if isinstance(verdict, GiveBack):
            return Decision(RELEASED, SETTLED)
        if held.queue.endswith(DEAD_SUFFIX):
            return self._decide_dead(held, verdict)
        count = held.received.count + 1
        if isinstance(verdict, Defer):
            return Decision(modified({}, undeliverable=True), SETTLED)
        if isinstance(verdict, DeadLetter):
            return self._bury(held, verdict.reason, verdict.description, "rejected", verdict.error, SETTLED)
        assert isinstance(verdict, Abandon)
        settings = await self._places.settings(held.queue)
        received, now = held.received, self._clock.now()
        if count >= settings.max_deliveries:
            text = exhausted_description(count)
            return self._bury(held, MAX_DELIVERIES, text, "abandoned", verdict.error, SETTLED_DEAD)
        expires_at = None if received.ttl is None else received.enqueued_at + received.ttl
        if expires_at is not None and expires_at <= now:
            return self._bury(held, EXPIRED, EXPIRED_DESCRIPTION, "abandoned", verdict.error, SETTLED_DEAD)
        notes = received.notes.with_attempt(Attempt(count, now, "abandoned", verdict.error))
        if verdict.delay < DELAY_NONE or held.arrived is None:
            return Decision(modified(notes.properties() if verdict.error else {}), SETTLED)
        if held.session is not None:
            # Within a session, a copy would come behind the others: it is put back, and this process waits.
            held.session.blocked_until = self._namespace.clock.now() + verdict.delay
            return Decision(modified(notes.properties()), SETTLED)
        if held.path.subscription is not None:
            # A copy would go to all subscriptions of the topic.
            return Decision(modified(notes.properties()), SETTLED)
        copy = copied(
            received,
            held.message,
            replace(notes, deliveries=count),
            new_id=await self._places.detects_duplicates(held.queue),
            ttl=None if expires_at is None else max(0.001, expires_at - now - verdict.delay),
            due_at=now + verdict.delay,
        )
        return Decision(ACCEPTED, SETTLED, copy)

    def _bury(
        self, held: Held, reason: str, description: str, how: Any, error: Failure | None, answer: Settled
    ) -> Decision:
        count, now = held.received.count + 1, self._clock.now()
        notes = held.received.notes.with_attempt(Attempt(count, now, how, error))
        changes = replace(notes, died_at=now, died_after=count).properties()
        return Decision(rejected(NATIVE_REASONS.get(reason, reason), description, changes), answer)

    def _decide_dead(self, held: Held, verdict: Verdict) -> Decision:
        """Decide about a dead letter, which stays one: the service has no delay for it."""
        received = held.received
        if not isinstance(verdict, DeadLetter):
            return Decision(RELEASED, SETTLED)
        history = received.death.history
        if verdict.error is not None:
            history = (*history, Attempt(received.deaths_count, self._clock.now(), "rejected", verdict.error))
        died_at = received.death.at
        notes = replace(received.notes, history=history, died_at=died_at, died_after=received.deaths_count)
        named = {REASON: verdict.reason, DESCRIPTION: verdict.description}
        return Decision(modified({**notes.properties(), **named}), SETTLED)


def _usable(held: Held) -> ReceiveLink | None:
    """Return the link on which a message can be settled: the one that brought it, for a first verdict."""
    link, arrived = held.link, held.arrived
    if link is None or arrived is None or link.lost is not None or arrived.delivery_id not in link.unsettled:
        return None
    return link


def _status(outcome: Outcome) -> str:
    """Return an outcome as the management node calls it. It has none for a message that is handed back uncounted."""
    match outcome.name:
        case "accepted":
            return "completed"
        case "rejected":
            return "suspended"
        case "modified" if outcome.state.undeliverable_here:
            return "defered"
    return "abandoned"
