"""Messages of a Storage Queue as they were handed out, and what is made of them: deliveries, graves, dead letters."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from azure.storage.queue import QueueMessage

from tenure._backends.azure_storage.message_format import Note
from tenure._queue.broker import LiveSelection, Selection
from tenure._queue.message import DEAD_SUFFIX, Attempt, DeadMessage, Death, Delivery, Failure, LiveMessage

UNKNOWN = "unknown"
"""The reason of a dead letter that somebody else put there."""

_EPOCH = 1_577_836_800  # 2020-01-01: a sequence begins with the seconds since then


@dataclass(slots=True, eq=False)
class Held:
    """A message that was handed out, and the newest receipt for it."""

    queue: str
    message: str
    receipt: str
    ends: float
    """By our clock, when the lock is over for certain."""
    note: Note
    text: str
    """As it stands in the queue."""
    flying: int = 0
    """How many requests about it are under way; each may bring a new receipt."""
    is_settled: bool = False
    """Whether a verdict stands: then a renewal that crossed it must not use the receipt that it brought."""


@dataclass(frozen=True, slots=True)
class Found:
    """A message as Azure handed it out, read."""

    raw: QueueMessage
    body: bytes
    note: Note
    now: float
    """The service's clock when it did, in whole seconds."""

    @property
    def sequence(self) -> int:
        """Its number: the second in which it was sent, and something to tell those of one second apart."""
        if self.note.sequence:
            return self.note.sequence
        return (int(moment_of(self.raw.inserted_on)) - _EPOCH << 33) + zlib.crc32(str(self.raw.id).encode())

    @property
    def id(self) -> str:
        """What its sender called it, or Azure."""
        return self.note.id or str(self.raw.id)

    @property
    def enqueued_at(self) -> float:
        """When it was sent."""
        return self.note.enqueued_at or moment_of(self.raw.inserted_on)

    @property
    def count(self) -> int:
        """How often it was delivered, this time included if it lives."""
        if self.note.reason is not None:
            return self.note.deliveries
        return max(1, (self.raw.dequeue_count or 0) - self.note.uncounted)

    @property
    def is_expired(self) -> bool:
        """Whether its time to live is over."""
        return self.is_expired_at(self.now)

    def is_expired_at(self, now: float) -> bool:
        """Whether its time to live is over then."""
        return self.note.ttl is not None and now >= self.enqueued_at + self.note.ttl


def moment_of(moment: datetime | None) -> float:
    assert moment is not None, "Azure always tells"
    return moment.timestamp()


EXPIRED_TOLD = "not handled before it expired"


def tried(count: int) -> str:
    return f"delivered {count} times, and never completed"


def last_error(note: Note) -> Failure | None:
    return next((one.error for one in reversed(note.history) if one.error is not None), None)


def filled_up(note: Note, count: int, now: float) -> Note:
    """Return *note* with the attempts that nobody told of: their locks ran out."""
    told_of = {one.number for one in note.history[note.before :]}
    missing: Iterable[int] = (number for number in range(1, count + 1) if number not in told_of)
    for number in missing:
        note = note.after(Attempt(number, now, "expired"))
    return replace(note, history=(*note.history[: note.before], *sorted(note.history[note.before :], key=_number)))


def _number(attempt: Attempt) -> int:
    return attempt.number


def grave_of(
    one: Found | Delivery,
    note: Note,
    reason: str,
    description: str,
    count: int,
    now: float,
    error: Failure | None = None,
) -> Note:
    """Return what is written on the grave of a message."""
    return replace(
        note,
        id=one.id,
        sequence=one.sequence,
        enqueued_at=one.enqueued_at,
        deliveries=count,
        reason=reason,
        description=description,
        dead_at=now,
        error=error or last_error(note),
        ttl=None,
        uncounted=0,
    )


def settled_down(note: Note, delivery: Delivery) -> Note:
    """Return the note of a dead letter that others may have put there, with what is known of it."""
    return replace(note, id=delivery.id, sequence=delivery.sequence, enqueued_at=delivery.enqueued_at)


def delivery_of(queue: str, one: Found, token: str) -> Delivery:
    note = one.note
    death = death_of(one) if queue.endswith(DEAD_SUFFIX) else None
    return Delivery(
        queue,
        one.sequence,
        token,
        one.id,
        one.body,
        note.headers,
        one.count,
        one.enqueued_at,
        moment_of(one.raw.next_visible_on),
        None,
        0,
        note.reply_to,
        note.correlation_id,
        death,
    )


def death_of(one: Found) -> Death:
    note = one.note
    return Death(note.reason or UNKNOWN, note.description, note.dead_at or one.enqueued_at, note.error, note.history)


def dead_message(queue: str, one: Found) -> DeadMessage:
    note, death = one.note, death_of(one)
    return DeadMessage(
        queue,
        one.sequence,
        one.id,
        one.body,
        note.headers,
        one.count,
        one.enqueued_at,
        None,
        0,
        note.reply_to,
        note.correlation_id,
        death.reason,
        death.description,
        death.at,
        death.error,
        death.history,
    )


def live_message(queue: str, one: Found) -> LiveMessage:
    note = one.note
    return LiveMessage(
        queue,
        one.sequence,
        one.id,
        one.body,
        note.headers,
        "ready",
        max(0, (one.raw.dequeue_count or 0) - note.uncounted),  # that of a message that nobody has received just now
        one.enqueued_at,
        None,
        None,
        None,
        0,
        note.reply_to,
        note.correlation_id,
    )


def is_live(one: Found, which: LiveSelection, now: float) -> bool:
    return not one.is_expired_at(now) and which.fits(one.sequence, lambda: one.id, None, one.enqueued_at)


def is_meant(one: Found, which: Selection) -> bool:
    death = death_of(one)
    return (
        one.sequence > which.after
        and (which.sequences is None or one.sequence in which.sequences)
        and (which.ids is None or one.id in which.ids)
        and (which.reason is None or death.reason == which.reason)
        and (which.dead_before is None or death.at < which.dead_before)
    )
