"""Messages in the form of Service Bus. Body, properties and application properties are the sender's: no envelope.

What tenure has to note of a message that failed is in application properties of its own, ``tenure-…``, set with the
verdict; a message that never failed has none.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Self
from uuid import UUID

from tenure._backends.servicebus import amqp, codec
from tenure._backends.servicebus.codec import (
    CORRELATION,
    COUNT,
    CREATED,
    EXPIRES,
    GROUP,
    REPLY_TO,
    TTL,
    Encoded,
    Incoming,
    encoded,
    encoded_again,
    plain,
)
from tenure._checks import LONGEST
from tenure._foreign import Unreadable, a_count, a_list, a_text, read_json, read_or, seconds
from tenure._queue.checks import COUNT_MAX, DEAD_SUFFIX, INT_MAX, read_id
from tenure._queue.delivery_ends import Cause, Outcome, history_noted
from tenure._queue.failures import Failure
from tenure._queue.headers import is_reserved, read_headers
from tenure._queue.identity import ID_MARK
from tenure._queue.message import (
    EXPIRED,
    EXPIRED_DESCRIPTION,
    HISTORY_MAX,
    MAX_DELIVERIES,
    NO_HEADERS,
    Attempt,
    Death,
    Delivery,
    Headers,
    Token,
    exhausted_description,
    newest_error,
)
from tenure._queue.notes import Notes, read_deliveries, read_history_text, read_reason, rows_of
from tenure._queue.outgoing import Outgoing

ID, DELIVERIES, HISTORY, DEATH = "tenure-id", "tenure-deliveries", "tenure-history", "tenure-death"
BEFORE, NO_ATTEMPTS, SENT_AT = "tenure-before", "tenure-no-attempts", "tenure-enqueued-at"
"""What releases before these ignore, and pass on."""
QUEUE = "tenure-queue"
"""Of which queue the others tell: in another one, a program has passed them on, and they say nothing. Releases before
this name none, and are believed."""
REASON, DESCRIPTION = "DeadLetterReason", "DeadLetterErrorDescription"
_OF_A_QUEUE = (ID, DELIVERIES, HISTORY, DEATH, BEFORE, NO_ATTEMPTS, SENT_AT, QUEUE)
NOTED = (*_OF_A_QUEUE, REASON, DESCRIPTION)
"""The application properties that are not the sender's."""
CONTENT_TYPE = "content-type"

REASONS = {"MaxDeliveryCountExceeded": MAX_DELIVERIES, "TTLExpiredException": EXPIRED}
"""The reasons that the service gives, and tenure's words for them."""
NATIVE_REASONS = {ours: native for native, ours in REASONS.items()}

PROPERTY_MAX = 24_000
"""Characters of a property: Service Bus takes 32 KB for one, and 64 KB for all."""

EACH = 8
"""Bytes that each property takes besides its name and its value."""

HEADERS_MAX = 60_000
"""Bytes of all headers, also those that tenure adds: the rest is for the other properties, and the service's own."""

NOTES_ROOM = 2_048
"""Bytes of them that a sender leaves for why its message dies: the longest reason, and a short description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageNotes(Notes):
    """What tenure has noted of a message. ``deliveries`` are those before it was copied: the service counts on."""

    id: str | None = None
    """The sender's id, where the message is a copy that needed another."""
    sent_at: float | None = None
    """When the message was sent of which it is a copy, in Unix seconds."""
    died_after: int | None = None
    """After how many deliveries."""
    no_attempts: tuple[int, ...] = ()
    """The numbers of deliveries that count and were no attempts: they ended with a deferral, or were given back by the
    lock token, which the service counts."""

    def properties(self, taken: int) -> dict[str, str | int]:
        """Return it as application properties, beside *taken* bytes of others: the history takes what they leave."""
        found: dict[str, str | int] = {}
        if self.id is not None:
            found[ID] = self.id
        if self.sent_at is not None:
            found[SENT_AT] = f"{self.sent_at:.3f}"  # an int has 32 bits
        if self.deliveries:
            found[DELIVERIES] = self.deliveries
        if self.no_attempts:
            found[NO_ATTEMPTS] = json.dumps(self.no_attempts)
        if self.history:
            found[HISTORY], dropped = _written(self.history, min(PROPERTY_MAX, HEADERS_MAX - taken))
            if self.before > dropped:
                found[BEFORE] = self.before - dropped
        if self.dead_at:
            found[DEATH] = json.dumps([self.dead_at, self.died_after])
        return found

    def with_expired_attempts(self, count: int, now: float) -> Self:
        """Return the notes with those of *count* attempts that are missing: their locks have ended.

        None is missing of those before it was copied: what a copy doesn't tell of them was left out, for want of room.
        """
        filled = Notes.with_expired_attempts(self, count, now)
        known = {one.number for one in self.history[self.before :]}
        recent = (
            one
            for one in filled.history[filled.before :]
            if one.number in known or (one.number > self.deliveries and one.number not in self.no_attempts)
        )
        return replace(filled, history=(*filled.history[: filled.before], *recent))

    def without_attempt(self, number: int) -> Self:
        """Return the notes after a delivery that counts and was no attempt."""
        return replace(self, no_attempts=(*self.no_attempts, number)[-HISTORY_MAX:])

    def redriven(self) -> Self:
        """Return the notes of it as a message with all deliveries left, and its history."""
        return replace(Notes.redriven(self), died_after=None, no_attempts=())

    def least(self) -> Self:
        """Return the notes for a message that has no room for them: what it needs to be counted and named."""
        return replace(self, history=(), before=0, no_attempts=(), sent_at=None)


