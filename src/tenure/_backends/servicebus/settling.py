"""Verdicts: on the link that brought the message while it is there, else by the lock token."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from tenure._backends.servicebus.client import GONE, LOST, Namespace
from tenure._backends.servicebus.codec import Encoded, array_of
from tenure._backends.servicebus.driver import (
    ACCEPTED,
    FAILURES,
    RELEASED,
    Outcome,
    Refused,
    modified,
    readable,
    rejected,
)
from tenure._backends.servicebus.links import ReceiveLink
from tenure._backends.servicebus.message_format import (
    DESCRIPTION,
    REASON,
    buried,
    copied,
    outgoing,
    with_cause,
)
from tenure._backends.servicebus.places import Places
from tenure._backends.servicebus.receipts import Held, Receipts
from tenure._backends.servicebus.sending import Sending
from tenure._lease import NoAnswer
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.delivery_ends import EndedDelivery, history_noted, outcome_of
from tenure._queue.verdicts import (
    LAPSED,
    SETTLED,
    Abandon,
    Complete,
    Defer,
    GiveBack,
    Lapsed,
    Settled,
    Settlement,
    Verdict,
)
from tenure._runtime.remote_clock import RemoteClock
from tenure.errors import MessageRefused, Unavailable

DELAY_NONE = 0.05
"""Seconds: a shorter delay is none."""

Answer = Settled | Lapsed | NoAnswer


class Row(NamedTuple):
    """One of many verdicts."""

    at: int
    """Its place among the answers."""
    held: Held
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done about one delivery: first a copy, perhaps; then the outcome, in the words of the link."""

    outcome: Outcome
    answer: Settled | Lapsed
    copies: tuple[Encoded, ...] = ()
    """The copy that is to be sent, and a smaller one for where it is too large."""


