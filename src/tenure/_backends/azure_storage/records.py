"""Messages as Azure delivers them, converted to deliveries, dead letters and live messages."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from azure.storage.queue import QueueMessage

from tenure._backends.azure_storage.message_format import Properties
from tenure._queue.broker import LiveSelection, Selection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.failures import Failure
from tenure._queue.message import (
    Attempt,
    DeadMessage,
    Death,
    Delivery,
    LiveMessage,
    dead_message_of,
    live_message_of,
    newest_error,
)

UNKNOWN = "unknown"
"""The reason of a dead letter from another program."""

_EPOCH = 1_577_836_800  # 2020-01-01: a sequence begins with the seconds since then


@dataclass(slots=True, eq=False)
class HeldMessage:
    """A message that this process has locked, with its newest pop receipt."""

    queue: str
    message: str
    receipt: str
    locked_until: float
    """The end of the lock by the local clock; Azure may end it a little earlier."""
    properties: Properties
    text: str
    """Its text in the queue."""
    open_requests: int = 0
    """The number of requests about it that are not answered; each may return a new receipt."""
    is_settled: bool = False
    """Whether a verdict was applied: a concurrent renewal must not use its receipt."""
    dead: Properties | None = None
    """Its properties as a dead letter, once they are written to it; no later verdict changes them."""
    copy: QueueMessage | None = None
    """Its copy among the dead letters, until the message is removed."""


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A message as Azure delivered it, decoded."""

    raw: QueueMessage
    body: bytes
    properties: Properties
    now: float
    """The service's time of the delivery, in whole seconds."""

    @property
    def sequence(self) -> int:
        """Its sequence: the second in which it was sent, and a hash that differs within one second."""
        if self.properties.sequence:
            return self.properties.sequence
        return (int(timestamp_of(self.raw.inserted_on)) - _EPOCH << 33) + zlib.crc32(str(self.raw.id).encode())

    @property
    def id(self) -> str:
        """The id from its sender, or Azure's."""
        return self.properties.id or str(self.raw.id)

    @property
    def key(self) -> tuple[int, str]:
        """Its sequence and id, which copies of one message share."""
        return self.sequence, self.id

    @property
    def enqueued_at(self) -> float:
        """The time at which it was sent."""
        return self.properties.enqueued_at or timestamp_of(self.raw.inserted_on)

    @property
    def count(self) -> int:
        """Its delivery count; if it is live, this delivery included."""
        if self.properties.reason is not None:
            return self.properties.deliveries
        return max(1, (self.raw.dequeue_count or 0) - self.properties.uncounted)

    @property
    def is_expired(self) -> bool:
        """Whether it has expired."""
        return self.is_expired_at(self.now)

    def is_expired_at(self, now: float) -> bool:
        """Return whether it has expired at *now*."""
        return self.properties.ttl is not None and now >= self.enqueued_at + self.properties.ttl


def timestamp_of(moment: datetime | None) -> float:
    """Return a time of Azure in Unix seconds."""
    assert moment is not None, "Azure always returns it"
    return moment.timestamp()


def with_expired_attempts(properties: Properties, count: int, now: float) -> Properties:
    """Return *properties* with the attempts that are missing in the history: their locks expired."""
    recorded = {one.number for one in properties.history[properties.before :]}
    missing: Iterable[int] = (number for number in range(1, count + 1) if number not in recorded)
    for number in missing:
        properties = properties.with_attempt(Attempt(number, now, "expired"))
    return replace(
        properties,
        history=(
            *properties.history[: properties.before],
            *sorted(properties.history[properties.before :], key=_number),
        ),
    )


def _number(attempt: Attempt) -> int:
    return attempt.number


def dead_letter_properties(
    one: FoundMessage | Delivery,
    properties: Properties,
    reason: str,
    description: str,
    count: int,
    now: float,
    error: Failure | None = None,
) -> Properties:
    """Return the properties of a message as a dead letter."""
    return replace(
        properties,
        id=one.id,
        sequence=one.sequence,
        enqueued_at=one.enqueued_at,
        deliveries=count,
        reason=reason,
        description=description,
        dead_at=now,
        error=error or newest_error(properties.history),
        ttl=None,
        uncounted=0,
    )


def with_identity(properties: Properties, delivery: Delivery) -> Properties:
    """Return the properties of a dead letter of another program, completed by its identity."""
    return replace(properties, id=delivery.id, sequence=delivery.sequence, enqueued_at=delivery.enqueued_at)


def delivery_of(queue: str, one: FoundMessage, token: str = "", locked_until: float = 0.0) -> Delivery:
    properties = one.properties
    death = death_of(one) if queue.endswith(DEAD_SUFFIX) else None
    return Delivery(
        queue,
        one.sequence,
        token,
        one.id,
        one.body,
        properties.headers,
        one.count,
        one.enqueued_at,
        locked_until,
        None,
        0,
        properties.reply_to,
        properties.correlation_id,
        death,
    )


def death_of(one: FoundMessage) -> Death:
    properties = one.properties
    return Death(
        properties.reason or UNKNOWN,
        properties.description,
        properties.dead_at or one.enqueued_at,
        properties.error,
        properties.history,
    )


def dead_message(queue: str, one: FoundMessage) -> DeadMessage:
    return dead_message_of(queue, delivery_of(queue, one), death_of(one))


def live_message(queue: str, one: FoundMessage) -> LiveMessage:
    count = max(0, (one.raw.dequeue_count or 0) - one.properties.uncounted)  # a peek doesn't count as a delivery
    return live_message_of(delivery_of(queue, one)._replace(delivery_count=count), "ready")


def is_selected_live(one: FoundMessage, which: LiveSelection, now: float) -> bool:
    """Return whether *which* selects this live message."""
    if one.properties.moving or one.is_expired_at(now):
        return False
    return which.fits(one.sequence, lambda: one.id, None, one.enqueued_at)


def is_selected_dead(one: FoundMessage, which: Selection) -> bool:
    """Return whether *which* selects this dead letter."""
    return which.fits(one.sequence, one.id, death_of(one))