@dataclass(frozen=True, slots=True)
class Received:
    """A message as it was received or looked at."""

    sequence: int
    id: str
    body: bytes
    headers: Headers
    taken: int
    """The bytes of the application properties that are not tenure's."""
    count: int
    """How often it was handed out before."""
    enqueued_at: float
    """When the service took it; of a copy, later than what it is a copy of."""
    locked_until: float
    session: str | None
    reply_to: str | None
    correlation_id: str | None
    ttl: float | None
    due_at: float | None
    state: int
    notes: MessageNotes
    reason: str | None
    description: str
    queue: str
    """The queue, whose dead letter it may be."""
    stale: tuple[str, ...]
    """The application properties that are about another queue."""

    def noted(self, notes: MessageNotes, besides: int = 0) -> dict[str, str | int]:
        """Return *notes* as changes of its application properties; *besides* is how many bytes others of them take."""
        found = notes.properties(self.taken + besides)
        if found.keys() - {ID}:  # a name is the sender's, whatever the queue
            found[QUEUE] = self.queue
        return dict.fromkeys(self.stale, "") | found

    @property
    def sent_at(self) -> float:
        """When it was sent, in Unix seconds."""
        return self.enqueued_at if self.notes.sent_at is None else self.notes.sent_at

    @property
    def expires_at(self) -> float:
        """When it expires, in Unix seconds; infinity for never."""
        return math.inf if self.ttl is None else min(self.enqueued_at + self.ttl, LONGEST)

    @property
    def notes_of_death(self) -> MessageNotes:
        """What is noted of a dead letter. If the service moved it, nobody could note that: it is what can be told."""
        notes, reason = self.notes, REASONS.get(self.reason or "", self.reason or "")
        if notes.dead_at:
            return replace(notes, reason=reason, description=self.description)
        count, description = self.deaths_count, self.description
        at = max(self.enqueued_at, notes.history[-1].at if notes.history else 0.0)
        if reason == EXPIRED:
            at, description = max(at, 0.0 if self.ttl is None else self.expires_at), EXPIRED_DESCRIPTION
        elif reason == MAX_DELIVERIES:
            description = exhausted_description(count)
        if reason in NATIVE_REASONS:
            notes = notes.with_expired_attempts(count, at)
        return replace(notes, reason=reason, description=description, dead_at=at, died_after=count)

    @property
    def death(self) -> Death:
        """Why and when it died; the service notes no moment, so it is at best that of its last known change."""
        notes = self.notes_of_death
        return Death(notes.reason or "", notes.description, notes.dead_at, newest_error(notes.history), notes.history)

    @property
    def deaths_count(self) -> int:
        """Return after how many deliveries it died."""
        if self.notes.died_after is not None:
            return self.notes.died_after
        return max(self.count, max((one.number for one in self.notes.history[self.notes.before :]), default=0))

    def delivery(self, queue: str, token: Token, *, is_dead: bool = False) -> Delivery:
        """Return it as a delivery under a lock."""
        return Delivery(
            queue,
            self.sequence,
            token,
            self.id,
            self.body,
            self.headers,
            self.deaths_count if is_dead else self.count + 1,
            self.sent_at,
            self.locked_until,
            self.session,
            0,
            self.reply_to,
            self.correlation_id,
            self.death if is_dead else None,
        )


