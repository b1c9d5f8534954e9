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
from typing import Any
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
from tenure._queue.checks import COUNT_MAX, INT_MAX, read_id
from tenure._queue.failures import Failure
from tenure._queue.headers import is_reserved, read_headers
from tenure._queue.identity import ID_MARK
from tenure._queue.message import (
    EXPIRED,
    HISTORY_MAX,
    MAX_DELIVERIES,
    NO_HEADERS,
    Attempt,
    Death,
    Delivery,
    Headers,
    Token,
    newest_error,
)
from tenure._queue.notes import read_attempts, read_deliveries, read_reason
from tenure._queue.outgoing import Outgoing

ID, DELIVERIES, HISTORY, DEATH = "tenure-id", "tenure-deliveries", "tenure-history", "tenure-death"
REASON, DESCRIPTION = "DeadLetterReason", "DeadLetterErrorDescription"
NOTED = (ID, DELIVERIES, HISTORY, DEATH, REASON, DESCRIPTION)
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
"""Bytes of all headers: the rest is for the service's own."""


@dataclass(frozen=True, slots=True)
class Notes:
    """What tenure has noted of a message."""

    id: str | None = None
    """The sender's id, where the message is a copy that needed another."""
    deliveries: int = 0
    """How often it was handed out before it was copied."""
    history: tuple[Attempt, ...] = ()
    died_at: float | None = None
    died_after: int | None = None
    """After how many deliveries."""

    def properties(self, taken: int) -> dict[str, str | int]:
        """Return it as application properties, beside *taken* bytes of others: the history takes what they leave."""
        found: dict[str, str | int] = {}
        if self.id is not None:
            found[ID] = self.id
        if self.deliveries:
            found[DELIVERIES] = self.deliveries
        if self.history:
            found[HISTORY] = _written(self.history, min(PROPERTY_MAX, HEADERS_MAX - taken))
        if self.died_at is not None:
            found[DEATH] = json.dumps([self.died_at, self.died_after])
        return found

    def with_attempt(self, attempt: Attempt) -> Notes:
        """Return the notes with one more attempt; those before it that left no note ended with their lock."""
        known = {one.number for one in self.history}
        first = attempt.number - HISTORY_MAX
        missing = [
            Attempt(number, attempt.at, "expired")
            for number in range(max(1, first), attempt.number)
            if number not in known and not any(one > number for one in known)
        ]
        return replace(self, history=(*self.history, *missing, attempt)[-HISTORY_MAX:])


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
    locked_until: float
    session: str | None
    reply_to: str | None
    correlation_id: str | None
    ttl: float | None
    due_at: float | None
    state: int
    notes: Notes
    reason: str | None
    description: str

    @property
    def death(self) -> Death:
        """Why and when it died; the service notes no moment, so it is at best that of its last known change."""
        notes, reason = self.notes, self.reason or ""
        reason = REASONS.get(reason, reason)
        at = notes.died_at
        if at is None and notes.history:
            at = notes.history[-1].at
        if at is None:
            at = min(self.enqueued_at + (self.ttl or 0.0 if reason == EXPIRED else 0.0), LONGEST)
        history = notes.history
        if reason == MAX_DELIVERIES:
            last = max((one.number for one in history), default=0)
            missing = range(max(last, self.deaths_count - HISTORY_MAX) + 1, self.deaths_count + 1)
            history = (*history, *(Attempt(number, at, "expired") for number in missing))[-HISTORY_MAX:]
        return Death(reason, self.description, at, newest_error(history), history)

    @property
    def deaths_count(self) -> int:
        """Return after how many deliveries it died."""
        if self.notes.died_after is not None:
            return self.notes.died_after
        return max(self.count, max((one.number for one in self.notes.history), default=0))

    def delivery(self, queue: str, token: Token, *, is_dead: bool = False) -> Delivery:
        """Return it as a delivery under a lock."""
        return Delivery(
            queue,
            self.sequence,
            token,
            self.id,
            self.body,
            self.headers,
            max(1, self.deaths_count) if is_dead else self.count + 1,
            self.enqueued_at,
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
    notes = _NO_NOTES if _NOTED.isdisjoint(application) else _notes(application)
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
    notes: Notes,
    *,
    new_id: str | None,
    ttl: float | None = None,
    due_at: float | None = None,
) -> Encoded:
    """Return *message*, which was read as *found*, as it is sent again: with all that its sender has set, and *notes*.

    With *new_id*, that is its message id, as where the service would take it for a duplicate; the notes keep the
    sender's.
    """
    notes = replace(notes, id=found.notes.id if new_id is None else found.id)
    return encoded_again(
        message,
        message_id=new_id,
        application=notes.properties(found.taken),
        dropped=NOTED,
        ttl=ttl,
        due_at=due_at,
    )


def _notes(application: Mapping[Any, Any]) -> Notes:
    """Return what tenure has noted; of that, what it can't have written is ignored."""
    died_at, died_after = read_or(_read_death, application.get(DEATH), (None, None))
    return Notes(
        read_or(read_id, application.get(ID), None),
        read_or(read_deliveries, application.get(DELIVERIES), 0),
        read_or(lambda text: read_attempts(read_json(text)), application.get(HISTORY), ()),
        died_at,
        died_after,
    )


_NO_NOTES, _NOTED = Notes(), frozenset(NOTED)


def _read_death(text: object) -> tuple[float | None, int | None]:
    found = a_list(read_json(text))
    if len(found) < 2:
        raise Unreadable("it is no death")
    return read_or(seconds, found[0], None), read_or(read_deliveries, found[1], None)


def size_of(headers: Headers) -> int:
    """Return about how many bytes *headers* take as application properties."""
    return sum(len(name.encode()) + len(str(value).encode()) + EACH for name, value in headers.items())


def _written(history: Sequence[Attempt], room: int) -> str:
    """Return a history as text of *room* characters at most: tracebacks go first, then the oldest attempts."""
    rows: list[list[object]] = []
    text = ""
    for most in (16_384, 1_024, 200, 0):
        rows = [
            [
                one.number,
                one.at,
                one.outcome,
                _shortened(one.error, most),
            ]
            for one in history
        ]
        text = json.dumps(rows)
        if len(text) <= room:
            return text
    while rows and len(text) > room:
        rows = rows[(len(rows) + 1) // 2 :]
        text = json.dumps(rows)
    return text


def _shortened(error: Failure | None, most: int) -> list[str] | None:
    if error is None:
        return None
    return [error.type, error.message[: most + 200], error.traceback[-most:] if most else ""]


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
