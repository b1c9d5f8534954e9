"""Messages as JetStream delivers and shows them, converted to deliveries, dead letters and live messages."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from nats.aio.msg import Msg

from tenure._backends.nats.client import Json, stored_in
from tenure._backends.nats.connection import headers_of
from tenure._backends.nats.message_format import (
    HEADERS_TOO_LONG,
    LOCK_MAX,
    NATIVE_ID,
    NO_PROPERTIES,
    Properties,
    State,
    decode,
)
from tenure._backends.nats.places import is_own
from tenure._backends.nats.store_clock import timestamp_of
from tenure._foreign import read_or
from tenure._queue.broker import LiveSelection, Selection
from tenure._queue.checks import COUNT_MAX
from tenure._queue.delivery_ends import Cause, Outcome
from tenure._queue.identity import ID_MARK
from tenure._queue.message import (
    Attempt,
    DeadMessage,
    Death,
    Delivery,
    LiveMessage,
    Token,
    dead_message_of,
    live_message_of,
)
from tenure._queue.note_headers import noted_death
from tenure._queue.verdicts import Settled

_RECEIPT = re.compile(
    r"\$JS\.ACK(?:\.[^.]+\.[^.]+)?\.[^.]+\.([^.]+)"
    r"\.([0-9]{1,18})\.([0-9]{1,18})\.[0-9]{1,20}\.([0-9]{1,19})\.[0-9]{1,20}(?:\.[^.]+)?"
)


def undeliverable(deliveries: int, attempt: Attempt | None = None) -> Outcome:
    """Return what becomes of a message that can't be stored again, as it must be for another delivery."""
    cause = Cause(HEADERS_TOO_LONG, "it can't be stored again, as it must be for another delivery")
    return Outcome("dead", deliveries, 0.0, attempt, cause, Settled(dead=True, reason=HEADERS_TOO_LONG))


@dataclass(frozen=True, slots=True)
class Found:
    """A message of a stream, decoded."""

    queue: str
    subject: str
    stored_as: int
    """Its sequence in the stream, which is another one each time that it is stored again."""
    stored_at: float
    body: bytes
    properties: Properties
    reply: str = ""
    """The subject to which it is acknowledged, if it was delivered."""
    delivered: int = 0
    """How often NATS has delivered it since it was stored, this time included."""
    consumer: str = ""
    """The consumer that has delivered it, or the message of which it is a copy."""
    native_id: str = ""
    """What its stream remembers it by: of a copy, see ``copies``."""

    @property
    def state(self) -> State:
        """What tenure has noted with it."""
        return self.properties.state

    @property
    def sequence(self) -> int:
        """Its sequence in the queue: that of the stream when it was sent."""
        return self.state.sequence or self.stored_as

    @property
    def id(self) -> str:
        """The id from its sender, or one that is made up."""
        return self.properties.id or f"{self.queue.removesuffix('$dead')}{ID_MARK}{self.sequence}"

    @property
    def enqueued_at(self) -> float:
        """When it was sent, by the store's clock."""
        return self.state.enqueued_at or self.stored_at

    @property
    def count(self) -> int:
        """The number of its present delivery, if it is locked."""
        return min(COUNT_MAX, self.state.deliveries + (0 if self.state.locked_for else 1))

    @property
    def locked_until(self) -> float:
        """When the lock of a dead letter ends at the latest, by the store's clock: as it was read from its stream."""
        return min(self.state.locked_until, self.stored_at + LOCK_MAX + 1.0)

    def is_expired_at(self, now: float) -> bool:
        """Whether it has expired at *now*."""
        return now >= self.enqueued_at + self.properties.expires_in

    def with_state(self, **changes: object) -> Properties:
        """Return its properties, completed by its identity, with *changes* of its state, to be stored again."""
        changes = {"locked_for": 0.0, "lock": "", **changes}
        state = replace(self.state, sequence=self.sequence, enqueued_at=self.enqueued_at, **changes)  # type: ignore[arg-type]
        return replace(self.properties, id=self.id, state=state)

    def dead(self, dead: State) -> Properties:
        """Return its properties as those of a dead letter with this state, completed by its identity."""
        dead = replace(dead, sequence=self.sequence, enqueued_at=self.enqueued_at, locked_for=0.0)
        return replace(self.properties, id=self.id, due=0.0, expires_in=math.inf, state=dead)