def received(queue: str, message: Incoming) -> Received:
    """Return what is in *message*. It raises nothing: its messages are locked, perhaps with others."""
    annotations = message.annotations
    application = message.application
    properties, header = message.properties, message.header
    home = queue.removesuffix(DEAD_SUFFIX)
    # The service doesn't tell names by case, and neither do programs.
    is_passed_on = (_text(application.get(QUEUE, home)) or "").lower() != home.lower()
    notes = _NO_NOTES if is_passed_on or _NOTED.isdisjoint(application) else _notes(application)
    sequence = read_or(a_count, annotations.get("x-opt-sequence-number"), 0)
    named = _shown(properties[codec.ID])
    due = annotations.get("x-opt-scheduled-enqueue-time")
    return Received(
        sequence,
        notes.id or named or f"{queue}{ID_MARK}{sequence}",
        message.body,
        _headers(message),
        _taken(message) if application else 0,
        min(notes.deliveries + read_or(a_count, header[COUNT], 0), COUNT_MAX - 1),
        _moment(annotations.get("x-opt-enqueued-time")),
        _moment(annotations.get("x-opt-locked-until")),
        _text(properties[GROUP]),
        _shown(properties[REPLY_TO]),
        _shown(properties[CORRELATION]),
        _ttl(message),
        None if due is None else _moment(due),
        read_or(a_count, annotations.get("x-opt-message-state", 0), 0),
        notes,
        read_or(read_reason, _text(application.get(REASON)), None),
        read_or(read_reason, _text(application.get(DESCRIPTION)), ""),
        home,
        tuple(name for name in _OF_A_QUEUE if name in application) if is_passed_on else (),
    )


def _headers(message: Incoming) -> Headers:
    """Return what a sender can have set as headers; values of other types become text."""
    content_type = message.properties[codec.CONTENT_TYPE]
    if not message.application and content_type is None:
        return NO_HEADERS
    found = {name: _value(value) for name, value in message.application.items() if not is_reserved(str(name))}
    if content_type is not None:
        found.setdefault(CONTENT_TYPE, _text(content_type))
    return read_headers(found)


def _taken(message: Incoming) -> int:
    """Return the bytes of the application properties that are not tenure's, as they came."""
    section = message.parts.get(amqp.APPLICATION, b"")
    ours = (value for name, value in message.application.items() if name in NOTED)
    return len(section) - sum(len(value.encode()) for value in ours if isinstance(value, str))


def _ttl(message: Incoming) -> float | None:
    """Return how long a message lives in all, in seconds; None: for ever, as far as it can be read."""
    expires, created = message.properties[EXPIRES], message.properties[CREATED]
    if type(expires) is int and type(created) is int and expires > created:
        return min((expires - created) / 1_000, LONGEST)
    life = read_or(a_count, message.header[TTL], None)
    return None if life is None else min(life / 1_000, LONGEST)


def outgoing(message: Outgoing, now: float, changes: Mapping[str, str | int] | None = None) -> Encoded:
    """Return *message* as it is sent, with more application properties; a delay is counted from *now*."""
    headers = dict(message.headers)
    content_type = headers.pop(CONTENT_TYPE, None)
    at = now + message.delay if message.delay else message.at
    return encoded(
        message.body,
        message_id=message.id or uuid.uuid4().hex,
        session=message.session,
        reply_to=message.reply_to,
        correlation_id=message.correlation_id,
        content_type=None if content_type is None else str(content_type),
        application={**headers, **(changes or {})},
        ttl=message.expires_in,
        due_at=None if at is None else float(at),  # type: ignore[arg-type]
    )


def copied(
    found: Received,
    message: Incoming,
    notes: MessageNotes,
    *,
    new_id: str | None,
    to: str | None = None,
    ttl: float | None = None,
    due_at: float | None = None,
) -> Encoded:
    """Return *message*, which was read as *found*, as it is sent again: with all that its sender has set, and *notes*.

    It is sent to its own queue, or to the queue *to*. With *new_id*, that is its message id, as where the service would
    take it for a duplicate; the notes keep the sender's.
    """
    notes = replace(notes, id=found.notes.id if new_id is None else found.id)
    return encoded_again(
        message,
        message_id=new_id,
        application=replace(found, stale=(), queue=to or found.queue).noted(notes),
        dropped=NOTED,
        ttl=ttl,
        due_at=due_at,
    )