class Settling:
    """Passes verdicts. All of it belongs to the library's thread."""

    def __init__(
        self, namespace: Namespace, places: Places, receipts: Receipts, sending: Sending, clock: RemoteClock
    ) -> None:
        self._namespace = namespace
        self._places = places
        self._receipts = receipts
        self._sending = sending
        self._clock = clock

    async def settle(self, settlements: Sequence[Settlement]) -> list[Answer]:
        """Pass many verdicts; each has its own answer, or ``NoAnswer``."""
        answers: list[Answer | None] = [LAPSED] * len(settlements)
        plain: list[Row] = []
        sending: list[Row] = []
        for index, (_, verdict), held in self._receipts.find_all(settlements):
            answers[index] = None
            (sending if _may_send(verdict) else plain).append(Row(index, held, verdict))
        # Those that only need a frame don't wait for those for which something is sent before.
        passing = (self._settle_plain(plain, answers), self._settle_sending(sending, answers))
        passed = await asyncio.gather(*passing, return_exceptions=True)
        for row in (*plain, *sending):
            if isinstance(answers[row.at], Settled | Lapsed):
                self._receipts.forget(settlements[row.at].delivery)
        for error in passed:
            if error is not None:
                raise error
        return [one if one is not None else NoAnswer("there was no answer") for one in answers]

    async def _settle_plain(self, rows: Sequence[Row], answers: list[Answer | None]) -> None:
        await self._pass_all([(row, await self._prepared(row)) for row in rows], answers)

    async def _settle_sending(self, rows: Sequence[Row], answers: list[Answer | None]) -> None:
        prepared = await asyncio.gather(*map(self._prepared, rows), return_exceptions=True)
        failed = [one for one in prepared if isinstance(one, BaseException)]
        done = [(row, one) for row, one in zip(rows, prepared, strict=True) if not isinstance(one, BaseException)]
        await self._pass_all(done, answers)
        if failed:
            raise failed[0]

    async def _prepared(self, row: Row) -> Decision | Answer:
        """Decide, and send what goes before the verdict; return an answer if there is one already."""
        try:
            decision = await self._decide(row.held, row.verdict)
            if isinstance(decision, Decision) and decision.copies:
                if not await self._is_held(row.held):
                    return LAPSED
                if not await self._send_first(row.held, decision.copies):
                    return Decision(modified({}), SETTLED)
                row.held.begun, row.held.is_copied = row.verdict, True
            return decision
        except (*FAILURES, Unavailable) as error:
            return self._unanswered(error)

    async def _is_held(self, held: Held) -> bool:
        """Renew a lock before something is sent, as a late verdict must have no effect; return whether it is ours."""
        try:
            if held.session is not None:
                body: dict[str, Any] = {"session-id": held.session.name}
                await self._namespace.ask(held.path, "renew-session-lock", body, held.session.link)
            else:
                await self._namespace.ask(held.path, "renew-lock", {"lock-tokens": array_of([held.token])})
        except Refused as refused:
            if refused.condition not in LOST:
                raise
            return False
        return True

    async def _send_first(self, held: Held, copies: Sequence[Encoded]) -> bool:
        """Send the first of *copies* that is not too large; return False if all are."""
        for copy in copies:
            with suppress(MessageRefused):
                await self._sending.send(
                    held.queue, [copy], sessions=held.received.session is not None, are_copies=True
                )
                return True
        return False

    async def _pass_all(self, rows: Sequence[tuple[Row, Decision | Answer]], answers: list[Answer | None]) -> None:
        by_link: dict[ReceiveLink | None, list[tuple[int, Held, Decision]]] = {}
        for row, found in rows:
            if isinstance(found, Decision):
                by_link.setdefault(_usable(row.held), []).append((row.at, row.held, found))
            else:
                answers[row.at] = found
        await asyncio.gather(*(self._pass(link, passed, answers) for link, passed in by_link.items()))

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
            elif isinstance(error, Refused) and error.condition in GONE:
                answers[index] = LAPSED
            elif held.session is not None and held.session.is_lost:
                answers[index] = NoAnswer("the session's link was detached")
            else:
                answers[index] = self._unanswered(error)

    async def _by_token(self, held: Held, outcome: Outcome) -> Exception | None:
        """Settle over the management link, as after a lost link; return why it was not done, or None."""
        body: dict[str, Any] = {"disposition-status": _status(outcome), "lock-tokens": array_of([held.token])}
        link = None
        if held.session is not None:  # its locks are known on its link alone
            body["session-id"], link = held.session.name, held.session.link
        if outcome.changes:
            body["properties-to-modify"] = outcome.changes
        if outcome.name == "rejected":
            body["deadletter-reason"] = outcome.reason
            body["deadletter-description"] = outcome.description
        try:
            await self._namespace.ask(held.path, "update-disposition", body, link)
        except FAILURES as error:
            return readable(error)
        return None

    def _unanswered(self, error: Exception) -> NoAnswer:
        return NoAnswer(str(self._namespace.translated(error)))

    # --- decisions ---

    async def _decide(self, held: Held, verdict: Verdict) -> Decision | Lapsed:
        if held.is_copied:  # by an attempt that had no answer: another verdict comes too late
            return Decision(ACCEPTED, SETTLED if verdict == held.begun else LAPSED)
        if isinstance(verdict, Complete):
            if verdict.sends and held.begun != verdict:
                if not await self._is_held(held):
                    return LAPSED
                held.begun, held.sent = verdict, 0
            for queue, message in verdict.sends[held.sent :]:
                named = message if message.id is not None else replace(message, id=_id_of(held, f"send {held.sent}"))
                encoded = outgoing(named, self._clock.now())
                await self._sending.send(queue, [encoded], sessions=message.session is not None)
                held.sent += 1
            return Decision(ACCEPTED, SETTLED)
        if held.queue.endswith(DEAD_SUFFIX):
            return self._decide_dead(held, verdict)
        received, now = held.received, self._clock.now()
        count, is_deferred = received.count + 1, held.arrived is None
        most = await self._deliveries_max(held) if isinstance(verdict, Abandon | Defer) else math.inf
        if isinstance(verdict, Defer) and count >= most:
            verdict = Abandon()  # the service counts a deferral as a delivery, and lets its last one die
        delivered = EndedDelivery(count, received.expires_at <= now, is_deferred)
        outcome = outcome_of(verdict, delivered, most, now)
        if outcome.cause is not None:
            return Decision(rejected(*buried(received, outcome, now)), outcome.answer)
        if isinstance(verdict, GiveBack) and _usable(held) is not None:
            return Decision(RELEASED, outcome.answer)
        if isinstance(verdict, GiveBack | Defer):  # the service counts it
            changes = received.noted(received.notes.without_attempt(count))
            return Decision(modified(changes, undeliverable=isinstance(verdict, Defer)), outcome.answer)
        notes = history_noted(received.notes, outcome, now, fills=True)
        put_back = Decision(modified(received.noted(notes)), outcome.answer)
        if outcome.delay < DELAY_NONE:
            return put_back
        if held.session is not None:
            # Within a session, a copy would come behind the others: it is put back, and this process waits.
            held.session.blocked_until = self._namespace.clock.now() + outcome.delay
            return put_back
        if held.path.subscription is not None:
            # A copy would go to all subscriptions of the topic.
            return put_back
        build = partial(
            copied,
            received,
            held.message,
            new_id=_id_of(held, f"retry {count}") if await self._places.detects_duplicates(held.queue) else None,
            ttl=None if received.ttl is None else max(0.001, received.expires_at - now - outcome.delay),
            due_at=now + outcome.delay,
        )
        notes = replace(notes, deliveries=outcome.deliveries, sent_at=received.sent_at)
        return Decision(ACCEPTED, outcome.answer, (build(notes), build(notes.least())))

    async def _deliveries_max(self, held: Held) -> float:
        """Return after how many deliveries a message dies by a verdict; infinity if the service alone decides that."""
        most = await self._places.deliveries_max(held.queue, is_copy=held.received.notes.deliveries > 0)
        return math.inf if most is None else most

    def _decide_dead(self, held: Held, verdict: Verdict) -> Decision:
        """Decide about a dead letter, which stays one: the service has no delay for it."""
        received, now = held.received, self._clock.now()
        outcome = outcome_of(verdict, EndedDelivery(received.deaths_count, is_dead=True), math.inf, now)
        if outcome.cause is None:
            return Decision(RELEASED, outcome.answer)
        notes = history_noted(received.notes_of_death, outcome, now)
        notes = replace(notes, dead_at=now, died_after=outcome.deliveries)
        reason, description, changes = with_cause(received, notes, outcome.cause)
        return Decision(modified({**changes, REASON: reason, DESCRIPTION: description}), outcome.answer)


def _usable(held: Held) -> ReceiveLink | None:
    """Return the link on which a message can be settled: the one that brought it, for a first verdict."""
    link, arrived = held.link, held.arrived
    if link is None or arrived is None or link.lost is not None or arrived.delivery_id not in link.unsettled:
        return None
    return link


def _may_send(verdict: Verdict) -> bool:
    return (isinstance(verdict, Abandon) and verdict.delay >= DELAY_NONE) or (
        isinstance(verdict, Complete) and bool(verdict.sends)
    )


def _id_of(held: Held, what: str) -> str:
    """Return the id of a message that is sent for a delivery: the same for each attempt, so that it is sent once."""
    return uuid.uuid5(held.token, what).hex


def _status(outcome: Outcome) -> str:
    """Return an outcome as the management node calls it. It has none for a message that is handed back uncounted."""
    match outcome.name:
        case "accepted":
            return "completed"
        case "rejected":
            return "suspended"
        case "modified" if outcome.undeliverable:
            return "defered"
    return "abandoned"