def delivered_message(queue: str, message: Msg) -> Found | None:
    """Return a message that was delivered; None if it doesn't come from a consumer: any program may send to an inbox.

    The subject of its acknowledgement is ``$JS.ACK.STREAM.CONSUMER.DELIVERED.SEQUENCE.SEQUENCE.TIME.PENDING``, and has
    a domain and an account after ``ACK``, and a random word at the end, if the server has domains.
    """
    receipt = _RECEIPT.fullmatch(message.reply)
    if receipt is None:
        return None
    consumer, delivered, stored_as, stored_at = receipt.groups()
    return Found(
        queue,
        message.subject,
        int(stored_as),
        int(stored_at) / 1e9,
        message.data,
        decode(message.headers, is_ours=is_own(message.subject)) if message.headers else NO_PROPERTIES,
        message.reply,
        int(delivered),
        consumer,
        (message.headers or {}).get(NATIVE_ID, ""),
    )


def read_message(queue: str, answer: Json) -> Found:
    """Return a message that was read from its stream, not delivered."""
    one = stored_in(answer)
    headers = headers_of(one.headers) if one.headers else {}
    properties = decode(headers, is_ours=is_own(one.subject))
    stored_at, native_id = read_or(timestamp_of, one.time, 0.0), headers.get(NATIVE_ID, "")
    return Found(queue, one.subject, one.number, stored_at, one.body, properties, native_id=native_id)


def delivery_of(found: Found, token: Token, locked_until: float) -> Delivery:
    """Return a live message as a delivery."""
    return _delivery(found, token, found.count, locked_until, None)


def dead_delivery_of(found: Found, token: Token, locked_until: float) -> Delivery:
    """Return a dead letter as a delivery."""
    return _delivery(found, token, found.state.deliveries, locked_until, death_of(found))


def _delivery(found: Found, token: Token, count: int, locked_until: float, death: Death | None) -> Delivery:
    properties = found.properties
    return Delivery(
        found.queue,
        found.sequence,
        token,
        found.id,
        found.body,
        properties.headers,
        count,
        found.enqueued_at,
        locked_until,
        None,
        0,
        properties.reply_to,
        properties.correlation_id,
        death,
    )


def death_of(found: Found) -> Death:
    """Return why a dead letter died."""
    return noted_death(found.state, found.stored_at)


def dead_message(home: str, found: Found) -> DeadMessage:
    """Return a dead letter of the queue *home*, to be looked at."""
    return dead_message_of(home, dead_delivery_of(found, "", 0.0), death_of(found))


def live_message(found: Found) -> LiveMessage:
    """Return a message that is ready, to be looked at."""
    return live_message_of(_delivery(found, "", found.state.deliveries, 0.0, None), "ready")


def rank_of(found: Found) -> tuple[int, str, int]:
    """Return what messages are ordered by; of two, one may claim the sequence and the id of the other."""
    return found.sequence, found.id, found.stored_as


async def lowest(founds: AsyncIterator[Found], limit: int) -> list[Found]:
    """Return the first *limit* messages in order, and hold no more than twice as many meanwhile."""
    lowest: list[Found] = []
    async for one in founds:
        lowest.append(one)
        if len(lowest) >= 2 * limit:
            lowest = sorted(lowest, key=rank_of)[:limit]
    return sorted(lowest, key=rank_of)[:limit]


def is_selected_live(found: Found, which: LiveSelection) -> bool:
    """Whether *which* selects this live message, by everything but its state."""
    return not found.state.is_dead and which.fits(found.sequence, lambda: found.id, None, found.enqueued_at)


def is_selected_dead(found: Found, which: Selection) -> bool:
    """Whether *which* selects this dead letter."""
    return which.fits(found.sequence, found.id, death_of(found))