def buried(found: Received, outcome: Outcome, now: float) -> tuple[str, str, dict[str, str | int]]:
    """Return the reason and the description with which a live message dies of *outcome*, and its new properties."""
    assert outcome.cause is not None
    notes = history_noted(found.notes, outcome, now, fills=True)
    return with_cause(found, replace(notes, dead_at=now, died_after=outcome.deliveries), outcome.cause)


def with_cause(found: Received, notes: MessageNotes, cause: Cause) -> tuple[str, str, dict[str, str | int]]:
    """Return the reason and the description of a death, and its *notes* as properties, all as far as there is room."""
    reason = NATIVE_REASONS.get(cause.reason, cause.reason)
    room = max(0, HEADERS_MAX - found.taken - len(reason.encode()))
    description = cause.description.encode()[:room].decode(errors="ignore")
    return reason, description, found.noted(notes, len(f"{reason}{description}".encode()))


def _notes(application: Mapping[Any, Any]) -> MessageNotes:
    """Return what tenure has noted; of that, what it can't have written is ignored."""
    died_at, died_after = read_or(_read_death, application.get(DEATH), (None, None))
    history, before = read_history_text(application.get(HISTORY), application.get(BEFORE))
    return MessageNotes(
        id=read_or(read_id, application.get(ID), None),
        sent_at=read_or(_read_sent_at, application.get(SENT_AT), None),
        deliveries=read_or(read_deliveries, application.get(DELIVERIES), 0),
        no_attempts=read_or(_read_numbers, application.get(NO_ATTEMPTS), ()),
        history=history,
        before=before,
        dead_at=died_at or 0.0,
        died_after=died_after,
    )


_NO_NOTES, _NOTED = MessageNotes(), frozenset(NOTED)


def _read_sent_at(text: object) -> float:
    return seconds(read_json(text))


def _read_numbers(text: object) -> tuple[int, ...]:
    found = (read_or(read_deliveries, one, None) for one in a_list(read_json(text))[-HISTORY_MAX:])
    return tuple(one for one in found if one is not None)


def _read_death(text: object) -> tuple[float | None, int | None]:
    found = a_list(read_json(text))
    if len(found) < 2:
        raise Unreadable("it is no death")
    return read_or(seconds, found[0], None), read_or(read_deliveries, found[1], None)


def size_of(headers: Headers) -> int:
    """Return about how many bytes *headers* take as application properties."""
    return sum(len(name.encode()) + len(str(value).encode()) + EACH for name, value in headers.items())


def _written(history: Sequence[Attempt], room: int) -> tuple[str, int]:
    """Return a history as text of *room* characters at most, and how many of its oldest attempts are left out.

    Tracebacks go first, then the oldest attempts, then what the newest one raised: without that attempt, its delivery
    would count as one whose lock has ended.
    """
    rows: list[tuple[object, ...]] = []
    text = ""
    for most in (16_384, 1_024, 200, 0):
        rows = rows_of(replace(one, error=_shortened(one.error, most)) for one in history)
        text = json.dumps(rows)
        if len(text) <= room:
            return text, 0
    while rows and len(text) > room:
        least = [] if rows[0][-1] is None else [(*rows[0][:-1], None)]
        rows = rows[len(rows) // 2 :] if len(rows) > 1 else least
        text = json.dumps(rows)
    return text, len(history) - len(rows)


def _shortened(error: Failure | None, most: int) -> Failure | None:
    if error is None:
        return None
    return Failure(error.type, error.message[: most + 200], error.traceback[-most:] if most else "")


def _value(value: Any) -> Any:
    """Return a value as a header: what senders of tenure's can't set becomes text."""
    match value:
        case bool() | str() | None:
            return value
        case int():
            return value if -INT_MAX - 1 <= value <= INT_MAX else str(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case dict() | list():
            return json.dumps(plain(value))
    return _text(value)


def _shown(value: Any) -> str | None:
    """Return an id, or an address, that every store can keep."""
    return read_or(a_text, _text(value), None)


def _text(value: Any) -> str | None:
    """Return a simple value as text."""
    match value:
        case str():
            return value
        case bytes():
            return value.decode(errors="replace")
        case int() | float() | Decimal() | UUID():
            return str(value)
    return None


def _moment(value: Any) -> float:
    """Return a moment in Unix seconds; 0 if it is none, and the latest if it is later."""
    return min(max(0.0, value / 1_000), LONGEST) if type(value) is int else 0.0
