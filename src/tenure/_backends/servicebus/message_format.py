"""Messages in the form of Service Bus. Body, properties and application properties are the sender's: no envelope.

What tenure has to note of a message that failed is in application properties of its own, ``tenure-…``, set with the
verdict; a message that never failed has none.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from tenure._backends.servicebus.codec import Encoded, encoded, encoded_again
from tenure._queue.failures import Failure
from tenure._queue.identity import ID_MARK
from tenure._queue.message import (
    EXPIRED,
    HISTORY_MAX,
    MAX_DELIVERIES,
    Attempt,
    Death,
    Delivery,
    Headers,
    HeaderValue,
    Token,
    newest_error,
)
from tenure._queue.outgoing import Outgoing

OURS = "tenure-"
ID, DELIVERIES, HISTORY, DEATH = "tenure-id", "tenure-deliveries", "tenure-history", "tenure-death"
REASON, DESCRIPTION = "DeadLetterReason", "DeadLetterErrorDescription"
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

    def properties(self, headers: Headers) -> dict[str, str | int]:
        """Return it as application properties, beside the sender's: the history takes the room that they leave."""
        found: dict[str, str | int] = {}
        if self.id is not None:
            found[ID] = self.id
        if self.deliveries:
            found[DELIVERIES] = self.deliveries
        if self.history:
            found[HISTORY] = _written(self.history, min(PROPERTY_MAX, HEADERS_MAX - size_of(headers)))
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
            at = self.enqueued_at + (self.ttl or 0.0 if reason == EXPIRED else 0.0)
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


def received(queue: str, message: Any) -> Received:
    """Return what is in *message*, as the library decodes it."""
    annotations = message.message_annotations or {}
    properties, header = message.properties, message.header
    application = {_text(name): value for name, value in (message.application_properties or {}).items()}
    sequence = int(annotations.get(b"x-opt-sequence-number", 0))
    notes = _notes(application)
    named = None if properties is None else properties[0]
    content_type = None if properties is None else properties[6]
    headers = {
        name: _value(value)
        for name, value in application.items()
        if not name.startswith(OURS) and name not in (REASON, DESCRIPTION)
    }
    if content_type is not None:
        headers.setdefault(CONTENT_TYPE, _text(content_type))
    due = annotations.get(b"x-opt-scheduled-enqueue-time")
    ttl = None if header is None or header[2] is None else header[2] / 1_000
    if properties is not None and properties[8] is not None and properties[9] is not None:
        ttl = _seconds(properties[8]) - _seconds(properties[9])
    reason = application.get(REASON)
    return Received(
        sequence,
        notes.id or (f"{queue}{ID_MARK}{sequence}" if named is None else _text(named)),
        _body(message),
        headers,
        notes.deliveries + (header[4] or 0 if header is not None else 0),
        _seconds(annotations.get(b"x-opt-enqueued-time")),
        _seconds(annotations.get(b"x-opt-locked-until")),
        _optional(properties, 10),
        _optional(properties, 4),
        _optional(properties, 5),
        ttl,
        None if due is None else _seconds(due),
        int(annotations.get(b"x-opt-message-state", 0)),
        notes,
        None if reason is None else _text(reason),
        _text(application.get(DESCRIPTION, "")),
    )


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
    message: Any,
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
        application=notes.properties(found.headers),
        dropped=(ID, DELIVERIES, HISTORY, DEATH, REASON, DESCRIPTION),
        ttl=ttl,
        due_at=due_at,
    )


def _notes(application: Mapping[str, Any]) -> Notes:
    """Return what tenure has noted; what it can't have written is ignored."""
    named, count = application.get(ID), application.get(DELIVERIES, 0)
    try:
        died_at, died_after = json.loads(_text(application[DEATH])) if DEATH in application else (None, None)
        written = json.loads(_text(application[HISTORY])) if HISTORY in application else []
        history = tuple(
            Attempt(int(number), float(at), outcome, None if error is None else Failure(*map(str, error)))
            for number, at, outcome, error in written
        )
        return Notes(
            None if named is None else _text(named),
            count if isinstance(count, int) and count >= 0 else 0,
            history,
            None if died_at is None else float(died_at),
            None if died_after is None else int(died_after),
        )
    except (ValueError, TypeError):
        return Notes()


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


def _body(message: Any) -> bytes:
    data = message.data
    if data is not None:
        return bytes(data[0]) if len(data) == 1 else b"".join(map(bytes, data))
    if message.value is not None:
        value = message.value
        return value if isinstance(value, bytes) else json.dumps(_plain(value)).encode()
    if message.sequence:
        return json.dumps(_plain(message.sequence)).encode()
    return b""


def _plain(value: Any) -> Any:
    match value:
        case bytes():
            return value.decode(errors="replace")
        case dict():
            return {str(_plain(name)): _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case bool() | int() | float() | str() | None:
            return value
    return str(value)


def _value(value: Any) -> HeaderValue:
    if isinstance(value, (bool, int, float)):
        return value
    return _text(value)


def _optional(properties: Any, index: int) -> str | None:
    found = None if properties is None else properties[index]
    return None if found is None else _text(found)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, (bytes, bytearray)) else str(value)


def _seconds(value: Any) -> float:
    """Return a moment in Unix seconds."""
    if value is None:
        return 0.0
    return value.timestamp() if isinstance(value, datetime) else value / 1_000
