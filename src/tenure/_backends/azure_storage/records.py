"""Messages as Azure delivers them, converted to deliveries, dead letters and live messages."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Self, TypeAlias

from azure.storage.queue import QueueMessage

from tenure._backends.azure_storage.message_format import NO_PROPERTIES, Properties, decode
from tenure._queue.broker import LiveSelection, Selection
from tenure._queue.checks import DEAD_SUFFIX
from tenure._queue.delivery_ends import Outcome, noted
from tenure._queue.message import (
    DeadMessage,
    Death,
    Delivery,
    LiveMessage,
    dead_message_of,
    live_message_of,
)
from tenure._queue.note_headers import noted_death
from tenure._queue.receipts import Held

Key: TypeAlias = tuple[int, str, bytes, str]

_EPOCH = 1_577_836_800  # 2020-01-01: a sequence begins with the seconds since then


@dataclass(slots=True, eq=False)
class HeldMessage(Held):
    """A message that this process has locked, with its newest pop receipt."""

    queue: str
    message: str
    receipt: str
    ends_at: float
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

    @classmethod
    def of(cls, queue: str, raw: QueueMessage, now: float = 0.0, *, is_delivery: bool) -> Self:
        """Return a message of *queue*, decoded. *is_delivery*: it was not only looked at, so Azure has counted that."""
        body, properties = decode(raw.content)
        if properties is not NO_PROPERTIES:
            earlier = max(0, (raw.dequeue_count or 0) - is_delivery)
            properties = _possible(properties, earlier, is_dead=queue.endswith(DEAD_SUFFIX))
        return cls(raw, body, properties, now)

    @property
    def sequence(self) -> int:
        """Its sequence: that from before it was moved, or its own."""
        return self.properties.sequence or self.own_sequence

    @property
    def own_sequence(self) -> int:
        """The second in which it was put into this queue, and a hash that differs within one second."""
        return (int(timestamp_of(self.raw.inserted_on)) - _EPOCH << 33) + zlib.crc32(str(self.raw.id).encode())

    @property
    def id(self) -> str:
        """The id from its sender, or Azure's."""
        return self.properties.id or str(self.raw.id)

    @property
    def key(self) -> Key:
        """What copies of one message share: all that its consumer would get of it.

        Sequence and id are not enough: anybody who may write to the queue can write those of another message.
        """
        properties = self.properties
        sent = dict(properties.headers), properties.reply_to, properties.correlation_id
        return self.sequence, self.id, self.body, json.dumps(sent, sort_keys=True)

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


def _possible(properties: Properties, earlier: int, *, is_dead: bool) -> Properties:
    """Return *properties* without what can't be true of a message in this queue that was delivered *earlier* times.

    Another program has written that, or has copied a message from one queue into another:

    - More deliveries that were given back than there were. The message could be delivered for ever.
    - A move that was begun, of a dead letter, or of a message that no process has received, and so none has moved.
    - A death, of a live message that is not being moved. It is like one that was redriven.
    """
    if properties.uncounted > earlier:
        properties = replace(properties, uncounted=0)
    if is_dead:
        return replace(properties, moving=False) if properties.moving else properties
    if properties.reason is None:
        return replace(properties, moving=False) if properties.moving else properties
    return properties if properties.moving and earlier else replace(properties.redriven(), moving=False)


def timestamp_of(moment: datetime | None) -> float:
    """Return a time of Azure in Unix seconds."""
    assert moment is not None, "Azure always returns it"
    return moment.timestamp()


def dead_letter_properties(
    one: FoundMessage | Delivery, properties: Properties, outcome: Outcome, now: float
) -> Properties:
    """Return the properties of a message that dies with this *outcome*, as a dead letter."""
    return replace(
        noted(properties, outcome, now, fills=True),
        id=one.id,
        sequence=one.sequence,
        enqueued_at=one.enqueued_at,
        ttl=None,
        uncounted=0,
    )


def with_identity(properties: Properties, delivery: Delivery) -> Properties:
    """Return the properties of a dead letter of another program, completed by its identity."""
    return replace(
        properties,
        id=properties.id or delivery.id,
        sequence=properties.sequence or delivery.sequence,
        enqueued_at=properties.enqueued_at or delivery.enqueued_at,
    )


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
    return noted_death(one.properties, one.enqueued_at)


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
